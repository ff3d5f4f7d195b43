"""A device of Python lists: runs scheduled batches in order over a KV pool and checks every slot
that a row reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.scheduler.batch import (
    FLAG_COUNT,
    FLAG_GUIDED,
    FLAG_MASK_STOP,
    FLAGS,
    SEED_LO,
    TEMPERATURE,
    ScheduledBatch,
    SlotAdmission,
    StepResult,
)
from engine.scheduler.limits import SchedulerLimits

from .reference import (
    MAX_LOGPROBS,
    VOCAB,
    Draw,
    empty_hash,
    extend_hash,
    logprob,
    next_token,
    top_ids,
)


@dataclass
class SlotState:
    """Sampling state of a slot, as SlotAdmission set it and draws with FLAG_COUNT went on."""

    seen: list[int] = field(default_factory=list)
    bias: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()


class FakeDevice:
    """KV pool, page table, last tokens and sampling state; run() is one step."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        # Per KV slot: (position, token, hash of the prefix that ends here) or None, and the step
        # that wrote it.
        self.kv: list[tuple[int, int, int] | None] = [None] * (limits.num_pages * limits.page_size)
        self.written_in = [-1] * len(self.kv)
        self.page_table = np.zeros((limits.max_running, limits.pages_per_sequence), np.int32)
        self.last_token = [0] * limits.max_running
        self.sampling = [SlotState() for _ in range(limits.max_running)]
        self.masks: dict[int, int] = {}
        self.touched: dict[int, set[int]] = {}  # pages of the last step: page -> slots
        self.written: dict[int, int] = {}  # pages written in the last step: page -> slot

    def run(self, batch: ScheduledBatch, previous_in_flight: bool) -> StepResult:
        """Run one step; `previous_in_flight`: the host does not know yet that the step before
        ended.
        """
        self.page_table[batch.update_slots, batch.update_columns] = batch.update_pages
        for admission in batch.admissions:
            self._admit(admission)
        self.masks = {mask.slot: int(mask.words[0]) for mask in batch.masks}
        tokens = [
            int(token) if token >= 0 else max(self.last_token[slot], 0)
            for token, slot in zip(batch.token_ids, batch.token_slots, strict=True)
        ]
        before = self.touched
        self.touched, self.written = {}, {}
        hashes = self._run_rows(batch, tokens)
        for page, slot in self.written.items():
            others = before.get(page, set()) - {slot}
            assert not (previous_in_flight and others), "a page was given away while in flight"
        return self._draw(batch, hashes)

    def _admit(self, admission: SlotAdmission) -> None:
        self.sampling[admission.slot] = SlotState(
            [*admission.prompt_ids.tolist(), *admission.output_ids.tolist()],
            tuple(admission.bias_ids.tolist()),
            frozenset(admission.stop_ids.tolist()),
        )

    def _run_rows(self, batch: ScheduledBatch, tokens: list[int]) -> list[int]:
        """Every layer writes the KV of all tokens before its attention reads any: a row may read
        another's of the same step. Here: rows whose reads nobody will still write go first.
        """
        offsets = np.cumsum(batch.row_lens) - batch.row_lens
        size = self.limits.page_size
        reads, writes = [], []
        for row, slot in enumerate(batch.row_slots.tolist()):
            pages = self.page_table[slot, : -(-int(batch.row_starts[row]) // size)]
            first = int(offsets[row])
            reads.append({int(page) for page in pages})
            writes.append(
                set((batch.kv_slots[first : first + batch.row_lens[row]] // size).tolist())
            )
        hashes: dict[int, list[int]] = {}
        while len(hashes) < batch.num_rows:
            waiting = [row for row in range(batch.num_rows) if row not in hashes]
            ready = [
                row
                for row in waiting
                if not any(reads[row] & writes[other] for other in waiting if other != row)
            ]
            assert ready, "rows read each other's KV in a circle"
            for row in ready:
                hashes[row] = self._run_row(batch, row, tokens, int(offsets[row]))
        return [value for row in range(batch.num_rows) for value in hashes[row]]

    def _run_row(
        self, batch: ScheduledBatch, row: int, tokens: list[int], offset: int
    ) -> list[int]:
        """Check what the row reads, write its tokens' KV; the prefix hash at each of its tokens."""
        size, slot = self.limits.page_size, int(batch.row_slots[row])
        start, count = int(batch.row_starts[row]), int(batch.row_lens[row])
        assert count > 0
        prefix = empty_hash()
        for position in range(start):
            page = int(self.page_table[slot, position // size])
            index = page * size + position % size
            assert page > 0, "a row reads the dummy page"
            entry = self.kv[index]
            assert entry is not None, "a row reads KV that nobody wrote"
            prefix = extend_hash(prefix, entry[1])
            assert entry == (position, entry[1], prefix), "a row reads another sequence's KV"
            self.touched.setdefault(page, set()).add(slot)
        hashes = []
        for index in range(offset, offset + count):
            position = start + index - offset
            page = int(self.page_table[slot, position // size])
            assert batch.positions[index] == position
            assert batch.token_slots[index] == slot
            assert batch.kv_slots[index] == page * size + position % size, "KV goes elsewhere"
            assert page > 0, "the dummy page is written"
            kv_slot = int(batch.kv_slots[index])
            assert self.written_in[kv_slot] < batch.step, "two tokens of a step share a KV slot"
            prefix = extend_hash(prefix, tokens[index])
            self.kv[kv_slot] = (position, tokens[index], prefix)
            self.written_in[kv_slot] = batch.step
            self.touched.setdefault(page, set()).add(slot)
            assert self.written.setdefault(page, slot) == slot
            hashes.append(prefix)
        return hashes

    def _draw(self, batch: ScheduledBatch, hashes: list[int]) -> StepResult:
        ids, logprobs, tops, top_logprobs = [], [], [], []
        for row in range(batch.num_logit_rows):
            prefix = hashes[batch.logit_tokens[row]]
            slot, target = int(batch.logit_slots[row]), int(batch.logit_targets[row])
            assert batch.token_slots[batch.logit_tokens[row]] == slot
            position = int(batch.positions[batch.logit_tokens[row]]) + 1
            assert batch.logit_positions[row] == position
            token = self._draw_one(batch, row, prefix)
            if target == -1:
                self.last_token[slot] = token
            elif target >= 0 and token >= 0:
                token = target
            ids.append(token)
            logprobs.append(logprob(prefix, token))
            tops.append(top_ids(prefix))
            top_logprobs.append([logprob(prefix, top) for top in top_ids(prefix)])
        assert not self.masks, "a mask for a slot that draws nothing"
        token_ids = np.array(ids, np.int32)
        if batch.variant == "plain":
            return StepResult(token_ids)
        return StepResult(
            token_ids,
            np.array(logprobs, np.float32),
            np.array(tops, np.int32).reshape(-1, MAX_LOGPROBS),
            np.array(top_logprobs, np.float32).reshape(-1, MAX_LOGPROBS),
        )

    def _draw_one(self, batch: ScheduledBatch, row: int, prefix: int) -> int:
        slot, ints = int(batch.logit_slots[row]), batch.sampling_ints[row]
        flags, state = int(ints[FLAGS]), self.sampling[slot]
        masked: frozenset[int] = frozenset()
        if flags & FLAG_MASK_STOP:
            assert batch.variant == "full", "a masked row in the plain variant"
            masked = state.stop_ids
        if flags & FLAG_GUIDED:
            assert batch.variant == "full", "a row with a grammar in the plain variant"
            bits = self.masks.pop(slot)  # of this very step, and for one row
            masked |= {token for token in range(VOCAB) if not bits >> token & 1}
        bias = state.bias if batch.variant == "full" else ()
        draw = Draw(
            int(ints[SEED_LO]) & 0xFFFF,
            int(batch.logit_positions[row]),
            float(batch.sampling_floats[row, TEMPERATURE]) == 0,
            bias,
            masked,
        )
        token = next_token(prefix, draw)
        if flags & FLAG_COUNT and batch.variant == "full":
            assert batch.logit_targets[row] == -1, "a row that draws nothing is counted"
            seen = empty_hash()
            for known in state.seen:
                seen = extend_hash(seen, known)
            assert seen == prefix, "penalty counts do not hold the tokens of the sequence"
            state.seen.append(max(token, 0))
        return token
