"""What cannot work on this machine or with this model, told by file and key before a start begins.

Only what is certain at once: whether a hub has a model, or torch sees a GPU, a start finds out.
Never imports torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.config import EngineConfig, load_config
from engine.config_errors import Problem, value_text
from engine.machine import why_no_cuda
from models.config import ModelConfig
from models.errors import UnsupportedModel

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
    folder = Path(model.path)
    # Else GGUF files' own headers count, or it has to be fetched first.
    if model.load == "random" or any(folder.glob("*.safetensors")):
        try:
            found = ModelConfig.from_hf(json.loads((folder / "config.json").read_bytes()))
        except Exception:  # whatever is wrong with it, the engine tells
            return
        yield from beyond_the_model(config, found)


def beyond_the_model(config: EngineConfig, model: ModelConfig) -> Iterator[Problem]:
    """One for each key that asks for more than the model has."""
    length, ranks = config.model.max_model_len, config.parallel.tp
    if length != "auto" and length > model.max_position:
        allowed = f"at most {model.max_position}, the model's own limit"
        yield Problem("model.max_model_len", f"got {length}, allowed: {allowed}")
    try:
        model.check_ranks(ranks)
    except UnsupportedModel as error:
        yield Problem("parallel.tp", f"got {ranks}, but {error}")
