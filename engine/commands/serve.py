"""`fullgraph serve`: the HTTP server. Never imports torch; the engine is a process of its own."""

from __future__ import annotations

import argparse
import importlib

from engine.config import load_config
from engine.engine_launch import launched


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    config = load_config(args.config, args.overrides)
    with launched(config) as transport:
        # Imported by name, and only now: FastAPI takes a second, in which the engine starts.
        status: int = importlib.import_module("engine.server.app").serve(config, transport)
    return status
