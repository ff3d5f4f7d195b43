"""Finds the files of a model: a folder, a .gguf file or a hub id. Reads no weights and no torch.

Knows nothing of what the files must contain beyond their names and config.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from models.errors import CheckpointError
from models.gguf import hf_config, read_header

_TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_MOST_NAMED = 8


@dataclass(frozen=True)
class Checkpoint:
    """Where a model's files are.

    Attributes:
        kind: "safetensors", "gguf" or "random" (weights are drawn, only the config is there).
        root: the folder.
        files: weight files, none for "random".
        config: parsed config.json, or what a GGUF's metadata amounts to.
    """

    kind: str
    root: Path
    files: tuple[Path, ...]
    config: dict[str, Any]


def resolve_checkpoint(
    path: str, revision: str | None = None, offline: bool = False, load: str = "auto"
) -> Checkpoint:
    """Find the files of a model; downloads those that a hub id lacks in the local cache.

    Args:
        path: a folder, a .gguf file or a hub id.
        revision: branch, tag or commit of a hub id.
        offline: only look into the local cache.
        load: "auto" (safetensors, else GGUF), "safetensors", "gguf" or "random".

    Raises:
        CheckpointError: nothing usable there; the message says what was looked for.
    """
    root = Path(path).expanduser()
    if root.suffix == ".gguf" and load != "random" and not root.is_file():
        raise CheckpointError(f"{path}: no such file")
    if not root.exists():
        if path.startswith(("/", "./", "../", "~")):
            raise CheckpointError(f"{path}: no such file or folder")
        root = _download(path, revision, offline, load)
    if root.is_file():
        if root.suffix != ".gguf":
            raise CheckpointError(f"{path}: a folder, a .gguf file or a hub id is needed")
        return _gguf_checkpoint(root, load)
    weights = _safetensors_files(root) if load in ("auto", "safetensors") else ()
    ggufs = sorted(root.glob("*.gguf")) if load in ("auto", "gguf") and not weights else []
    if len(ggufs) > 1:
        names = ", ".join(file.name for file in ggufs)
        raise CheckpointError(f"{root}: several GGUF files ({names}); give the path of one")
    if ggufs:
        return _gguf_checkpoint(ggufs[0], load)
    if not weights and load != "random":
        wanted = {"auto": "*.safetensors or *.gguf", "gguf": "*.gguf"}.get(load, "*.safetensors")
        raise CheckpointError(f"{root}: no {wanted} there")
    kind = "random" if load == "random" else "safetensors"
    return Checkpoint(kind, root, weights, _read_json(root / "config.json"))


def _download(hub_id: str, revision: str | None, offline: bool, load: str) -> Path:
    patterns = list(_TEXT_FILES)
    if load in ("auto", "safetensors"):
        patterns.append("*.safetensors")
    if load == "gguf":
        patterns.append("*.gguf")
    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                local_files_only=offline,
                allow_patterns=patterns,
                ignore_patterns=["consolidated*", "original/*"],
            )
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        where = "the local cache (model.offline is set)" if offline else "the hub"
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(
            f"{hub_id}{at}: not a local path, nor found in {where}: {error}"
        ) from error


def _gguf_checkpoint(file: Path, load: str) -> Checkpoint:
    if load == "safetensors":
        raise CheckpointError(f"{file}: is a GGUF file, but model.load is safetensors")
    config = hf_config(read_header(file))
    if load == "random":
        return Checkpoint("random", file.parent, (), config)
    return Checkpoint("gguf", file.parent, (file,), config)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds no JSON object")
    return value


def _safetensors_files(root: Path) -> tuple[Path, ...]:
    """Files of the index if there is one, else model.safetensors, else all there are."""
    index = root / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (root / name).exists()]
        if missing or not names:
            raise CheckpointError(f"{index}: missing files {some_names(missing)}")
        return tuple(root / name for name in names)
    if (root / "model.safetensors").exists():
        return (root / "model.safetensors",)
    files = sorted(root.glob("*.safetensors"))
    return tuple(file for file in files if not file.name.startswith("consolidated"))


def some_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
