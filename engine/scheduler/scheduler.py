"""Scheduler: which tokens of which requests the next step computes.

A request has tokens and computed tokens, and the latter catch up with the former: chunked prefill,
prefix hits and recompute after a preemption are all that. schedule() advances requests as if the
step had already run, so that the next step can be made before the ids of this one are known;
whoever ends meanwhile keeps slot and pages until no step in flight has a row of it.

Two budgets: tokens (and their cost) of one step, pages over a request's life. A request is admitted
on an estimate of its pages; when pages run out the youngest is preempted and recomputed later. The
oldest is never preempted and has a row in every step, or in the one after the steps that still hold
the pages it needs. A request with a grammar has none while its last token is still to come.

Knows nothing of devices, tensors or text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from engine.request import EngineRequest, RequestFailed, Stats
from engine.scheduler.admission import next_chunk, reason_to_refuse
from engine.scheduler.batch import Kind, ScheduledBatch
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.policy import make_queue, seniority
from engine.scheduler.radix_cache import Match
from engine.scheduler.running import RunningSet
from engine.scheduler.slots import Guide, Phase, RequestState
from engine.scheduler.step_plan import DRAW, Chunk, StepPlan, build_batch


class Scheduler:
    """The host's state of all requests.

    Args:
        limits: every number it obeys.
        clock: seconds, for max_waiting_s.
    """

    def __init__(
        self, limits: SchedulerLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self._queue = make_queue(limits.policy)
        self._running = RunningSet(limits, self._queue.push)
        self.tables, self.pages = self._running.tables, self._running.pages
        self.num_generated = 0
        self._clock = clock
        self._requests: dict[int, RequestState] = {}
        self._unpublished: list[RequestState] = []  # duplicates of the tree's pages to be replaced
        self._arrivals: deque[RequestState] = deque()
        self._failed: list[RequestFailed] = []
        self._next_step = 0
        self._num_prompt = self._num_cached = 0
        self._num_steps: dict[Kind, int] = {"decode": 0, "extend": 0}

    # What the engine core calls.

    def add(self, request: EngineRequest, guide: Guide | None = None) -> RequestFailed | None:
        """Queue a request, with the guide of its grammar, or say why it is refused: 400 when it can
        never run, 429 when the queue is full.
        """
        assert (guide is not None) == bool(request.grammar), "a grammar needs a guide"
        prompt = np.array(request.prompt_ids, np.int64)
        message = reason_to_refuse(request, prompt, self.limits)
        if request.request_id in self._requests:
            message = f"request id {request.request_id} is in use"
        if message:
            return RequestFailed(request.request_id, message, 400)
        if len(self._queue) >= self.limits.max_waiting + self.tables.num_free:
            return RequestFailed(request.request_id, "the waiting queue is full", 429)
        state = RequestState(
            request=request,
            tokens=prompt.astype(np.int32),
            seniority=seniority(self.limits.policy, request.request_id, request.priority),
            arrived=self._clock(),
            guide=guide,
        )
        self._requests[request.request_id] = state
        self._queue.push(state)
        if self.limits.max_waiting_s is not None:
            self._arrivals.append(state)
        return None

    def abort(self, request_ids: Iterable[int]) -> None:
        """End these requests without a word; unknown ids are ignored."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                self.end(state)

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when nothing can run before a step in flight was processed (or at
        all).
        """
        assert self.num_in_flight <= self.limits.overlap, "too many steps in flight"
        self._expire()
        plan = StepPlan(self.limits, self._next_step)
        self._running.add_decode_rows(plan)
        for state in list(self._running.prefilling):
            if self.limits.policy == "priority":
                self._admit(plan, ahead_of=state)
            self._add_chunk(plan, state)
        self._admit(plan)
        if plan.is_empty:
            return None
        self._replace_duplicates(plan)
        batch = build_batch(plan, self.tables)
        self._advance(plan, batch)
        return batch

    @property
    def has_work(self) -> bool:
        """Whether a request is open or a step is in flight."""
        return bool(self._requests) or self.num_in_flight > 0

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and not processed."""
        return self._next_step - 1 - self._running.processed

    def take_failed(self) -> list[RequestFailed]:
        """Requests that ended in the queue (max_waiting_s) since the last call; process() reports
        them too.
        """
        failed, self._failed = self._failed, []
        return failed

    def stats(self) -> Stats:
        """Counters and gauges; those of the graphs are left at 0."""
        occupied = self.tables.occupied()
        running = sum(state.phase is Phase.RUNNING for state in occupied)
        preempted = sum(state.phase is Phase.PREEMPTED for state in occupied)
        pool, cache = self.pages.pool, self.pages.cache
        return Stats(
            running=running,
            waiting=len(self._queue) + preempted,
            pages_total=pool.num_usable,
            pages_free=pool.num_free,
            pages_cached=cache.num_evictable,
            pages_held=pool.num_usable - pool.num_free - cache.num_evictable,
            steps_decode=self._num_steps["decode"],
            steps_extend=self._num_steps["extend"],
            preemptions=self._running.num_preemptions,
            prompt_tokens=self._num_prompt,
            cached_prompt_tokens=self._num_cached,
            generated_tokens=self.num_generated,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError with what is broken in slots, pages or tree. For tests and idle
        moments: walks all.
        """
        self._running.check_integrity()
        in_queue = sum(state.phase is Phase.WAITING for state in self._requests.values())
        assert in_queue == len(self._queue), "the queue's length is wrong"
        occupied = self.tables.occupied()
        assert self.has_work or not occupied, "nothing to do, but a slot is held"

    # What the output processor calls.

    def begin_processing(self, step: int) -> None:
        """The results of `step` are here. Steps come back in order."""
        assert step == self._running.processed + 1 < self._next_step, (
            "a step was processed out of order"
        )
        self._running.processed = step

    def release_drained(self) -> None:
        """The results of the last step were applied: release whoever waited for it."""
        self._running.release_drained()

    def end(self, state: RequestState) -> None:
        """The request is over, wherever it is; its slot and pages go when no step in flight has a
        row of it.
        """
        del self._requests[state.request.request_id]
        if state.phase is Phase.WAITING:
            state.phase = Phase.ENDED
            self._queue.remove(state)
        else:
            self._running.end(state)

    # Chunks and admission.

    def _add_chunk(self, plan: StepPlan, state: RequestState) -> bool:
        """The next chunk of a request, as long as the budgets allow; whether it got one."""
        tables, slot = self.tables, state.slot
        chunk = next_chunk(state, tables, plan, self.pages.available, self._logit_rows(plan, state))
        if chunk is None:
            return False
        missing = self.limits.pages_for(chunk.stop) - int(tables.num_pages[slot])
        if missing > 0:
            self.pages.grow(slot, missing)
        shipped, state.num_shipped = state.num_shipped, int(tables.num_pages[slot])
        plan.add_columns(slot, shipped, tables.page_table[slot, shipped : state.num_shipped].copy())
        plan.add_chunk(chunk)
        if not state.announced and (admission := tables.admission(state)) is not None:
            plan.admissions.append(admission)
        self._advance_chunk(state, chunk)
        return True

    def _logit_rows(self, plan: StepPlan, state: RequestState) -> int:
        """Most logit rows of a request's chunk. A scored prompt would take them all: it leaves one
        to each request whose chunk comes later, and up to half to those that may start.
        """
        left, order = plan.logits_left, self._running.prefilling
        if not state.scores_prompt:
            return left
        starting = min(len(self._queue), self.tables.num_free, left // 2)
        later = len(order) - 1 - order.index(state)
        return min(left, max(1, left - later - starting))

    def _advance_chunk(self, state: RequestState, chunk: Chunk) -> None:
        """The chunk counts as computed, the token it draws as there."""
        tables, slot, stop = self.tables, state.slot, chunk.stop
        tables.computed[slot] = stop
        # At once, so that the next request of this very step shares these pages: every layer writes
        # the keys and values of all tokens before its attention reads any.
        self.pages.publish(state, stop, 0)
        if self._has_unpublished(state) and state not in self._unpublished:
            self._unpublished.append(state)
        if state.request.prompt_logprobs >= 0:
            state.num_scored = max(state.num_scored, min(stop + 1, state.num_prompt))
        if chunk.last_target is None:
            return
        self._running.prefilling.remove(state)
        if chunk.last_target == DRAW:
            tables.length[slot] += 1
            if tables.length[slot] < tables.limit[slot]:
                tables.set_decoding(slot, True)

    def _admit(self, plan: StepPlan, ahead_of: RequestState | None = None) -> None:
        """Start requests from the queue, strictly in its order, while slot, step and pages have
        room; with `ahead_of` only those of a higher priority than that one.
        """
        if not len(self._queue) or not self.tables.num_free or not self.pages.available:
            return
        self._queue.refresh(lambda state: self._match(state).num_pages, self.pages.cache.version)
        while self.tables.num_free and plan.tokens_left and plan.logits_left:
            state = self._queue.peek()
            if state is None:
                break
            if ahead_of is not None and state.seniority[0] >= ahead_of.seniority[0]:
                break
            match = self._match(state)
            estimate = self._estimated_pages(state)
            if not self._fits(plan, match, estimate):
                break
            self._queue.pop()
            self._start(state, match, estimate)
            started = self._add_chunk(plan, state)
            assert started, "an admitted request has no row in its first step"

    def _match(self, state: RequestState) -> Match:
        """Cached pages that the request can use: at least one token is left, and every token still
        to be scored.
        """
        usable = len(state.tokens) - 1
        if state.scores_prompt:
            usable = min(usable, state.num_scored - 1)
        longest = self.limits.max_page_updates - self.limits.max_running
        return self.pages.cache.match(state.tokens, min(usable // self.limits.page_size, longest))

    def _estimated_pages(self, state: RequestState) -> int:
        # The last token drawn has no keys and values.
        return self.limits.pages_for(
            max(1, state.estimated_tokens(self.limits.output_estimate) - 1)
        )

    def _fits(self, plan: StepPlan, match: Match, estimate: int) -> bool:
        """Whether the head of the queue can start in this step."""
        if match.num_pages + 1 > plan.updates_left:
            return False
        if plan.affordable(match.num_pages * self.limits.page_size) < 1:
            return False
        available = self.pages.available - self.pages.cache.num_evictable_in(match)
        if available < 1:
            return False
        tables = self.tables
        if tables.num_free == self.limits.max_running:
            return True  # alone, it fits: add() saw to that
        outstanding = np.maximum(tables.estimated_pages - tables.num_pages, 0)
        needed = estimate - match.num_pages + int(outstanding[tables.alive].sum())
        return needed <= available

    def _start(self, state: RequestState, match: Match, estimate: int) -> None:
        self._running.start(state, match, estimate)
        if state.num_cached < 0:
            cached = match.num_pages * self.limits.page_size
            state.num_cached = min(cached, state.num_prompt)
            self._num_prompt += state.num_prompt
            self._num_cached += state.num_cached

    # The end of schedule().

    def _replace_duplicates(self, plan: StepPlan) -> None:
        """Requests that computed pages which the tree has by now take the tree's, as far as updates
        are to spare.
        """
        starts = {chunk.slot: chunk.start for chunk in plan.chunks}
        spare = plan.spare_updates()
        waiting, self._unpublished = self._unpublished, []
        for state in waiting:
            if state.phase is not Phase.RUNNING:
                continue
            # This step writes its own tokens where the page table said before.
            before = starts.get(state.slot, int(self.tables.computed[state.slot]))
            column = state.num_published
            pages = self.pages.publish(state, before, spare)
            plan.add_columns(state.slot, column, pages)
            spare -= len(pages)
            if self._has_unpublished(state):
                self._unpublished.append(state)

    def _has_unpublished(self, state: RequestState) -> bool:
        full = int(self.tables.computed[state.slot]) // self.limits.page_size
        return self.limits.prefix_cache and state.num_published < full

    def _advance(self, plan: StepPlan, batch: ScheduledBatch) -> None:
        """The batch counts as run."""
        tables, slots = self.tables, plan.decode_slots
        self._next_step += 1
        self._num_steps[batch.kind] += 1
        tables.last_step[batch.row_slots] = plan.step
        if len(slots) == 0:
            return
        tables.computed[slots] += 1
        tables.length[slots] += 1
        full = tables.length[slots] >= tables.limit[slots]
        if full.any():
            tables.stop_decoding(slots[full])

    def _expire(self) -> None:
        """Requests that waited too long for their first step end with 503."""
        limit = self.limits.max_waiting_s
        while limit is not None and self._arrivals:
            state = self._arrivals[0]
            if state.phase is Phase.WAITING and state.num_cached < 0:
                waited = self._clock() - state.arrived
                if waited <= limit:
                    return
                message = f"the request waited {waited:.1f} s, longer than the limit of {limit} s"
                self._failed.append(RequestFailed(state.request.request_id, message, 503))
                self.end(state)
            self._arrivals.popleft()
