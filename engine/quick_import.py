"""Imports a module with the garbage collector paused: what imports make stays alive, and walking it
again and again is a fifth of the time that importing torch and its compiler takes.

    python -m engine.quick_import MODULE ARGUMENT...   runs MODULE's main(arguments)

Imports nothing of ours.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType


def import_quickly(name: str) -> ModuleType:
    """The module. Whatever is alive after the import is never walked again."""
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def command(module: str, *arguments: str) -> list[str]:
    """A command that runs the main() of a module of ours in a process of its own."""
    return [sys.executable, "-m", __name__, module, *arguments]


def main(argv: Sequence[str]) -> int:
    """Run a module's main(); its exit status."""
    status: int = import_quickly(argv[0]).main(argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
