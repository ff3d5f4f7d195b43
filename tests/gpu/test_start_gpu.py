"""Starts on a GPU, each in a process of its own: what a warm one builds, in torch and in Triton."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.e2e.tiny_models import hf_config, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

START = """
import json, sys
import triton
from engine import LLM, SamplingParams
misses = []
def listener(*, src, cache_hit, **_):
    if not cache_hit:
        misses.append(src.name)
triton.knobs.compilation.listener = listener
with LLM(sys.argv[1], sys.argv[2:]) as llm:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (plain,) = llm.generate([[1, 2, 3]], params)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=2)
    (full,) = llm.generate([[1, 2, 3]], params)
    assert full.token_ids == plain.token_ids
    worker = llm.engine.worker
    print(json.dumps({
        "compiled": sorted(worker.compile_log.compiled),
        "misses": misses,
        "eager": worker.counters.eager_steps,
        "recompiles": worker.counters.recompiles,
        "ids": plain.token_ids,
    }))
"""


def start(*arguments: str) -> Any:
    result = subprocess.run(
        [sys.executable, "-c", START, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("runner", ["manual", "trees"])
def test_a_warm_start_builds_nothing(runner: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", hf_config("qwen3", head_dim=128), dtype=torch.bfloat16)
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{path: {tmp_path / 'model'}, dtype: bfloat16}}\n")
    settings = [
        "model.tokenizer=configs/hf/tiny-llama",
        f"compile.cache_dir={tmp_path / 'cache'}",
        f"compile.cudagraphs={runner}",
        "scheduler.max_running=16",
        "scheduler.max_step_tokens=128",
        "log.progress=none",
    ]
    cold = start(str(config), *settings, "kv.num_pages=100")
    # What needs no weights is built by compile processes, in the cold start, too.
    assert cold["compiled"] == [], "the engine compiled what a process was asked for"
    warm = start(str(config), *settings, "kv.num_pages=333")
    assert warm["compiled"] == [] and warm["misses"] == []
    assert warm["eager"] == warm["recompiles"] == 0
    assert warm["ids"] == cold["ids"]
