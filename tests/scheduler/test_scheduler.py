"""What the scheduler promises, case by case; the simulation holds it all together."""

from __future__ import annotations

import numpy as np
import pytest

from engine.request import EngineRequest
from engine.scheduler.batch import (
    FLAG_COUNT,
    FLAGS,
    FREQUENCY,
    PRESENCE,
    REPETITION,
    SEED_HI,
    SEED_LO,
    TEMPERATURE,
    TOP_K,
    ScheduledBatch,
)

from . import reference
from .reference import VOCAB
from .simulation import Abort, Simulation, make_limits


@pytest.fixture(autouse=True)
def _nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "FAILURE_RATE", 1 << 70)


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 5 * index) % VOCAB for index in range(length)]


def ask(request_id: int, length: int, max_tokens: int, first: int = 1) -> EngineRequest:
    return EngineRequest(request_id, prompt(length, first), max_tokens)


def step_until_preempted(simulation: Simulation) -> None:
    for _ in range(200):
        if simulation.scheduler.stats().preemptions:
            return
        simulation.step()
    raise AssertionError("nothing was preempted")


def next_batch(simulation: Simulation) -> ScheduledBatch:
    batch = simulation.step()
    assert batch is not None
    return batch


# Refusals.


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (EngineRequest(1, [], 4), "empty"),
        (EngineRequest(1, [1, VOCAB], 4), "vocabulary"),
        (EngineRequest(1, [-1], 4), "vocabulary"),
        (EngineRequest(1, [1] * 60, 5), "64"),
        (EngineRequest(1, [1] * 20, 21), "10 KV pages"),
        (EngineRequest(1, [1], -1), "max_tokens"),
    ],
)
def test_what_can_never_run_is_refused(request_: EngineRequest, word: str) -> None:
    simulation = Simulation(make_limits(max_model_len=64, page_size=4, num_pages=10))
    refused = simulation.scheduler.add(request_)
    assert refused is not None
    assert (refused.request_id, refused.status) == (1, 400)
    assert word in refused.message
    assert not simulation.scheduler.has_work


def test_a_request_that_fills_the_pool_to_the_last_page_runs() -> None:
    limits = make_limits(max_model_len=64, page_size=4, num_pages=10)
    simulation = Simulation(limits)
    assert simulation.add(EngineRequest(1, prompt(20), 17)) is None
    simulation.run()
    simulation.check_outputs()


def test_an_id_in_use_is_refused_and_changes_nothing() -> None:
    simulation = Simulation(make_limits())
    simulation.add(ask(1, 3, 4))
    refused = simulation.scheduler.add(ask(1, 5, 6))
    assert refused is not None and refused.status == 400
    simulation.run()
    simulation.check_outputs()


def test_a_full_queue_is_429_and_free_slots_do_not_count() -> None:
    simulation = Simulation(make_limits(max_running=2, max_waiting=1))
    refusals = [simulation.add(ask(i, 3, 2)) for i in range(5)]
    assert [r.status if r else 0 for r in refusals] == [0, 0, 0, 429, 429]
    simulation.run()
    simulation.check_outputs()


def test_waiting_too_long_is_503_unless_it_had_started() -> None:
    now = [0.0]
    limits = make_limits(max_running=1, max_waiting_s=5.0)
    simulation = Simulation(limits, clock=lambda: now[0])
    for request_id in range(3):
        simulation.add(ask(request_id, 3, 4))
    simulation.step()
    now[0] = 5.0
    simulation.add(ask(3, 3, 4))
    simulation.step()
    assert simulation.records[1].reason == ""
    now[0] = 5.1
    simulation.step()
    simulation.step()
    assert [simulation.records[i].reason for i in (1, 2)] == ["failed", "failed"]
    simulation.run()
    assert [simulation.records[i].reason for i in (0, 3)] == ["length", "length"]


def test_expired_requests_are_told_even_when_nothing_runs() -> None:
    now = [0.0]
    simulation = Simulation(make_limits(max_waiting_s=1.0), clock=lambda: now[0])
    simulation.scheduler.add(ask(1, 3, 4))
    now[0] = 2.0
    assert simulation.scheduler.schedule() is None
    (failed,) = simulation.scheduler.take_failed()
    assert (failed.request_id, failed.status) == (1, 503)
    assert not simulation.scheduler.has_work


# Shape of the steps.


def test_a_prompt_is_cut_at_the_token_budget_and_mixed_with_decode_rows() -> None:
    simulation = Simulation(make_limits(max_step_tokens=8, page_size=4))
    simulation.add(ask(1, 3, 20))
    assert next_batch(simulation).kind == "extend"
    assert next_batch(simulation).kind == "decode"
    simulation.add(ask(2, 20, 5, first=2))
    shapes = []
    for _ in range(4):
        batch = next_batch(simulation)
        shapes.append((batch.kind, batch.num_decode_rows, batch.row_lens.tolist()))
    assert shapes == [
        ("extend", 1, [1, 7]),
        ("extend", 1, [1, 7]),
        ("extend", 1, [1, 6]),
        ("decode", 2, [1, 1]),
    ]
    simulation.run()
    simulation.check_outputs()


def test_the_cost_budget_makes_later_chunks_shorter() -> None:
    limits = make_limits(
        max_step_tokens=1000, max_model_len=400, num_pages=110, step_budget=40, context_unit=50
    )
    simulation = Simulation(limits)
    simulation.add(ask(1, 300, 1))
    lens = []
    while simulation.scheduler.has_work:
        batch = simulation.step()
        if batch is not None:
            lens.append(int(batch.row_lens[0]))
    assert lens[0] > lens[1] > lens[2]
    assert min(lens[:-1]) == 16, "the first chunk of a step always gets some tokens"
    assert sum(lens) == 300


def test_decode_rows_beyond_the_budget_slow_prompts_down_and_never_stop_them() -> None:
    limits = make_limits(max_running=4, step_budget=2, max_step_tokens=64)
    simulation = Simulation(limits)
    for request_id in range(3):
        simulation.add(ask(request_id, 4, 60, first=request_id))
    for _ in range(4):
        simulation.step()
    simulation.add(ask(9, 40, 2, first=7))
    lens = [next_batch(simulation).row_lens.tolist() for _ in range(3)]
    assert lens == [[1, 1, 1, 16], [1, 1, 1, 16], [1, 1, 1, 8]]


def test_the_last_token_is_not_scheduled_beyond_max_tokens() -> None:
    simulation = Simulation(make_limits(overlap=True))
    simulation.add(ask(1, 3, 2))
    assert next_batch(simulation).num_rows == 1
    assert next_batch(simulation).num_rows == 1
    assert simulation.step() is None
    assert simulation.records[1].reason == "length"


def test_logit_rows_of_a_scored_prompt_leave_none_for_the_next_request() -> None:
    limits = make_limits(max_running=2, max_logit_rows=4, max_step_tokens=64)
    simulation = Simulation(limits)
    simulation.add(EngineRequest(1, prompt(10), 3, prompt_logprobs=1))
    simulation.add(ask(2, 5, 2, first=3))
    batch = next_batch(simulation)
    assert batch.row_lens.tolist() == [4], "no logit row was left, so nothing new started"
    simulation.run()
    simulation.check_outputs()


# Sampling rows.


def test_sampling_columns() -> None:
    simulation = Simulation(make_limits())
    seed = 0x8000_0001_FFFF_FFFE
    request = EngineRequest(
        1, [1, 2], 3, temperature=0.5, top_p=0.25, min_p=0.125, top_k=7, seed=seed,
        frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.5,
    )  # fmt: skip
    simulation.scheduler.add(request)
    batch = simulation.scheduler.schedule()
    assert batch is not None and batch.variant == "full"
    assert batch.sampling_floats[0].tolist() == [0.5, 0.25, 0.125, 1.5, 0.5, -0.5]
    ints = batch.sampling_ints[0]
    assert int(ints[TOP_K]) == 7
    assert np.array([ints[SEED_LO], ints[SEED_HI]], np.int32).view(np.uint64)[0] == seed
    assert int(ints[FLAGS]) == FLAG_COUNT


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1])
def test_top_k_that_keeps_all_is_off_and_tiny_temperatures_are_greedy(top_k: int) -> None:
    simulation = Simulation(make_limits())
    simulation.scheduler.add(EngineRequest(1, [1], 1, temperature=9e-6, top_k=top_k))
    batch = simulation.scheduler.schedule()
    assert batch is not None and batch.variant == "plain"
    assert batch.sampling_ints[0, TOP_K] == 0
    assert batch.sampling_floats[0, TEMPERATURE] == 0
    assert batch.sampling_ints[0, FLAGS] == 0


@pytest.mark.parametrize(
    "full",
    [
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
    ],
)
def test_full_variant_only_while_such_a_request_has_a_logit_row(full: dict[str, object]) -> None:
    simulation = Simulation(make_limits())
    simulation.add(ask(1, 3, 20))
    assert next_batch(simulation).variant == "plain"
    simulation.add(EngineRequest(2, [4, 5], 2, **full))  # type: ignore[arg-type]
    batch = next_batch(simulation)
    assert batch.variant == "full"
    (admission,) = batch.admissions
    assert admission.slot == batch.row_slots[-1]
    assert admission.prompt_ids.tolist() == [4, 5]
    batches = [next_batch(simulation) for _ in range(4)]
    assert [b.variant for b in batches] == ["full", "plain", "plain", "plain"]
    assert not any(b.admissions for b in batches)


def test_min_tokens_is_full_only_until_it_is_reached() -> None:
    simulation = Simulation(make_limits())
    simulation.add(EngineRequest(1, prompt(3), 6, [4], min_tokens=2))
    variants = [next_batch(simulation).variant for _ in range(4)]
    assert variants == ["full", "full", "plain", "plain"]


def test_scored_rows_are_neither_penalised_nor_masked_nor_counted() -> None:
    simulation = Simulation(make_limits())
    request = EngineRequest(
        1, prompt(4), 2, [3], frequency_penalty=1.0, presence_penalty=1.0,
        repetition_penalty=2.0, min_tokens=1, prompt_logprobs=0,
    )  # fmt: skip
    simulation.scheduler.add(request)
    batch = simulation.scheduler.schedule()
    assert batch is not None
    assert batch.logit_targets.tolist() == [*prompt(4)[1:], -1]
    assert batch.sampling_ints[:3, FLAGS].tolist() == [0, 0, 0]
    assert batch.sampling_ints[3, FLAGS] != 0
    neutral = batch.sampling_floats[:3][:, [REPETITION, FREQUENCY, PRESENCE]]
    assert neutral.tolist() == [[1, 0, 0]] * 3
    assert batch.sampling_floats[3, REPETITION] == 2


def test_the_bias_of_a_slots_last_request_is_cleared() -> None:
    simulation = Simulation(make_limits(max_running=2))
    simulation.add(EngineRequest(1, [1, 2], 1, logit_bias={3: 1.0}))
    simulation.run()
    simulation.add(ask(2, 3, 4))
    (cleared,) = next_batch(simulation).admissions
    assert len(cleared.bias_ids) == len(cleared.prompt_ids) == 0
    simulation.run()
    simulation.add(ask(3, 3, 4))
    assert next_batch(simulation).admissions == ()


# Prefix sharing.


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


# Pages run out.


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
    limits = make_limits(max_running=2, max_logit_rows=2, max_step_tokens=8, policy="priority")
    simulation = Simulation(limits)
    simulation.add(EngineRequest(1, prompt(12), 2, priority=1))
    simulation.step()
    simulation.add(EngineRequest(2, prompt(10, 3), 2, prompt_logprobs=0, priority=0))
    shapes = [next_batch(simulation).row_lens.tolist() for _ in range(3)]
    assert shapes == [[2, 3], [2], [2]]
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


# Aborts.


@pytest.mark.parametrize("moment", [0, 1, 2])
@pytest.mark.parametrize("tick", [0, 1, 2, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_abort_frees_slot_and_pages_within_two_steps(
    moment: int, tick: int, overlap: bool
) -> None:
    simulation = Simulation(make_limits(max_step_tokens=8, overlap=overlap))
    simulation.add(ask(1, 12, 40, first=1))
    simulation.add(ask(2, 4, 40, first=2))
    simulation.aborts.append(Abort(tick, moment, 1))
    for _ in range(tick + 3):
        simulation.step()
    ids = [s.request.request_id for s in simulation.scheduler.tables.occupied()]
    assert ids == [2]
    simulation.run()
    simulation.check_outputs()


def test_aborting_unknown_or_ended_requests_does_nothing() -> None:
    simulation = Simulation(make_limits())
    simulation.add(ask(1, 3, 2))
    simulation.scheduler.abort([7])
    simulation.run()
    simulation.scheduler.abort([1, 7])
    assert not simulation.scheduler.has_work
    simulation.check_outputs()


# The host's own state.


def test_the_token_table_grows_with_its_rows() -> None:
    limits = make_limits(
        max_model_len=4096, num_pages=1000, page_size=4, max_step_tokens=4096, step_budget=1e9
    )
    simulation = Simulation(limits)
    simulation.add(ask(1, 1020, 9, first=1))  # grows it while it decodes
    simulation.step()
    for _ in range(6):
        simulation.step()
    assert simulation.scheduler.tables.tokens.shape[1] > 1024
    simulation.add(ask(2, 2500, 3, first=2))  # and this one at its start
    simulation.run()
    simulation.check_outputs()
    width = simulation.scheduler.tables.tokens.shape[1]
    assert 2500 < width <= 4096


def test_a_batch_is_not_changed_by_later_steps() -> None:
    simulation = Simulation(make_limits(page_size=1))
    for request_id in range(3):
        simulation.add(ask(request_id, 5, 12, first=request_id))
    kept = []
    while simulation.scheduler.has_work:
        batch = simulation.step()
        if batch is not None:
            arrays = {
                name: getattr(batch, name)
                for name in batch.__slots__
                if isinstance(getattr(batch, name), np.ndarray)
            }
            kept.append((arrays, {name: array.copy() for name, array in arrays.items()}))
    for arrays, copies in kept:
        for name, array in arrays.items():
            assert np.array_equal(array, copies[name]), name


def test_steps_come_back_in_order() -> None:
    simulation = Simulation(make_limits())
    simulation.scheduler.add(ask(1, 3, 4))
    simulation.scheduler.schedule()
    simulation.scheduler.schedule()
    with pytest.raises(AssertionError, match="order"):
        simulation.scheduler.begin_processing(1)
    with pytest.raises(AssertionError, match="in flight"):
        simulation.scheduler.schedule()


def test_integrity_names_what_is_broken() -> None:
    simulation = Simulation(make_limits())
    simulation.add(ask(1, 9, 30))
    for _ in range(3):
        simulation.step()
    scheduler = simulation.scheduler
    page = int(scheduler.tables.page_table[0, 2])
    scheduler.tables.page_table[0, 2] = scheduler.tables.page_table[0, 0]
    with pytest.raises(AssertionError, match=rf"pages lost: \[{page}\]"):
        scheduler.check_integrity()
    scheduler.tables.page_table[0, 2] = page
    scheduler.check_integrity()
    scheduler.pages.pool.take(1)
    with pytest.raises(AssertionError, match="pages lost"):
        scheduler.check_integrity()
