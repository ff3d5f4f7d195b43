"""`fullgraph bench`: runs bench/WHAT.py of the source tree on the configuration.

Knows only where the benchmarks lie: they are programs of their own, not part of the package.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from engine.config import load_config
from engine.errors import ConfigError

BENCH_FOLDER = Path(__file__).resolve().parents[2] / "bench"


def run(args: argparse.Namespace) -> int:
    """Run the benchmark in a process of its own; its exit status is ours."""
    load_config(args.config, args.overrides)
    program = BENCH_FOLDER / f"{args.what}.py"
    if not program.is_file():
        raise ConfigError(f"bench: no {program}; the benchmarks come with the source tree only")
    overrides = [word for text in args.overrides for word in ("--set", text)]
    return subprocess.call([sys.executable, str(program), str(args.config), *overrides])
