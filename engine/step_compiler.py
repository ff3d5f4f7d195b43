"""Which buckets there are, and how each kind and variant of the step is compiled and recorded.

Knows the configuration's compile section; knows nothing of batches, buffers or what a step
computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from compile_cache.session import Session
from engine.attention_plan import AttentionPlanner
from engine.compile_jobs import VARIANTS
from engine.compiled import CompiledFunction, CompileLog, CompileSettings
from engine.flashinfer_plan import AttentionShape
from engine.graph_programs import ManualProgram, Program, StepTensors, TreesProgram
from engine.graph_runner import GraphRunner
from engine.limits import max_page_updates
from engine.resolve import ResolvedConfig
from engine.scheduler.batch import Kind, Variant
from engine.step_inputs import Bucket
from models.config import ModelConfig
from models.forward import CompilePiece, as_is
from models.inputs import KVCache, TensorParallel
from models.ops import between, experts, linear
from models.sharding import local_heads
from models.step import make_step

logger = logging.getLogger(__name__)

KINDS: tuple[Kind, ...] = ("decode", "extend")


@dataclass(frozen=True, eq=False)
class Setup:
    """What the steps of one rank are built from, besides tensors.

    Attributes:
        config: resolved.
        tp, device: the rank's.
        session: the opened entry of the compile cache.
    """

    config: ResolvedConfig
    model: ModelConfig
    tp: TensorParallel
    device: torch.device
    session: Session

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV pages."""
        dtype: torch.dtype = getattr(torch, self.config.model.dtype)
        return dtype


def make_buckets(config: ResolvedConfig) -> list[Bucket]:
    """The padded shapes of a resolved configuration: decode by requests, extend by tokens."""
    rows = config.scheduler.max_running
    updates = max_page_updates(config)
    decode = [Bucket("decode", n, n, n, n, rows) for n in config.compile.decode_buckets]
    extend = [Bucket("extend", n, rows, rows, updates, rows) for n in config.compile.extend_buckets]
    return [*decode, *extend]


def build_runner(
    setup: Setup, tensors: StepTensors, *, compiles: bool = True, records: bool = True
) -> GraphRunner:
    """A runner with a program per kind and variant, nothing compiled yet.

    Args:
        compiles: False: the step as it is, whatever the configuration says.
        records: False: compiled steps are called, not recorded into graphs.
    """
    device, buckets = setup.device, make_buckets(setup.config)
    cuda = device.type == "cuda"
    if cuda:
        torch._inductor.config.triton.cudagraph_dynamic_shape_warn_limit = None
    linear.prepare(device)
    missing = between.prepare(device)
    if missing:
        logger.warning("Decode steps of more than 32 rows take slower kernels: %s", missing)
    experts.prepare(device)
    builder = _ProgramBuilder(setup, tensors, compiles, records)
    return GraphRunner(
        {(kind, variant): builder.build(kind, variant) for variant in VARIANTS for kind in KINDS},
        tensors,
        buckets,
        device,
        planner=_planner(setup, tensors, buckets) if cuda else None,
        is_graph=builder.compiles,
        log=builder.log,
    )


def _planner(setup: Setup, tensors: StepTensors, buckets: list[Bucket]) -> AttentionPlanner:
    config, model = setup.config, setup.model
    first_layer = tensors.kv_cache.layers[0]
    shape = AttentionShape(
        *local_heads(model, setup.tp),
        model.head_dim,
        config.kv.page_size,
        tensors.state.page_table_SP.shape[1],
        first_layer.dtype,
        tuple(sorted(set(model.layer_windows))),
    )
    options = config.attention
    kernels = (options.decode, options.extend)
    return AttentionPlanner(shape, *kernels, buckets, first_layer, options.workspace, setup.session)


def few_layers(model: ModelConfig, tensors: StepTensors) -> tuple[ModelConfig, StepTensors]:
    """The same with as few of the first layers as have one of each sort, and with a last one."""
    layers, windows = tensors.params["layers"], model.layer_windows
    sorts = [(window, *sorted(p)) for window, p in zip(windows, layers, strict=True)]
    count = min(len(layers), max(2, 1 + max(sorts.index(sort) for sort in set(sorts))))
    few = replace(
        tensors,
        params={**tensors.params, "layers": layers[:count]},
        kv_cache=KVCache(tensors.kv_cache.layers[:count]),
    )
    mixes = model.moe_layers[:count]
    return replace(model, num_layers=count, layer_windows=windows[:count], moe_layers=mixes), few


class _ProgramBuilder:
    """Makes the programs of one configuration; they share a graph pool and a log."""

    def __init__(self, setup: Setup, tensors: StepTensors, compiles: bool, records: bool) -> None:
        config = setup.config
        self._setup, self._tensors = setup, tensors
        cuda = setup.device.type == "cuda"
        self.compiles = compiles and config.compile.backend != "eager"
        self._records = records and cuda
        self._by_layer = self.compiles and config.compile.unit == "layer"
        self._trees = cuda and self.compiles and config.compile.cudagraphs == "trees"
        self._pool = torch.cuda.graph_pool_handle() if cuda else None
        self.log = CompileLog()
        self._functions: dict[str, CompiledFunction] = {}
        self._settings = CompileSettings(
            setup.session,
            cudagraphs=self._trees and not self._by_layer,
            static=cuda,
            dynamic=config.compile.dynamic,
            # Padding a matrix would copy weights at every call, and where it pays is decided by the
            # number of rows, which then is no longer free to vary.
            options={
                "shape_padding": False,
                **({"coordinate_descent_tuning": True} if config.compile.autotune else {}),
            },
            warn=logger.warning,
        )

    def build(self, kind: Kind, variant: Variant) -> Program:
        """The program of one kind and variant."""

        def compile_piece(function: Callable[..., Any]) -> Callable[..., Any]:
            return self._compiled(function, kind) if self._by_layer else function

        step = self._step(self._setup.model, kind, variant, compile_piece)
        if self.compiles and not self._by_layer:
            step = self._compiled(step, kind)
        if not (self.compiles and self._records):
            return Program(step, self._tensors)
        few_model, few_tensors = few_layers(self._setup.model, self._tensors)
        primer = Program(self._step(few_model, kind, variant, as_is), few_tensors)
        dynamic = self._setup.config.compile.dynamic
        if self._trees and not self._by_layer:
            return TreesProgram(step, self._tensors, primer, dynamic)
        return ManualProgram(step, self._tensors, primer, dynamic, self._pool)

    def _step(
        self, model: ModelConfig, kind: Kind, variant: Variant, compile_piece: CompilePiece
    ) -> Callable[..., Any]:
        setup, options = self._setup, self._setup.config
        kernels = linear.decode_kernels(setup.device, options.compile.skinny_gemm)
        most_logprobs = options.sampling.max_logprobs
        return make_step(model, setup.tp, variant, kind, most_logprobs, compile_piece, kernels)

    def _compiled(self, function: Callable[..., Any], kind: Kind) -> CompiledFunction:
        """The function, compiled; variants share what has the same name."""
        name = f"{kind}-{function.__name__}"
        device, tp = self._setup.device, self._setup.tp
        if device.index:  # it is in the code; all ranks of a CPU share theirs
            name += f"-cuda{device.index}"
        if tp.group and tp.size == 1:  # collectives of one rank, under torchrun
            name += "-group"
        if name not in self._functions:
            self._functions[name] = CompiledFunction(function, name, kind, self._settings, self.log)
        return self._functions[name]
