"""Qwen3: Llama with an RMS norm on each query and key head before the rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from models.config import ModelConfig
from models.inputs import TensorParallel
from models.layers import LayerSpecs, Params, layer_specs, norm_spec, plain_heads
from models.llama import FAMILY as LLAMA
from models.ops.plain import rms_norm


def normed_heads(
    model: ModelConfig, tp: TensorParallel, p: Params, qkv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q_THD, k_TKD (both normed over D) and v_TKD of the fused projection."""
    q_THD, k_TKD, v_TKD = plain_heads(model, tp, p, qkv)
    q_THD = rms_norm(q_THD, p["q_norm"], model.norm_eps)
    k_TKD = rms_norm(k_TKD, p["k_norm"], model.norm_eps)
    return q_THD, k_TKD, v_TKD


def normed_specs(model: ModelConfig, dtype: torch.dtype, prefix: str) -> LayerSpecs:
    """q_norm and k_norm: [D] each."""
    return {
        f"{name}_norm": norm_spec(
            f"{prefix}self_attn.{name}_norm.weight", model.head_dim, dtype, "head_dim"
        )
        for name in ("q", "k")
    }


def _layer_specs(model: ModelConfig, dtype: torch.dtype, prefix: str, layer: int) -> LayerSpecs:
    return layer_specs(model, dtype, prefix, layer) | normed_specs(model, dtype, prefix)


FAMILY = LLAMA._replace(layer_specs=_layer_specs, heads=normed_heads)
