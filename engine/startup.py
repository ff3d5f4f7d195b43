"""From a configuration to an engine that can step: checkpoint, resolved settings, worker, graphs,
scheduler.

Both fronts start here: the engine process (HTTP) and LLM (in process). Knows nothing of sockets or
text.
"""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from compile_cache import Session
from engine.artefacts import open_cache, prepare
from engine.compile_jobs import VARIANTS
from engine.compiler import Compiler
from engine.config import EngineConfig
from engine.engine_core import EngineCore
from engine.errors import ModelError
from engine.limits import scheduler_limits
from engine.resolve import ResolvedConfig, settings_of
from engine.scheduler.scheduler import Scheduler
from engine.worker import ProgressCallback, Worker
from models.config import ModelConfig
from models.errors import ModelError as ModelsError
from models.inputs import TensorParallel

# A file to which the seconds of each phase of the start are written, for bench/startup.py.
STARTUP_JSON = "FULLGRAPH_STARTUP_JSON"


@dataclass(frozen=True, eq=False)
class Engine:
    """A started engine and what it was started as.

    Attributes:
        core: call step() on it.
        config: resolved: no "auto" left.
        num_pages: KV pages a request can use (the dummy page not counted).
        settings: what "auto" became, for the log.
    """

    core: EngineCore
    worker: Worker
    cache: Session
    config: ResolvedConfig
    model: ModelConfig
    num_pages: int
    settings: dict[str, str]

    def close(self) -> None:
        """Free graphs, threads and memory."""
        self.worker.close()
        self.cache.close()


def start_engine(config: EngineConfig, progress: ProgressCallback) -> Engine:
    """Load, compile and warm everything.

    Args:
        config: as loaded from YAML.
        progress: called with (phase, done, total, text) as the start goes on.

    Raises:
        ConfigError: a setting that this machine or model cannot honour.
        ModelError: the checkpoint cannot be served.
    """
    begin = time.perf_counter()
    progress("checkpoint", 0, 1, str(config.model.path))
    prepared = prepare(config)
    resolved, model = prepared.config, prepared.model
    cache = open_cache(prepared)
    compiler = Compiler(config, resolved, cache)
    try:
        # On a CPU what the first requests need is compiled here: a process of its own would need
        # the same cores, and longer.
        if resolved.device == "cuda":
            compiler.start(VARIANTS)
        worker = Worker(
            resolved,
            model,
            prepared.checkpoint,
            TensorParallel(),
            cache,
            progress,
            lambda: compiler.wait(progress),
        )
    except ModelsError as error:
        compiler.close()
        raise ModelError(str(error)) from error
    except BaseException:
        compiler.close()
        raise
    worker.warm(compiler)
    num_pages = worker.capacity.num_pages
    scheduler = Scheduler(scheduler_limits(resolved, num_pages, model.vocab_size))
    core = EngineCore(scheduler, worker, overlap=resolved.scheduler.overlap)
    _write_phases(worker, time.perf_counter() - begin)
    # What is alive now stays alive: the collector would walk it all, a second each time.
    gc.collect()
    gc.freeze()
    settings = settings_of(config, resolved)
    settings["kv.num_pages"] = str(num_pages - 1)
    return Engine(core, worker, cache, resolved, model, num_pages - 1, settings)


def _write_phases(worker: Worker, total: float) -> None:
    file = os.environ.get(STARTUP_JSON)
    if file:
        Path(file).write_text(json.dumps({**worker.capacity.phases, "engine_total": total}))
