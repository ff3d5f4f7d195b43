"""Which buckets there are, and how torch.compile is asked for each kind and variant.

Knows torch.compile's settings; knows nothing of batches, buffers or what a step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.resolve import ResolvedConfig
from engine.graph_programs import (
    CompiledProgram,
    EagerProgram,
    ManualProgram,
    Program,
    StepFunction,
    StepTensors,
    TreesProgram,
)
from engine.graph_runner import VARIANTS, GraphRunner
from engine.limits import max_page_updates
from engine.scheduler.batch import Kind, Variant
from engine.step_inputs import Bucket
from models.config import ModelConfig
from models.inputs import TensorParallel
from models.step import make_step

KINDS: tuple[Kind, ...] = ("decode", "extend")
# Past this many compiles of one function torch runs it eagerly with one warning; buckets may be that many.
_COMPILES_PER_FUNCTION = 512


def make_buckets(config: ResolvedConfig) -> list[Bucket]:
    """The padded shapes of a resolved configuration: decode by requests, extend by tokens."""
    rows = config.scheduler.max_running
    updates = max_page_updates(config)
    decode = [Bucket("decode", n, n, n, n, rows) for n in config.compile.decode_buckets]
    extend = [Bucket("extend", n, rows, rows, updates, rows) for n in config.compile.extend_buckets]
    return [*decode, *extend]


def build_runner(
    config: ResolvedConfig,
    model: ModelConfig,
    tp: TensorParallel,
    tensors: StepTensors,
    device: torch.device,
) -> GraphRunner:
    """A runner with a program per kind and variant, nothing compiled yet."""
    _configure_torch(config, tensors, device)
    programs: dict[tuple[Kind, Variant], Program] = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for variant in VARIANTS:
        for kind in KINDS:
            programs[kind, variant] = _program(
                config, model, tp, tensors, device, kind, variant, pool
            )
    return GraphRunner(
        programs,
        tensors,
        make_buckets(config),
        device,
        planner=None,
        is_graph=config.compile.backend != "eager",
        dynamic=config.compile.dynamic,
    )


def _program(
    config: ResolvedConfig,
    model: ModelConfig,
    tp: TensorParallel,
    tensors: StepTensors,
    device: torch.device,
    kind: Kind,
    variant: Variant,
    pool: Any,
) -> Program:
    compiled = config.compile.backend != "eager"
    by_layer = compiled and config.compile.unit == "layer"
    options = _compile_options(config, device)

    def compile_piece(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, **options) if by_layer else function

    step: StepFunction = make_step(
        model, tp, variant, kind, config.sampling.max_logprobs, compile_piece
    )
    if not compiled:
        return EagerProgram(step, tensors)
    trees = device.type == "cuda" and config.compile.cudagraphs == "trees"
    if not by_layer:
        mode = {"mode": "reduce-overhead"} if trees else options
        step = torch.compile(step, fullgraph=True, **mode)
    if device.type == "cpu":
        return CompiledProgram(step, tensors)
    return TreesProgram(step, tensors) if trees else ManualProgram(step, tensors, pool)


def _compile_options(config: ResolvedConfig, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if device.type == "cuda" and config.compile.autotune:
        options["coordinate_descent_tuning"] = True
    return {"options": options} if options else {}


def _configure_torch(config: ResolvedConfig, tensors: StepTensors, device: torch.device) -> None:
    torch._dynamo.config.recompile_limit = _COMPILES_PER_FUNCTION
    torch._dynamo.config.accumulated_recompile_limit = 4 * _COMPILES_PER_FUNCTION
    if device.type != "cuda" or config.compile.backend == "eager":
        return
    torch._inductor.config.triton.cudagraph_dynamic_shape_warn_limit = None
    for tensor in torch.utils._pytree.tree_leaves(tuple(vars(tensors).values())):
        if isinstance(tensor, torch.Tensor):
            torch._dynamo.mark_static_address(tensor, guard=False)
