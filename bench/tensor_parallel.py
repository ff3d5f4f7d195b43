"""Two ranks against one on GPUs of one host: same tokens, decode step, host time, starts, a death.

    python -m bench.tensor_parallel [--tp 2] [--limit 420] [--results FOLDER]

Each part is a process of its own with its own time limit, so that one failure does not lose the
rest; all tables are printed again at the end. Parts that only check or compile run side by side,
those that are timed run alone. With one GPU only what one rank can do is run, in a process group
of one over NCCL.

    parity   greedy tokens of small random models judged by HF transformers in float32
    reduce   bench.all_reduce
    decode   a decode step of Qwen3-14B's shape at KV length 1024, Mini-SGLang's offline workload
    serve    warm start to first token over HTTP; a rank killed under load
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
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

LARGE = "configs/hf/qwen3-14b"
SMALL = "configs/hf/qwen3-0.6b"


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
    limit_s: float
    module: str = "bench.tensor_parallel_part"
    process: Any = field(default=None, repr=False)


def start(part: Part, folder: Path) -> Part:
    """Start it, its output going to a log."""
    with (folder / f"{part.name}.log").open("w") as log:
        words = [*part.words, "--results", str(folder)]
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
        part.process.kill()
        part.process.wait()
        return f"{part.name}: killed after {limit_s:.0f} s"
    return f"{part.name}: status {status} after {time.monotonic() - begin:.0f} s more"


def parts(tp: int, cache: str) -> tuple[list[Part], list[Part]]:
    """(those that run side by side, those that run one after the other)."""
    if tp == 1:
        ways = ["nccl", "symmetric"]
        small = [Part(f"parity_{m}", ["parity", m, "1", *ways], 100) for m in ("qwen3", "moe")]
        return [*small, Part("parity_trees", ["parity", "qwen3", "1", "trees"], 100)], []
    one, two = "1", str(tp)
    both = ("nccl", "symmetric")
    side = [Part(f"parity_{m}", ["parity", m, two, *both], 130) for m in ("qwen3", "moe")]
    side += [Part("parity_trees", ["parity", "qwen3", two, "trees"], 130)]
    side += [
        Part(f"fill_{n}", ["fill", shape, n, how, cache], 130)
        for shape, n, how in (
            ("large", one, "nccl"),
            ("large", two, "nccl"),
            ("large", two, "symmetric"),
            ("small", one, "nccl"),
            ("small", two, "symmetric"),
        )
    ]
    for part in side:
        if part.words[0] == "fill":
            part.name = "_".join(part.words[:4])
    alone = [
        Part("decode_2_symmetric", ["decode", two, "symmetric", cache, "--workload"], 100),
        Part("decode_1", ["decode", one, "nccl", cache], 60),
        Part("serve_2", ["serve", two, "symmetric", cache], 75),
        Part("serve_1", ["serve", one, "nccl", cache], 45),
        Part("decode_2", ["decode", two, "nccl", cache], 60),
        Part("reduce", ["--size", two], 40, "bench.all_reduce"),
    ]
    return side, alone


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; tables at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tp", type=int, default=min(2, torch.cuda.device_count()))
    parser.add_argument("--limit", type=float, default=420, help="seconds for everything")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    begin = time.monotonic()
    folder = args.results / "tensor_parallel"
    folder.mkdir(parents=True, exist_ok=True)

    def left() -> float:
        return float(args.limit) - (time.monotonic() - begin)

    cache = tempfile.mkdtemp(prefix="fullgraph-bench-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    # Several processes compile at once at first.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    side, alone = parts(args.tp, cache)
    for part in side:
        start(part, folder)
    last = begin + max(part.limit_s for part in side)
    ends = [finish(part, min(left(), last - time.monotonic())) for part in side]
    print(f"side by side: {time.monotonic() - begin:.0f} s\n" + "\n".join(ends), flush=True)
    for part in alone:
        if left() > 5:
            limit = min(part.limit_s, left())
            ends.append(finish(start(part, folder), limit))
            print(f"{ends[-1]}; {left():.0f} s left", flush=True)
        else:
            ends.append(f"{part.name}: no time left")
    report([*side, *alone], folder, ends, args.results)
    return 0


def report(all_parts: Sequence[Part], folder: Path, ends: Sequence[str], results: Path) -> None:
    """Print every part's table, or the end of its log where it has none."""
    found: dict[str, Any] = {"ends": list(ends)}
    for part in all_parts:
        file = folder / f"{part.name.replace('reduce', 'all_reduce')}.json"
        print(f"\n== {part.name}")
        if file.is_file():
            found[part.name] = json.loads(file.read_text())
            found[part.name].pop("environment", None)
            for rows in found[part.name].values():
                if isinstance(rows, list) and rows and isinstance(rows[0], dict):
                    print(table(rows))
        else:
            log = folder / f"{part.name}.log"
            text = log.read_text(errors="replace") if log.is_file() else "not run"
            lines = [line for line in text.splitlines() if "Writing model" not in line]
            if part.words[0] != "fill" or "rror" in "".join(lines):
                print("\n".join(line[:200] for line in lines[-15:]))
    print("\n".join(["", *ends, str(save("tensor_parallel", found, results))]))


if __name__ == "__main__":
    sys.exit(main())
