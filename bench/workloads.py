"""Requests to measure with: sizes, token ids and arrival times, all from seeds or a trace file.

Knows nothing of engines, servers or tokenizers: a prompt is a list of ids.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ids are drawn below this, as in Mini-SGLang's benchmark; every vocabulary in earnest use has it.
NUM_IDS = 10000


@dataclass(frozen=True)
class Job:
    """One request: its prompt's ids, how many tokens to generate, when it arrives (seconds)."""

    prompt_ids: list[int]
    num_output: int
    arrival_s: float = 0.0


def mini_sglang(seed: int = 0, num_prompts: int = 256, longest: int = 1024) -> list[Job]:
    """Mini-SGLang's offline workload: 100 to `longest` tokens in and as many out.

    All prompts are drawn before all output lengths, so that the same seed gives the same work.
    """
    rng = random.Random(seed)
    prompts = [
        [rng.randint(0, NUM_IDS) for _ in range(rng.randint(100, longest))]
        for _ in range(num_prompts)
    ]
    return [Job(prompt, rng.randint(100, longest)) for prompt in prompts]


def uniform(
    num: int, num_input: int, num_output: int, seed: int = 0, num_ids: int = NUM_IDS
) -> list[Job]:
    """`num` requests of one size that share no prefix."""
    rng = random.Random(seed)
    return [Job([rng.randrange(num_ids) for _ in range(num_input)], num_output) for _ in range(num)]


def spread(
    num: int,
    num_input: tuple[int, int],
    num_output: tuple[int, int],
    seed: int = 0,
    num_ids: int = NUM_IDS,
) -> list[Job]:
    """`num` requests whose sizes are drawn between two bounds, both included."""
    rng = random.Random(seed)
    jobs = []
    for _ in range(num):
        prompt = [rng.randrange(num_ids) for _ in range(rng.randint(*num_input))]
        jobs.append(Job(prompt, rng.randint(*num_output)))
    return jobs


def poisson(jobs: Sequence[Job], rate: float, seed: int = 0) -> list[Job]:
    """The same jobs, arriving independently at `rate` a second on average."""
    rng = random.Random(seed)
    now = 0.0
    timed = []
    for job in jobs:
        now += rng.expovariate(rate)
        timed.append(Job(job.prompt_ids, job.num_output, now))
    return timed


def read_trace(
    path: Path,
    *,
    limit: int | None = None,
    speed: float = 1.0,
    block_size: int = 16,
    num_ids: int = NUM_IDS,
    longest: int | None = None,
) -> list[Job]:
    """A trace as JSON lines with timestamp (s), input_length, output_length and hash_ids.

    Prompts are made up, but two that share leading hash ids share that many blocks of ids.

    Args:
        path: the file.
        limit: take so many of its first lines.
        speed: replay so many times as fast.
        block_size: tokens that one hash id stands for.
        num_ids: draw ids below this.
        longest: leave out requests of more tokens, in and out together.
    """
    jobs: list[Job] = []
    for line in _first(path, limit):
        num_input, num_output = int(line["input_length"]), max(1, int(line["output_length"]))
        if longest is not None and num_input + num_output > longest:
            continue
        ids = _prompt_ids(line.get("hash_ids") or [], num_input, block_size, num_ids, len(jobs))
        jobs.append(Job(ids, num_output, float(line["timestamp"]) / speed))
    start = min((job.arrival_s for job in jobs), default=0.0)
    return [Job(job.prompt_ids, job.num_output, job.arrival_s - start) for job in jobs]


def _first(path: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for index, line in enumerate(file):
            if index == limit:
                return
            if line.strip():
                yield json.loads(line)


def _prompt_ids(
    hash_ids: Sequence[int], length: int, block_size: int, num_ids: int, index: int
) -> list[int]:
    ids: list[int] = []
    for hash_id in hash_ids:
        rng = random.Random(f"block {hash_id}")
        ids += [rng.randrange(num_ids) for _ in range(block_size)]
    rng = random.Random(f"request {index}")
    ids += [rng.randrange(num_ids) for _ in range(length - len(ids))]
    return ids[:length]
