"""fullgraph's host side; `from engine import LLM, SamplingParams` is the library's front door.

Importing this package loads neither torch nor anything else that is heavy: LLM and the
configuration come on first use, so that the API process and the command line stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from engine.errors import (
    ConfigError,
    EngineDead,
    FullgraphError,
    InvalidRequest,
    ModelError,
    NotFound,
    QueueFull,
    RequestError,
    Unavailable,
)
from engine.request import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from engine.config import EngineConfig, load_config
    from engine.llm import LLM, RequestOutput, TextDelta

__all__ = [
    "LLM",
    "ConfigError",
    "EngineConfig",
    "EngineDead",
    "FullgraphError",
    "InvalidRequest",
    "ModelError",
    "NotFound",
    "QueueFull",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "TextDelta",
    "Unavailable",
    "load_config",
]

__version__ = "0.1.0"

_LAZY = {
    "LLM": "engine.llm",
    "RequestOutput": "engine.llm",
    "TextDelta": "engine.llm",
    "EngineConfig": "engine.config",
    "load_config": "engine.config",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
