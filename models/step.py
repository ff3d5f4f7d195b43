"""step(params, kv_cache, state, sampling_state, inputs) -> StepOutputs: THE traced function.

Forward pass and sampling in one graph. Knows nothing of buckets, compilers or devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from models.config import ModelConfig
from models.forward import PLAIN, CompilePiece, as_is, head_inputs, lm_logits, make_backbone
from models.inputs import (
    KVCache,
    SamplingState,
    StepInputs,
    StepOutputs,
    StepState,
    TensorParallel,
)
from models.ops.linear import Kernels
from models.param_spec import Tree
from models.sampling import sample, sample_hidden

Variant = Literal["plain", "full"]

Step = Callable[[Tree, KVCache, StepState, SamplingState | None, StepInputs], StepOutputs]


def make_step(
    model: ModelConfig,
    tp: TensorParallel,
    variant: Variant,
    kind: str,
    max_logprobs: int,
    compile_piece: CompilePiece = as_is,
    kernels: Kernels = PLAIN,
) -> Step:
    """The step function of one kind and variant; everything given here is static.

    Args:
        model: the configuration.
        tp: this rank's place.
        variant: "plain" or "full", see models.sampling.
        kind: "decode" (every row has one token) or "extend".
        max_logprobs: alternatives reported by the full variant.
        compile_piece: applied to the embedding, to a layer of each window (dense and of experts
            apart), and to head and sampling together; for an engine that compiles pieces.
        kernels: which kernels of ours decode steps use, and the head of the plain variant.

    Returns:
        A function of (params, kv_cache, state, sampling_state, inputs). It mutates the cache and
        both states. Where the variant is plain, the sampling state is None.
    """
    backbone = make_backbone(model, tp, kind, compile_piece, kernels)

    def head(
        params: Tree,
        x_TE: Tensor,
        residual_TE: Tensor | None,
        state: StepState,
        sampling_state: SamplingState | None,
        inputs: StepInputs,
    ) -> StepOutputs:
        if variant == "plain" and kernels.fused and not tp.group:
            x_LE, head_VE = head_inputs(model, params, x_TE, residual_TE, inputs)
            return sample_hidden(x_LE, head_VE, inputs, state)
        logits_LV = lm_logits(model, tp, params, x_TE, residual_TE, inputs)
        return sample(variant, logits_LV, inputs, state, sampling_state, max_logprobs)

    head.__name__ += f"_{variant}"
    head_piece = compile_piece(head)

    def step(
        params: Tree,
        kv_cache: KVCache,
        state: StepState,
        sampling_state: SamplingState | None,
        inputs: StepInputs,
    ) -> StepOutputs:
        x_TE, residual_TE = backbone(params, kv_cache, state, inputs)
        return head_piece(params, x_TE, residual_TE, state, sampling_state, inputs)

    step.__name__ += f"_{variant}"
    return step
