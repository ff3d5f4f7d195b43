"""ScheduledBatch as bytes and back: what rank 0 broadcasts to the ranks that follow it.

One msgpack list in the order of the fields; arrays as their raw bytes, for their dtypes are known
from the annotations. Knows nothing of sockets.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np

from engine.scheduler.batch import NUM_FLOATS, NUM_INTS, ScheduledBatch, SlotAdmission, SlotMask

_DTYPES = {"I32": np.dtype(np.int32), "F32": np.dtype(np.float32)}
_WIDTHS = {"sampling_floats": NUM_FLOATS, "sampling_ints": NUM_INTS}
_Fields = tuple[tuple[str, Any], ...]


def _fields_of(kind: type[Any]) -> _Fields:
    return tuple((f.name, _DTYPES.get(str(f.type))) for f in dataclasses.fields(kind))


_FIELDS = _fields_of(ScheduledBatch)
# Of the batch's last fields, tuples of these.
_PARTS = {kind: _fields_of(kind) for kind in (SlotAdmission, SlotMask)}


def _to_list(item: Any, fields: _Fields) -> list[Any]:
    values = ((getattr(item, name), dtype) for name, dtype in fields)
    return [value if dtype is None else value.astype(dtype).tobytes() for value, dtype in values]


def _from_list(values: list[Any], fields: _Fields) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for value, (name, dtype) in zip(values, fields, strict=True):
        if dtype is not None:
            value = np.frombuffer(bytearray(value), dtype)  # writable: torch warns otherwise
            if name in _WIDTHS:
                value = value.reshape(-1, _WIDTHS[name])
        named[name] = value
    return named


def encode(batch: ScheduledBatch) -> bytes:
    """The batch as bytes; some microseconds."""
    values = _to_list(batch, _FIELDS)
    for index, part in enumerate(_PARTS.values(), -len(_PARTS)):
        values[index] = [_to_list(item, part) for item in values[index]]
    return msgspec.msgpack.encode(values)


def decode(data: bytes) -> ScheduledBatch:
    """What `encode` was given."""
    values = msgspec.msgpack.decode(data)
    for index, (kind, part) in enumerate(_PARTS.items(), -len(_PARTS)):
        values[index] = tuple(kind(**_from_list(item, part)) for item in values[index])
    return ScheduledBatch(**_from_list(values, _FIELDS))
