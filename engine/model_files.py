"""The small files beside a model's weights: tokenizer, templates, stop ids, sampling defaults.

Finds them in a folder, on the hub or in a GGUF file's header and reads them into one record. Knows
nothing of weights or text, and never imports torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub  # loads its parts on use
from tokenizers import Tokenizer as Backend

from engine.errors import ModelError
from engine.gguf_tokenizer import build_gguf_tokenizer
from models.errors import CheckpointError
from models.gguf_header import read_gguf_header

_HUB_PATTERNS = ["*.json", "*.jinja", "additional_chat_templates/*.jinja"]
_HUB_IGNORED = ["*.index.json"]
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_EOS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, eq=False)
class TokenizerFiles:
    """What was found, read but not yet interpreted.

    Attributes:
        source: folder or file, for error messages.
        backend: the tokenizer itself, or None where there is none.
        special_tokens: role ("bos_token", ...) -> its text, as chat templates want them.
        eos_ids: from config.json, generation_config.json or GGUF keys, without the tokenizer's own.
        templates: name -> Jinja source; the nameless one is "default".
        add_bos: what tokenizer_config.json says about a BOS before every text; None: nothing.
        sampling_defaults: the keys of generation_config.json that are sampling parameters.
    """

    source: str
    backend: Backend | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    eos_ids: frozenset[int] = frozenset()
    templates: dict[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    sampling_defaults: dict[str, float] = field(default_factory=dict)


def read_tokenizer_files(
    path: str, revision: str | None = None, *, offline: bool = False
) -> TokenizerFiles:
    """Read what belongs to a folder, a .gguf file or a hub id.

    Raises:
        ModelError: nothing there, or a file that cannot be read.
    """
    local = Path(path)
    if local.is_file():
        return _from_gguf(local)
    if local.is_dir():
        return _from_folder(local)
    return _from_folder(_download(path, revision, offline))


def _download(hub_id: str, revision: str | None, offline: bool) -> Path:
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            revision=revision,
            local_files_only=offline,
            allow_patterns=_HUB_PATTERNS,
            ignore_patterns=_HUB_IGNORED,
        )
    except Exception as error:  # the hub client raises a dozen unrelated types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{hub_id}: neither a folder nor a file here, and not to be had from the hub: {reason}"
        ) from None
    return Path(folder)


def _from_gguf(path: Path) -> TokenizerFiles:
    try:
        metadata = read_gguf_header(path).metadata
    except CheckpointError as error:
        raise ModelError(str(error)) from None
    if "tokenizer.ggml.tokens" not in metadata:
        raise ModelError(f"{path}: holds no tokenizer; set model.tokenizer")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    special = {}
    for key, name in (
        ("bos_token_id", "bos_token"),
        ("eos_token_id", "eos_token"),
        ("unknown_token_id", "unk_token"),
        ("padding_token_id", "pad_token"),
    ):
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is not None and token_id < len(tokens):
            special[name] = tokens[token_id]
    eos = (metadata.get(f"tokenizer.ggml.{key}") for key in _GGUF_EOS)
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key.startswith(prefix) and isinstance(value, str)
    }
    return TokenizerFiles(
        source=str(path),
        backend=build_gguf_tokenizer(metadata, str(path)),
        special_tokens=special,
        eos_ids=frozenset(token_id for token_id in eos if token_id is not None),
        templates=templates,
    )


def _from_folder(folder: Path) -> TokenizerFiles:
    options = _json(folder / "tokenizer_config.json")
    model = _json(folder / "config.json")
    generation = _json(folder / "generation_config.json")
    special = _special_tokens({**_json(folder / "special_tokens_map.json"), **options})
    eos = _eos_ids(folder, model) | _eos_ids(folder, model.get("text_config") or {})
    add_bos = options.get("add_bos_token")
    return TokenizerFiles(
        source=str(folder),
        backend=_backend(folder / "tokenizer.json"),
        special_tokens=special,
        eos_ids=eos | _eos_ids(folder, generation),
        templates=_templates(folder, options),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        sampling_defaults=_sampling_defaults(folder, generation),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected")
    return value


def _backend(path: Path) -> Backend | None:
    if not path.is_file():
        return None
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path}: cannot be read: {error}") from None


def _special_tokens(options: dict[str, Any]) -> dict[str, str]:
    special = {}
    for name, value in options.items():
        if not name.endswith("_token") or name.startswith("add_"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    return special


def _eos_ids(folder: Path, options: dict[str, Any]) -> frozenset[int]:
    value = options.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise ModelError(f"{folder}: eos_token_id is {value!r}; token ids are expected")
    return frozenset(ids)


def _sampling_defaults(folder: Path, options: dict[str, Any]) -> dict[str, float]:
    defaults = {name: options[name] for name in _DEFAULTS if options.get(name) is not None}
    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{folder}/generation_config.json: {name} is {value!r}, not a number")
    return defaults


def _templates(folder: Path, options: dict[str, Any]) -> dict[str, str]:
    """Later sources win: tokenizer_config.json, chat_template.json, the .jinja files."""
    templates: dict[str, str] = {}
    for value in (
        options.get("chat_template"),
        _json(folder / "chat_template.json").get("chat_template"),
    ):
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            named = (item for item in value if isinstance(item, dict))
            templates |= {str(item.get("name")): str(item.get("template")) for item in named}
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates
