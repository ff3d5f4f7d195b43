"""What a batch says about sampling: columns, flags, variants, state sent at admission."""

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
)

from .cases import ask, next_batch, prompt
from .reference import VOCAB
from .simulation import Simulation, make_limits

pytestmark = pytest.mark.usefixtures("nothing_fails")


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
