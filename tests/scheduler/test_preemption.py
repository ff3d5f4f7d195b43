"""Who gives up pages when they run out, who waits, who starts."""

from __future__ import annotations

import pytest

from engine.request import EngineRequest

from .cases import ask, next_batch, prompt
from .simulation import Simulation, make_limits

pytestmark = pytest.mark.usefixtures("nothing_fails")


def step_until_preempted(simulation: Simulation) -> None:
    for _ in range(200):
        if simulation.scheduler.stats().preemptions:
            return
        simulation.step()
    raise AssertionError("nothing was preempted")


def crowded(overlap: bool, max_step_tokens: int = 32) -> Simulation:
    """Two requests that fit at first; the pool holds one of them at full length."""
    limits = make_limits(
        page_size=1, num_pages=33, max_model_len=32, max_running=3, output_estimate=0.0,
        overlap=overlap, max_step_tokens=max_step_tokens,
    )  # fmt: skip
    return Simulation(limits)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_youngest_is_preempted_and_finishes_later(overlap: bool) -> None:
    simulation = crowded(overlap)
    simulation.add(ask(1, 4, 28, first=1))
    simulation.add(ask(2, 4, 28, first=2))
    step_until_preempted(simulation)
    running = [s for s in simulation.scheduler.tables.occupied() if s.phase == 1]
    assert [state.request.request_id for state in running] == [1]
    assert simulation.scheduler.stats().waiting == 1
    simulation.run()
    assert simulation.records[1].reason and simulation.records[2].reason
    simulation.check_outputs()


@pytest.mark.parametrize("overlap", [True, False])
def test_no_more_are_preempted_than_needed(overlap: bool) -> None:
    limits = make_limits(
        num_pages=9, max_model_len=32, max_running=3, output_estimate=0.0, overlap=overlap
    )
    simulation = Simulation(limits)
    # 2, 3 and 3 pages of 4; the first is the first to need another.
    for request_id, length in ((1, 7), (2, 9), (3, 9)):
        simulation.add(ask(request_id, length, 20, first=request_id))
    step_until_preempted(simulation)
    assert simulation.scheduler.stats().preemptions == 1
    assert simulation.scheduler.stats().running == 2
    simulation.run()
    simulation.check_outputs()


def test_nothing_starts_in_the_step_that_preempts() -> None:
    simulation = crowded(overlap=False)
    simulation.add(ask(1, 4, 28, first=1))
    simulation.add(ask(2, 4, 28, first=2))
    before = 0
    while simulation.scheduler.has_work:
        batch = next_batch(simulation)
        preemptions = simulation.scheduler.stats().preemptions
        if preemptions > before:
            assert batch.kind == "decode"
        before = preemptions
    assert before > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_the_youngest_waits_for_a_page_rather_than_giving_its_own_up(overlap: bool) -> None:
    limits = make_limits(num_pages=9, max_model_len=32, output_estimate=0.0, overlap=overlap)
    simulation = Simulation(limits)
    # 5 and 3 pages of 4: the first ends within its pages, the second needs one at once.
    simulation.add(ask(1, 18, 3, first=1))
    simulation.add(ask(2, 12, 9, first=2))
    simulation.run()
    simulation.check_outputs()
    assert simulation.scheduler.stats().preemptions == 0


def test_lowest_priority_is_preempted_first() -> None:
    limits = make_limits(
        page_size=1, num_pages=33, max_model_len=32, output_estimate=0.0, policy="priority"
    )
    simulation = Simulation(limits)
    simulation.add(EngineRequest(1, prompt(4, 1), 28, priority=5))
    simulation.add(EngineRequest(2, prompt(4, 2), 28, priority=0))
    step_until_preempted(simulation)
    running = [s for s in simulation.scheduler.tables.occupied() if s.phase == 1]
    assert [state.request.request_id for state in running] == [2]
    simulation.run()
    simulation.check_outputs()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_more_senior_prompt_takes_the_pages_of_a_decode_row(overlap: bool) -> None:
    limits = make_limits(
        page_size=1, num_pages=33, max_model_len=32, max_running=2, max_step_tokens=4,
        output_estimate=0.0, overlap=overlap, policy="priority",
    )  # fmt: skip
    simulation = Simulation(limits)
    simulation.add(EngineRequest(1, prompt(4, 2), 28, priority=5))
    for _ in range(4):
        simulation.step()
    # It fits now; while its chunks are computed the other one grows.
    simulation.add(EngineRequest(2, prompt(24, 3), 2, priority=0))
    simulation.run()
    simulation.check_outputs()
    assert simulation.scheduler.stats().preemptions == 1


def test_without_a_logit_row_a_prompt_stops_one_token_short() -> None:
    simulation = Simulation(make_limits(max_running=6, max_step_tokens=8, policy="priority"))
    simulation.add(EngineRequest(1, prompt(10), 2, priority=2))
    simulation.step()
    simulation.add(EngineRequest(2, prompt(10, 3), 2, prompt_logprobs=0, priority=0))
    for request_id in range(3, 7):
        simulation.add(EngineRequest(request_id, prompt(1, request_id), 2, priority=1))
    shapes = [next_batch(simulation).row_lens.tolist() for _ in range(2)]
    assert shapes == [[2, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    simulation.run()
    simulation.check_outputs()


def test_a_higher_priority_prompt_has_its_chunk_first() -> None:
    limits = make_limits(max_step_tokens=8, policy="priority", max_running=3)
    simulation = Simulation(limits)
    simulation.add(EngineRequest(1, prompt(12, 2), 2, priority=1))
    simulation.add(EngineRequest(2, prompt(30, 3), 2, priority=1))
    simulation.step()
    simulation.step()  # the first is done, the second has 4 tokens
    simulation.add(EngineRequest(3, prompt(30, 4), 2, priority=0))
    simulation.step()  # a decode row of the first, 7 tokens of the third
    lens = [next_batch(simulation).row_lens.tolist() for _ in range(4)]
    assert lens == [[8], [8], [7, 1], [1, 7]], "the newcomer first, then what the other has left"
    simulation.run()
    simulation.check_outputs()


def test_admission_waits_for_the_estimated_pages() -> None:
    limits = make_limits(page_size=1, num_pages=33, max_model_len=32, output_estimate=1.0)
    simulation = Simulation(limits)
    simulation.add(ask(1, 4, 20, first=1))
    simulation.add(ask(2, 4, 20, first=2))
    while simulation.scheduler.has_work:
        simulation.step()
        assert simulation.scheduler.stats().running <= 1
    assert simulation.scheduler.stats().preemptions == 0
