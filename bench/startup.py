"""How long a start takes, cold and warm: process start -> /health -> first token over HTTP.

    python -m bench.startup CONFIG [--set KEY.PATH=VALUE] [--warm 3] [--request "Hello"]

Cold: no artefact of Inductor, Triton or Dynamo (an empty cache folder of its own; FlashInfer's
modules stay). Warm: the same folder again. Between the two rows of the server's own phases stands
what the machine needs for `import torch` alone. Prints a table; writes bench/results/startup.json.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import add_config, command_line, save, table
from bench.server_process import (
    ServerFailed,
    ask,
    first_text,
    free_port,
    stop,
    wait_until_healthy,
)
from engine.config import load_config

# The engine writes the seconds of its own phases to the file that this variable names.
PHASES_VARIABLE = "FULLGRAPH_STARTUP_JSON"
# Folders that torch would otherwise share with every other program of the user.
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
RANGE = "warm min .. max"
_POLL_S = 0.01
_WATCHED = ("eager", "recompile", "cudagraph_skip")


@dataclass(frozen=True)
class Start:
    """One start, all times in seconds since the process was started.

    Attributes:
        ready: /health answered 200.
        first_token: the first text of a streamed completion arrived.
        phases: the engine's own, each in seconds it took.
        counters: metrics that must be 0 when no step was compiled or ran eagerly after the start.
    """

    ready: float
    first_token: float
    phases: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)


def measure_start(
    command: Sequence[str], url: str, prompt: str, folder: Path, environment: Mapping[str, str]
) -> Start:
    """Start a server, ask it for one completion, stop it.

    Args:
        command: starts the server in the foreground.
        url: where it will listen.
        prompt: of the request.
        folder: for the phases file and the server's log.
        environment: of the process.

    Raises:
        ServerFailed: it ended, or was not healthy in time; the message has the end of its log.
    """
    phases_file, log_file = folder / "phases.json", folder / "server.log"
    phases_file.unlink(missing_ok=True)
    with open(log_file, "wb") as log:
        begin = time.perf_counter()
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, PHASES_VARIABLE: str(phases_file)},
        )
    try:
        wait_until_healthy(url, server, _POLL_S, log_file)
        ready = time.perf_counter() - begin
        first_text(url, prompt)
        first_token = time.perf_counter() - begin
        return Start(ready, first_token, read_phases(phases_file), watched_counters(url))
    finally:
        stop(server)


def read_phases(file: Path) -> dict[str, float]:
    """Phase to seconds as the engine wrote them; empty where it wrote nothing usable."""
    with contextlib.suppress(OSError, ValueError):
        data = json.loads(file.read_text())
        if isinstance(data, dict):
            return {str(k): float(v) for k, v in data.items() if isinstance(v, (int, float))}
    return {}


def watched_counters(url: str) -> dict[str, float]:
    """Metrics of eager steps, recompiles and skipped graphs; empty without /metrics."""
    with contextlib.suppress(OSError, http.client.HTTPException), ask(url, "/metrics") as r:
        if r.status == 200:
            return parse_counters(r.read().decode(errors="replace"))
    return {}


def parse_counters(text: str) -> dict[str, float]:
    """Name to value of the samples that `_WATCHED` names."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if not name.startswith("#") and any(word in name for word in _WATCHED):
            with contextlib.suppress(ValueError):
                found[name] = float(value)
    return {name: value for name, value in found.items() if "_created" not in name}


def import_torch_seconds() -> float:
    """What no server in Python gets below on this machine: a process that only imports torch."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begin


def rows(cold: Start, warm: Sequence[Start]) -> list[dict[str, object]]:
    """The table: a row per phase, then the times since the process was started."""
    names = [*cold.phases, *(n for n in warm[0].phases if n not in cold.phases)]
    lines: list[dict[str, object]] = [
        {
            "seconds": f"  {name}",
            "cold": cold.phases.get(name),
            "warm": _median([w.phases[name] for w in warm if name in w.phases]),
        }
        for name in names
    ]
    for name in ("ready", "first_token"):
        values = [getattr(w, name) for w in warm]
        lines.append(
            {
                "seconds": name.replace("_", " "),
                "cold": getattr(cold, name),
                "warm": _median(values),
                RANGE: f"{min(values):.2f} .. {max(values):.2f}",
            }
        )
    # report.table takes its columns from the first row.
    return [{"seconds": None, "cold": None, "warm": None, RANGE: None, **line} for line in lines]


def as_json(start: Start) -> dict[str, Any]:
    """Plain JSON."""
    return {
        "ready_s": start.ready,
        "first_token_s": start.first_token,
        "phases_s": dict(start.phases),
        "counters": dict(start.counters),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one cold start and several warm ones."""
    options = _parser().parse_args(arguments)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="fullgraph-startup-") as name:
        folder = Path(name)
        cache = options.keep or folder / "cache"
        settings = [
            *options.overrides,
            f"compile.cache_dir={cache}",
            f"server.port={port}",
            "server.host=127.0.0.1",
            "server.api_key=null",
        ]
        words = [word for text in settings for word in ("--set", text)]
        command = [sys.executable, "-m", "engine", "serve", str(options.config), *words]
        caches = {variable: str(folder / variable) for variable in CACHE_VARIABLES}
        environment = {**os.environ, **caches}
        floor = import_torch_seconds()
        try:
            cold = measure_start(command, url, options.request, folder, environment)
            print(f"cold: first token after {cold.first_token:.2f} s", file=sys.stderr)
            warm = []
            for _ in range(options.warm):
                warm.append(measure_start(command, url, options.request, folder, environment))
                print(f"warm: first token after {warm[-1].first_token:.2f} s", file=sys.stderr)
        except ServerFailed as error:
            print(f"bench startup: {error}", file=sys.stderr)
            return 1
        size = sum(f.stat().st_size for f in cache.rglob("*") if f.is_file())
    print(table(rows(cold, warm)))
    print(f"import torch alone: {floor:.2f} s; cache on disk: {size / 2**20:.1f} MiB")
    result = {
        "config": str(options.config),
        "overrides": options.overrides,
        "import_torch_s": floor,
        "cache_bytes": size,
        "cold": as_json(cold),
        "warm": [as_json(start) for start in warm],
    }
    print(f"written to {save(options.name, result, options.results)}")
    if load_config(options.config, options.overrides).compile.backend == "eager":
        return 0
    bad = {k: v for start in warm for k, v in start.counters.items() if v}
    if bad:
        print(f"steps compiled or ran eagerly after a warm start: {bad}", file=sys.stderr)
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line("startup", __doc__, "startup")
    add_config(parser)
    parser.add_argument("--warm", type=int, default=3, help="warm starts; the median is shown")
    parser.add_argument("--keep", type=Path, help="an empty folder for the cache, to look at after")
    parser.add_argument("--request", default="Hello", help="prompt of the first request")
    return parser


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


if __name__ == "__main__":
    sys.exit(main())
