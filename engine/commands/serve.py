"""`fullgraph serve`: the HTTP server. Never imports torch; the engine is a process of its own."""

from __future__ import annotations

import argparse
import importlib

from engine.config import EngineConfig
from engine.engine_launch import launched
from engine.server.listener import listen


def run(_: argparse.Namespace, config: EngineConfig) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    with listen(config.server.host, config.server.port) as listener, launched(config) as transport:
        # Imported by name, and only now: FastAPI takes a second, in which the engine starts.
        app = importlib.import_module("engine.server.app")
        status: int = app.serve(config, transport, listener)
    return status
