"""Two ranks against one on GPUs of one host: same tokens, decode step, host time, starts, a death.

    python -m bench.tensor_parallel [--tp 2] [--limit 420] [--only PART...]

Each part is a process of its own with its own time limit, so that one failure does not lose the
rest; all tables are printed again at the end. Parts that only check or compile run side by side,
those that are timed run alone. With one GPU only what one rank can do is run, in a process group
of one over NCCL.

    parity   greedy tokens of small random models judged by HF transformers in float32
    reduce   bench.all_reduce
    decode   a decode step of Qwen3-14B's shape at KV length 1024, Mini-SGLang's offline workload
    serve    the same shape: warm start to first token over HTTP; a rank killed under load
    torchrun the same server, started by torchrun
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.report import RESULTS, save, table
from bench.server_process import free_port
from bench.tensor_parallel_part import CONFIG, SHAPE, command_of, descendants, settings

PART = "bench.tensor_parallel_part"
SIDE_S = 95.0  # for parts side by side, which load what a warm-up beside them compiles
# Of a part's log that has no result: its end, less what says nothing.
LOG_LINES, DULL = 60, ("Writing model", "For debugging consider", "Compile with `TORCH_USE")


@dataclass
class Part:
    """One process.

    Attributes:
        name: of its log and its result.
        words: arguments of bench.tensor_parallel_part, or of another module.
        limit_s: it is killed after that.
    """

    name: str
    words: Sequence[str]
    limit_s: float = SIDE_S
    module: str = PART
    process: Any = field(default=None, repr=False)


def start(part: Part, folder: Path) -> Part:
    """Start it, its output going to a log."""
    with (folder / f"{part.name}.log").open("w") as log:
        words = [*part.words, *(() if part.module == "engine" else ("--results", str(folder)))]
        part.process = subprocess.Popen(
            [sys.executable, "-m", part.module, *words], stdout=log, stderr=log
        )
    return part


def finish(part: Part, limit_s: float) -> str:
    """Wait for it; how it ended."""
    begin = time.monotonic()
    try:
        status = part.process.wait(max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        # With PYTHONFAULTHANDLER each says where it hangs.
        for pid in (*descendants(part.process.pid), part.process.pid):
            if any(name in command_of(pid) for name in (PART, "rank_process", "engine_process")):
                os.kill(pid, signal.SIGABRT)
        time.sleep(2)
        part.process.kill()
        part.process.wait()
        return f"{part.name}: killed after {limit_s:.0f} s"
    return f"{part.name}: status {status} after {time.monotonic() - begin:.0f} s more"


def beside(tp: int, cache: str) -> list[Part]:
    """Parts that run side by side."""
    many = str(tp)
    ways = [("qwen3", "nccl"), ("moe", "nccl")]
    if tp > 1:
        ways += [("qwen3", "symmetric"), ("moe", "symmetric"), ("qwen3", "trees")]
        ways += [("qwen3", "alone"), ("moe", "alone")]
    side = [Part(f"parity_{model}_{way}", ["parity", model, many, way]) for model, way in ways]
    if tp == 1:
        launch = ["--nproc-per-node", "1", "--master-port", str(free_port()), "-m", PART]
        words = [*launch, "parity", "qwen3", "1", "torchrun"]
        return [*side, Part("parity_qwen3_torchrun", words, module="torch.distributed.run")]
    return side + [
        Part(f"fill_{n}", filling(n, way, cache), module="engine")
        for n, way in ((tp, "symmetric"), (1, "nccl"))
    ]


def one_by_one(tp: int, way: str, cache: str, quick: bool) -> list[Part]:
    """Parts that are timed, by importance."""
    many = str(tp)
    other = "nccl" if way == "symmetric" else "symmetric"
    starts = "1" if quick else "2"
    return [
        Part(f"decode_2_{way}", ["decode", many, way, cache], 36),
        Part("decode_1_nccl", ["decode", "1", "nccl", cache], 36),
        Part("serve_2", ["serve", many, way, cache, starts], 45),
        Part("serve_1", ["serve", "1", "nccl", cache, starts], 25),
        Part("workload_2", ["workload", many, way, cache], 60),
        Part(f"torchrun_{tp}", ["torchrun", many, way, cache], 40),
        Part(f"decode_2_{other}", ["decode", many, other, cache], 100),  # compiles first
        Part("reduce", ["--size", many], 40, "bench.all_reduce"),
    ]


def wanted(parts: Sequence[Part], beginnings: Sequence[str]) -> list[Part]:
    """Those whose names begin with one of the words."""
    return [part for part in parts if part.name.startswith(tuple(beginnings))]


def works(folder: Path, way: str) -> bool:
    """Whether a small model gave tokens this way."""
    return (folder / f"parity_qwen3_{way}.json").is_file()


def compare(folder: Path) -> None:
    """Add to each parity result how many of its prompts got the tokens of one rank alone."""
    for file in sorted(folder.glob("parity_*_*.json")):
        alone = folder / f"parity_{file.name.split('_')[1]}_alone.json"
        found = json.loads(file.read_text())
        if alone.is_file() and "ids" in found:
            pairs = list(zip(found.pop("ids"), json.loads(alone.read_text())["ids"], strict=True))
            found["rows"][0]["as alone"] = f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
            (folder / f"compared_{file.name}").write_text(json.dumps(found))


def filling(tp: int, way: str, cache: str) -> list[str]:
    """Words of a warm-up: it compiles what later parts load, without weights or ranks."""
    # Five groups of jobs for each GPU, all at once.
    texts = [*settings(SHAPE, tp, way, cache), f"compile.workers={5 * tp}"]
    return ["warmup", CONFIG, *(word for text in texts for word in ("--set", text))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; tables at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tp", type=int, default=min(2, torch.cuda.device_count()))
    parser.add_argument("--only", nargs="+", default=[""], help="parts whose names begin so")
    parser.add_argument("--limit", type=float, default=420, help="seconds for everything")
    parser.add_argument("--quick", action="store_true", help="one start each")
    parser.add_argument("--cache", help="compile cache to use and keep; else one is made")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    begin = time.monotonic()
    folder = args.results / "tensor_parallel"
    folder.mkdir(parents=True, exist_ok=True)

    def left() -> float:
        return float(args.limit) - (time.monotonic() - begin)

    cache = args.cache
    if cache is None:
        cache = tempfile.mkdtemp(prefix="fullgraph-bench-")
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
    # Several processes compile at once at first.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    side = wanted(beside(args.tp, cache), args.only)
    alone: list[Part] = []
    for part in side:
        start(part, folder)
    # A group of one compiles in its own process.
    last = begin + (SIDE_S if args.tp > 1 else args.limit)
    ends = [finish(part, min(left(), last - time.monotonic())) for part in side]
    print(f"side by side: {time.monotonic() - begin:.0f} s\n" + "\n".join(ends), flush=True)
    if args.tp > 1:
        way = "nccl" if works(folder, "nccl") and not works(folder, "symmetric") else "symmetric"
        alone = wanted(one_by_one(args.tp, way, cache, args.quick), args.only)
    for part in alone:
        if left() > 5:
            limit = min(part.limit_s, left())
            ends.append(finish(start(part, folder), limit))
            print(f"{ends[-1]}; {left():.0f} s left", flush=True)
            show(part, folder, {})
        else:
            ends.append(f"{part.name}: no time left")
    report([*side, *alone], folder, ends, args.results)
    return 0


def show(part: Part, folder: Path, found: dict[str, Any]) -> None:
    """Print a part's tables, or the end of its log where it has none; add its result to `found`."""
    file = folder / f"{part.name.replace('reduce', 'all_reduce')}.json"
    compared = folder / f"compared_{file.name}"
    file = compared if compared.is_file() else file
    print(f"\n== {part.name}")
    if file.is_file():
        found[part.name] = json.loads(file.read_text())
        for needless in ("environment", "ids"):
            found[part.name].pop(needless, None)
        for rows in found[part.name].values():
            if isinstance(rows, list) and rows and isinstance(rows[0], dict):
                print(table(rows), flush=True)
    logs = sorted(folder.glob(f"{part.name}*.log"))
    text = "\n".join(log.read_text(errors="replace") for log in logs) or "not run"
    if not file.is_file() or "Traceback" in text:
        lines = [x for x in text.splitlines() if x and not x.startswith("frame #")]
        lines = [line for line in lines if not any(word in line for word in DULL)]
        print("\n".join(line[:200] for line in lines[-LOG_LINES:]), flush=True)


def report(all_parts: Sequence[Part], folder: Path, ends: Sequence[str], results: Path) -> None:
    """Print every part's table, or the end of its log where it has none."""
    found: dict[str, Any] = {"ends": list(ends)}
    compare(folder)
    for part in all_parts:
        show(part, folder, found)
    print("\n".join(["", *ends, str(save("tensor_parallel", found, results))]))


if __name__ == "__main__":
    sys.exit(main())
