"""Mixtral: Mistral's attention with experts in every layer."""

from __future__ import annotations

import torch

from models.config import ModelConfig
from models.layers import LayerSpecs, attention_specs
from models.mistral import FAMILY as MISTRAL
from models.moe import feed_forward, moe_specs

_NAMES = ("w1.weight", "w3.weight", "w2.weight")


def _layer_specs(model: ModelConfig, dtype: torch.dtype, prefix: str, layer: int) -> LayerSpecs:
    router, expert = (
        prefix + "block_sparse_moe.gate.weight",
        prefix + "block_sparse_moe.experts.{}.",
    )
    return attention_specs(model, dtype, prefix) | moe_specs(model, dtype, router, expert, _NAMES)


FAMILY = MISTRAL._replace(layer_specs=_layer_specs, feed_forward=feed_forward)
