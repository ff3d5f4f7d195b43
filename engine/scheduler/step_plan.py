"""StepPlan: what is left of a step's budgets and what was put into it so far; build_batch() freezes
it.

Knows nothing of requests beyond their slots, and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.scheduler.batch import (
    FLAGS,
    FREQUENCY,
    I32,
    PRESENCE,
    REPETITION,
    ScheduledBatch,
    SlotAdmission,
    SlotMask,
)
from engine.scheduler.limits import (
    CHUNKS_ALONE,
    MIN_CHUNK_SHARE,
    MIN_CHUNK_TOKENS,
    SchedulerLimits,
    TokenBucket,
    context_pairs,
    tokens_within,
)
from engine.scheduler.slots import SlotTables

DRAW, DRAW_AND_DISCARD = -1, -2
_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start .. stop of a request; logits are needed from position `logits_from` on (stop:
    none).

    `last_target` is the target of the last token when it draws (DRAW or DRAW_AND_DISCARD), else
    None.
    """

    slot: int
    start: int
    stop: int
    logits_from: int
    last_target: int | None


@dataclass(slots=True)
class StepPlan:
    """One step being put together.

    Attributes:
        decode_slots / decode_positions: int32 [rows], in row order.
        budget: cost of tokens and chunks.
        pairs: context_pairs of the chunks.
        deepest: of the chunk that starts last, where it does and its tokens.
    """

    limits: SchedulerLimits
    step: int
    decode_slots: I32 = field(default_factory=lambda: _NONE)
    decode_positions: I32 = field(default_factory=lambda: _NONE)
    chunks: list[Chunk] = field(default_factory=list)
    admissions: list[SlotAdmission] = field(default_factory=list)
    tokens_left: int = 0
    logits_left: int = 0
    updates_left: int = 0
    budget: float = 0.0
    pairs: float = 0.0
    deepest: tuple[int, int] = (0, 0)
    updates: list[tuple[I32, I32, I32]] = field(default_factory=list)
    num_updates: int = 0

    def set_decode_rows(self, slots: I32, positions: I32) -> None:
        """The step's decode rows, before anything else; starts the budgets."""
        limits, rows = self.limits, len(slots)
        self.decode_slots, self.decode_positions = slots, positions
        self.tokens_left = limits.max_step_tokens - rows
        self.logits_left = limits.max_logit_rows - rows
        self.updates_left = limits.max_page_updates - self.num_updates
        left = limits.step_budget * (1 if rows else CHUNKS_ALONE)
        left -= int(positions.sum()) / limits.decode_unit
        self.budget = max(left, MIN_CHUNK_SHARE * limits.step_budget)

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not len(self.decode_slots)

    def affordable(self, start: int) -> int:
        """Tokens that a chunk from position `start` may have."""
        used = self.limits.max_step_tokens - self.tokens_left
        least = used if self.chunks else used + 1
        padded = next((b for b in self.limits.buckets if b.tokens >= least), None)
        most, below = 0, used
        for bucket in self.limits.buckets:
            if bucket.tokens <= used:
                continue
            left = self.budget - bucket.tokens
            if bucket is padded:  # whatever the chunk's size
                left = max(left, MIN_CHUNK_SHARE * self.limits.step_budget)
            count = min(bucket.tokens - used, self._affordable_in(bucket, start, left))
            # Padding costs what tokens do: a larger bucket is worth half of what it adds.
            if not most or 2 * (count - most) >= bucket.tokens - below:
                most, below = count, bucket.tokens
        if not self.chunks and padded is not None:  # a wave costs the same however short it is
            most = max(most, MIN_CHUNK_TOKENS, min(padded.wave, padded.tokens - used))
        return min(most, self.tokens_left)

    def _affordable_in(self, bucket: TokenBucket, start: int, left: float) -> int:
        """The same in a step of that bucket, its size aside, for what is left of the budget."""
        pairs = left * bucket.context_unit
        deepest, count = self.deepest
        if deepest * bucket.waves(count) > pairs:
            return 0
        count = tokens_within(start, pairs - self.pairs)
        if start:
            count = min(count, int(pairs // (start * bucket.wave)) * bucket.wave)
        return count

    def add_updates(self, slots: I32, columns: I32, pages: I32) -> None:
        self.updates.append((slots, columns, pages))
        self.num_updates += len(pages)
        self.updates_left -= len(pages)

    def add_columns(self, slot: int, start: int, pages: I32) -> None:
        """Updates of consecutive columns of one slot."""
        count = len(pages)
        if count:
            columns = np.arange(start, start + count, dtype=np.int32)
            self.add_updates(np.full(count, slot, np.int32), columns, pages)

    def add_chunk(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        count = chunk.stop - chunk.start
        self.tokens_left -= count
        self.logits_left -= chunk.stop - chunk.logits_from
        self.pairs += context_pairs(chunk.start, count)
        self.deepest = max(self.deepest, (chunk.start, count))

    def spare_updates(self) -> int:
        """Page-table updates that this step can still carry."""
        if self.chunks:
            return self.updates_left
        return len(self.decode_slots) - self.num_updates


def build_batch(plan: StepPlan, tables: SlotTables) -> ScheduledBatch:
    """The frozen batch of a plan."""
    rows = _decode_rows(plan.decode_slots, plan.decode_positions)
    if plan.chunks:
        parts = {name: [array] for name, array in rows.items()}
        offset = len(plan.decode_slots)
        for chunk in plan.chunks:
            _add_chunk_rows(parts, chunk, tables, offset)
            offset += chunk.stop - chunk.start
        rows = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    positions, page_size = rows["positions"], plan.limits.page_size
    columns = positions // page_size
    pages = tables.page_table[rows["token_slots"], columns]
    floats, ints, full = tables.sampling_rows(rows["logit_slots"], rows["logit_positions"])
    scored = rows["logit_targets"] != DRAW
    if plan.chunks and scored.any():
        # The prompt is scored as the model sees it: no penalty, nothing masked, nothing counted.
        ints[scored, FLAGS] = 0
        floats[scored, REPETITION] = 1
        floats[np.ix_(scored, (FREQUENCY, PRESENCE))] = 0
    return ScheduledBatch(
        step=plan.step,
        kind="extend" if plan.chunks else "decode",
        variant="full" if full else "plain",
        num_decode_rows=len(plan.decode_slots),
        kv_slots=pages * page_size + (positions - columns * page_size),
        sampling_floats=floats,
        sampling_ints=ints,
        update_slots=_join([part[0] for part in plan.updates]),
        update_columns=_join([part[1] for part in plan.updates]),
        update_pages=_join([part[2] for part in plan.updates]),
        admissions=tuple(plan.admissions),
        masks=_masks(rows["logit_slots"][~scored], tables),
        **rows,
    )


def _masks(slots: I32, tables: SlotTables) -> tuple[SlotMask, ...]:
    """What the slots that draw may, of those with a grammar."""
    guided = tables.guides.keys() & set(slots.tolist()) if tables.guides else ()
    return tuple(SlotMask(slot, tables.guides[slot].mask()) for slot in guided)


def _decode_rows(slots: I32, positions: I32) -> dict[str, I32]:
    """Fields of a batch that has only decode rows."""
    count = len(slots)
    minus_one = np.full(count, -1, np.int32)
    return {
        "token_ids": minus_one,
        "positions": positions,
        "token_slots": slots,
        "row_slots": slots,
        "row_starts": positions,
        "row_lens": np.ones(count, np.int32),
        "logit_tokens": np.arange(count, dtype=np.int32),
        "logit_slots": slots,
        "logit_targets": minus_one,
        "logit_positions": positions + 1,
    }


def _add_chunk_rows(
    parts: dict[str, list[I32]], chunk: Chunk, tables: SlotTables, offset: int
) -> None:
    """Append one chunk, whose first token is token `offset` of the step, to each field's parts."""
    slot, start, stop = chunk.slot, chunk.start, chunk.stop
    ids = tables.tokens[slot]
    parts["token_ids"].append(ids[start:stop])
    parts["positions"].append(np.arange(start, stop, dtype=np.int32))
    parts["token_slots"].append(np.full(stop - start, slot, np.int32))
    parts["row_slots"].append(np.array([slot], np.int32))
    parts["row_starts"].append(np.array([start], np.int32))
    parts["row_lens"].append(np.array([stop - start], np.int32))
    if chunk.logits_from == stop:
        return
    scored = np.arange(chunk.logits_from, stop, dtype=np.int32)
    targets = np.empty(len(scored), np.int32)
    if chunk.last_target is None:
        targets[:] = ids[chunk.logits_from + 1 : stop + 1]
    else:
        targets[:-1] = ids[chunk.logits_from + 1 : stop]
        targets[-1] = chunk.last_target
    parts["logit_tokens"].append(scored - (start - offset))
    parts["logit_slots"].append(np.full(len(scored), slot, np.int32))
    parts["logit_targets"].append(targets)
    parts["logit_positions"].append(scored + 1)


def _join(parts: list[I32]) -> I32:
    return np.concatenate(parts) if parts else _NONE
