"""The layers that all families share: pure functions of tensors and static configuration.

Knows nothing of checkpoints, of buckets or of which layer it is called for.

Legend: T tokens, R rows, S slots, P page-table columns, H query heads, K kv heads, D head dim, E
hidden, F ffn, V vocab; heads and ffn are this rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.inputs import TensorParallel
from models.ops.attention import paged_attention
from models.ops.collectives import all_reduce
from models.ops.few_rows import few_rows_linear
from models.ops.fused import qk_norm_rope_kv_write
from models.ops.kv_write import kv_write
from models.ops.linear import Kernels, fused_linear
from models.ops.plain import apply_rope, rms_norm
from models.param_spec import ParamSpec, Part
from models.sharding import local_heads

Params = dict[str, Tensor]
LayerSpecs = dict[str, ParamSpec]


class Rows(NamedTuple):
    """What attention needs to know of a step; see models.inputs.StepInputs and StepState."""

    kv_slots_T: Tensor
    page_table_SP: Tensor
    row_slots_R: Tensor
    row_starts_R: Tensor
    row_lens_R: Tensor
    row_offsets_R: Tensor


class Family(NamedTuple):
    """In what a family of models differs from the layers here.

    Attributes:
        layer_specs: parameters of one layer: (model, dtype, name prefix in the checkpoint, layer
            index).
        heads: qkv [T, (H + 2K) * D] -> q_THD, k_TKD, v_TKD before the rotary embedding. Fused
            kernels stand in for it: they split, and apply `q_norm` and `k_norm` where there are
                such.
        feed_forward: normed [T, E] -> [T, E], summed over the ranks; the last argument is
            kv_slots_T.
    """

    layer_specs: Callable[[ModelConfig, torch.dtype, str, int], LayerSpecs]
    heads: Callable[[ModelConfig, TensorParallel, Params, Tensor], tuple[Tensor, Tensor, Tensor]]
    feed_forward: Callable[[ModelConfig, TensorParallel, Kernels, Params, Tensor, Tensor], Tensor]


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] @ w [out, in].T + bias [out]. The one place where a matrix is applied."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] != 1:
        y: Tensor = few_rows_linear(x, w, bias)
        return y
    return F.linear(x, w, bias)


def plain_heads(
    model: ModelConfig, tp: TensorParallel, p: Params, qkv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the fused projection into heads."""
    num_heads, num_kv_heads = local_heads(model, tp)
    head_dim = model.head_dim
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    q, k, v = torch.split(qkv, sizes, -1)
    return (
        q.view(-1, num_heads, head_dim),
        k.view(-1, num_kv_heads, head_dim),
        v.view(-1, num_kv_heads, head_dim),
    )


def mlp(
    model: ModelConfig,
    tp: TensorParallel,
    kernels: Kernels,
    p: Params,
    x_TE: Tensor,
    kv_slots_T: Tensor,
) -> Tensor:
    """down(silu(gate(x)) * up(x)), summed over the ranks (Shazeer 2020, SwiGLU)."""
    gate_up = p["gate_up"], p.get("gate_up_bias")
    if kernels.fused:
        mid_TF = fused_linear(x_TE, *gate_up, None, 0.0, True, None, kernels.pdl)
    else:
        gate_TF, up_TF = linear(x_TE, *gate_up).chunk(2, -1)
        mid_TF = F.silu(gate_TF) * up_TF
    return row_parallel(tp, kernels, p, "down", mid_TF)


def row_parallel(tp: TensorParallel, kernels: Kernels, p: Params, name: str, x: Tensor) -> Tensor:
    """A projection whose input is split over the ranks; the bias is added once, after the sum."""
    if kernels.fused:
        # Opaque: the compiler would have the product add the residual, of which that takes a copy.
        y = fused_linear(x, p[name], None, None, 0.0, False, None, kernels.pdl)
    else:
        y = linear(x, p[name])
    y = all_reduce(y, tp.group)
    bias = p.get(name + "_bias")
    return y if bias is None else y + bias


def attention(
    model: ModelConfig,
    family: Family,
    tp: TensorParallel,
    window: int,
    kind: str,
    kernels: Kernels,
    p: Params,
    x_TE: Tensor,
    rope_TD: Tensor,
    kv_layer: Tensor,
    rows: Rows,
) -> Tensor:
    """Project, rotate, write keys and values to their pages, attend, project back: [T, E]."""
    qkv = linear(x_TE, p["qkv"], p.get("qkv_bias"))
    if kernels.fused:
        num_heads, num_kv_heads = local_heads(model, tp)
        q_THD = qk_norm_rope_kv_write(
            qkv,
            rope_TD,
            p.get("q_norm"),
            p.get("k_norm"),
            model.norm_eps,
            num_heads,
            num_kv_heads,
            model.head_dim,
            kv_layer,
            rows.kv_slots_T,
            kernels.pdl,
        )
    else:
        q_THD, k_TKD, v_TKD = family.heads(model, tp, p, qkv)
        q_THD, k_TKD = apply_rope(q_THD, rope_TD), apply_rope(k_TKD, rope_TD)
        kv_write(k_TKD, v_TKD, kv_layer, rows.kv_slots_T)
    o_THD = paged_attention(
        q_THD,
        kv_layer,
        *rows[1:],
        model.head_dim**-0.5,
        window,
        kind,
    )
    return row_parallel(tp, kernels, p, "o", o_THD.flatten(1))


def decoder_layer(
    model: ModelConfig,
    family: Family,
    tp: TensorParallel,
    window: int,
    kind: str,
    kernels: Kernels,
    p: Params,
    x_TE: Tensor,
    residual_TE: Tensor,
    rope_TD: Tensor,
    kv_layer: Tensor,
    rows: Rows,
) -> tuple[Tensor, Tensor]:
    """One layer. The hidden state is x + residual; the sum is left to the next norm, which fuses
    it.

    Everything before `p` is static, so that one compile serves all layers of a window.
    """
    residual_TE = residual_TE + x_TE
    x_TE = rms_norm(residual_TE, p["input_norm"], model.norm_eps)
    x_TE = attention(model, family, tp, window, kind, kernels, p, x_TE, rope_TD, kv_layer, rows)
    residual_TE = residual_TE + x_TE
    x_TE = rms_norm(residual_TE, p["post_norm"], model.norm_eps)
    return family.feed_forward(model, tp, kernels, p, x_TE, rows.kv_slots_T), residual_TE


def attention_specs(model: ModelConfig, dtype: torch.dtype, prefix: str) -> LayerSpecs:
    """input_norm, qkv, qkv_bias?, o, o_bias?, post_norm of the layer named `prefix`."""
    query, keys, embed = (
        model.num_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
        model.hidden_size,
    )
    fused = (("q", query, "heads"), ("k", keys, "kv_heads"), ("v", keys, "kv_heads"))
    name = prefix + "self_attn.{}_proj.{}"
    specs = {
        "input_norm": norm_spec(prefix + "input_layernorm.weight", embed, dtype),
        "qkv": ParamSpec(
            tuple(
                Part(name.format(letter, "weight"), (size, embed), (axis, "embed"))
                for letter, size, axis in fused
            ),
            dtype,
        ),
    }
    if model.qkv_bias:
        parts = (
            Part(name.format(letter, "bias"), (size,), (axis,)) for letter, size, axis in fused
        )
        specs["qkv_bias"] = ParamSpec(tuple(parts), dtype, "zeros")
    o = Part(name.format("o", "weight"), (embed, query), ("embed", "heads"))
    specs["o"] = ParamSpec((o,), dtype)
    if model.o_bias:
        o_bias = Part(name.format("o", "bias"), (embed,), ("embed",))
        specs["o_bias"] = ParamSpec((o_bias,), dtype, "zeros")
    specs["post_norm"] = norm_spec(prefix + "post_attention_layernorm.weight", embed, dtype)
    return specs


def mlp_specs(model: ModelConfig, dtype: torch.dtype, prefix: str) -> LayerSpecs:
    """gate_up, gate_up_bias?, down, down_bias? of the layer named `prefix`."""
    ffn, embed = model.ffn_size, model.hidden_size
    name = prefix + "mlp.{}_proj.{}"
    gate_up = tuple(
        Part(name.format(part, "weight"), (ffn, embed), ("ffn", "embed")) for part in ("gate", "up")
    )
    down = Part(name.format("down", "weight"), (embed, ffn), ("embed", "ffn"))
    specs = {"gate_up": ParamSpec(gate_up, dtype), "down": ParamSpec((down,), dtype)}
    if model.mlp_bias:
        biases = tuple(Part(name.format(part, "bias"), (ffn,), ("ffn",)) for part in ("gate", "up"))
        specs["gate_up_bias"] = ParamSpec(biases, dtype, "zeros")
        down_bias = Part(name.format("down", "bias"), (embed,), ("embed",))
        specs["down_bias"] = ParamSpec((down_bias,), dtype, "zeros")
    return specs


def layer_specs(model: ModelConfig, dtype: torch.dtype, prefix: str, layer: int) -> LayerSpecs:
    """Parameters of a layer with attention and a gated MLP."""
    return attention_specs(model, dtype, prefix) | mlp_specs(model, dtype, prefix)


def norm_spec(source: str, size: int, dtype: torch.dtype, axis: str = "embed") -> ParamSpec:
    """The weight of an RMS norm."""
    return ParamSpec((Part(source, (size,), (axis,)),), dtype, "ones")
