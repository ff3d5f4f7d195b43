"""What cannot work on this machine, told by file and key before anything is started for it.

Only what is certain at once: whether a hub has a model, or torch sees a GPU, a start finds out.
Never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.config import EngineConfig, load_config
from engine.config_errors import Problem, value_text
from engine.machine import why_no_cuda

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_to_start(path: Path, overrides: Sequence[str] = ()) -> EngineConfig:
    """load_config(), for a start on this machine.

    Raises:
        ConfigError: as load_config() does, or something that the configuration names is not here.
    """
    return load_config(path, overrides, not_here)


def not_here(config: EngineConfig) -> Iterator[Problem]:
    """One for each key that names what this machine does not have."""
    model = config.model
    if config.device == "cuda" and (reason := why_no_cuda()):
        yield Problem("device", f"got cuda, allowed: cpu or auto, for {reason}")
    for key, place in (("path", model.path), ("tokenizer", model.tokenizer)):
        if place and not Path(place).exists() and not _HUB_ID.fullmatch(place):
            allowed = "a folder, a .gguf file or a hub id; there is no such folder or file"
            yield Problem(f"model.{key}", f"got {value_text(place)}, allowed: {allowed}")
    file = model.chat_template
    if file is not None and not Path(file).is_file():
        yield Problem("model.chat_template", f"got {value_text(file)}, which is no file")
