"""Hugging Face architecture name -> family, and the parameters of a whole model."""

from __future__ import annotations

import torch

from models import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from models.config import ModelConfig
from models.errors import UnsupportedModel
from models.layers import Family, norm_spec
from models.param_spec import ParamSpec, Part, Tree

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama.FAMILY,
    "MinistralForCausalLM": mistral.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
}


def family_of(architecture: str) -> Family:
    """The family of a Hugging Face class name; UnsupportedModel lists the known ones."""
    if architecture not in FAMILIES:
        raise UnsupportedModel(f"architecture {architecture!r}: known are {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def param_specs(model: ModelConfig, dtype: torch.dtype | None = None) -> Tree:
    """Specs of all parameters: embed [V, E], layers, final_norm [E] and, unless tied, lm_head [V,
    E].

    Args:
        model: the configuration.
        dtype: of the parameters in memory; default the checkpoint's.
    """
    dtype = dtype or getattr(torch, model.dtype)
    family = family_of(model.architecture)
    shape, axes = (model.vocab_size, model.hidden_size), ("vocab", "embed")
    specs: Tree = {
        "embed": ParamSpec((Part("model.embed_tokens.weight", shape, axes),), dtype),
        "layers": [
            family.layer_specs(model, dtype, f"model.layers.{layer}.", layer)
            for layer in range(model.num_layers)
        ],
        "final_norm": norm_spec("model.norm.weight", model.hidden_size, dtype),
    }
    if not model.tie_embeddings:
        specs["lm_head"] = ParamSpec((Part("lm_head.weight", shape, axes),), dtype)
    return specs
