"""What `generate` and `chat` begin with: configuration to LLM, and what "auto" became."""

from __future__ import annotations

import argparse
from typing import Any

from engine.config import EngineConfig
from engine.llm import LLM
from engine.terminal import ProgressDisplay


def open_llm(config: EngineConfig) -> LLM:
    """Load the model that a configuration names; shows the resolved settings."""
    llm = LLM(config)
    ProgressDisplay(config.log.progress).table("resolved", llm.engine.settings)
    return llm


def drawn(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of how tokens are drawn."""
    return {} if args.temperature is None else {"temperature": args.temperature}
