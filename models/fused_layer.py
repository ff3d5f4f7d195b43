"""A decoder layer made of few kernels, for decode steps on a GPU: the same function as
layers.decoder_layer.

A dense layer on one GPU is two operators: heads + KV write + attention, and all that lies between
it and the next layer's attention (o, gate_up, down, the next qkv, with what goes around them). The
others have five: norm + qkv, attention, o + residual, norm + gate_up + SwiGLU, down + residual. A
mixture of experts is one instead of the last two: norm + router + experts + residual. The hidden
state is one tensor here; there is no separate residual.

Knows nothing of how many rows there are or which kernel they get.

Legend: T tokens, H query heads, K kv heads, D head dim, E hidden, Q columns of qkv.
"""

from __future__ import annotations

from torch import Tensor

from models.config import ModelConfig
from models.inputs import TensorParallel
from models.layers import Family, Params, Rows, mlp
from models.moe import feed_forward, fused_mixture
from models.ops.between import between_attentions
from models.ops.collectives import all_reduce_add
from models.ops.fused import decode_attention
from models.ops.linear import Kernels, fused_linear


def can_fuse(family: Family) -> bool:
    """Whether the family's layers are what is fused here: attention with optional q/k norms, and a
    gated MLP or a mixture of such.
    """
    return family.feed_forward in (mlp, feed_forward)


def can_join(model: ModelConfig, tp: TensorParallel) -> bool:
    """Whether a layer computes the next one's qkv, too."""
    return not tp.group and not any(model.moe_layers)


def fused_qkv(model: ModelConfig, kernels: Kernels, p: Params, x_TE: Tensor) -> Tensor:
    """Norm and projection of the hidden state: [T, Q]."""
    qkv_TQ: Tensor = fused_linear(
        x_TE, p["qkv"], p.get("qkv_bias"), p["input_norm"], model.norm_eps, False, None, kernels.pdl
    )
    return qkv_TQ


def joined_decoder_layer(
    model: ModelConfig,
    window: int,
    kernels: Kernels,
    p: Params,
    following: Params | None,
    x_TE: Tensor,
    qkv_TQ: Tensor,
    rope_TD: Tensor,
    kv_layer: Tensor,
    rows: Rows,
) -> tuple[Tensor, Tensor]:
    """One layer on the hidden state and its qkv; those of the following layer, if there is one."""
    o_THD = _attend(model, window, kernels, p, qkv_TQ, rope_TD, kv_layer, rows)
    then = following or {}
    both: tuple[Tensor, Tensor] = between_attentions(
        o_THD.flatten(1),
        x_TE,
        p["o"],
        p.get("o_bias"),
        p["post_norm"],
        p["gate_up"],
        p.get("gate_up_bias"),
        p["down"],
        p.get("down_bias"),
        then.get("input_norm"),
        then.get("qkv"),
        then.get("qkv_bias"),
        model.norm_eps,
        kernels.pdl,
    )
    return both


def fused_decoder_layer(
    model: ModelConfig,
    tp: TensorParallel,
    window: int,
    kernels: Kernels,
    p: Params,
    x_TE: Tensor,
    rope_TD: Tensor,
    kv_layer: Tensor,
    rows: Rows,
) -> Tensor:
    """One layer on the hidden state [T, E]."""
    qkv_TQ = fused_qkv(model, kernels, p, x_TE)
    o_THD = _attend(model, window, kernels, p, qkv_TQ, rope_TD, kv_layer, rows)
    x_TE = _project(tp, kernels, p, "o", o_THD.flatten(1), x_TE)
    if "router" in p:
        if not tp.group:
            return fused_mixture(model, kernels, p, x_TE, p["post_norm"], x_TE, rows.kv_slots_T)
        y_TE = fused_mixture(model, kernels, p, x_TE, p["post_norm"], None, rows.kv_slots_T)
        return all_reduce_add(y_TE, x_TE, tp.group, tp.symmetric)
    mid_TF = fused_linear(
        x_TE,
        p["gate_up"],
        p.get("gate_up_bias"),
        p["post_norm"],
        model.norm_eps,
        True,
        None,
        kernels.pdl,
    )
    return _project(tp, kernels, p, "down", mid_TF, x_TE)


def _attend(
    model: ModelConfig,
    window: int,
    kernels: Kernels,
    p: Params,
    qkv_TQ: Tensor,
    rope_TD: Tensor,
    kv_layer: Tensor,
    rows: Rows,
) -> Tensor:
    o_THD: Tensor = decode_attention(
        qkv_TQ,
        rope_TD,
        p.get("q_norm"),
        p.get("k_norm"),
        model.norm_eps,
        kv_layer,
        *rows,
        model.head_dim**-0.5,
        window,
        kernels.pdl,
    )
    return o_THD


def _project(
    tp: TensorParallel, kernels: Kernels, p: Params, name: str, x: Tensor, residual_TE: Tensor
) -> Tensor:
    """Back to the hidden size, summed over the ranks and added to the residual."""
    bias = p.get(name + "_bias")
    if not tp.group:
        return fused_linear(x, p[name], bias, None, 0.0, False, residual_TE, kernels.pdl)
    y_TE = fused_linear(x, p[name], None, None, 0.0, False, None, kernels.pdl)
    x_TE = all_reduce_add(y_TE, residual_TE, tp.group, tp.symmetric)
    return x_TE if bias is None else x_TE + bias
