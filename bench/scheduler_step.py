"""Host time of one decode step: schedule + pack + process, without any device.

    python bench/scheduler_step.py [--json FILE] [--batches 1 16 64 256] [--lengths 100 1000 8000]

All requests run (their prompts are computed with made-up results first), then STEPS decode steps
are timed one by one; the table gives medians in microseconds. Every page boundary falls into the
timed steps as often as in real life.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from engine.output_processor import OutputProcessor
from engine.request import EngineRequest
from engine.scheduler.batch import ScheduledBatch, StepResult
from engine.scheduler.limits import SchedulerLimits, TokenBucket
from engine.scheduler.scheduler import Scheduler
from engine.step_inputs import Bucket, pack

PAGE_SIZE = 16
WARMUP_STEPS = 32
STEPS = 320  # a multiple of the page size


@dataclass(frozen=True)
class Timing:
    """Medians of one case in microseconds; `worst` is the 99th percentile of the total."""

    batch: int
    length: int
    schedule: float
    pack: float
    process: float
    total: float
    worst: float


def make_limits(batch: int, length: int) -> SchedulerLimits:
    """Room for `batch` requests of `length` tokens and what they generate."""
    max_model_len = length + 2 * (WARMUP_STEPS + STEPS)
    columns = -(-max_model_len // PAGE_SIZE)
    return SchedulerLimits(
        num_pages=1 + (batch + 1) * columns,
        page_size=PAGE_SIZE,
        max_model_len=max_model_len,
        max_running=batch,
        max_waiting=batch,
        max_step_tokens=max(8192, batch),
        step_budget=1e9,
        decode_unit=16384,
        buckets=(TokenBucket(max(8192, batch), 16384),),
        policy="fcfs",
        output_estimate=0.25,
        prefix_cache=True,
        max_waiting_s=None,
        max_logit_rows=batch,
        max_page_updates=batch + columns,
        overlap=False,
        vocab_size=32000,
    )


def fake_result(batch: ScheduledBatch) -> StepResult:
    """Token 7 for every row; it stops nobody."""
    return StepResult(np.full(batch.num_logit_rows, 7, np.int32))


def measure(batch: int, length: int) -> Timing:
    """One row of the table."""
    limits = make_limits(batch, length)
    scheduler = Scheduler(limits)
    processor = OutputProcessor(scheduler)
    rng = np.random.default_rng(0)
    max_tokens = limits.max_model_len - length
    for request_id in range(batch):
        prompt = rng.integers(8, 32000, length - request_id % PAGE_SIZE).tolist()
        request = EngineRequest(request_id, prompt, max_tokens, [2], temperature=0.7, top_p=0.9)
        assert scheduler.add(request) is None
    while True:
        step = scheduler.schedule()
        assert step is not None
        processor.process(step, fake_result(step))
        if step.kind == "decode" and step.num_rows == batch:
            break
    bucket = Bucket("decode", batch, batch, batch, batch, dummy_slot=batch)
    buffer = np.zeros(bucket.buffer_length, np.int32)
    samples = [_step(scheduler, processor, bucket, buffer) for _ in range(WARMUP_STEPS + STEPS)]
    columns = [sorted(column) for column in zip(*samples[WARMUP_STEPS:], strict=True)]
    totals = sorted(sum(sample) for sample in samples[WARMUP_STEPS:])
    schedule, packing, process = (statistics.median(column) for column in columns)
    worst = totals[int(0.99 * len(totals))]
    return Timing(batch, length, schedule, packing, process, statistics.median(totals), worst)


def _step(
    scheduler: Scheduler, processor: OutputProcessor, bucket: Bucket, buffer: np.ndarray
) -> tuple[float, float, float]:
    """Microseconds of schedule, pack and process of one step."""
    start = time.perf_counter_ns()
    batch = scheduler.schedule()
    scheduled = time.perf_counter_ns()
    assert batch is not None and batch.kind == "decode"
    pack(batch, bucket, buffer)
    packed = time.perf_counter_ns()
    result = fake_result(batch)
    launched = time.perf_counter_ns()
    processor.process(batch, result)
    done = time.perf_counter_ns()
    return (scheduled - start) / 1e3, (packed - scheduled) / 1e3, (done - launched) / 1e3


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 1000, 8000])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(arguments)
    print(f"{'batch':>6} {'length':>7} {'schedule':>9} {'pack':>7} {'process':>8} "
          f"{'total us':>9} {'p99 us':>8}")  # fmt: skip
    rows = []
    for batch in options.batches:
        for length in options.lengths:
            row = measure(batch, length)
            rows.append(asdict(row))
            print(f"{batch:6d} {length:7d} {row.schedule:9.1f} {row.pack:7.1f} "
                  f"{row.process:8.1f} {row.total:9.1f} {row.worst:8.1f}")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
