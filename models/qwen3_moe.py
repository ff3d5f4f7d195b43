"""Qwen3-MoE: Qwen3's attention; experts in the layers that the config names, an MLP in the rest."""

from __future__ import annotations

import torch

from models.config import ModelConfig
from models.layers import LayerSpecs, attention_specs, mlp_specs
from models.moe import feed_forward, moe_specs
from models.qwen3 import FAMILY as QWEN3
from models.qwen3 import normed_specs

_NAMES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def _layer_specs(model: ModelConfig, dtype: torch.dtype, prefix: str, layer: int) -> LayerSpecs:
    specs = attention_specs(model, dtype, prefix) | normed_specs(model, dtype, prefix)
    if not model.moe_layers[layer]:
        return specs | mlp_specs(model, dtype, prefix)
    router, expert = prefix + "mlp.gate.weight", prefix + "mlp.experts.{}."
    return specs | moe_specs(model, dtype, router, expert, _NAMES)


FAMILY = QWEN3._replace(layer_specs=_layer_specs, feed_forward=feed_forward)
