"""A long prompt among running requests: what its steps take by what an H200 was measured to take.

The kernels' times are those of bench/results/chunk_attention_h200.json; a token's, a decode row's
and a step's own are from steps of bench/interference.py (bench/NOTES.md).
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig, validate
from engine.limits import scheduler_limits
from engine.output_processor import OutputProcessor
from engine.request import EngineRequest
from engine.resolve import resolve
from engine.scheduler.batch import ScheduledBatch, StepResult
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.scheduler import Scheduler

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "chunk_attention_h200.json"
LAYERS, WAVE = 28, 1024
STEP_MS, TOKEN_MS, CONTEXT_MS = 1.1, 1.41e-3, 28.9e-6
LIMIT_MS = 15.0


@cache
def limits_of_default() -> SchedulerLimits:
    """Qwen3-0.6B on an H200, default settings."""
    config = resolve(
        validate(EngineConfig, {"model": {"path": "x"}, "scheduler": {}}, "test", {}),
        max_position=40960,
        checkpoint_dtype="bfloat16",
        cuda=True,
        capability=(9, 0),
        context_unit=3840,
    )
    return scheduler_limits(config, 8000, 10_000, 0.5, WAVE)


@cache
def attention_us(tokens: int, fa2: bool) -> tuple[list[int], list[float], int]:
    """Contexts, microseconds of a layer and the chunk that was measured, of the largest step
    measured up to `tokens`.
    """
    rows = json.loads(MEASURED.read_text())["rows"]
    size = max(row["tokens"] for row in rows if row["tokens"] <= tokens)
    rows = [row for row in rows if row["tokens"] == size]
    name = "fa2_us" if fa2 else "fa3_us"
    return [row["context"] for row in rows], [row[name] for row in rows], rows[0]["chunk"]


def step_ms(batch: ScheduledBatch, limits: SchedulerLimits) -> float:
    """A step of decode rows and one chunk."""
    bucket = next(b for b in limits.buckets if b.tokens >= batch.num_tokens)
    start, count = int(batch.row_starts[-1]), int(batch.row_lens[-1])
    contexts, times, chunk = attention_us(bucket.tokens, bucket.wave == 1)
    # fa3 takes a wave whatever of it is used; sizes that were not measured by their neighbours.
    share = (
        max(1.0, bucket.waves(count) / bucket.waves(chunk)) if bucket.wave > 1 else count / chunk
    )
    attention = LAYERS * float(np.interp(start, contexts, times)) * share / 1e3
    context = int(batch.row_starts[: batch.num_decode_rows].sum())
    return STEP_MS + TOKEN_MS * bucket.tokens + CONTEXT_MS * context + attention


def prompt_steps(limits: SchedulerLimits, running: int, prompt: int) -> list[float]:
    """Milliseconds of each step until the prompt's first token."""
    scheduler, rng = Scheduler(limits), random.Random(0)
    processor = OutputProcessor(scheduler)

    def ask(request_id: int, length: int, max_tokens: int) -> None:
        ids = [rng.randrange(10_000) for _ in range(length)]
        assert scheduler.add(EngineRequest(request_id, ids, max_tokens)) is None

    def step() -> ScheduledBatch:
        batch = scheduler.schedule()
        assert batch is not None
        processor.process(batch, StepResult(np.full(batch.num_logit_rows, 7, np.int32)))
        return batch

    for request_id in range(running):
        ask(request_id, 512, 1000)
    while running and step().kind == "extend":
        pass
    ask(running, prompt, 1)
    taken: list[float] = []
    while True:
        batch = step()
        taken.append(step_ms(batch, limits))
        if batch.num_logit_rows > batch.num_decode_rows:
            return taken


def with_budget(budget: float) -> SchedulerLimits:
    return replace(limits_of_default(), overlap=False, step_budget=budget)


def test_the_default_keeps_running_requests_within_15_ms() -> None:
    default = limits_of_default().step_budget
    taken = prompt_steps(with_budget(default), 64, 32_768)
    # Some passes on an H200 had steps half as long again as the kernels' times.
    assert max(taken) <= LIMIT_MS / 1.5
    # Nor does it buy that with steps of next to nothing.
    assert len(taken) < 90 and sum(taken) < 700
    assert np.median(taken) > 0.7 * max(taken)


@pytest.mark.parametrize("prompt", [700, 5_000, 17_000])
@pytest.mark.parametrize("running", [8, 128])
def test_so_it_does_with_other_prompts_and_loads(running: int, prompt: int) -> None:
    assert (
        max(prompt_steps(with_budget(limits_of_default().step_budget), running, prompt)) < LIMIT_MS
    )


def test_one_key_trades_gaps_for_the_first_token() -> None:
    results = [prompt_steps(with_budget(budget), 64, 32_768) for budget in (6144, 8192, 12288)]
    assert sorted(map(max, results)) == [max(taken) for taken in results]
    assert sorted(map(sum, results), reverse=True) == [sum(taken) for taken in results]


def test_alone_a_prompt_takes_large_steps() -> None:
    taken = prompt_steps(with_budget(limits_of_default().step_budget), 0, 32_768)
    assert len(taken) <= 6
    assert sum(taken) < 0.7 * sum(prompt_steps(with_budget(8192), 64, 32_768))
