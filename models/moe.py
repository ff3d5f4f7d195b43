"""Mixture of experts in place of the gated MLP: a router picks experts for each token.

No token is dropped, whatever the routing: there is no capacity. Padding costs no expert. Ranks
share each expert's width as they do a dense MLP's. Knows nothing of how the experts are computed
(models.ops.experts).

Legend: T tokens, E hidden, F ffn of an expert (this rank's), N experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.config import ModelConfig
from models.inputs import TensorParallel
from models.layers import LayerSpecs, Params, linear, mlp
from models.ops.collectives import all_reduce
from models.ops.experts import grouped_experts, mixture, top_experts
from models.ops.linear import Kernels
from models.param_spec import ParamSpec, Part


def route(model: ModelConfig, router_NE: Tensor, x_TE: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [T, K] weights and int64 [T, K] experts: the largest of a softmax over all N."""
    return top_experts(
        linear(x_TE, router_NE), model.num_experts_per_token, model.normalise_experts
    )


def feed_forward(
    model: ModelConfig,
    tp: TensorParallel,
    kernels: Kernels,
    p: Params,
    x_TE: Tensor,
    kv_slots_T: Tensor,
) -> Tensor:
    """The experts' weighted sum, over the ranks; a layer without a router has a dense MLP."""
    if "router" not in p:
        return mlp(model, tp, kernels, p, x_TE, kv_slots_T)
    if kernels.fused:
        y_TE = fused_mixture(model, kernels, p, x_TE, None, None, kv_slots_T)
    else:
        weights_TK, experts_TK = route(model, p["router"], x_TE)
        experts = (p["experts_gate_up"], p["experts_down"])
        y_TE = grouped_experts(x_TE, weights_TK, experts_TK, kv_slots_T, *experts)
    return all_reduce(y_TE, tp.group)


def fused_mixture(
    model: ModelConfig,
    kernels: Kernels,
    p: Params,
    x_TE: Tensor,
    norm_E: Tensor | None,
    residual_TE: Tensor | None,
    kv_slots_T: Tensor,
) -> Tensor:
    """This rank's share of the experts' weighted sum, with norm and residual in one operator."""
    y_TE: Tensor = mixture(
        x_TE,
        norm_E,
        model.norm_eps,
        p["router"],
        kv_slots_T,
        p["experts_gate_up"],
        p["experts_down"],
        model.num_experts_per_token,
        model.normalise_experts,
        residual_TE,
        kernels.pdl,
    )
    return y_TE


def moe_specs(
    model: ModelConfig,
    dtype: torch.dtype,
    router: str,
    expert: str,
    names: tuple[str, str, str],
) -> LayerSpecs:
    """router [N, E], experts_gate_up [N, 2F, E], experts_down [N, E, F].

    Args:
        model: the configuration.
        dtype: of the parameters.
        router: the router's name in the checkpoint.
        expert: an expert's prefix, with {} for its number.
        names: of an expert's gate, up and down projection.
    """
    num_experts, ffn, embed = model.num_experts, model.expert_ffn_size, model.hidden_size
    gate_up, down = [], []
    for number in range(num_experts):
        gate_name, up_name, down_name = (expert.format(number) + name for name in names)
        for name in (gate_name, up_name):
            gate_up.append(Part(name, (ffn, embed), ("ffn", "embed")))
        down.append(Part(down_name, (embed, ffn), ("embed", "ffn")))
    router_part = Part(router, (num_experts, embed), ("experts", "embed"))
    return {
        "router": ParamSpec((router_part,), dtype),
        "experts_gate_up": ParamSpec(tuple(gate_up), dtype, stack=num_experts),
        "experts_down": ParamSpec(tuple(down), dtype, stack=num_experts),
    }
