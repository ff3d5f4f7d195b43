"""Ranks above 0 as processes that are started before anybody knows their place, for importing takes
them seconds.

    python -m engine.quick_import engine.early_ranks COUNT MODULE ARGUMENT...

starts COUNT of them and then runs MODULE's main(arguments), which takes them by `next_process`.
Each reads its place, a line, from its standard input; it ends if that is closed. Imports nothing
heavy.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence

from engine.quick_import import command, import_quickly

_early: list[subprocess.Popen[bytes]] = []


def main(argv: Sequence[str]) -> int:
    """Start the ranks and run another module's main(); its exit status."""
    _early.extend(_start() for _ in range(int(argv[0])))
    status: int = import_quickly(argv[1]).main(argv[2:])
    return status


def next_process() -> subprocess.Popen[bytes]:
    """One that was started early, or a new one.

    Raises:
        OSError: it cannot be started.
    """
    return _early.pop() if _early else _start()


def place(process: subprocess.Popen[bytes], rank: int, size: int, store: int) -> None:
    """Tell it its rank, of `size`, and the store's port on this host."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its end is seen by whoever watches it
        process.stdin.write(json.dumps([rank, size, store]).encode() + b"\n")
        process.stdin.close()


def _start() -> subprocess.Popen[bytes]:
    words = command("engine.rank_process", "--parent", str(os.getpid()))
    # Standard output is rank 0's alone: `generate` prints its answer there.
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=2)
