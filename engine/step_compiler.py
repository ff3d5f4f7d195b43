"""Which buckets there are, and how torch.compile is asked for each kind and variant.

Knows torch.compile's settings; knows nothing of batches, buffers or what a step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.attention_plan import AttentionPlanner, build_planner
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
from engine.resolve import ResolvedConfig
from engine.scheduler.batch import Kind, Variant
from engine.step_inputs import Bucket
from models.config import ModelConfig
from models.inputs import TensorParallel
from models.ops import linear
from models.sharding import local_heads
from models.step import make_step

KINDS: tuple[Kind, ...] = ("decode", "extend")
# Past this many compiles of one function torch would run it eagerly, with one warning.
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
    buckets = make_buckets(config)
    cuda = device.type == "cuda"
    _configure_torch(config, tensors, device)
    linear.prepare(device)
    pool = torch.cuda.graph_pool_handle() if cuda else None
    programs = {
        (kind, variant): _program(config, model, tp, tensors, device, kind, variant, pool)
        for variant in VARIANTS
        for kind in KINDS
    }
    return GraphRunner(
        programs,
        tensors,
        buckets,
        device,
        planner=_planner(config, model, tp, tensors, buckets) if cuda else None,
        is_graph=config.compile.backend != "eager",
        dynamic=config.compile.dynamic,
    )


def _planner(
    config: ResolvedConfig,
    model: ModelConfig,
    tp: TensorParallel,
    tensors: StepTensors,
    buckets: list[Bucket],
) -> AttentionPlanner:
    num_heads, num_kv_heads = local_heads(model, tp)
    return build_planner(
        config,
        num_heads,
        num_kv_heads,
        model.head_dim,
        model.layer_windows,
        buckets,
        tensors.state.page_table_SP,
        tensors.kv_cache.layers[0],
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
        if not by_layer:
            return function
        compiled_piece = torch.compile(function, fullgraph=True, **options)
        return _with_dynamic_rows(compiled_piece) if config.compile.dynamic else compiled_piece

    step: StepFunction = make_step(
        model,
        tp,
        variant,
        kind,
        config.sampling.max_logprobs,
        compile_piece,
        linear.decode_kernels(device, config.compile.skinny_gemm),
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


def _with_dynamic_rows(piece: Callable[..., Any]) -> Callable[..., Any]:
    """The piece, with the first dim of its tensor arguments symbolic from the first call on.

    Between pieces stand new tensors: torch would take their size for a constant until a second one
    comes, and compile each piece twice. The pages of a layer's cache become symbolic, too, so that
    their number does not decide whether a compiled piece is found again.
    """

    def call(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.shape[0] > 1:
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        return piece(*args)

    return call


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
    # A whole step's weights never change: guarded, they are constants of its graph and cost nothing
    # per call. A layer's compile serves all layers, so there they must stay arguments.
    guard = config.compile.unit == "step"
    for tensor in torch.utils._pytree.tree_leaves(tuple(vars(tensors).values())):
        if isinstance(tensor, torch.Tensor):
            torch._dynamo.mark_static_address(tensor, guard=guard)
