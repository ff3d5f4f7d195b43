"""`fullgraph serve`: the HTTP server. Never imports torch; the engine is a process of its own."""

from __future__ import annotations

import argparse
import importlib

from engine.engine_launch import launched
from engine.preflight import load_to_start
from engine.server.listener import listen


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    config = load_to_start(args.config, args.overrides)
    with listen(config.server.host, config.server.port) as listener, launched(config) as transport:
        # Imported by name, and only now: FastAPI takes a second, in which the engine starts.
        app = importlib.import_module("engine.server.app")
        status: int = app.serve(config, transport, listener)
    return status
