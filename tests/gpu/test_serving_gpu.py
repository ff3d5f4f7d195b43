"""A compiled engine on a GPU over many steps: load that comes and goes, seeds that repeat, draws
that follow the distribution, what a step does; and a short run under compute-sanitizer.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.request import EngineRequest, Stats, StepOutput
from engine.startup import Engine
from tests.e2e.harness import run, running_engine
from tests.e2e.tiny_models import VOCAB, hf_config, save_model
from tests.gpu.engines import Runner, gpu_sections, warm_all, watch_buckets, with_scheduler
from tests.gpu.judge import Reference, Verdict, judge
from tests.gpu.test_overlap_gpu import check_steps
from tests.models.sampling_reference import assert_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # of torch's compiler and of transformers
]

SOAK_STEPS = 500
ROWS = 32
LEAST_SAME = 0.95
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.parametrize("runner", ["trees", "manual"])
def test_serving(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One start, for it takes longest."""
    model = save_model(
        tmp_path, hf_config("qwen3", head_dim=128, initializer_range=0.1), dtype=torch.bfloat16
    )
    sections = gpu_sections([1, 2, 8, 16, ROWS], [64, 256], runner)
    with running_engine(tmp_path, "cuda", **sections) as engine:
        warm_all(engine)
        check_steps(engine)
        check_seeds_repeat(engine)
        check_draws_follow_the_distribution(engine)
        check_soak(engine, Reference(model), monkeypatch)


class Load:
    """Requests of all kinds, as many at a time as a slow wave says."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.core, self.rng = engine.core, random.Random(seed)
        self.requests: dict[int, EngineRequest] = {}
        self.answers: dict[int, list[int]] = {}
        self.scores: dict[int, list[float]] = {}
        self.open: set[int] = set()
        self.shared = [self.rng.randrange(3, VOCAB) for _ in range(64)]

    def step(self, number: int) -> None:
        """Come, go, compute. Between two bursts of arrivals nobody comes, so that many rows decode
        by themselves.
        """
        wanted = 1 + int(1.2 * ROWS * math.sin(math.pi * number / 100) ** 2)
        arriving = number < SOAK_STEPS and number % 40 < 20
        while arriving and len(self.open) < wanted:
            self._add(len(self.requests))
        if self.rng.random() < 0.05 and self.open:
            leaver = self.rng.choice(sorted(self.open))
            self.core.abort([leaver])
            self.open.remove(leaver)
        output, failed = self.core.step()
        assert not failed, failed
        if output is not None:
            for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
                self.answers[request_id].append(token_id)
            for request_id, entry in zip(output.request_ids, output.logprobs, strict=False):
                if entry is not None:
                    self.scores.setdefault(request_id, []).append(entry.logprob)
            self.open -= {finished.request_id for finished in output.finished}
        if number % 50 == 0:
            self.core.scheduler.check_integrity()

    def _add(self, request_id: int) -> None:
        rng = self.rng
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 120))]
        request = EngineRequest(
            request_id=request_id,
            prompt_ids=self.shared[: rng.choice((0, 0, 16, 40, 64))] + own,
            max_tokens=rng.randint(1, 80),
            temperature=rng.choice((0.0, 0.0, 0.8)),
            top_p=rng.choice((1.0, 0.9)),
            seed=request_id,
            logprobs=rng.choice((-1, -1, -1, 2)),
        )
        assert not self.core.add([request])
        self.requests[request_id], self.answers[request_id] = request, []
        self.open.add(request_id)


def check_soak(engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with pages for all, so that every bucket is used, once with so few that requests are
    preempted and computed again.
    """
    fills = watch_buckets(engine, monkeypatch)
    stats = [soak(engine, reference, num_pages) for num_pages in (500, 60)]
    assert stats[1].preemptions and all(s.cached_prompt_tokens for s in stats)
    sizes = {(kind, size) for kind, size, _ in fills}
    assert sizes >= {("decode", n) for n in (1, 2, 8, 16, ROWS)} | {("extend", 64)}, sizes
    cache = engine.worker._runner._tensors.kv_cache
    assert not any(layer[0].any() for layer in cache.layers), "padding wrote to the dummy page"


def soak(engine: Engine, reference: Reference, num_pages: int) -> Stats:
    load = Load(with_scheduler(engine, {"num_pages": num_pages}), seed=1)
    number = 0
    while number < SOAK_STEPS or load.core.has_work:
        load.step(number)
        number += 1
    stats, counters = load.core.stats(check=True), engine.worker.counters
    assert stats.integrity == "" and stats.pages_held == 0
    assert (counters.eager_steps, counters.recompiles, counters.cudagraph_skips) == (0, 0, 0)
    verdict = Verdict()
    for request_id, request in load.requests.items():
        if request.temperature == 0 and load.answers[request_id]:
            answer, scores = load.answers[request_id], load.scores.get(request_id, ())
            judge(verdict, reference, request.prompt_ids, answer, scores)
    print(f"\n{number} steps, {len(load.requests)} requests, {stats}, {verdict}")
    verdict.check(LEAST_SAME)
    return stats


def check_seeds_repeat(engine: Engine) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(ROWS)]

    def draw(seed: int) -> dict[int, list[int]]:
        requests = [
            EngineRequest(request_id=i, prompt_ids=p, max_tokens=24, temperature=1.0, seed=seed + i)
            for i, p in enumerate(prompts)
        ]
        return run(with_scheduler(engine, {"prefix_cache": False}), requests, waves=2)

    first = draw(7)
    assert draw(7) == first
    assert draw(8) != first


def check_draws_follow_the_distribution(engine: Engine, count: int = 8000) -> None:
    """Tokens drawn by extend steps and by decode steps against the exact distributions that the
    log-probabilities of the same steps give; steps without log-probabilities draw the same tokens.
    """
    engine = with_scheduler(engine, {})
    prompt, temperature, top_k = list(range(20, 60)), 1.3, 4
    expected, places = np.zeros((2, VOCAB)), Counter[int]()

    def watch(output: StepOutput) -> None:
        for request_id, entry in zip(output.request_ids, output.logprobs, strict=False):
            if entry is not None:
                logits = np.array(entry.top_logprobs)
                kept = logits >= logits[top_k - 1]  # equal ones at the edge are all kept
                weights = np.where(kept, np.exp((logits - logits[0]) / temperature), 0.0)
                expected[places[request_id], entry.top_ids] += weights / weights.sum()
                places[request_id] += 1

    def draw(logprobs: int) -> list[list[int]]:
        answers: dict[int, list[int]] = {}
        for begin in range(0, count, 1000):
            requests = [
                EngineRequest(
                    i, prompt, 2, temperature=temperature, top_k=top_k, seed=i, logprobs=logprobs
                )
                for i in range(begin, min(begin + 1000, count))
            ]
            answers |= run(engine, requests, check=False, watch=watch)
        return [answers[i] for i in range(count)]

    drawn = draw(20)
    assert places.total() == 2 * count
    for place in range(2):
        assert_distributed([ids[place] for ids in drawn], expected[place] / count)
    same = sum(a == b for a, b in zip(drawn, draw(-1), strict=True))
    assert same >= 0.97 * count, f"{same} of {count}"


@pytest.mark.skipif(not Path(SANITIZER).exists(), reason="no compute-sanitizer")
def test_compute_sanitizer_finds_nothing() -> None:
    """No access out of bounds in a short run; every tensor is an allocation of its own."""
    command = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors"]
    command += ["no", sys.executable, "-m", "tests.gpu.short_run"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
    assert "30 tokens" in done.stdout
