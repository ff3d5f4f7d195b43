"""`fullgraph chat`: a conversation with the model in the terminal. LLM does the work."""

from __future__ import annotations

import argparse
import sys

from engine.commands.conversation import HELP, converse, read_lines
from engine.commands.opening import drawn, open_llm
from engine.config import EngineConfig


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Load the model and talk until /exit or the end of the input."""
    llm = open_llm(config)
    try:
        params = llm.default_params(max_tokens=None, **drawn(args))
        terminal = sys.stdin.isatty()
        if terminal:
            print(HELP)
        lines = read_lines("> " if terminal else "")
        converse(lines, lambda messages: (d.text for d in llm.stream_chat(messages, params)))
    finally:
        llm.close()
    return 0
