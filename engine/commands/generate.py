"""`fullgraph generate`: prompts in, their continuations on standard output.

Knows the terminal; tokens, batches and sampling defaults are LLM's.
"""

from __future__ import annotations

import argparse
import sys

from engine.commands.opening import drawn, open_llm
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.llm import LLM
from engine.request import SamplingParams

# A base model seldom ends by itself, so that "until the context is full" would be no default.
MAX_TOKENS = 512


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Stream one prompt, or generate several as a batch."""
    prompts = args.prompts or [sys.stdin.read()]
    if not all(prompts):
        raise InvalidRequest("a prompt is empty")
    llm = open_llm(config)
    try:
        default = min(MAX_TOKENS, llm.engine.config.model.max_model_len // 2)
        params = llm.default_params(max_tokens=args.max_tokens or default, **drawn(args))
        if len(prompts) == 1:
            _stream(llm, prompts[0], params)
        else:
            _batch(llm, prompts, params)
    finally:
        llm.close()
    return 0


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
    for delta in llm.stream(prompt, params):
        print(delta.text, end="", flush=True)
    print()


def _batch(llm: LLM, prompts: list[str], params: SamplingParams) -> None:
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        print(f"--- {prompt}\n{output.text}")
