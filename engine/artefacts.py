"""Which entry of the compile cache belongs to a configuration: the engine's side of compile_cache.

    config -> prepare -> checkpoint, model, resolved settings -> fingerprint -> entry of the store

Loads no weights and compiles nothing.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from compile_cache.aot import settle_triton
from compile_cache.fingerprint import (
    Fingerprint,
    compile_config,
    flatten,
    machine_parts,
    source_digest,
)
from compile_cache.session import Session
from compile_cache.store import Store
from compile_cache.vector_isa import settle_vector_isa
from engine import scratch
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.preflight import beyond_the_model
from engine.resolve import ResolvedConfig, resolve
from engine.world import ranks_here
from models.checkpoint import Checkpoint, resolve_checkpoint
from models.config import ModelConfig
from models.errors import ModelError as ModelsError

logger = logging.getLogger(__name__)

# Besides models/: what decides how the step is traced, compiled and recorded.
_VECTOR_ISA = "vector_isa"
# When a new one is begun, all but those used last go: every upgrade of torch leaves one behind.
_KEPT_ENTRIES = 16
_ENGINE_SOURCES = (
    "compile_jobs",
    "compiled",
    "graph_programs",
    "graph_runner",
    "step_compiler",
    "step_inputs",
)


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that is known of a start before the weights are read."""

    checkpoint: Checkpoint
    model: ModelConfig
    config: ResolvedConfig


def prepare(config: EngineConfig) -> Prepared:
    """Find the model's files, read its configuration, resolve every "auto" on this machine.

    Raises:
        ConfigError: a setting that this machine or model cannot honour.
        ModelError: no such checkpoint, or one that cannot be served.
    """
    options = config.model
    try:
        checkpoint = resolve_checkpoint(
            options.path, options.revision, options.offline, options.load
        )
        model = ModelConfig.from_hf(checkpoint.config)
    except ModelsError as error:
        raise ModelError(str(error)) from error
    if problems := list(beyond_the_model(config, model)):
        raise ConfigError("\n".join(map(str, problems)))
    cuda = torch.cuda.is_available()
    if cuda:
        # Sets variables that the fingerprint holds, and that child processes inherit.
        settle_triton()
    resolved = resolve(
        config,
        max_position=model.max_position,
        checkpoint_dtype=model.dtype,
        cuda=cuda,
        capability=torch.cuda.get_device_capability() if cuda else None,
        one_host=ranks_here(config.parallel.tp) == config.parallel.tp,
        context_unit=model.context_unit,
    )
    return Prepared(checkpoint, model, resolved)


def store_of(config: EngineConfig) -> Store:
    """Where the configuration keeps artefacts; trouble with the disk is a warning in the log."""
    folder = config.compile.cache_dir
    return Store(Path(folder) if folder else None, logger.warning)


def fingerprint_of(prepared: Prepared) -> Fingerprint:
    """Everything that the compiled artefacts of this start depend on."""
    if prepared.config.device == "cuda":
        settle_triton()  # sets a variable that processes started from here inherit, and count
    here = Path(__file__).resolve().parent
    sources = [here.parent / "models", *(here / f"{name}.py" for name in _ENGINE_SOURCES)]
    return Fingerprint(
        {
            **machine_parts(prepared.config.device),
            **compile_config(prepared.config.model_dump(mode="json")),
            **flatten(dataclasses.asdict(prepared.model), "model."),
            "source": source_digest(sources),
        }
    )


def open_cache(prepared: Prepared) -> Session:
    """The entry of this start, opened, and torch's own caches pointed into it.

    Must come before anything is compiled in this process. With `compile.cache: false` the entry is
    in a temporary folder and goes with the process.
    """
    config = prepared.config
    store = store_of(config)
    if not config.compile.cache:
        folder = scratch.make_folder()
        atexit.register(scratch.remove_folder, folder)
        store = Store(folder, logger.warning)
    session = store.open(fingerprint_of(prepared))
    if not session.manifest.files:
        store.prune(_KEPT_ENTRIES)
    os.environ.update(session.environment())
    if config.device == "cpu" and config.compile.backend == "inductor":
        session.note(_VECTOR_ISA, settle_vector_isa(session.manifest.notes.get(_VECTOR_ISA)))
    return session
