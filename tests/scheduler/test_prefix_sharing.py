"""Which pages requests share, and which they leave behind."""

from __future__ import annotations

import pytest

from engine.request import EngineRequest

from .cases import ask, next_batch, prompt
from .simulation import Simulation, make_limits

pytestmark = pytest.mark.usefixtures("nothing_fails")


def test_requests_of_the_same_step_share_their_prefix() -> None:
    simulation = Simulation(make_limits(max_step_tokens=64, page_size=4))
    for request_id in range(3):
        simulation.add(ask(request_id, 18, 2))
    batch = next_batch(simulation)
    assert batch.row_lens.tolist() == [18, 2, 2]
    simulation.run()
    simulation.check_outputs()
    assert [simulation.records[i].num_cached for i in range(3)] == [0, 16, 16]
    stats = simulation.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (54, 32)


def test_a_hit_leaves_a_token_to_compute() -> None:
    simulation = Simulation(make_limits(page_size=4))
    for request_id in range(2):
        simulation.add(ask(request_id, 8, 2))
        simulation.run()
    assert simulation.records[1].num_cached == 4
    simulation.check_outputs()


def test_generated_pages_are_shared_with_the_next_turn() -> None:
    simulation = Simulation(make_limits(page_size=4))
    simulation.add(ask(1, 6, 11))
    simulation.run()
    turn = [*prompt(6), *simulation.records[1].tokens, 3, 4]
    # 17 tokens, of which the last drawn one has no KV.
    simulation.add(EngineRequest(2, turn, 2))
    simulation.run()
    assert simulation.records[2].num_cached == 16
    simulation.check_outputs()


def test_without_the_cache_nothing_is_shared_or_kept() -> None:
    simulation = Simulation(make_limits(page_size=4, prefix_cache=False))
    for request_id in range(2):
        simulation.add(ask(request_id, 18, 2))
    simulation.run()
    simulation.check_outputs()
    assert simulation.records[1].num_cached == 0
    stats = simulation.scheduler.stats()
    assert stats.pages_cached == 0 and stats.pages_free == stats.pages_total


def test_duplicates_are_replaced_as_updates_allow_and_nothing_unknown_is_published() -> None:
    limits = make_limits(page_size=4, max_running=1, max_model_len=128, overlap=True)
    simulation = Simulation(limits)
    simulation.add(ask(1, 60, 1))
    simulation.run()
    # Scored, so it computes the pages that the tree has; it decodes long before all are replaced.
    simulation.add(EngineRequest(2, prompt(60), 60, prompt_logprobs=0))
    simulation.run()
    simulation.check_outputs()
    assert simulation.scheduler.pages.num_remapped >= 14


def test_a_hit_longer_than_a_step_can_tell_is_cut() -> None:
    limits = make_limits(page_size=1, max_running=2, max_page_updates=8, max_step_tokens=64)
    simulation = Simulation(limits)
    for request_id in range(2):
        simulation.add(ask(request_id, 30, 2))
        simulation.run()
    assert simulation.records[1].num_cached == 6
    simulation.check_outputs()


def test_failed_requests_leave_nothing_in_the_cache() -> None:
    simulation = Simulation(make_limits(page_size=1))
    simulation.add(ask(1, 5, 40))
    for _ in range(4):
        simulation.step()
    state = simulation.scheduler.tables.requests[0]
    assert state is not None
    state.tainted = True
    simulation.scheduler.abort([1])
    simulation.records[1].aborted = True
    simulation.run()
    stats = simulation.scheduler.stats()
    assert stats.pages_cached == 0 and stats.pages_free == stats.pages_total
