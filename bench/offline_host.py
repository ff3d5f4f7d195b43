"""What the host costs an offline run: Mini-SGLang's workload on a device that only lets time pass.

    python -m bench.offline_host [--repeats 7]

LLM, scheduler, packing and output processing are the real ones, with an H200's settings and the
vocabulary of Qwen3. The device's time is made up (a fit to steps of the Qwen3-0.6B shape) and is
not waited for: a wait moves the clock. So a run takes seconds of a CPU, and what is told is the
time in which such a device would have had nothing to do. The least of some runs counts; what a
graph's launch and FlashInfer's plans cost is not in it. Writes bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from bench.offline import fit, params_for
from bench.report import ROOT, command_line, percentile, save, table
from bench.workloads import Job, mini_sglang
from engine.config import load_config
from engine.engine_core import EngineCore
from engine.graph_runner import Pending
from engine.limits import scheduler_limits
from engine.llm import LLM
from engine.machine import Machine
from engine.resolve import ResolvedConfig, resolve
from engine.scheduler.batch import ScheduledBatch, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.step_compiler import make_buckets
from engine.step_inputs import pack

VOCAB_SIZE = 151936
NUM_PAGES = 66614
CONFIG = ROOT / "configs" / "qwen3_0_6b.yaml"
OVERRIDES = (f"model.path={ROOT}/configs/hf/qwen3-0.6b", "model.load=random")


class Device:
    """Runs one step after the other, on a clock of CPU time and of what was waited.

    Attributes:
        idle_s: between steps, the device had nothing to do.
        host_s: by step, from the end of one wait to the next.
        first_launch / last_end: of the clock.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self._buckets = make_buckets(config)
        self._buffer = np.zeros(max(b.buffer_length for b in self._buckets), np.int32)
        self.counters = SimpleNamespace(eager_steps=0, recompiles=0)
        self._waited = 0.0
        self.reset()

    def reset(self) -> None:
        self._free_at, self._woken = 0.0, self.now()
        self.idle_s, self.first_launch, self.last_end = 0.0, 0.0, 0.0
        self.host_s: list[tuple[str, int, float]] = []

    def now(self) -> float:
        return time.thread_time() + self._waited  # others may have the cores, too

    def is_ready(self, variant: str) -> bool:
        return True

    def warm_next(self) -> bool:
        return False

    def launch(self, batch: ScheduledBatch) -> Pending:
        bucket = next(b for b in self._buckets if b.fits(batch))
        pack(batch, bucket, self._buffer)
        now = self.now()
        if not self._free_at:
            self.first_launch = self._free_at = now
        self.idle_s += max(0.0, now - self._free_at)
        self._free_at = max(now, self._free_at) + self._seconds(batch, bucket.num_tokens)
        return _Step(self, batch, self._free_at)

    def wait_until(self, end: float, batch: ScheduledBatch) -> None:
        now = self.now()
        self.host_s.append((batch.kind, batch.num_rows, now - self._woken))
        self._waited += max(0.0, end - now)
        self._woken = self.last_end = self.now()

    def _seconds(self, batch: ScheduledBatch, num_tokens: int) -> float:
        context = 27e-9 * int(batch.row_starts[: batch.num_decode_rows].sum())
        if batch.kind == "extend":
            return 0.24e-3 + 2.02e-6 * num_tokens + 1.17 * context
        return 1.0e-3 + 1e-6 * batch.num_rows + context


@dataclass(frozen=True, eq=False)
class _Step:
    device: Device
    batch: ScheduledBatch
    end: float

    def wait(self) -> StepResult:
        self.device.wait_until(self.end, self.batch)
        return StepResult(np.full(self.batch.num_logit_rows, 7, np.int32))

    def poll(self) -> bool:
        return True


def make_llm() -> tuple[LLM, Device]:
    """The real LLM over a Device."""
    config = load_config(CONFIG, OVERRIDES)
    resolved = resolve(
        config,
        max_position=40960,
        checkpoint_dtype="bfloat16",
        cuda=True,
        capability=(9, 0),
        context_unit=3840,
        machine=Machine(16, None),
    )
    resolved = resolved.model_copy(
        update={"scheduler": resolved.scheduler.model_copy(update={"step_budget": 8192})}
    )
    device = Device(resolved)
    limits = scheduler_limits(resolved, NUM_PAGES, VOCAB_SIZE, 0.5, 1024)
    worker: Any = device
    engine = SimpleNamespace(
        core=EngineCore(Scheduler(limits), worker, overlap=True),
        config=resolved,
        num_pages=NUM_PAGES - 1,
        model=SimpleNamespace(vocab_size=VOCAB_SIZE, eos_ids=frozenset({151645})),
        close=lambda: None,
    )
    with mock.patch("engine.llm.start_engine", lambda *_: engine):
        return LLM(config), device


def measure(llm: LLM, device: Device, jobs: Sequence[Job]) -> dict[str, float]:
    """One run, in milliseconds."""
    prompts, params = [job.prompt_ids for job in jobs], params_for(jobs, 0.6)
    device.reset()
    begin = device.now()
    outputs = llm.generate(prompts, params, progress=False)
    end = device.now()
    assert sum(len(o.token_ids) for o in outputs) == sum(job.num_output for job in jobs)
    full = [s for kind, rows, s in device.host_s if kind == "decode" and rows >= 240]
    extend = [s for kind, _, s in device.host_s if kind == "extend"]
    return {
        "before": 1e3 * (device.first_launch - begin),
        "between": 1e3 * device.idle_s,
        "after": 1e3 * (end - device.last_end),
        "total": 1e3 * (end - begin),
        "decode_step": 1e3 * percentile(full, 50),
        "extend_step": 1e3 * percentile(extend, 50),
        "extend_step_most": 1e3 * max(extend),
    }


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_line("offline_host", __doc__, "offline_host_cpu")
    parser.add_argument("--repeats", type=int, default=7)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    args = build_parser().parse_args(argv)
    llm, device = make_llm()
    gc.collect()
    gc.freeze()  # as a start does
    # Other prompts each time: a hit in the prefix cache would shorten steps.
    runs = [measure(llm, device, fit(mini_sglang(7 + i), VOCAB_SIZE)) for i in range(args.repeats)]
    least = {key: min(run[key] for run in runs) for key in runs[0]}
    print(table([*runs, least]))
    print(save(args.name, {"least_ms": least, "runs_ms": runs}, args.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
