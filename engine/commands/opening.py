"""What `generate` and `chat` begin with: configuration to LLM, and what "auto" became."""

from __future__ import annotations

import argparse
from typing import Any

from engine.llm import LLM
from engine.preflight import load_to_start
from engine.terminal import ProgressDisplay


def open_llm(args: argparse.Namespace) -> LLM:
    """Load the model that the command line names; shows the resolved settings."""
    config = load_to_start(args.config, args.overrides)
    llm = LLM(config)
    ProgressDisplay(config.log.progress).table("resolved", llm.engine.settings)
    return llm


def drawn(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of how tokens are drawn."""
    return {} if args.temperature is None else {"temperature": args.temperature}
