"""A few steps of an eager engine with each decode kernel, to be watched by compute-sanitizer."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tests.e2e.harness import greedy_requests, run, running_engine
from tests.e2e.test_parity import prompts_for
from tests.e2e.tiny_models import hf_config, save_model
from tests.gpu.engines import gpu_sections


def main() -> None:
    """Print how many tokens came."""
    total = 0
    for decode, extend in (("triton", "fa3"), ("fa2", "fa2"), ("xqa", "fa3")):
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), hf_config("qwen3", head_dim=128), dtype=torch.bfloat16)
            sections = gpu_sections([1, 4], [64], "plain")
            sections["attention"] = {"decode": decode, "extend": extend}
            sections["kv"]["num_pages"] = 32
            with running_engine(Path(folder), "cuda", **sections) as engine:
                answers = run(engine, greedy_requests(prompts_for(1)[:5:2], 4)[:2], waves=2)
                answers |= run(engine, greedy_requests(prompts_for(2)[1:2], 2, first_id=10))
                total += sum(map(len, answers.values()))
    print(f"{total} tokens")


if __name__ == "__main__":
    main()
