"""Order of the waiting queue: first come first served, priority, or longest cached prefix first.

Under every policy the head of the queue is the only candidate: nothing overtakes it because it is
smaller. Knows nothing of budgets or slots.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable
from typing import Protocol

from engine.scheduler.limits import Policy
from engine.scheduler.slots import Phase, RequestState

# `longest_prefix` looks at this many requests, oldest first, and lets the oldest be overtaken this
# often.
PREFIX_WINDOW = 128
MAX_OVERTAKEN = 64


class WaitingQueue(Protocol):
    """Requests without a slot, in the policy's order."""

    def __len__(self) -> int: ...

    def push(self, state: RequestState) -> None: ...

    def refresh(self, num_matched: Callable[[RequestState], int], version: int) -> None:
        """Before a round of admissions: how many pages of a request are cached, and the cache's
        version.
        """

    def peek(self) -> RequestState | None:
        """The next request to start."""

    def pop(self) -> RequestState:
        """Take it."""

    def remove(self, state: RequestState) -> None:
        """Forget a request of the queue (its phase must not be WAITING any more)."""


def seniority(policy: Policy, request_id: int, priority: int) -> tuple[int, int]:
    """Sort key: who is served first and preempted last."""
    return (priority if policy == "priority" else 0, request_id)


def make_queue(policy: Policy) -> WaitingQueue:
    return PrefixQueue() if policy == "longest_prefix" else SeniorityQueue()


class SeniorityQueue:
    """By seniority: a heap, from which removed requests are dropped when they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, RequestState]] = []
        self._num_waiting = 0
        self._num_pushed = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, state: RequestState) -> None:
        self._num_pushed += 1
        self._num_waiting += 1
        heapq.heappush(self._heap, (state.seniority, self._num_pushed, state))

    def refresh(self, num_matched: Callable[[RequestState], int], version: int) -> None:
        pass

    def peek(self) -> RequestState | None:
        while self._heap and self._heap[0][2].phase is not Phase.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> RequestState:
        state = self.peek()
        assert state is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        self._num_waiting -= 1
        return state

    def remove(self, state: RequestState) -> None:
        assert state.phase is not Phase.WAITING
        self._num_waiting -= 1
        if len(self._heap) > 2 * self._num_waiting + 64:
            self._heap = [entry for entry in self._heap if entry[2].phase is Phase.WAITING]
            heapq.heapify(self._heap)


class PrefixQueue:
    """Preempted requests first, then the longest cached prefix; ties and requests outside the
    window by seniority.

    The oldest request is overtaken at most MAX_OVERTAKEN times, then it is next: it never starves.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[int, int], RequestState]] = []
        self._order: list[RequestState] = []  # the next one last
        self._ordered_at: int | None = None  # version of the cache for which _order is right

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, state: RequestState) -> None:
        bisect.insort(self._waiting, (state.seniority, state), key=lambda entry: entry[0])
        self._ordered_at = None

    def refresh(self, num_matched: Callable[[RequestState], int], version: int) -> None:
        if self._ordered_at == version:
            return
        self._ordered_at = version
        window = [state for _, state in self._waiting[:PREFIX_WINDOW]]
        keys = {
            id(state): (state.num_cached < 0, -num_matched(state), state.seniority)
            for state in window
        }
        self._order = sorted(window, key=lambda state: keys[id(state)], reverse=True)
        if window and window[0].num_overtaken >= MAX_OVERTAKEN:
            self._order.remove(window[0])
            self._order.append(window[0])

    def peek(self) -> RequestState | None:
        return self._order[-1] if self._order else None

    def pop(self) -> RequestState:
        assert self._order, "pop from an empty queue"
        state = self._order.pop()
        oldest = self._waiting[0][1]
        if oldest is not state:
            oldest.num_overtaken += 1
            if oldest.num_overtaken >= MAX_OVERTAKEN:
                self._ordered_at = None
        self._forget(state)
        if not self._order:
            self._ordered_at = None
        return state

    def remove(self, state: RequestState) -> None:
        self._forget(state)
        self._ordered_at = None
        self._order = []

    def _forget(self, state: RequestState) -> None:
        index = bisect.bisect_left(self._waiting, state.seniority, key=lambda entry: entry[0])
        assert self._waiting[index][1] is state
        del self._waiting[index]
