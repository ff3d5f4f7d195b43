"""What a long prompt costs those who are being served, in this process.

    python -m bench.interference CONFIG [--set KEY.PATH=VALUE] [--budgets 2048 4096 8192]

While `--running` requests decode, a prompt of `--prompt` tokens arrives: the gaps between their
tokens until its first token is there, and how long that takes, for each scheduler.step_budget.

    python -m bench.interference CONFIG --rows 64 --row-context 32768

Decode rows of that context in a step of their own, and in a step that computes a chunk of a prompt
as well. Of few layers (`--layers`), so that the pages fit; a step's time is that of its layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.decode_step import decode_batch, step_ms
from bench.report import GpuClock, add_config, command_line, save, summary, table
from engine.config import load_config
from engine.engine_core import EngineCore
from engine.request import EngineRequest
from engine.scheduler.batch import ScheduledBatch
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.scheduler import Scheduler
from engine.startup import Engine, start_engine

STEPS = 30
CHUNK = 64


@contextmanager
def running(config: Path, overrides: Sequence[str]) -> Iterator[Engine]:
    """An engine, with every graph recorded."""
    engine = start_engine(load_config(config, overrides), lambda *_: None)
    try:
        while engine.worker.warm_next():
            pass
        yield engine
    finally:
        engine.close()


class Recording(Scheduler):
    """A scheduler that keeps its steps in `batches`."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self.batches: list[ScheduledBatch] = []

    def schedule(self) -> ScheduledBatch | None:
        batch = super().schedule()
        if batch is not None:
            self.batches.append(batch)
        return batch


def core_with(
    engine: Engine, budget: int | None, unit: float | None
) -> tuple[EngineCore, Recording]:
    """A new scheduler over the engine's worker; contexts cost less by what `unit` is larger."""
    limits = engine.core.scheduler.limits
    scale = (unit or limits.buckets[-1].context_unit) / limits.buckets[-1].context_unit
    limits = dataclasses.replace(
        limits,
        step_budget=budget or limits.step_budget,
        decode_unit=scale * limits.decode_unit,
        buckets=tuple(b._replace(context_unit=scale * b.context_unit) for b in limits.buckets),
    )
    scheduler = Recording(limits)
    return EngineCore(scheduler, engine.worker, overlap=limits.overlap), scheduler


def step_until(core: EngineCore, request_id: int | None, most: int) -> list[float]:
    """Times at which outputs came, up to `most` or to the first token of a request."""
    times: list[float] = []
    while len(times) < most:
        output, failed = core.step()
        assert not failed, failed
        if output is None:
            continue
        times.append(time.perf_counter())
        if request_id in output.request_ids:
            break
    return times


def interference(
    engine: Engine, args: argparse.Namespace, budget: int | None, unit: float | None
) -> dict[str, Any]:
    """One long prompt among running requests."""
    rng = random.Random(0)
    core, scheduler = core_with(engine, budget, unit)
    num_ids = engine.model.vocab_size

    def request(number: int, length: int, max_tokens: int) -> EngineRequest:
        return EngineRequest(number, [rng.randrange(num_ids) for _ in range(length)], max_tokens)

    room = min(4000, scheduler.limits.max_model_len - args.context)
    short = [request(i, args.context, room) for i in range(args.running)]
    long = request(args.running, args.prompt, 1)
    assert not core.add(short)
    with GpuClock() as clock:
        step_until(core, None, 40)
        quiet = step_until(core, None, 100)
        # The step in flight is the first of those whose outputs are still to come.
        begun = len(scheduler.batches) - 1
        begin = time.perf_counter()
        assert not core.add([long])
        times = step_until(core, long.request_id, 10**6)
    core.abort([r.request_id for r in short])
    while core.has_work:
        core.step()
    gaps = 1e3 * np.diff([quiet[-1], *times])
    limits = scheduler.limits
    steps = scheduler.batches[begun : begun + len(times)]
    return {
        "timeline": [timeline_row(step, gap) for step, gap in zip(steps, gaps, strict=True)],
        "step_budget": int(limits.step_budget),
        "context_unit": int(limits.buckets[-1].context_unit),
        "steps": len(times),
        "quiet_gap_ms_p50": summary(list(1e3 * np.diff(quiet)))["p50"],
        **{f"gap_ms_{key}": value for key, value in summary(list(gaps)).items()},
        "ttft_ms": 1e3 * (times[-1] - begin),
        **clock.seen,
    }


def timeline_row(step: ScheduledBatch, gap: float) -> str:
    """Decode rows, tokens of the chunk, where it starts, and milliseconds."""
    chunk = step.num_tokens - step.num_decode_rows
    start = int(step.row_starts[-1]) if chunk else 0
    return f"{step.num_decode_rows} rows + {chunk} at {start}: {gap:.2f} ms"


def mixed_batch(rows: ScheduledBatch, pages: np.ndarray[Any, Any], page: int) -> ScheduledBatch:
    """The decode rows and, on the slot after theirs, a chunk of CHUNK tokens of a prompt."""
    count, chunk = rows.num_rows, np.arange(CHUNK, dtype=np.int32)
    slot = np.full(CHUNK, count, np.int32)
    one = slice(0, 1)

    def both(name: str, tail: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([getattr(rows, name), tail.astype(getattr(rows, name).dtype)])

    return dataclasses.replace(
        rows,
        kind="extend",
        token_ids=both("token_ids", chunk),
        positions=both("positions", chunk),
        token_slots=both("token_slots", slot),
        kv_slots=both("kv_slots", pages[chunk // page] * page + chunk % page),
        row_slots=both("row_slots", slot[one]),
        row_starts=both("row_starts", chunk[one]),
        row_lens=both("row_lens", np.array([CHUNK])),
        logit_tokens=both("logit_tokens", np.array([count + CHUNK - 1])),
        logit_slots=both("logit_slots", slot[one]),
        logit_targets=both("logit_targets", np.array([-1])),
        logit_positions=both("logit_positions", np.array([CHUNK])),
        sampling_floats=np.concatenate([rows.sampling_floats, rows.sampling_floats[one]]),
        sampling_ints=np.concatenate([rows.sampling_ints, rows.sampling_ints[one]]),
    )


def warm_step_ms(engine: Engine, batch: ScheduledBatch) -> float:
    """Milliseconds a step, many in a row."""
    for _ in range(3):
        engine.worker.launch(batch).wait()
    return step_ms(engine, batch, STEPS)


def rows_in_extend(args: argparse.Namespace) -> dict[str, Any]:
    """Long decode rows alone and beside a chunk."""
    rows, context = args.rows, args.row_context
    source = load_config(args.config, args.overrides)
    shape = json.loads((Path(source.model.path) / "config.json").read_text())
    overrides = [
        *args.overrides,
        f"scheduler.max_running={rows + 8}",
        f"compile.decode_buckets=[{rows},{rows + 8}]",
        f"compile.extend_buckets=[{rows + CHUNK}]",
        f"scheduler.max_step_tokens={rows + CHUNK}",
        f"model.max_model_len={context + 16}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        changed = {**shape, "num_hidden_layers": args.layers}
        (Path(folder) / "config.json").write_text(json.dumps(changed))
        page = source.kv.page_size
        columns = -(-context // page)
        overrides += [f"model.path={folder}", f"kv.num_pages={rows * columns + CHUNK // page}"]
        with running(args.config, overrides) as engine:
            table_SP = engine.worker._runner._tensors.state.page_table_SP
            pages = torch.arange(1, 1 + rows * columns, dtype=torch.int32).view(rows, columns)
            table_SP[:rows, :columns] = pages.to(table_SP.device)
            own = 1 + rows * columns + np.arange(CHUNK // page, dtype=np.int32)
            table_SP[rows, : len(own)] = torch.from_numpy(own).to(table_SP.device)
            alone = decode_batch(rows, context, page)
            pure, mixed = (warm_step_ms(engine, b) for b in (alone, mixed_batch(alone, own, page)))
            kernel = engine.config.attention.decode
    return {
        "rows": rows,
        "context": context,
        "layers": args.layers,
        "decode_kernel": kernel,
        "decode_step_ms": pure,
        f"with_{CHUNK}_prompt_tokens_ms": mixed,
        "ratio": mixed / pure,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = command_line("interference", __doc__, "interference")
    add_config(parser)
    add = parser.add_argument
    add("--running", type=int, default=64, help="requests that decode")
    add("--context", type=int, default=512, help="tokens of their prompts")
    add("--prompt", type=int, default=32768, help="tokens of the prompt that arrives")
    add("--budgets", type=int, nargs="*", help="scheduler.step_budget; default: the configured")
    add("--context-units", type=float, nargs="*", help="scheduler.context_unit, likewise")
    add("--rows", type=int, help="decode rows inside an extend step instead")
    add("--row-context", type=int, default=32768)
    add("--layers", type=int, default=8)
    args = parser.parse_args(argv)
    rows = []
    if args.rows:
        rows.append(rows_in_extend(args))
        save(args.name, {"rows": rows}, args.results)
    else:
        with running(args.config, args.overrides) as engine:
            interference(engine, args, None, None)  # a first pass warms what is left
            settings = itertools.product(args.context_units or [None], args.budgets or [None])
            for unit, budget in settings:
                rows.append(interference(engine, args, budget, unit))
                save(args.name, {"rows": rows}, args.results)
    print(table([{k: v for k, v in row.items() if k != "timeline"} for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
