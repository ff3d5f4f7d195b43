"""Order of the waiting queue under each policy."""

from __future__ import annotations

import random

import numpy as np

from engine.request import EngineRequest
from engine.scheduler.limits import Policy
from engine.scheduler.policy import (
    MAX_OVERTAKEN,
    PREFIX_WINDOW,
    PrefixQueue,
    SeniorityQueue,
    make_queue,
    seniority,
)
from engine.scheduler.slots import Phase, RequestState


def waiting(request_id: int, policy: Policy = "fcfs", priority: int = 0) -> RequestState:
    request = EngineRequest(request_id, [1], 1, priority=priority)
    key = seniority(policy, request_id, priority)
    return RequestState(request, np.array([1], np.int32), key, arrived=0.0)


def end(state: RequestState) -> RequestState:
    state.phase = Phase.ENDED
    return state


def drain(queue: SeniorityQueue | PrefixQueue) -> list[int]:
    ids = []
    while len(queue):
        ids.append(queue.pop().request.request_id)
    return ids


def test_fcfs_goes_by_arrival_and_ignores_priority() -> None:
    queue = make_queue("fcfs")
    for request_id in (3, 1, 2):
        queue.push(waiting(request_id, "fcfs", priority=-request_id))
    assert [queue.pop().request.request_id for _ in range(3)] == [1, 2, 3]
    assert queue.peek() is None


def test_priority_first_then_arrival() -> None:
    queue = make_queue("priority")
    for request_id, priority in ((1, 5), (2, 0), (3, 5), (4, -1)):
        queue.push(waiting(request_id, "priority", priority))
    assert [queue.pop().request.request_id for _ in range(4)] == [4, 2, 1, 3]


def test_a_preempted_request_comes_back_to_its_place() -> None:
    queue = SeniorityQueue()
    for request_id in (4, 5):
        queue.push(waiting(request_id))
    queue.push(waiting(2))
    assert drain(queue) == [2, 4, 5]


def test_removed_requests_do_not_come_out_and_do_not_pile_up() -> None:
    queue = SeniorityQueue()
    states = [waiting(request_id) for request_id in range(1000)]
    for state in states:
        queue.push(state)
    order = list(range(1000))
    random.Random(0).shuffle(order)
    for index in order[:990]:
        queue.remove(end(states[index]))
    assert len(queue) == 10
    assert len(queue._heap) < 200
    assert drain(queue) == sorted(order[990:])


def prefix_queue(matches: dict[int, int]) -> PrefixQueue:
    queue = PrefixQueue()
    for request_id in matches:
        queue.push(waiting(request_id))
    refresh(queue, matches)
    return queue


def refresh(queue: PrefixQueue, matches: dict[int, int], version: int = 0) -> None:
    queue.refresh(lambda state: matches[state.request.request_id], version)


def test_longest_prefix_first_ties_by_arrival() -> None:
    assert drain(prefix_queue({1: 0, 2: 5, 3: 9, 4: 5})) == [3, 2, 4, 1]


def test_longest_prefix_puts_preempted_requests_first() -> None:
    queue = prefix_queue({1: 3, 2: 9})
    back = waiting(7)
    back.num_cached = 0
    queue.push(back)
    refresh(queue, {1: 3, 2: 9, 7: 0})
    assert drain(queue) == [7, 2, 1]


def test_longest_prefix_looks_again_when_the_cache_changed() -> None:
    matches = {1: 1, 2: 2}
    queue = prefix_queue(matches)
    matches[1] = 3
    refresh(queue, matches, version=0)
    head = queue.peek()
    assert head is not None and head.request.request_id == 2
    refresh(queue, matches, version=1)
    assert drain(queue) == [1, 2]


def test_longest_prefix_never_starves_the_oldest() -> None:
    queue = PrefixQueue()
    queue.push(waiting(0))
    for round_number in range(MAX_OVERTAKEN + 1):
        queue.push(waiting(round_number + 1))
        refresh(queue, {0: 0, round_number + 1: 9}, version=round_number)
        popped = queue.pop().request.request_id
        assert (popped == 0) == (round_number == MAX_OVERTAKEN)


def test_longest_prefix_beyond_its_window() -> None:
    matches = dict.fromkeys(range(PREFIX_WINDOW + 3), 0)
    matches[PREFIX_WINDOW + 2] = 99
    queue = prefix_queue(matches)
    for expected in range(PREFIX_WINDOW):
        assert queue.pop().request.request_id == expected
    assert queue.peek() is None, "the window is used up until the next round"
    refresh(queue, matches)
    assert queue.pop().request.request_id == PREFIX_WINDOW + 2


def test_longest_prefix_forgets_removed_requests() -> None:
    queue = PrefixQueue()
    states = [waiting(request_id) for request_id in range(3)]
    for state in states:
        queue.push(state)
    refresh(queue, {0: 3, 1: 2, 2: 1})
    queue.remove(end(states[0]))
    refresh(queue, {1: 2, 2: 1})
    assert drain(queue) == [1, 2]
