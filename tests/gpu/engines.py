"""What GPU tests do with an engine: settings, another scheduler over it, what its steps fill."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
import torch

from engine import step_compiler
from engine.engine_core import EngineCore
from engine.graph_programs import ManualProgram, Program, StepFunction, StepTensors
from engine.graph_runner import Pending
from engine.scheduler.batch import ScheduledBatch
from engine.scheduler.scheduler import Scheduler
from engine.startup import Engine

Fills = Counter[tuple[str, int, int]]


# How steps become graphs: "manual" and "trees" are compiled. "plain" is captured by hand as it is,
# without a compiler: the same kernels, plans and replays, started in a second.
Runner = Literal["manual", "trees", "plain"]


def gpu_sections(
    decode: Sequence[int], extend: Sequence[int], runner: Runner
) -> dict[str, dict[str, Any]]:
    """For tests.e2e.harness.running_engine: bf16, with these buckets."""
    return {
        "model": {"dtype": "bfloat16"},
        "compile": {
            "backend": "eager" if runner == "plain" else "inductor",
            "cudagraphs": "trees" if runner == "trees" else "manual",
            "decode_buckets": list(decode),
            "extend_buckets": list(extend),
            "cache": False,
            "workers": 0,
        },
        "kv": {"num_pages": 600},
        "scheduler": {"max_running": decode[-1], "max_step_tokens": extend[-1]},
    }


def capture_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines without a compiler record their steps."""
    pool = torch.cuda.graph_pool_handle()

    def recorded(step: StepFunction, tensors: StepTensors) -> ManualProgram:
        return ManualProgram(step, tensors, Program(step, tensors), True, pool)

    monkeypatch.setattr(step_compiler, "Program", recorded)


def warm_all(engine: Engine) -> None:
    """Record what a start leaves for later."""
    while engine.worker.warm_next():
        pass


def with_scheduler(engine: Engine, changes: Mapping[str, Any]) -> Engine:
    """The engine under a new scheduler, whose pages are all free, with limits changed."""
    limits = dataclasses.replace(engine.core.scheduler.limits, **changes)
    core = EngineCore(Scheduler(limits), engine.worker, overlap=limits.overlap)
    return dataclasses.replace(engine, core=core)


def watch_buckets(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Fills:
    """Counts steps by kind, bucket and how many tokens of the bucket were padding."""
    fills: Fills = Counter()
    launch = engine.worker.launch

    def watched(batch: ScheduledBatch) -> Pending:
        size = engine.worker._runner.bucket_for(batch).num_tokens
        fills[batch.kind, size, size - batch.num_tokens] += 1
        return launch(batch)

    monkeypatch.setattr(engine.worker, "launch", watched)
    return fills
