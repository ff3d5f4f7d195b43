"""Property tests: scheduler, page pool, radix cache and output processor against a simulated
device.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.request import EngineRequest
from engine.scheduler.limits import Policy, SchedulerLimits

from .reference import VOCAB
from .simulation import Abort, Simulation, make_limits

POLICIES: tuple[Policy, ...] = ("fcfs", "priority", "longest_prefix")


def random_limits(rng: random.Random, *, overlap: bool, crowded: bool) -> SchedulerLimits:
    """Limits; `crowded`: requests fit at first, grow, and are preempted."""
    page_size = rng.choice((1, 4, 16))
    max_model_len = rng.choice((24, 64))
    max_running = rng.choice((1, 2, 3, 5))
    columns = -(-max_model_len // page_size)
    spare_pages = rng.choice((0, 0, 1, 2, columns // 2, 3 * columns))
    if crowded:
        max_running, spare_pages = 5, rng.choice((0, 1))
    return make_limits(
        page_size=page_size,
        max_model_len=max_model_len,
        num_pages=1 + columns + spare_pages,
        max_running=max_running,
        max_step_tokens=max_running + rng.choice((0, 1, 7, 40)),
        step_budget=rng.choice((1.0, 6.0, 20.0, 500.0)),
        decode_unit=rng.choice((2.0, 50.0)),
        context_unit=rng.choice((4.0, 50.0, 16384.0)),
        wave=rng.choice((1, 8)),
        policy=rng.choice(POLICIES),
        output_estimate=0.0 if crowded else rng.choice((0.0, 0.25, 1.0)),
        prefix_cache=rng.random() < 0.85,
        max_logit_rows=max_running + rng.choice((0, 0, 3)),
        max_page_updates=max_running + rng.choice((0, 1, columns, 2 * columns)),
        overlap=overlap,
        token_buckets=rng.choice(((), (2, 4, 8, 24))),
    )


def random_request(
    rng: random.Random, request_id: int, stems: list[list[int]], *, crowded: bool
) -> EngineRequest:
    """A request whose prompt often starts as others do."""
    stem = rng.choice(stems)
    prompt = stem[: rng.randint(1, rng.choice((4, len(stem))))]
    prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 5)))]
    full = rng.random()
    min_tokens = rng.choice((1, 4)) if 0.15 < full < 0.3 else 0
    grammar = f"grammar {rng.randrange(9)}" if rng.random() < 0.2 else ""
    return EngineRequest(
        request_id=request_id,
        prompt_ids=prompt,
        max_tokens=rng.choice((20, 40) if crowded else (1, 2, 5, 20)),
        stop_ids=rng.sample(range(VOCAB), 0 if crowded else rng.choice((0, 0, 1, 2))),
        temperature=rng.choice((0.0, 0.8)),
        seed=rng.randrange(3),
        presence_penalty=0.5 if full < 0.15 else 0.0,
        logit_bias={rng.randrange(1, VOCAB): 1.5} if 0.1 < full < 0.2 else {},
        min_tokens=min_tokens,
        logprobs=rng.randrange(4) if 0.25 < full < 0.4 else -1,
        prompt_logprobs=rng.randrange(4) if 0.35 < full < 0.45 else -1,
        priority=rng.randrange(3),
        grammar=grammar,
    )


def simulate(seed: int, *, overlap: bool) -> Simulation:
    """A whole random life of an engine: arrivals, aborts, and everything checked on the way."""
    rng = random.Random(seed)
    crowded = rng.random() < 0.4
    limits = random_limits(rng, overlap=overlap, crowded=crowded)
    simulation = Simulation(limits)
    stems = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(2)]
    stems.append(stems[0][:17] + stems[1][:20])
    num_requests = rng.choice((8, 12) if crowded else (1, 3, 8, 20))
    arrivals = sorted(
        rng.randrange(1 + rng.choice((1, 5 if crowded else 30))) for _ in range(num_requests)
    )
    for request_id in range(num_requests):
        if rng.random() < 0.3:
            tick = arrivals[request_id] + rng.randrange(12)
            simulation.aborts.append(Abort(tick, rng.randrange(3), request_id))
    for request_id, tick in enumerate(arrivals):
        while simulation.tick < tick:
            simulation.step()
        request = random_request(rng, request_id, stems, crowded=crowded)
        if rng.random() < 0.05:
            request = EngineRequest(request_id, request.prompt_ids, 0, prompt_logprobs=2)
        refused = simulation.add(request)
        if refused is not None:
            total = len(request.prompt_ids) + request.max_tokens
            assert refused.status == 400 and total > limits.max_model_len
    simulation.run()
    simulation.check_outputs()
    return simulation


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), overlap=st.booleans())
def test_random_lives(seed: int, overlap: bool) -> None:
    simulate(seed, overlap=overlap)


def trace_digest() -> str:
    """A digest of the batches of some random lives."""
    digest = hashlib.sha256()
    for seed in range(6):
        digest.update(repr(simulate(seed, overlap=True).trace).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_order_does_not_depend_on_hashing(hash_seed: str) -> None:
    root = Path(__file__).parents[2]
    code = "from tests.scheduler.test_simulation import trace_digest; print(trace_digest())"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == trace_digest()
