"""RunningSet: the requests that hold a slot, from their start to the release of slot and pages.

Gives every running request past its prompt its row and page in each step; preempts the youngest
when pages run out; keeps slot and pages of whoever ended until no step in flight has a row of it.

Knows nothing of the queue, of chunks or of what a step may cost.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.scheduler.batch import I32
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.radix_cache import Match
from engine.scheduler.request_pages import RequestPages
from engine.scheduler.slots import Phase, RequestState, SlotTables
from engine.scheduler.step_plan import StepPlan

# Masks are asked for once a step's tokens are known, while the step after it runs: to wait for them
# a little costs nothing, and a step of few rows costs nearly what one of all does. Where nobody
# decodes without one, longer.
MASK_WAIT_S, MASK_WAIT_ALONE_S = 0.002, 0.05


class RunningSet:
    """Requests in slots.

    Args:
        limits: the scheduler's.
        requeue: called with a preempted request when its slot and pages are free again.

    Attributes:
        prefilling: tokens known but not computed yet, in the order of their chunks.
        processed: the last step whose results are known.
    """

    def __init__(self, limits: SchedulerLimits, requeue: Callable[[RequestState], None]) -> None:
        self.tables = SlotTables(limits)
        self.pages = RequestPages(limits, self.tables)
        self.prefilling: list[RequestState] = []
        self.processed = -1
        self.num_preemptions = 0
        self._limits = limits
        self._requeue = requeue
        self._draining: list[RequestState] = []  # PREEMPTED or ENDED, and in flight

    def start(self, state: RequestState, match: Match, estimated_pages: int) -> None:
        """Give a waiting request a slot and the cached prefix that it matched."""
        slot = self.tables.enter(state, estimated_pages)
        self.pages.attach(state, match)
        self.tables.computed[slot] = match.num_pages * self._limits.page_size
        state.phase = Phase.RUNNING
        self.prefilling.append(state)
        if self._limits.policy == "priority":
            self.prefilling.sort(key=self._by_priority)

    def end(self, state: RequestState) -> None:
        """A request in a slot is over: no results are wanted any more."""
        before, state.phase = state.phase, Phase.ENDED
        self.tables.alive[state.slot] = False
        if before is Phase.RUNNING:
            self._unschedule(state)
            self._release_when_idle(state)

    def release_drained(self) -> None:
        """The results of step `processed` were applied: release whoever waited for it."""
        if not self._draining:
            return
        last_step = self.tables.last_step
        draining, self._draining = self._draining, []
        for state in draining:
            if last_step[state.slot] <= self.processed:
                self._release(state)
            else:
                self._draining.append(state)

    def add_decode_rows(self, plan: StepPlan) -> None:
        """Every running request past its prompt has a row, as far as pages and grammars go."""
        tables = self.tables
        slots = self._decode_slots()
        positions = tables.computed[slots]
        lacking = positions // self._limits.page_size >= tables.num_pages[slots]
        stuck = [state for state in self.prefilling if self._needs_page(state)]
        num_needed = int(np.count_nonzero(lacking)) + len(stuck)
        if num_needed > self.pages.available:
            needy = [self._at(slot) for slot in slots[lacking].tolist()] + stuck
            granted = np.zeros(self._limits.max_running, np.bool_)
            granted[[state.slot for state in self._make_room(needy)]] = True
            slots = self._decode_slots()
            positions = tables.computed[slots]
            lacking = positions // self._limits.page_size >= tables.num_pages[slots]
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

    def _decode_slots(self) -> I32:
        """Slots whose next row is a decode row and may be drawn: whoever has a grammar sits out
        until its last token has come, and what may follow is known.
        """
        tables = self.tables
        slots, waiting = tables.decode_slots(), []
        patience = MASK_WAIT_S if len(slots) > len(tables.guides) else MASK_WAIT_ALONE_S
        for slot, guide in tables.guides.items():
            if tables.last_step[slot] > self.processed:
                waiting.append(slot)
            elif not guide.wait(patience):
                waiting.append(slot)
                patience = 0.0
        return slots[~np.isin(slots, waiting)] if waiting else slots

    def _make_room(self, needy: list[RequestState]) -> list[RequestState]:
        """Preempt the youngest until every one of `needy` (a page each) who is older can have one.

        Returns those who get their page now, oldest first; others wait for pages that steps in
        flight still use, or are the youngest themselves.
        """
        needy = sorted(needy, key=_seniority)
        occupied = self.tables.occupied()
        prefilling = {state.slot for state in self.prefilling}
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
        """Take slot and pages from a running request; it goes back to the queue with all its
        tokens.
        """
        self.num_preemptions += 1
        state.phase = Phase.PREEMPTED
        self._unschedule(state)
        self._release_when_idle(state)

    def _unschedule(self, state: RequestState) -> None:
        if self.tables.decoding[state.slot]:
            self.tables.set_decoding(state.slot, False)
        elif state in self.prefilling:
            self.prefilling.remove(state)

    def _release_when_idle(self, state: RequestState) -> None:
        if self.tables.last_step[state.slot] <= self.processed:
            self._release(state)
        else:
            self._draining.append(state)

    def _release(self, state: RequestState) -> None:
        self.pages.release(state)
        self.tables.leave(state)
        if state.phase is Phase.PREEMPTED:
            state.phase = Phase.WAITING
            self._requeue(state)

    def _needs_page(self, state: RequestState) -> bool:
        tables, slot = self.tables, state.slot
        return bool(tables.computed[slot] >= tables.num_pages[slot] * self._limits.page_size)

    def _by_priority(self, state: RequestState) -> tuple[int, int]:
        return (state.seniority[0], int(self.tables.sequence[state.slot]))

    def _at(self, slot: int) -> RequestState:
        state = self.tables.requests[slot]
        assert state is not None
        return state

    def check_integrity(self) -> None:
        """Raise AssertionError with what is broken in slots, pages or tree."""
        occupied = self.tables.occupied()
        self.pages.check_integrity(occupied)
        assert len(occupied) + self.tables.num_free == self._limits.max_running, "a slot is lost"
        prefilling = {state.slot for state in self.prefilling}
        for state in occupied:
            slot, live = state.slot, state.phase is Phase.RUNNING
            assert state.phase is not Phase.WAITING, "a waiting request holds a slot"
            assert live or state in self._draining, "a request that ended is not drained"
            assert live or not (slot in prefilling or self.tables.decoding[slot]), (
                "a request that ended is still scheduled"
            )
            assert not (slot in prefilling and self.tables.decoding[slot]), "scheduled twice"


def _seniority(state: RequestState) -> tuple[int, int]:
    return state.seniority
