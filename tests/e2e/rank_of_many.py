"""One rank that serves checkpoint after checkpoint, as if torchrun had started it for each.

Started by test_ranks.py: importing torch once per rank and model would take most of the test's
time. Rank 0 writes the ids that it generated beside each checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from engine.rank_process import follow
from engine.world import launched_world
from tests.e2e.harness import greedy_requests, run, running_engine

ANSWER = "answer.json"


def run_rank(
    rank: int, size: int, ports: Sequence[int], folders: Sequence[str], prompts: Any, tokens: int
) -> None:
    """Generate `tokens` for every prompt on every checkpoint; `ports` are those of stores that
    somebody else holds, as torchrun does.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for port, folder in zip(ports, map(Path, folders), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        if rank > 0:
            follow(launched_world())
            continue
        sections: dict[str, dict[str, Any]] = {
            "parallel": {"tp": size},
            "compile": {"backend": "eager", "threads": 1},
            "scheduler": {"max_running": 4, "step_budget": 48, "overlap": size == 2},
        }
        with running_engine(folder, **sections) as engine:
            outputs = run(engine, greedy_requests(prompts, tokens), waves=2)
        assert not dist.is_initialized()
        (folder / ANSWER).write_text(json.dumps([outputs[i] for i in range(len(prompts))]))
