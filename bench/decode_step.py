"""One decode step by bucket: time on the GPU, on the host, in attention's plan, and to compile.

    python -m bench.decode_step CONFIG [--set KEY.PATH=VALUE] [--kv 256] [--batch 1 8 64]

Every row of a full bucket has `--kv` tokens in its cache. Without --one, the two runners (trees,
manual) and the two units (step, layer) run one after the other, each in a process of its own with
an empty compile cache, and one table shows them all. Buckets above 1 share one compile.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

from bench.gpu_timing import elapsed_ms
from bench.report import add_config, command_line, percentile, save, table
from engine.config import load_config
from engine.scheduler.batch import NUM_FLOATS, NUM_INTS, ScheduledBatch
from engine.startup import Engine, start_engine

STEPS = 60


def decode_batch(batch: int, kv_len: int, page_size: int, column: int = 0) -> ScheduledBatch:
    """`batch` greedy rows of `kv_len` tokens; the step also sets each row's page in `column` of the
    page table.
    """
    rows = np.arange(batch, dtype=np.int32)
    columns = -(-kv_len // page_size)
    pages = 1 + rows * columns
    last = kv_len - 1
    position = np.full(batch, last, np.int32)
    floats = np.zeros((batch, NUM_FLOATS), np.float32)
    floats[:, [1, 3]] = 1.0  # top_p, repetition
    return ScheduledBatch(
        step=0,
        kind="decode",
        variant="plain",
        num_decode_rows=batch,
        token_ids=np.full(batch, -1, np.int32),
        positions=position,
        token_slots=rows,
        kv_slots=(pages + last // page_size) * page_size + last % page_size,
        row_slots=rows,
        row_starts=position,
        row_lens=np.ones(batch, np.int32),
        logit_tokens=rows,
        logit_slots=rows,
        logit_targets=np.full(batch, -1, np.int32),
        logit_positions=position + 1,
        sampling_floats=floats,
        sampling_ints=np.zeros((batch, NUM_INTS), np.int32),
        update_slots=rows,
        update_columns=np.full(batch, column, np.int32),
        update_pages=pages + column,
    )


def time_bucket(engine: Engine, batch: int, kv_len: int) -> dict[str, Any]:
    """Milliseconds of a step of `batch` rows."""
    worker, page_size = engine.worker, engine.config.kv.page_size
    for column in range(-(-kv_len // page_size)):
        worker.launch(decode_batch(batch, kv_len, page_size, column)).wait()
    step = decode_batch(batch, kv_len, page_size)
    host, single = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        pending = worker.launch(step)
        host.append(time.perf_counter() - begin)
        pending.wait()
        single.append(time.perf_counter() - begin)
    return {
        "batch": batch,
        "gpu_ms": step_ms(engine, step, STEPS),
        "host_ms": 1e3 * percentile(host, 50),
        "latency_ms": 1e3 * percentile(single, 50),
        "plan_us": plan_microseconds(engine, step),
    }


def step_ms(engine: Engine, step: ScheduledBatch, count: int) -> float:
    """Milliseconds a step on the GPU, `count` in a row."""
    launch = engine.worker.launch
    return elapsed_ms(lambda: [launch(step) for _ in range(count)]) / count


def plan_microseconds(engine: Engine, step: ScheduledBatch) -> float:
    """Host time of attention's plan when every row has come to its next page, so that nothing can
    be reused.
    """
    runner = engine.worker._runner
    planner, bucket = runner._planner, runner.bucket_for(step)
    if planner is None:
        return 0.0
    moved = decode_batch(step.num_rows, int(step.row_starts[0]) - 15, engine.config.kv.page_size)
    times = []
    for repeat in range(STEPS):
        begin = time.perf_counter()
        planner.plan(bucket, (step, moved)[repeat % 2])
        times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    return 1e6 * percentile(times, 50)


def measure(args: argparse.Namespace) -> list[Any]:
    """Start the engine with the asked buckets and time each."""
    buckets = ",".join(str(batch) for batch in args.batch)
    config = load_config(
        args.config,
        [
            f"scheduler.max_running={max(args.batch)}",
            f"compile.decode_buckets=[{buckets}]",
            f"compile.extend_buckets=[{args.extend}]",
            f"scheduler.max_step_tokens={args.extend}",
            *args.overrides,
        ],
    )
    marks: list[tuple[float, str]] = []
    compiled: dict[str, float] = {}  # by job: compiles and kernels

    def progress(phase: str, done: int, total: int, text: str) -> None:
        job = re.fullmatch(r"(.+): ([\d.]+) s", text)
        if phase == "graphs":
            marks.append((time.perf_counter(), text))
        elif phase == "compile" and job:
            compiled[job[1]] = float(job[2])

    engine = start_engine(config, progress)
    seconds = {
        text: later - begin for (begin, text), (later, _) in zip(marks, marks[1:], strict=False)
    }
    rows = []
    for batch in args.batch:
        row = time_bucket(engine, batch, args.kv)
        row["compile_s"] = compile_seconds(compiled, batch)
        row["record_s"] = seconds.get(f"decode {batch} plain", float("nan"))
        rows.append(
            {"runner": config.compile.cudagraphs, "unit": engine.config.compile.unit, **row}
        )
    engine.close()
    return rows


def compile_seconds(compiled: dict[str, float], batch: int) -> float:
    """Of the compile that the bucket of `batch` rows uses; NaN if none was needed."""
    for name, seconds in compiled.items():
        job = re.fullmatch(r"decode (\d+)(?:\.\.(\d+))? plain", name)
        if job and int(job[1]) <= batch <= int(job[2] or job[1]):
            return seconds
    return float("nan")


def all_variants(args: argparse.Namespace) -> None:
    """One process per runner and unit: compiled state does not survive a change of either."""
    rows: list[Any] = []
    for runner, unit in (("trees", "step"), ("manual", "step"), ("manual", "layer")):
        with tempfile.TemporaryDirectory() as empty:
            command = [sys.executable, "-m", "bench.decode_step", str(args.config), "--one"]
            command += ["--kv", str(args.kv), "--extend", str(args.extend)]
            command += ["--batch", *map(str, args.batch)]
            own = (f"compile.cudagraphs={runner}", f"compile.unit={unit}")
            for text in (*args.overrides, *own, f"compile.cache_dir={empty}"):
                command += ["--set", text]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"{runner} {unit}: failed with {done.returncode}", file=sys.stderr)
            continue
        rows += json.loads(done.stdout.splitlines()[-1])
        print(table(rows), flush=True)
        save(args.name, {"kv": args.kv, "rows": rows}, args.results)


def main() -> None:
    parser = command_line("decode_step", __doc__, "decode_step")
    add_config(parser)
    parser.add_argument("--kv", type=int, default=256)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--extend", type=int, default=256, help="the one extend bucket")
    parser.add_argument("--one", action="store_true", help="only the configured runner and unit")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args)))
        return
    all_variants(args)


if __name__ == "__main__":
    main()
