"""Scheduler: which tokens of which requests the next step computes.

A request has tokens and computed tokens, and the latter catch up with the former: chunked prefill, prefix hits and
recompute after a preemption are all that. schedule() advances requests as if the step had already run, so that the next
step can be made before the ids of this one are known; whoever ends meanwhile keeps slot and pages until no step in
flight has a row of it.

Two budgets: tokens (and their cost) of one step, pages over a request's life. A request is admitted on an estimate of
its pages; when pages run out the youngest is preempted and recomputed later. The oldest is never preempted and has
a row in every step, or in the one after the steps that still hold the pages it needs.

Knows nothing of devices, tensors or text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from engine.request import EngineRequest, RequestFailed
from engine.scheduler.batch import I32, ScheduledBatch
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.policy import make_queue, seniority
from engine.scheduler.radix_cache import Match
from engine.scheduler.request_pages import RequestPages
from engine.scheduler.slots import Phase, RequestState, SlotTables
from engine.scheduler.step_plan import DRAW, DRAW_AND_DISCARD, Chunk, StepPlan, build_batch


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
        self.tables = SlotTables(limits)
        self.pages = RequestPages(limits, self.tables)
        self.num_generated = 0
        self._clock = clock
        self._queue = make_queue(limits.policy)
        self._requests: dict[int, RequestState] = {}
        self._prefilling: list[RequestState] = []  # in a slot, prompt (or recompute) not done
        self._unpublished: list[RequestState] = []  # duplicates of the tree's pages to be replaced
        self._draining: list[RequestState] = []  # keep slot and pages until their last step is done
        self._arrivals: deque[RequestState] = deque()
        self._failed: list[RequestFailed] = []
        self._next_step = 0
        self._processed = -1
        self._counters = dict.fromkeys(
            (
                "steps_decode",
                "steps_extend",
                "preemptions",
                "prompt_tokens",
                "cached_prompt_tokens",
            ),
            0,
        )

    # What the engine core calls.

    def add(self, request: EngineRequest) -> RequestFailed | None:
        """Queue a request, or say why it is refused: 400 when it can never run, 429 when the queue is full."""
        prompt = np.array(request.prompt_ids, np.int64)
        message = self._reason_to_refuse(request, prompt)
        if message:
            return RequestFailed(request.request_id, message, 400)
        if len(self._queue) >= self.limits.max_waiting + self.tables.num_free:
            return RequestFailed(request.request_id, "the waiting queue is full", 429)
        state = RequestState(
            request=request,
            tokens=prompt.astype(np.int32),
            seniority=seniority(self.limits.policy, request.request_id, request.priority),
            arrived=self._clock(),
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
        """The next step, or None when nothing can run before a step in flight was processed (or at all)."""
        self._expire()
        plan = StepPlan(self.limits, self._next_step)
        self._add_decode_rows(plan)
        for state in list(self._prefilling):
            self._add_chunk(plan, state)
        self._admit(plan)
        if plan.is_empty:
            return None
        self._publish(plan)
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
        return self._next_step - 1 - self._processed

    def take_failed(self) -> list[RequestFailed]:
        """Requests that ended in the queue (max_waiting_s) since the last call; process() reports them too."""
        failed, self._failed = self._failed, []
        return failed

    def stats(self) -> dict[str, int]:
        """The scheduler's fields of engine.request.Stats."""
        occupied = self.tables.occupied()
        running = sum(state.phase is Phase.RUNNING for state in occupied)
        preempted = sum(state.phase is Phase.PREEMPTED for state in occupied)
        pool, cache = self.pages.pool, self.pages.cache
        return {
            "running": running,
            "waiting": len(self._queue) + preempted,
            "pages_total": pool.num_usable,
            "pages_free": pool.num_free,
            "pages_cached": cache.num_evictable,
            "pages_held": pool.num_usable - pool.num_free - cache.num_evictable,
            "generated_tokens": self.num_generated,
            **self._counters,
        }

    def check_integrity(self) -> None:
        """Raise AssertionError with what is broken in slots, pages or tree. For tests and idle moments: walks all."""
        occupied = self.tables.occupied()
        self.pages.check_integrity(occupied)
        assert len(occupied) + self.tables.num_free == self.limits.max_running, "a slot is lost"
        in_queue = sum(state.phase is Phase.WAITING for state in self._requests.values())
        assert in_queue == len(self._queue), "the queue's length is wrong"
        prefilling = {state.slot for state in self._prefilling}
        for state in occupied:
            slot, live = state.slot, state.phase is Phase.RUNNING
            assert state.phase is not Phase.WAITING, "a waiting request holds a slot"
            assert live or state in self._draining, "a request that ended is not drained"
            assert not (slot in prefilling or self.tables.decoding[slot]) or live
            assert not (slot in prefilling and self.tables.decoding[slot])
        assert self.has_work or not occupied, "nothing to do, but a slot is held"

    # What the output processor calls.

    def begin_processing(self, step: int) -> None:
        """The results of `step` are here. Steps come back in order."""
        assert step == self._processed + 1 < self._next_step, "a step was processed out of order"
        self._processed = step
        self.pages.free_processed(step)

    def release_drained(self) -> None:
        """The results of the last step were applied: release whoever waited for it."""
        if not self._draining:
            return
        last_step = self.tables.last_step
        done = [state for state in self._draining if last_step[state.slot] <= self._processed]
        self._draining = [state for state in self._draining if state not in done]
        for state in done:
            self._release(state)

    def end(self, state: RequestState) -> None:
        """The request is over, wherever it is; its slot and pages go when no step in flight has a row of it."""
        before, state.phase = state.phase, Phase.ENDED
        del self._requests[state.request.request_id]
        if before is Phase.WAITING:
            self._queue.remove(state)
            return
        self.tables.alive[state.slot] = False
        if before is Phase.RUNNING:
            self._unschedule(state)
            self._release_when_idle(state)

    # Pages and preemption.

    def _add_decode_rows(self, plan: StepPlan) -> None:
        """Every running request past its prompt has a row, as far as pages go."""
        tables = self.tables
        slots = tables.decode_slots()
        positions = tables.computed[slots]
        lacking = positions // self.limits.page_size >= tables.num_pages[slots]
        stuck = [state for state in self._prefilling if self._needs_page(state)]
        num_needed = int(np.count_nonzero(lacking)) + len(stuck)
        if num_needed > self.pages.available:
            needy = [self._state_at(slot) for slot in slots[lacking].tolist()] + stuck
            granted = np.zeros(self.limits.max_running, np.bool_)
            granted[[state.slot for state in self._make_room(needy)]] = True
            plan.blocked = True
            slots = tables.decode_slots()
            positions = tables.computed[slots]
            lacking = positions // self.limits.page_size >= tables.num_pages[slots]
            runs = ~lacking | granted[slots]
            slots, positions, lacking = slots[runs], positions[runs], lacking[runs]
            stuck = [state for state in stuck if state.slot >= 0 and granted[state.slot]]
        if num_needed:
            growing = slots[lacking]
            columns, pages = self.pages.grow_each(growing)
            if len(pages):
                plan.add_updates(growing, columns, pages)
            for state in stuck:
                self.pages.grow(state.slot, 1)
        plan.set_decode_rows(slots, positions)

    def _make_room(self, needy: list[RequestState]) -> list[RequestState]:
        """Preempt the youngest until every one of `needy` (a page each) who is older can have one.

        Returns those who get their page now, oldest first; others wait for pages that steps in flight still use, or are
        the youngest themselves.
        """
        needy = sorted(needy, key=_seniority)
        occupied = self.tables.occupied()
        prefilling = {state.slot for state in self._prefilling}
        runnable = [s for s in occupied if s.slot in prefilling or self.tables.decoding[s.slot]]
        leaving = [state for state in occupied if state not in runnable]
        coming = sum(self.pages.num_recoverable(state) for state in leaving)
        runnable.sort(key=_seniority)
        while len(needy) > self.pages.available + coming:
            victim = runnable.pop()
            if needy[self.pages.available + coming] is victim:
                break
            if needy[-1] is victim:
                needy.pop()
            recoverable = self.pages.num_recoverable(victim)
            self._preempt(victim)
            if victim.slot >= 0:
                coming += recoverable
        return needy[: self.pages.available]

    def _preempt(self, state: RequestState) -> None:
        """Take slot and pages from a running request; it goes back to the queue with all its tokens."""
        self._counters["preemptions"] += 1
        state.phase = Phase.PREEMPTED
        self._unschedule(state)
        self._release_when_idle(state)

    def _unschedule(self, state: RequestState) -> None:
        if self.tables.decoding[state.slot]:
            self.tables.set_decoding(state.slot, False)
        elif state in self._prefilling:
            self._prefilling.remove(state)

    def _release_when_idle(self, state: RequestState) -> None:
        if self.tables.last_step[state.slot] <= self._processed:
            self._release(state)
        else:
            self._draining.append(state)

    def _release(self, state: RequestState) -> None:
        self.pages.release(state)
        self.tables.leave(state)
        if state.phase is Phase.PREEMPTED:
            state.phase = Phase.WAITING
            self._queue.push(state)

    # Chunks and admission.

    def _add_chunk(self, plan: StepPlan, state: RequestState) -> bool:
        """The next chunk of a request whose tokens are known, as long as the budgets allow; whether it got one."""
        tables, slot = self.tables, state.slot
        start, total = int(tables.computed[slot]), int(tables.length[slot])
        held = int(tables.num_pages[slot])
        new_pages = min(self.pages.available, plan.updates_left - (held - state.num_shipped))
        if new_pages < 0:
            return False
        room = (held + new_pages) * self.limits.page_size - start
        count = min(total - start, room, plan.affordable(start))
        scored_from = max(start, state.num_scored - 1)
        if state.scores_prompt:
            # From there on every token has a logit row.
            count = min(count, scored_from - start + plan.logits_left)
        elif count == total - start and plan.logits_left == 0:
            count -= 1
        if count <= 0:
            return False
        stop = start + count
        last_target = None
        if stop == total:
            last_target = DRAW if state.request.max_tokens else DRAW_AND_DISCARD
        logits_from = stop - 1 if last_target is not None else stop
        if state.scores_prompt:
            logits_from = min(stop, scored_from)
        missing = self.limits.pages_for(stop) - held
        if missing > 0:
            self.pages.grow(slot, missing)
        shipped, state.num_shipped = state.num_shipped, int(tables.num_pages[slot])
        plan.add_columns(slot, shipped, tables.page_table[slot, shipped : state.num_shipped].copy())
        plan.add_chunk(Chunk(state, slot, start, stop, logits_from, last_target))
        if not state.announced and (admission := tables.admission(state)) is not None:
            plan.admissions.append(admission)
        self._advance_chunk(state, stop, last_target)
        return True

    def _advance_chunk(self, state: RequestState, stop: int, last_target: int | None) -> None:
        """The chunk up to `stop` counts as computed, the token it draws as there."""
        tables, slot = self.tables, state.slot
        tables.computed[slot] = stop
        if state.request.prompt_logprobs >= 0:
            state.num_scored = max(state.num_scored, min(stop + 1, state.num_prompt))
        if last_target is None:
            return
        self._prefilling.remove(state)
        if last_target == DRAW:
            tables.length[slot] += 1
            if tables.length[slot] < tables.limit[slot]:
                tables.set_decoding(slot, True)

    def _admit(self, plan: StepPlan) -> None:
        """Start requests from the queue, strictly in its order, while slot, step and pages have room."""
        if plan.blocked or not len(self._queue) or not self.tables.num_free:
            return
        if any(state.phase is Phase.PREEMPTED for state in self._draining):
            return  # it comes first, and pages are short
        self._queue.refresh(lambda state: self._match(state).num_pages, self.pages.cache.version)
        while self.tables.num_free and plan.tokens_left and plan.logits_left:
            state = self._queue.peek()
            if state is None:
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
        """Cached pages that the request can use: at least one token is left, and every token still to be scored."""
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
        slot = self.tables.enter(state, estimate)
        self.pages.attach(state, match)
        cached = match.num_pages * self.limits.page_size
        self.tables.computed[slot] = cached
        state.phase = Phase.RUNNING
        if state.num_cached < 0:
            state.num_cached = min(cached, state.num_prompt)
            self._counters["prompt_tokens"] += state.num_prompt
            self._counters["cached_prompt_tokens"] += state.num_cached
        self._prefilling.append(state)
        if self.limits.policy == "priority":
            self._prefilling.sort(key=lambda other: (other.seniority[0], self._sequence(other)))

    # The end of schedule().

    def _publish(self, plan: StepPlan) -> None:
        """Put full pages into the tree, for the steps after this one."""
        starts = {chunk.slot: chunk.start for chunk in plan.chunks}
        spare = plan.spare_updates()
        waiting, self._unpublished = self._unpublished, []
        for state in waiting:
            if state.phase is not Phase.RUNNING:
                continue
            # Only what earlier steps computed: another request may take these pages over in this very loop, and reads
            # them in this step.
            before = starts.get(state.slot, int(self.tables.computed[state.slot]))
            column, known = state.num_published, min(before, len(state.tokens))
            pages, done = self.pages.publish(state, known, spare, plan.step)
            plan.add_columns(state.slot, column, pages)
            spare -= len(pages)
            if not done:
                self._unpublished.append(state)
        for chunk in plan.chunks:
            state = chunk.state
            _, done = self.pages.publish(state, chunk.stop, 0, plan.step)
            if not done and state not in self._unpublished:
                self._unpublished.append(state)

    def _advance(self, plan: StepPlan, batch: ScheduledBatch) -> None:
        """The batch counts as run."""
        tables, slots = self.tables, plan.decode_slots
        self._next_step += 1
        self._counters["steps_extend" if plan.chunks else "steps_decode"] += 1
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

    # Helpers.

    def _reason_to_refuse(self, request: EngineRequest, prompt: np.ndarray) -> str:
        limits, total = self.limits, len(prompt) + request.max_tokens
        if request.request_id in self._requests:
            return f"request id {request.request_id} is in use"
        if len(prompt) == 0:
            return "the prompt is empty"
        if request.max_tokens < 0:
            return f"max_tokens is {request.max_tokens}"
        if prompt.min() < 0 or prompt.max() >= limits.vocab_size:
            return f"the prompt has a token id outside the vocabulary of {limits.vocab_size}"
        if total > limits.max_model_len:
            return f"prompt and max_tokens are {total} tokens, more than the {limits.max_model_len} allowed"
        num_pages = limits.pages_for(max(len(prompt), total - 1))
        if num_pages > self.pages.pool.num_usable:
            return (
                f"the request may need {num_pages} KV pages; there are {self.pages.pool.num_usable}"
            )
        return ""

    def _needs_page(self, state: RequestState) -> bool:
        tables, slot = self.tables, state.slot
        return bool(tables.computed[slot] >= tables.num_pages[slot] * self.limits.page_size)

    def _sequence(self, state: RequestState) -> int:
        return int(self.tables.sequence[state.slot])

    def _state_at(self, slot: int) -> RequestState:
        state = self.tables.requests[slot]
        assert state is not None
        return state


def _seniority(state: RequestState) -> tuple[int, int]:
    return state.seniority
