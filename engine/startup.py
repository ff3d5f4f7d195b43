"""From a configuration to an engine that can step: checkpoint, resolved settings, worker, graphs,
scheduler.

Both fronts start here: the engine process (HTTP) and LLM (in process). Knows nothing of sockets or
text.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from compile_cache.aot import preload
from compile_cache.session import Session
from engine.artefacts import Prepared, open_cache, prepare
from engine.attention_plan import chunk_wave
from engine.compile_jobs import VARIANTS
from engine.compiler import LOW_PRIORITY, Compiler
from engine.config import EngineConfig
from engine.engine_core import EngineCore
from engine.errors import ModelError
from engine.grammars import Grammars
from engine.limits import scheduler_limits
from engine.rank_leader import Leader, OnFatal
from engine.ranks import Ranks, check_devices
from engine.resolve import ResolvedConfig, settings_of
from engine.scheduler.scheduler import Scheduler
from engine.step_compiler import Setup
from engine.tokenizer import load_tokenizer
from engine.worker import ProgressCallback, Worker
from engine.world import rank_zero
from models.config import ModelConfig
from models.errors import ModelError as ModelsError
from models.inputs import TensorParallel
from models.sharding import local_heads

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
    ranks: Ranks
    worker: Worker
    cache: Session
    config: ResolvedConfig
    model: ModelConfig
    num_pages: int
    settings: dict[str, str]

    def close(self) -> None:
        """Free graphs, threads, memory and ranks, in this order: NCCL waits for graphs."""
        self.ranks.stop()
        self.core.close()
        self.worker.close()
        self.cache.close()
        self.ranks.close()


@dataclass(frozen=True, eq=False)
class StartedWorker:
    """One rank, ready to run batches."""

    prepared: Prepared
    cache: Session
    worker: Worker


def start_worker(config: EngineConfig, ranks: Ranks, progress: ProgressCallback) -> StartedWorker:
    """Load, compile and warm one rank; see start_engine."""
    begin = time.perf_counter()
    device = ranks.device(_device_kind(config))
    progress("checkpoint", 0, 1, str(config.model.path))
    if config.compile.backend != "eager":  # imports, beside what waits for disk and device
        threading.Thread(target=preload, daemon=True).start()
    with ranks.first("prepared", waits=not Path(config.model.path).exists()):
        prepared = prepare(config)
    cache = open_cache(prepared)
    compiler = Compiler(config, prepared.config, cache)
    try:
        # On a CPU what the first requests need is compiled here: a process of its own would need
        # the same cores, and longer. Several ranks have all of it compiled once.
        if ranks.builds:
            compiler.start(VARIANTS)
        elif prepared.config.device == "cuda" and ranks.alone:
            compiler.start(["plain"])
            compiler.start(["full"], nice=LOW_PRIORITY)

        def compiled() -> None:
            compiler.wait(VARIANTS if ranks.builds else ["plain"], progress)
            if not ranks.alone:
                ranks.gather("compiled", 1)
                if not ranks.builds:
                    cache.refresh()

        phases = {"prepare": time.perf_counter() - begin}
        ranks.join(device, prepared.config.parallel.all_reduce)
        phases["join"] = time.perf_counter() - begin - phases["prepare"]
        setup = Setup(prepared.config, prepared.model, ranks.tp, device, cache)
        worker = Worker(setup, prepared.checkpoint, ranks, progress, compiled)
        worker.capacity.phases.update(phases)
    except ModelsError as error:
        compiler.close()
        raise ModelError(str(error)) from error
    except BaseException:
        compiler.close()
        raise
    try:
        worker.warm(compiler)
    except BaseException:
        worker.close()
        compiler.close()
        raise
    return StartedWorker(prepared, cache, worker)


def _device_kind(config: EngineConfig) -> str:
    return "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"


def _start_ranks(config: EngineConfig, on_fatal: OnFatal | None) -> Ranks:
    world = rank_zero(config.parallel.tp)
    if world.size == 1 and not world.launched:
        return Ranks()
    check_devices(world, _device_kind(config))
    return Leader(config, world, on_fatal)


def start_engine(
    config: EngineConfig, progress: ProgressCallback, on_fatal: OnFatal | None = None
) -> Engine:
    """Load, compile and warm everything, on all ranks.

    Args:
        config: as loaded from YAML.
        progress: called with (phase, done, total, text) as rank 0's start goes on.
        on_fatal: called in another thread if a rank has died and this one hangs; the process ends
            after it.

    Raises:
        ConfigError: a setting that this machine or model cannot honour.
        ModelError: the checkpoint cannot be served.
        EngineDead: a rank died.
    """
    begin = time.perf_counter()
    ranks = _start_ranks(config, on_fatal)

    def checked(phase: str, done: int, total: int, text: str) -> None:
        ranks.check()
        progress(phase, done, total, text)

    try:
        started = start_worker(config, ranks, checked)
    except Exception as error:
        ranks.give_up(error)
        raise
    prepared, cache, worker = started.prepared, started.cache, started.worker
    resolved, model = prepared.config, prepared.model
    ranks.started()
    num_pages = worker.capacity.num_pages
    num_heads, num_kv_heads = local_heads(model, TensorParallel(size=resolved.parallel.tp))
    wave = chunk_wave(worker.device, num_heads, model.head_dim)
    share = num_kv_heads / num_heads
    scheduler = Scheduler(scheduler_limits(resolved, num_pages, model.vocab_size, share, wave))
    grammars = Grammars(lambda: load_tokenizer(config.model), model.vocab_size)
    core = EngineCore(scheduler, worker, overlap=resolved.scheduler.overlap, grammars=grammars)
    _write_phases(worker, time.perf_counter() - begin)
    # What is alive now stays alive: the collector would walk it all, a second each time.
    gc.collect()
    gc.freeze()
    settings = settings_of(config, resolved)
    settings["kv.num_pages"] = str(num_pages - 1)
    return Engine(core, ranks, worker, cache, resolved, model, num_pages - 1, settings)


def _write_phases(worker: Worker, total: float) -> None:
    file = os.environ.get(STARTUP_JSON)
    if file:
        Path(file).write_text(json.dumps({**worker.capacity.phases, "engine_total": total}))
