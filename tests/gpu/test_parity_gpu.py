"""A GPU's greedy tokens against transformers in float32: every family, attention kernel and runner.

An engine is started once a case; several schedulers drive it one after the other, which cut, cache
and overlap the work in ways of their own. Run with -s to see how close it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from engine.request import EngineRequest, StepOutput
from engine.scheduler import step_plan
from engine.scheduler.limits import TokenBucket
from engine.startup import Engine
from tests.e2e.harness import run, running_engine
from tests.e2e.test_parity import prompts_for
from tests.e2e.tiny_models import hf_config, save_model
from tests.gpu.engines import (
    Runner,
    capture_uncompiled,
    gpu_sections,
    warm_all,
    watch_buckets,
    with_scheduler,
)
from tests.gpu.judge import Reference, Verdict, judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # of torch's compiler and of transformers
]

LEAST_SAME = 0.9  # of the tokens of a random model, whose logits lie close together


class Case(NamedTuple):
    """A model, the kernels it attends with, and how its steps are recorded."""

    family: str
    heads: int
    kv_heads: int
    head_dim: int
    decode: str
    extend: str
    runner: Runner

    def __str__(self) -> str:
        return "-".join(str(value) for value in self)


class Way(NamedTuple):
    """How a scheduler serves the requests."""

    name: str
    waves: int = 1  # 0: each request alone
    chunk: int = 128
    prefix_cache: bool = False
    overlap: bool = True
    scored: bool = False  # with log-probabilities: the `full` variant


CASES = (
    # Qwen3 is served, compiled and judged, by test_serving_gpu.py.
    Case("mistral", 4, 2, 128, "triton", "fa2", "manual"),
    Case("llama", 8, 2, 64, "triton", "fa3", "manual"),
    Case("qwen2", 14, 2, 64, "fa2", "fa3", "manual"),
    Case("qwen3", 4, 2, 128, "fa2", "fa2", "plain"),
    Case("qwen3", 4, 2, 128, "fa3", "fa3", "plain"),
    Case("qwen3", 4, 2, 128, "xqa", "fa2", "plain"),
    Case("mistral", 4, 2, 128, "triton", "fa3", "plain"),
    Case("mistral", 4, 2, 128, "fa2", "fa3", "plain"),
    Case("mistral", 4, 2, 128, "fa3", "fa2", "plain"),
    Case("mistral", 4, 2, 128, "xqa", "fa3", "plain"),
    Case("llama", 8, 2, 64, "fa2", "fa3", "plain"),
    Case("llama", 8, 2, 64, "fa3", "fa2", "plain"),
    Case("llama", 8, 2, 64, "xqa", "fa2", "plain"),
    Case("qwen2", 14, 2, 64, "triton", "fa2", "plain"),
    Case("qwen2", 14, 2, 64, "fa3", "fa3", "plain"),
)
WAYS = (
    Way("alone", waves=0),
    Way("mixed", waves=3, chunk=16, prefix_cache=True),
    Way("in lockstep", overlap=False, prefix_cache=True),
    Way("scored", waves=2, chunk=7, scored=True),
)


def requests_for(prompts: list[list[int]], way: Way, first_id: int) -> list[EngineRequest]:
    """Of many lengths, so that the batch shrinks row by row."""
    scored = 1 if way.scored else -1
    return [
        EngineRequest(
            request_id=first_id + i,
            prompt_ids=prompt,
            max_tokens=16 + 2 * i,
            logprobs=scored,
            prompt_logprobs=scored,
        )
        for i, prompt in enumerate(prompts)
    ]


def check_way(engine: Engine, reference: Reference, way: Way, verdict: Verdict) -> int:
    """Serve the prompts twice this way and judge the answers; prompt tokens found in the cache."""
    prompts = [*prompts_for(1), prompts_for(2)[4][:64], prompts_for(3)[4][:63]]
    scores: dict[int, list[float]] = {}
    prompt_scores: dict[int, list[float]] = {}

    def watch(output: StepOutput) -> None:
        for request_id, entry in zip(output.request_ids, output.logprobs, strict=False):
            if entry is not None:
                scores.setdefault(request_id, []).append(entry.logprob)
        for request_id, _, entries in output.prompt_logprobs:
            prompt_scores.setdefault(request_id, []).extend(e.logprob for e in entries)

    for first_id in (0, 100):
        requests = requests_for(prompts, way, first_id)
        if way.waves:
            answers = run(engine, requests, waves=way.waves, watch=watch)
        else:
            answers = {}
            for request in requests:
                answers |= run(engine, [request], watch=watch)
        for request in requests:
            number, answer = request.request_id, answers[request.request_id]
            assert len(answer) == request.max_tokens
            if way.scored:
                assert len(scores[number]) == len(answer)
                assert len(prompt_scores.get(number, ())) == len(request.prompt_ids) - 1
            judge(
                verdict,
                reference,
                request.prompt_ids,
                answer,
                scores.get(number, ()),
                prompt_scores.get(number, ()),
            )
    return engine.core.stats(check=True).cached_prompt_tokens


@pytest.mark.parametrize("case", CASES, ids=str)
def test_greedy_equals_float32(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks as small as a way asks for, whatever they are padded to.
    monkeypatch.setattr(step_plan, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(step_plan, "CHUNKS_ALONE", 1)
    unpadded = tuple(TokenBucket(n, 16384) for n in range(1, 129))
    if case.runner == "plain":
        capture_uncompiled(monkeypatch)
    config = hf_config(
        case.family,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        # Larger weights make attention so sharp that bf16 itself takes other ways.
        initializer_range=0.1,
    )
    reference = Reference(save_model(tmp_path, config, dtype=torch.bfloat16))
    sections = gpu_sections([1, 2, 4, 8], [64, 128], case.runner)
    sections["attention"] = {"decode": case.decode, "extend": case.extend}
    verdicts = {way.name: Verdict() for way in WAYS}
    with running_engine(tmp_path, "cuda", **sections) as engine:
        warm_all(engine)
        fills = watch_buckets(engine, monkeypatch)
        for way in WAYS:
            limits = {
                "overlap": way.overlap,
                "step_budget": way.chunk,
                "buckets": unpadded,
                "prefix_cache": way.prefix_cache,
            }
            cached = check_way(with_scheduler(engine, limits), reference, way, verdicts[way.name])
            assert (cached > 0) == way.prefix_cache
        counters = engine.worker.counters
    print(f"\n{case}: {verdicts}")
    assert (counters.recompiles, counters.cudagraph_skips) == (0, 0)
    assert counters.eager_steps == 0 or case.runner == "plain"
    for kind, size in (("decode", 8), ("decode", 4), ("extend", 64)):
        assert fills[kind, size, 0], "no step filled the bucket"
        assert fills[kind, size, 1], "no step filled the bucket but for one"
    for verdict in verdicts.values():
        verdict.check(LEAST_SAME)
