"""One rank: device, weights, KV cache, state and the graphs over them. Runs the batches it is
given.

    start: config.json -> ModelConfig -> weights -> KV pages -> graphs
    launch(batch): admit, pack, plan, replay (graph_runner.py)

Ranks above 0 follow rank 0: they run the same batches and never schedule. Knows nothing of requests
or text.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.compile_jobs import VARIANTS
from engine.compiled import CompileLog
from engine.compiler import LOW_PRIORITY, Compiler
from engine.graph_programs import StepTensors
from engine.graph_runner import GraphRunner, Pending
from engine.memory import explained, free_bytes, kv_page_bytes, num_kv_pages
from engine.memory_trial import step_bytes
from engine.ranks import Ranks
from engine.resolve import ResolvedConfig
from engine.scheduler.batch import ScheduledBatch, Variant
from engine.step_compiler import Setup, build_runner
from models.inputs import KVCache, SamplingState, StepState
from models.sampling import init_sampling_state
from models.sharding import local_heads
from models.weights import Checkpoint, load_params

ProgressCallback = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class Capacity:
    """What the rank can hold.

    Attributes:
        num_pages: KV pages, the dummy page 0 included.
        page_bytes: of keys and values of one page on this rank.
        step_bytes: that steps were measured to need besides; 0 where it was not asked.
        phases: seconds each part of the start took.
    """

    num_pages: int
    page_bytes: int
    step_bytes: int
    phases: dict[str, float]


class Worker:
    """One rank's device side.

    Args:
        setup: of its steps.
        checkpoint: where the weights are.
        ranks: joined; its own place among them.
        progress: called with (phase, done, total, text).
        compiled: waits for compile processes, which share the device's memory; called when the
            weights are loaded.

    Raises:
        ConfigError: the model does not fit the memory that the configuration gives it.
    """

    def __init__(
        self,
        setup: Setup,
        checkpoint: Checkpoint,
        ranks: Ranks,
        progress: ProgressCallback,
        compiled: Callable[[], object] = lambda: None,
    ) -> None:
        self._config = config = setup.config
        self._progress = progress
        self._compiler: Compiler | None = None
        self._phases: dict[str, float] = {}
        self.device = setup.device
        self._ranks = ranks
        configure_threads(config)
        with explained("weights", config):
            params = self._timed(
                "weights",
                lambda: load_params(
                    setup.model,
                    setup.tp,
                    checkpoint,
                    setup.dtype,
                    setup.device,
                    lambda name, done, total: progress("weights", done, total, name),
                    seed=config.model.seed,
                    num_positions=config.model.max_model_len,
                ),
            )
        with explained("state", config):
            state = step_state(setup)

        def tensors(num_pages: int) -> StepTensors:
            return StepTensors(params, kv_pages(setup, num_pages), *state)

        def trial() -> int:
            return step_bytes(setup, tensors, ranks.gather)

        step = 0
        if self.device.type == "cuda" and config.kv.num_pages is None:
            with explained("steps", config):
                step = self._timed("trial", trial)
        self._timed("compile", compiled)
        page_bytes = kv_page_bytes(setup.model, setup.tp, config.kv.page_size, setup.dtype)
        free = ranks.gather("free memory", free_bytes(self.device))
        step = max(ranks.gather("step memory", step))
        num_pages = num_kv_pages(config, page_bytes, free, step)
        self.capacity = Capacity(num_pages, page_bytes, step, self._phases)
        with explained("kv", config, num_pages):
            all_tensors = tensors(num_pages)
        with explained("steps", config):
            self._runner: GraphRunner = build_runner(setup, all_tensors)

    def warm(self, compiler: Compiler) -> None:
        """Load what is compiled, compile the rest, record the graphs; nothing is compiled while
        serving.

        The first request seldom needs the `full` variant. On a CPU it is left to the background,
        where there is one rank, on a GPU to `warm_next`.
        """
        with explained("steps", self._config):
            self._warm(compiler)

    def _warm(self, compiler: Compiler) -> None:
        runner = self._runner
        if self.device.type == "cpu" and self._ranks.alone:
            self._timed("graphs", lambda: runner.warm(self._warm_progress, ["plain"]))
            compiler.keep(["plain"])
            self._compiler = compiler
            compiler.start(["full"], nice=LOW_PRIORITY)
            runner.warm_in_background(
                ["full"], lambda: compiler.wait(["full"]), lambda: compiler.keep(["full"])
            )
            return
        gc.collect()
        gc.freeze()  # each recording may collect, and would walk all that is alive
        cuda = self.device.type == "cuda"
        first: Sequence[Variant] = ["plain"] if cuda else VARIANTS
        self._timed("graphs", lambda: runner.warm(self._warm_progress, first))
        compiler.keep(first)
        if cuda:
            self._compiler = compiler
        else:
            runner.forbid_recompiles()

    def warm_next(self) -> bool:
        """Record one graph that the start left out (a GPU), on all ranks; call it between steps.

        Returns:
            Whether something was done: not when nothing is left, or while it is being compiled.
        """
        compiler = self._compiler
        if compiler is None or self.device.type == "cpu" or not compiler.is_done(["full"]):
            return False
        self._ranks.broadcast(None)
        compiler.wait(["full"])
        if not self._runner.warm_next():
            self._runner.forbid_recompiles()
            compiler.keep(VARIANTS)
            self._compiler = None
        return True

    def is_ready(self, variant: Variant) -> bool:
        """Whether steps of the variant can be launched."""
        return self._runner.is_ready(variant)

    @property
    def counters(self) -> Any:
        """engine.graph_programs.Counters, refreshed."""
        self._runner.counters.refresh()
        return self._runner.counters

    @property
    def compile_log(self) -> CompileLog:
        """What was compiled and what was found since the start."""
        return self._runner.log

    def launch(self, batch: ScheduledBatch) -> Pending:
        """Start one step; does not wait for it."""
        self._ranks.broadcast(batch)
        return self._ranks.watched(self._runner.launch(batch))

    def close(self) -> None:
        """Free the graphs, threads and processes."""
        if self._compiler is not None:
            self._compiler.close()
        self._runner.close()

    def _warm_progress(self, name: str, done: int, total: int) -> None:
        self._progress("graphs", done, total, name)

    def _timed(self, phase: str, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = function()
        self._phases[phase] = time.perf_counter() - start
        return result


def configure_threads(config: ResolvedConfig) -> None:
    """Threads within an operator on a CPU. Inductor writes their number into its kernels; programs
    are accepted with no other number (torchrun sets one for each rank).
    """
    torch.set_num_threads(config.compile.threads)


def step_state(setup: Setup) -> tuple[StepState, SamplingState]:
    """What steps keep of each slot."""
    config, most = setup.config, setup.config.sampling
    slots = config.scheduler.max_running
    max_pages = -(-config.model.max_model_len // config.kv.page_size)
    zeros = functools.partial(torch.zeros, dtype=torch.int32, device=setup.device)
    tables = (setup.model.vocab_size, most.max_logit_bias, most.max_stop_ids, setup.device)
    state = StepState(zeros(slots + 1, max_pages), zeros(slots + 1))
    return state, init_sampling_state(slots, *tables)


def kv_pages(setup: Setup, num_pages: int) -> KVCache:
    """The cache of `num_pages` pages, the dummy page 0 included."""
    model, page_size = setup.model, setup.config.kv.page_size
    shape = (num_pages, 2, page_size, local_heads(model, setup.tp)[1], model.head_dim)
    zeros = functools.partial(torch.zeros, shape, dtype=setup.dtype, device=setup.device)
    return KVCache(tuple(zeros() for _ in range(model.num_layers)))
