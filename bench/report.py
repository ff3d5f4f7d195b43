"""What every result is made of: where and when it ran, how fast the GPU's clock was, percentiles,
tables, a JSON file, and the command line of what makes it.

Knows nothing of what is measured. Imports no torch: versions come from installed metadata.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "vllm", "sglang")


def command_line(program: str, doc: str | None, name: str) -> argparse.ArgumentParser:
    """A benchmark's parser with what all take: --name (of the JSON file) and --results (a folder).

    Args:
        doc: the module's; its first line describes the program.
        name: of the file, unless told otherwise.
    """
    summary = (doc or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"bench.{program}", description=summary)
    parser.add_argument("--name", default=name, help="of the JSON file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    return parser


def add_config(parser: argparse.ArgumentParser, **options: Any) -> None:
    """CONFIG, a path, and changes of its keys in `overrides`; `options` are those of CONFIG."""
    parser.add_argument("config", type=Path, **options)
    changes: dict[str, Any] = {"action": "append", "default": [], "metavar": "KEY.PATH=VALUE"}
    parser.add_argument("--set", dest="overrides", help="change one key of it", **changes)


def environment() -> dict[str, Any]:
    """Date, hardware, versions and source commit, for the head of a result."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "gpus": _lines("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES if _version(name)},
        "commit": "".join(_lines("git", "-C", str(ROOT), "describe", "--always", "--dirty")),
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or its architecture where Linux does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(*command: str) -> list[str]:
    """A command's output, or nothing where it is not there or fails."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return output.stdout.splitlines()


class GpuClock:
    """Samples a GPU's clock and power while it is open, through nvidia-smi; nothing without one.

    Attributes:
        seen: {"sm_mhz_least", "sm_mhz_median", "watts_most", "slowed_by"} once closed, the last a
            list of the bits (hexadecimal) that the driver gives as reasons for a lower clock.
    """

    def __init__(self, every_ms: int = 20) -> None:
        self._every_ms = every_ms
        self.seen: dict[str, Any] = {}

    def __enter__(self) -> GpuClock:
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0"
        fields = "clocks.sm,power.draw,clocks_event_reasons.active"
        command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={fields}"]
        command += ["--format=csv,noheader,nounits", f"--loop-ms={self._every_ms}"]
        try:
            self._process: subprocess.Popen[str] | None = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self._process = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        lines = self._process.communicate()[0].splitlines()
        samples = [line.split(", ") for line in lines if line.count(", ") == 2]
        if not samples:
            return
        clocks, watts, reasons = zip(*samples, strict=True)
        megahertz = [float(clock) for clock in clocks]
        self.seen = {
            "sm_mhz_least": min(megahertz),
            "sm_mhz_median": percentile(megahertz, 50),
            "watts_most": max(map(float, watts)),
            "slowed_by": sorted(set(reasons)),
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of them lie, linear between neighbours; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p90, p99 and maximum; NaN of nothing."""
    points = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    mean = sum(values) / len(values) if values else float("nan")
    return {"mean": mean, **points, "max": max(values, default=float("nan"))}


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as a Markdown table, its columns the keys of the first row."""
    if not rows:
        return ""
    columns = list(rows[0])
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def save(name: str, result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write `folder/name.json` with the environment at its head; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = json.dumps({"environment": environment(), **result}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    return path
