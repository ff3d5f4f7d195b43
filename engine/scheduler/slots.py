"""RequestState, what the scheduler keeps per request, and SlotTables, what it keeps per running
request in numpy.

Whatever changes at every step lives in SlotTables, one row per slot, so that a step costs a few
vector operations however many requests run. RequestState is touched only when something happens to
a request.

Knows nothing of budgets, pages or policies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.request import EngineRequest
from engine.scheduler.batch import (
    FLAG_COUNT,
    FLAG_GUIDED,
    FLAG_MASK_STOP,
    FLAGS,
    I32,
    NUM_FLOATS,
    NUM_INTS,
    SlotAdmission,
)
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.radix_cache import Node

GREEDY_BELOW = 1e-5
_NO_IDS = np.zeros(0, np.int32)
_NO_VALUES = np.zeros(0, np.float32)


class Phase(IntEnum):
    """Where a request is. PREEMPTED and ENDED ones may still hold a slot, until no step in flight
    has a row of them.
    """

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    ENDED = 3


class Guide(Protocol):
    """A request's place in the grammar that its answer follows.

    Attributes:
        error: why it cannot go on, or "".
    """

    error: str

    def wait(self, seconds: float) -> bool:
        """Whether `mask` would not wait, after so many seconds at most."""

    def mask(self) -> I32:
        """What may come next, as SlotMask.words."""

    def advance(self, token_id: int) -> bool:
        """Go on by a drawn id; whether the grammar is at its end."""


def needs_full(request: EngineRequest) -> bool:
    """Whether every step of the request takes the `full` variant."""
    penalised = request.frequency_penalty != 0 or request.presence_penalty != 0
    penalised |= request.repetition_penalty != 1
    scored = request.logprobs >= 0 or request.prompt_logprobs >= 0
    return bool(request.logit_bias) or penalised or scored or bool(request.grammar)


def may_need_full(request: EngineRequest) -> bool:
    """Whether some step of the request takes the `full` variant."""
    return needs_full(request) or request.min_tokens > 0


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from add() to its end.

    Attributes:
        request: as submitted.
        tokens: int32, every id known while the request has no slot: the prompt, and the output
            before a preemption.
        seniority: smaller is served first and preempted last.
        arrived: clock's seconds at add().
        slot: -1 without one. node: its locked node in the prefix tree.
        num_published: columns of its page table whose pages belong to the tree.
        num_shipped: columns of its page table that the device has, while its prompt is computed.
        num_scored: prompt tokens whose logprobs were computed; the first has none.
        num_cached: prompt tokens from the prefix cache at the first start, -1 before.
        announced: its sampling state was sent to the device for this slot.
        tainted: its keys and values are not to be trusted (non-finite logits).
        num_overtaken: younger requests that started before it while it was the oldest waiting.
        guide: where it is in its grammar.
    """

    request: EngineRequest
    tokens: I32
    seniority: tuple[int, int]
    arrived: float
    phase: Phase = Phase.WAITING
    slot: int = -1
    node: Node | None = None
    num_published: int = 0
    num_shipped: int = 0
    num_scored: int = 1
    num_cached: int = -1
    announced: bool = False
    tainted: bool = False
    num_overtaken: int = 0
    guide: Guide | None = None
    needs_full: bool = field(init=False)

    def __post_init__(self) -> None:
        self.needs_full = needs_full(self.request)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def limit(self) -> int:
        """Tokens of prompt and output at which the request ends."""
        return self.num_prompt + self.request.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of prompt tokens are still to be computed."""
        return self.request.prompt_logprobs >= 0 and self.num_scored < self.num_prompt

    def estimated_tokens(self, output_estimate: float) -> int:
        """Tokens that admission expects the request to have in the end."""
        request, known = self.request, len(self.tokens)
        from_start = self.num_prompt + int(np.ceil(output_estimate * request.max_tokens))
        from_here = known + int(np.ceil(output_estimate * (self.limit - known)))
        return max(1, min(self.limit, max(from_start, from_here)))


class SlotTables:
    """One row per slot; row max_running is the dummy slot of padding and stays as it is.

    Attributes (S slots, P pages of a sequence):
        requests: the request in each slot, or None.
        page_table: int32 [S + 1, P], as the device will have it once the updates scheduled so far
            were applied.
        num_pages: columns of page_table in use. estimated_pages: what admission expects them to
            become.
        computed: tokens whose keys and values are written by the steps scheduled so far.
        length: tokens of the sequence, those still to be drawn by steps in flight included.
        limit: length at which the request ends. num_prompt: tokens of the prompt.
        decoding: its next row is a decode row. alive: results are wanted.
        last_step: the last step with a row of it. sequence: number of its admission.
        guides: slots to guides, of requests with a grammar.
        tokens: int32 [S, max_model_len]: ids of the sequence; placeholders where a step in flight
            draws.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        size = limits.max_running
        self.vocab_size = limits.vocab_size
        self.requests: list[RequestState | None] = [None] * size
        self.page_table = np.zeros((size + 1, limits.pages_per_sequence), np.int32)
        self.num_pages = np.zeros(size, np.int32)
        self.estimated_pages = np.zeros(size, np.int32)
        self.computed = np.zeros(size, np.int32)
        self.length = np.zeros(size, np.int32)
        self.limit = np.zeros(size, np.int32)
        self.num_prompt = np.zeros(size, np.int32)
        self.min_tokens = np.zeros(size, np.int32)
        self.decoding = np.zeros(size, np.bool_)
        self.alive = np.zeros(size, np.bool_)
        self.needs_full = np.zeros(size, np.bool_)
        self.last_step = np.full(size, -1, np.int64)
        self.sequence = np.zeros(size, np.int64)
        self.request_id = np.zeros(size, np.int64)
        self.guides: dict[int, Guide] = {}
        self.sampling_floats = np.zeros((size, NUM_FLOATS), np.float32)
        self.sampling_ints = np.zeros((size, NUM_INTS), np.int32)
        self.stop_ids = np.full((size, 1), -1, np.int32)
        # The system backs only what is written; growing it would stop a step for 10 ms.
        self.tokens = np.zeros((size, limits.max_model_len), np.int32)
        # Slots whose device-side state would change the logits of a request that needs none.
        self._biased = np.zeros(size, np.bool_)
        self._free = list(range(size - 1, -1, -1))
        self._num_started = 0
        self._decode_slots: I32 | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def decode_slots(self) -> I32:
        """Slots whose next row is a decode row, in the order of their admission (int32 [n], never
        changed in place).
        """
        if self._decode_slots is None:
            slots = np.flatnonzero(self.decoding)
            order = np.argsort(self.sequence[slots])
            self._decode_slots = slots[order].astype(np.int32)
        return self._decode_slots

    def set_decoding(self, slot: int, decoding: bool) -> None:
        self.decoding[slot] = decoding
        self._decode_slots = None

    def stop_decoding(self, slots: I32) -> None:
        """These slots have no decode rows any more."""
        self.decoding[slots] = False
        self._decode_slots = None

    def occupied(self) -> list[RequestState]:
        """Every request that holds a slot, in slot order."""
        return [state for state in self.requests if state is not None]

    def enter(self, state: RequestState, estimated_pages: int) -> int:
        """Give the request a slot (there must be a free one) and fill its row; the page table stays
        empty.
        """
        slot = self._free.pop()
        request, length = state.request, len(state.tokens)
        state.slot, state.announced = slot, False
        self.requests[slot] = state
        self.tokens[slot, :length] = state.tokens
        self.num_pages[slot], self.computed[slot], self.length[slot] = 0, 0, length
        self.estimated_pages[slot] = estimated_pages
        self.limit[slot], self.num_prompt[slot] = state.limit, state.num_prompt
        self.alive[slot] = True
        self.needs_full[slot] = state.needs_full
        least = 0 if request.grammar else request.min_tokens  # its end may be all that is allowed
        self.min_tokens[slot] = min(least, request.max_tokens)
        self.last_step[slot], self.sequence[slot] = -1, self._num_started
        self.request_id[slot] = request.request_id
        if state.guide is not None:
            self.guides[slot] = state.guide
        self._num_started += 1
        self._fill_sampling(slot, request)
        return slot

    def leave(self, state: RequestState) -> None:
        """Take the request's slot back, keeping its ids in the request."""
        slot = state.slot
        assert self.requests[slot] is state
        state.tokens = self.tokens[slot, : self.length[slot]].copy()
        state.slot = -1
        self.requests[slot] = None
        self.alive[slot] = self.needs_full[slot] = False
        self.set_decoding(slot, False)
        self.min_tokens[slot] = self.num_pages[slot] = self.estimated_pages[slot] = 0
        self.guides.pop(slot, None)
        self._free.append(slot)

    def admission(self, state: RequestState) -> SlotAdmission | None:
        """The sampling state to set on the device before the first row of the request in its slot,
        if any.
        """
        slot, request = state.slot, state.request
        state.announced = True
        if not state.needs_full and request.min_tokens <= 0:
            if not self._biased[slot]:
                return None
            # The bias of the slot's last request would act on this one in a step of the full
            # variant.
            self._biased[slot] = False
            return SlotAdmission(slot, _NO_IDS, _NO_IDS, _NO_IDS, _NO_VALUES, _NO_IDS)
        self._biased[slot] = bool(request.logit_bias)
        split = state.num_prompt
        return SlotAdmission(
            slot=slot,
            prompt_ids=state.tokens[:split],
            output_ids=state.tokens[split:],
            bias_ids=np.fromiter(request.logit_bias.keys(), np.int32),
            bias_values=np.fromiter(request.logit_bias.values(), np.float32),
            stop_ids=np.array(list(dict.fromkeys(request.stop_ids)), np.int32),
        )

    def sampling_rows(self, slots: I32, positions: I32) -> tuple[NDArray[np.float32], I32, bool]:
        """sampling_floats, sampling_ints and "needs the full variant" of logit rows that draw at
        `positions`.
        """
        ints = self.sampling_ints[slots]
        full = bool(self.needs_full[slots].any())
        if self.min_tokens.any():
            masked = positions - self.num_prompt[slots] < self.min_tokens[slots]
            ints[masked, FLAGS] |= FLAG_MASK_STOP
            full |= bool(masked.any())
        return self.sampling_floats[slots], ints, full

    def _fill_sampling(self, slot: int, request: EngineRequest) -> None:
        greedy = request.temperature < GREEDY_BELOW
        self.sampling_floats[slot] = (
            0.0 if greedy else request.temperature,
            request.top_p,
            request.min_p,
            request.repetition_penalty,
            request.frequency_penalty,
            request.presence_penalty,
        )
        state = self.requests[slot]
        assert state is not None
        top_k = request.top_k if 0 < request.top_k < self.vocab_size else 0
        seed = np.array([request.seed & 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.int32)
        flags = FLAG_COUNT if state.needs_full else 0
        flags |= FLAG_GUIDED if slot in self.guides else 0
        self.sampling_ints[slot] = (top_k, seed[0], seed[1], flags)
        width = self.stop_ids.shape[1]
        if len(request.stop_ids) > width:
            grown = np.full((len(self.stop_ids), len(request.stop_ids)), -1, np.int32)
            grown[:, :width] = self.stop_ids
            self.stop_ids = grown
        # -2 equals no id, neither a drawn one nor the -1 of a failed row.
        self.stop_ids[slot] = -2
        self.stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
