"""`fullgraph bench`: runs bench.WHAT of the source tree on the configuration.

Knows only where the benchmarks lie: they are programs of their own, not part of the package.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError

SOURCE_TREE = Path(__file__).resolve().parents[2]


def run(args: argparse.Namespace, _: EngineConfig) -> int:
    """Run the benchmark in a process of its own; its exit status is ours."""
    program = SOURCE_TREE / "bench" / f"{args.what}.py"
    if not program.is_file():
        raise ConfigError(f"bench: no {program}; the benchmarks come with the source tree only")
    overrides = [word for text in args.overrides for word in ("--set", text)]
    command = [sys.executable, "-m", f"bench.{args.what}", str(args.config), *overrides]
    # The working directory stays, for paths on the command line are relative to it.
    paths = [str(SOURCE_TREE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.call(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
