"""ScheduledBatch -> one flat int32 buffer -> StepInputs, padded to a bucket.

All inputs of a step live in one buffer, so that a step costs one host-to-device copy. `pack` is the
host half (numpy), `views` the device half: tensors that alias the buffer at fixed offsets. Knows
nothing of streams, graphs or FlashInfer.

Legend: T tokens, R rows, L logit rows, U page-table updates, as in models.inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.scheduler.batch import I32, NUM_FLOATS, NUM_INTS, Kind, ScheduledBatch
from models.inputs import StepInputs

# Every field starts on a 128-byte boundary: vectorised loads, and Inductor's alignment assumption,
# hold for views.
_ALIGN = 32


class _Field(NamedTuple):
    """A field of StepInputs, and the one of ScheduledBatch that it is filled from."""

    name: str
    source: str
    dim: str
    columns: int
    pad: int | tuple[float, ...]


def _field(name: str, columns: int, pad: int | tuple[float, ...]) -> _Field:
    source, _, suffix = name.rpartition("_")
    return _Field(name, source, suffix[0], columns, pad)


_DUMMY_SLOT = -(2**31)  # stands for "the dummy slot", known only to the bucket
_FIELDS = (
    _field("token_ids_T", 1, 0),
    _field("positions_T", 1, 0),
    _field("token_slots_T", 1, _DUMMY_SLOT),
    _field("kv_slots_T", 1, -1),
    _field("row_slots_R", 1, _DUMMY_SLOT),
    _field("row_starts_R", 1, 0),
    _field("row_lens_R", 1, 0),
    _field("row_offsets_R", 1, 0),
    _field("logit_tokens_L", 1, 0),
    _field("logit_slots_L", 1, _DUMMY_SLOT),
    _field("logit_targets_L", 1, -2),
    _field("logit_positions_L", 1, 0),
    _field("sampling_floats_LF", NUM_FLOATS, (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)),
    _field("sampling_ints_LI", NUM_INTS, 0),
    _field("update_slots_U", 1, _DUMMY_SLOT),
    _field("update_columns_U", 1, 0),
    _field("update_pages_U", 1, 0),
)
assert tuple(f.name for f in _FIELDS) == StepInputs._fields


@dataclass(frozen=True)
class Bucket:
    """A padded shape that has a graph.

    Attributes:
        kind: "decode" (num_tokens == num_rows == num_logit_rows == num_updates) or "extend".
        num_tokens / num_rows / num_logit_rows / num_updates: capacities T, R, L, U.
        dummy_slot: the slot that padding points at (row S of the per-slot tables).
    """

    kind: Kind
    num_tokens: int
    num_rows: int
    num_logit_rows: int
    num_updates: int
    dummy_slot: int

    def fits(self, batch: ScheduledBatch) -> bool:
        """Whether every part of the batch has room in this bucket."""
        return (
            batch.kind == self.kind
            and batch.num_tokens <= self.num_tokens
            and batch.num_rows <= self.num_rows
            and batch.num_logit_rows <= self.num_logit_rows
            and len(batch.update_slots) <= self.num_updates
        )

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {
            "T": self.num_tokens,
            "R": self.num_rows,
            "L": self.num_logit_rows,
            "U": self.num_updates,
        }

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each field in int32 elements, and last the buffer's length."""
        offsets, end = [], 0
        for field in _FIELDS:
            offsets.append(end)
            end += -(-self.sizes[field.dim] * field.columns // _ALIGN) * _ALIGN
        return (*offsets, end)

    @property
    def buffer_length(self) -> int:
        """Length of the flat buffer in int32 elements."""
        return self.offsets[-1]


def pack(batch: ScheduledBatch, bucket: Bucket, out: I32) -> None:
    """Write the batch, padded to the bucket, into `out` (int32 [bucket.buffer_length])."""
    assert bucket.fits(batch), "the scheduler made a batch that no bucket holds"
    row_offsets = np.cumsum(batch.row_lens, dtype=np.int32) - batch.row_lens
    sizes, dummy = bucket.sizes, bucket.dummy_slot
    for field, offset in zip(_FIELDS, bucket.offsets, strict=False):
        known = field.source != "row_offsets"
        value: I32 = getattr(batch, field.source) if known else row_offsets
        if field.columns > 1:
            value = value.reshape(-1).view(np.int32)
        used = offset + len(value)
        out[offset:used] = value
        end = offset + sizes[field.dim] * field.columns
        if used == end:
            continue
        if isinstance(field.pad, tuple):
            out[used:end].view(np.float32).reshape(-1, field.columns)[:] = field.pad
        else:
            out[used:end] = dummy if field.pad == _DUMMY_SLOT else field.pad


def views(buffer: Tensor, bucket: Bucket) -> StepInputs:
    """StepInputs whose fields alias `buffer` (int32 [bucket.buffer_length]) at the offsets that
    `pack` writes.
    """
    fields = []
    for field, offset in zip(_FIELDS, bucket.offsets, strict=False):
        size = bucket.sizes[field.dim]
        view = buffer[offset : offset + size * field.columns]
        if isinstance(field.pad, tuple):
            view = view.view(torch.float32)
        fields.append(view.view(size, field.columns) if field.columns > 1 else view)
    return StepInputs(*fields)


def empty_batch(bucket: Bucket) -> ScheduledBatch:
    """A batch with nothing in it: every row of the bucket is padding. Used to warm graphs up."""
    none: dict[str, Any] = {field.source: np.zeros(0, np.int32) for field in _FIELDS}
    del none["row_offsets"]
    none["sampling_floats"] = np.zeros((0, NUM_FLOATS), np.float32)
    none["sampling_ints"] = np.zeros((0, NUM_INTS), np.int32)
    return ScheduledBatch(step=-1, kind=bucket.kind, variant="plain", num_decode_rows=0, **none)
