"""Greedy tokens equal HF's, whatever the chunking, paging, caching, batching and overlap: a
pairwise cover.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.graph_runner import Pending
from engine.scheduler import step_plan
from engine.scheduler.batch import ScheduledBatch
from engine.startup import Engine
from tests.e2e.harness import greedy_requests, run, running_engine
from tests.e2e.tiny_models import FAMILIES, VOCAB, chosen, hf_config, save_model

MAX_TOKENS = 20
FACTORS: Mapping[str, Sequence[Any]] = {
    "family": FAMILIES,
    "group": (1, 2, 4, 7),
    "head_dim": (32, 64, 128),
    "chunk": (1, 7, 16, 200),
    "page_size": (1, 4, 16),
    "prefix_cache": (True, False),
    "waves": (0, 1, 3),  # 0: each prompt alone
    "overlap": (True, False),
}


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Cases such that every pair of values of two factors occurs together: greedy, over random
    candidates.
    """
    rng = random.Random(seed)
    names = list(factors)
    open_pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    cases = []
    while open_pairs:
        candidates = [{n: rng.choice(list(factors[n])) for n in names} for _ in range(60)]
        covered = [
            {p for p in itertools.combinations(case.items(), 2) if p in open_pairs}
            for case in candidates
        ]
        best = max(range(len(candidates)), key=lambda i: len(covered[i]))
        if covered[best]:
            cases.append(candidates[best])
            open_pairs -= covered[best]
    return cases


def prompts_for(seed: int) -> list[list[int]]:
    """Prompts of mixed lengths; some share a prefix of several pages, one is exactly a number of
    pages.
    """
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(48)]
    lengths = (1, 5, 16, 33, 70)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]
    return [*prompts, shared, shared[:32] + prompts[1], shared + prompts[0]]


def watch_chunks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the longest row of every step from here on."""
    longest: list[int] = []
    launch = engine.worker.launch

    def watched(batch: ScheduledBatch) -> Pending:
        longest.append(int(batch.row_lens.max()))
        return launch(batch)

    monkeypatch.setattr(engine.worker, "launch", watched)
    return longest


def assert_greedy(model: Any, prompts: list[list[int]], outputs: Mapping[int, list[int]]) -> None:
    """Every output is all of what HF's model gives."""
    answers = [outputs[i] for i in range(len(prompts))]
    assert {len(answer) for answer in answers} == {MAX_TOKENS}
    assert answers == chosen(model, prompts, answers)


CASES = pairwise(FACTORS)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_greedy_equals_hf(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The case's size decides, not what steps cost.
    affordable = step_plan.StepPlan.affordable
    monkeypatch.setattr(
        step_plan.StepPlan, "affordable", lambda *args: min(case["chunk"], affordable(*args))
    )
    kv_heads = 2 if case["group"] < 7 else 1
    config = hf_config(
        case["family"],
        heads=case["group"] * kv_heads,
        kv_heads=kv_heads,
        head_dim=case["head_dim"],
        layers=3 if case["family"] == "llama" else 2,
    )
    model = save_model(tmp_path, config)
    prompts = prompts_for(1)
    sections: dict[str, dict[str, Any]] = {
        "kv": {"page_size": case["page_size"], "prefix_cache": case["prefix_cache"]},
        "scheduler": {"overlap": case["overlap"]},
    }
    with running_engine(tmp_path, **sections) as engine:
        longest = watch_chunks(engine, monkeypatch)
        if case["waves"] == 0:
            outputs: dict[int, list[int]] = {}
            for request in greedy_requests(prompts, MAX_TOKENS):
                outputs |= run(engine, [request])
        else:
            outputs = run(engine, greedy_requests(prompts, MAX_TOKENS), waves=case["waves"])
        again = run(engine, greedy_requests(prompts, MAX_TOKENS, first_id=100))
    assert_greedy(model, prompts, outputs)
    # A second pass finds its prompts in the prefix cache, where there is one.
    assert [again[100 + i] for i in range(len(prompts))] == [outputs[i] for i in sorted(outputs)]
    assert max(longest) == min(case["chunk"], max(map(len, prompts))), "chunks of another size"


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["step", "layer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_equals_hf(family: str, unit: str, tmp_path: Path) -> None:
    """Each family through Inductor once; no step outside a graph, no compile while serving."""
    if unit == "step" and family != "qwen3":
        pytest.skip("one family shows the whole-step compile; the layer compile covers each")
    model = save_model(tmp_path, hf_config(family))
    prompts = prompts_for(2)
    whole = family == "llama" or unit == "step"
    sections: dict[str, dict[str, Any]] = {
        "compile": {
            "backend": "inductor",
            "unit": unit,
            "threads": 2 if unit == "step" else 1,
            # A size of 1 is a compile of its own: of one family's layer, and of the step.
            "decode_buckets": [1, 8] if whole else [8],
            "extend_buckets": [64, 128],
            "cache": False,
        },
        "scheduler": {"max_step_tokens": 128},
    }
    with running_engine(tmp_path, **sections) as engine:
        outputs = run(engine, greedy_requests(prompts, MAX_TOKENS), waves=2)
        stats = engine.core.stats()
    assert_greedy(model, prompts, outputs)
    assert (stats.eager_steps, stats.recompiles) == (0, 0)
