"""`fullgraph serve`: the HTTP server. Never imports torch; the engine is a process of its own."""

from __future__ import annotations

import argparse

from engine.config import load_config
from engine.server.app import serve


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    return serve(load_config(args.config, args.overrides))
