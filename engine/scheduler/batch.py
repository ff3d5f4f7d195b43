"""ScheduledBatch: what one step computes, decided and frozen. Numpy only, no tensors, picklable.

It is all that a rank needs to run the step: rank 0 makes it, broadcasts it, and every rank turns it
into StepInputs. Knows nothing of buckets, padding or devices.

Legend: T tokens of the step, R rows (a row is one request's tokens in this step), L logit rows
(positions whose logits are needed), U page-table updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

# Columns of ScheduledBatch.sampling_floats.
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(6)
NUM_FLOATS = 6
# Columns of ScheduledBatch.sampling_ints. FLAGS is a bit set: see FLAG_*.
TOP_K, SEED_LO, SEED_HI, FLAGS = range(4)
NUM_INTS = 4
FLAG_MASK_STOP = 1  # min_tokens not reached: the slot's stop ids must not be drawn
FLAG_COUNT = 2  # add the drawn token to the slot's penalty counts
FLAG_GUIDED = 4  # draw only what the slot's grammar allows

Kind = Literal["decode", "extend"]
Variant = Literal["plain", "full"]


@dataclass(frozen=True, slots=True, eq=False)
class SlotAdmission:
    """Device-side sampling state that a slot starts with; only for requests that need the `full`
    variant.

    Attributes:
        slot: row of the per-slot tables.
        prompt_ids: ids counted as seen for the repetition penalty.
        output_ids: ids generated before a preemption; counted for every penalty.
        bias_ids / bias_values: logit bias, at most `sampling.max_logit_bias` entries.
        stop_ids: masked while FLAG_MASK_STOP is set, at most `sampling.max_stop_ids` entries.
    """

    slot: int
    prompt_ids: I32
    output_ids: I32
    bias_ids: I32
    bias_values: F32
    stop_ids: I32


@dataclass(frozen=True, slots=True, eq=False)
class SlotMask:
    """What a slot may draw in a step.

    Attributes:
        slot: row of the per-slot tables.
        words: [ceil(V / 32)]; bit i of word w set: id 32 w + i is allowed.
    """

    slot: int
    words: I32


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """One step.

    Rows are ordered: decode rows (one token, whose id is the last one drawn for the slot) first,
    then prefill chunks. Tokens are packed in row order. A row may read pages that another row of
    the same step writes: every layer writes the keys and values of all tokens, then attends.

    Attributes:
        step: number of the step, from 0.
        kind: "decode" when every row is a decode row (then T == R == L), else "extend".
        variant: "plain" (temperature, top-k, top-p, min-p) or "full" (also penalties, bias, masks,
            logprobs).
        num_decode_rows: how many rows at the front are decode rows.
        token_ids: [T]; -1 means "the last token drawn for this token's slot", read on the device.
        positions: [T] position in the sequence, from 0.
        token_slots: [T] slot of the token's request.
        kv_slots: [T] page * page_size + offset where the token's key and value go.
        row_slots: [R] slot, the row of page table and sampling state.
        row_starts: [R] position of the row's first token (= tokens already in the KV cache).
        row_lens: [R] tokens of the row in this step.
        logit_tokens: [L] index into T of the token whose logits are needed.
        logit_slots: [L] slot of that token.
        logit_targets: [L] -1: draw the next token and make it the slot's last token; >= 0: only
            score this id (prompt logprobs), draw nothing. -2: draw and discard (never the slot's
            last token).
        logit_positions: [L] position of the token to be drawn (with the seed, it fixes the draw).
        sampling_floats: [L, NUM_FLOATS]; sampling_ints: [L, NUM_INTS].
        update_slots / update_columns / update_pages: [U] page_table[slot, column] = page, applied
            before the step.
        admissions: sampling state to set before the step.
        masks: of the slots that draw and have FLAG_GUIDED.
    """

    step: int
    kind: Kind
    variant: Variant
    num_decode_rows: int
    token_ids: I32
    positions: I32
    token_slots: I32
    kv_slots: I32
    row_slots: I32
    row_starts: I32
    row_lens: I32
    logit_tokens: I32
    logit_slots: I32
    logit_targets: I32
    logit_positions: I32
    sampling_floats: F32
    sampling_ints: I32
    update_slots: I32
    update_columns: I32
    update_pages: I32
    admissions: tuple[SlotAdmission, ...] = ()
    masks: tuple[SlotMask, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.row_slots)

    @property
    def num_logit_rows(self) -> int:
        return len(self.logit_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What came back from the device for the logit rows of one batch, in their order.

    Attributes:
        token_ids: [L] id drawn; -1 where the row's logits were not finite.
        logprobs: [L] of the drawn (or target) id, or None in the plain variant.
        top_ids / top_logprobs: [L, max_logprobs] descending, or None in the plain variant.
    """

    token_ids: I32
    logprobs: F32 | None = None
    top_ids: I32 | None = None
    top_logprobs: F32 | None = None
