"""Operator that sends each token through its experts: the fake, and implementations in torch.

On a CPU a loop over the experts that have tokens; on a GPU grouped matrix products over tokens
sorted by expert, with no wait for the host. Neither drops a token. Knows nothing of routers.

Legend: T tokens, E hidden, F ffn of an expert, N experts, K experts per token, P = T * K pairs of a
token and one of its experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("fullgraph::grouped_experts", mutates_args=(), device_types="cpu")
def grouped_experts(
    x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_NGE: Tensor, down_NEF: Tensor
) -> Tensor:
    """y[t] = sum over k of weights[t, k] * down_n(silu(gate_n(x[t])) * up_n(x[t])), n = experts[t,
    k].

    Args:
        x_TE: [T, E].
        weights_TK: float32 [T, K].
        experts_TK: int64 [T, K], each in [0, N); distinct within a token.
        gate_up_NGE: [N, 2F, E] of x's dtype, gate rows before up rows.
        down_NEF: [N, E, F].

    Returns:
        [T, E] of x's dtype; summed in float32.
    """
    order_P = experts_TK.flatten().argsort(stable=True)
    counts = torch.bincount(experts_TK.flatten(), minlength=len(gate_up_NGE)).tolist()
    tokens_P = order_P // experts_TK.shape[1]
    weights_P = weights_TK.flatten()[order_P]
    y_TE = x_TE.new_zeros(x_TE.shape, dtype=torch.float32)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            tokens = tokens_P[start : start + count]
            gate, up = F.linear(x_TE[tokens], gate_up_NGE[expert]).chunk(2, -1)
            out = F.linear(F.silu(gate) * up, down_NEF[expert]).float()
            y_TE.index_add_(0, tokens, out * weights_P[start : start + count, None])
            start += count
    return y_TE.to(x_TE.dtype)


@grouped_experts.register_fake
def _(
    x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_NGE: Tensor, down_NEF: Tensor
) -> Tensor:
    return x_TE.new_empty(x_TE.shape)


@grouped_experts.register_kernel("cuda")
def sorted_experts(
    x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_NGE: Tensor, down_NEF: Tensor
) -> Tensor:
    """`grouped_experts` without a wait: sort by expert, two grouped products, sum per token."""
    num_tokens, chosen = experts_TK.shape
    sorted_P, order_P = experts_TK.flatten().sort(stable=True)
    numbers_N = torch.arange(len(gate_up_NGE), device=x_TE.device)
    ends_N = torch.searchsorted(sorted_P, numbers_N, right=True).to(torch.int32)
    x_PE = x_TE[order_P // chosen]
    gate_PF, up_PF = F.grouped_mm(x_PE, gate_up_NGE.transpose(1, 2), offs=ends_N).chunk(2, -1)
    y_PE = F.grouped_mm(F.silu(gate_PF) * up_PF, down_NEF.transpose(1, 2), offs=ends_N)
    # Back to the order of tokens; a sum over k, unlike atomic adds, is the same every time.
    y_TKE = torch.empty_like(y_PE).index_copy_(0, order_P, y_PE).view(num_tokens, chosen, -1)
    return (y_TKE.float() * weights_TK[:, :, None]).sum(1).to(x_TE.dtype)
