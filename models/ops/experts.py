"""Operators that send each token through its experts: the fakes, and implementations in torch.

`grouped_experts` is told where tokens go: on a CPU a loop over the experts that have tokens, on a
GPU torch's grouped matrix products. `mixture` is a whole layer of experts, router and residual sum
included, in kernels of ours on a GPU (route_triton.py, experts_triton.py). None of them drops a
token, waits for the host or lets padding cost an expert.

Legend: T tokens, E hidden, F ffn of an expert, N experts, K experts per token, P = T * K pairs of a
token and one of its experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library

from models.ops.experts_table import choose_experts, num_tiles
from models.ops.plain import rms_norm

try:
    from models.ops import experts_triton, fused_triton, route_triton
except ImportError:  # no Triton: a CPU
    experts_triton = fused_triton = route_triton = None  # type: ignore[assignment]


def top_experts(logits_TN: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """float32 [T, K] weights and int64 [T, K] experts: the largest of a softmax over all N, summing
    to one if `normalise`.
    """
    scores_TN = torch.softmax(logits_TN.float(), -1)
    weights_TK, experts_TK = torch.topk(scores_TN, top_k, -1)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK, experts_TK


@library.custom_op("fullgraph::grouped_experts", mutates_args=(), device_types="cpu")
def grouped_experts(
    x_TE: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    kv_slots_T: Tensor,
    gate_up_NGE: Tensor,
    down_NEF: Tensor,
) -> Tensor:
    """y[t] = sum over k of weights[t, k] * down_n(silu(gate_n(x[t])) * up_n(x[t])), n = experts[t,
    k].

    Args:
        x_TE: [T, E].
        weights_TK: float32 [T, K].
        experts_TK: int64 [T, K], each in [0, N); distinct within a token.
        kv_slots_T: int32 [T]; a token of -1 is padding: it costs nothing and its y is 0.
        gate_up_NGE: [N, 2F, E] of x's dtype, gate rows before up rows.
        down_NEF: [N, E, F].

    Returns:
        [T, E] of x's dtype; summed in float32.
    """
    num_experts = len(gate_up_NGE)
    chosen_P = experts_TK.masked_fill((kv_slots_T < 0)[:, None], num_experts).flatten()
    order_P = chosen_P.argsort(stable=True)
    counts = torch.bincount(chosen_P, minlength=num_experts).tolist()[:num_experts]
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
def _(x_TE: Tensor, *_: Any) -> Tensor:
    return x_TE.new_empty(x_TE.shape)


@grouped_experts.register_kernel("cuda")
def sorted_experts(
    x_TE: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    kv_slots_T: Tensor,
    gate_up_NGE: Tensor,
    down_NEF: Tensor,
) -> Tensor:
    """`grouped_experts` without a wait: sort by expert, two grouped products, sum per token."""
    (num_tokens, chosen), num_experts = experts_TK.shape, len(gate_up_NGE)
    padding_T1 = (kv_slots_T < 0)[:, None]
    # Padding sorts behind the last expert's end, where no product is computed.
    keys_TK = experts_TK.masked_fill(padding_T1, num_experts)
    sorted_P, order_P = keys_TK.flatten().sort(stable=True)
    numbers_N = torch.arange(num_experts, device=x_TE.device)
    ends_N = torch.searchsorted(sorted_P, numbers_N, right=True).to(torch.int32)
    x_PE = x_TE[order_P // chosen]
    gate_PF, up_PF = F.grouped_mm(x_PE, gate_up_NGE.transpose(1, 2), offs=ends_N).chunk(2, -1)
    y_PE = F.grouped_mm(F.silu(gate_PF) * up_PF, down_NEF.transpose(1, 2), offs=ends_N)
    # Back to the order of tokens; a sum over k, unlike atomic adds, is the same every time.
    y_TKE = torch.empty_like(y_PE).index_copy_(0, order_P, y_PE).view(num_tokens, chosen, -1)
    y_TE = (y_TKE.float() * weights_TK[:, :, None]).sum(1)
    return y_TE.masked_fill(padding_T1, 0).to(x_TE.dtype)


@library.custom_op("fullgraph::mixture", mutates_args=(), device_types="cpu")
def mixture(
    x_TE: Tensor,
    norm_E: Tensor | None,
    eps: float,
    router_NE: Tensor,
    kv_slots_T: Tensor,
    gate_up_NGE: Tensor,
    down_NEF: Tensor,
    top_k: int,
    normalise: bool,
    residual_TE: Tensor | None,
    pdl: bool,
) -> Tensor:
    """y = residual + `grouped_experts` of norm(x), sent where `top_experts` of norm(x) @ router.T
    says; norm and residual may be absent.

    Args:
        x_TE: [T, E], contiguous.
        norm_E: weight of an RMS norm with `eps`.
        router_NE: [N, E].
        kv_slots_T: int32 [T]; a token of -1 is padding: it costs no expert, its y is the residual.
        gate_up_NGE: [N, 2F, E], gate rows before up rows; contiguous.
        down_NEF: [N, E, F], contiguous.
        top_k / normalise: as in `top_experts`.
        pdl: programmatic dependent launch; no effect on a CPU.

    Returns:
        [T, E], contiguous, of x's dtype. The same whatever else is in the batch, in the same order
        of sums, so that a step repeats.
    """
    if norm_E is not None:
        x_TE = rms_norm(x_TE, norm_E, eps)
    weights_TK, experts_TK = top_experts(F.linear(x_TE, router_NE), top_k, normalise)
    y_TE = grouped_experts(x_TE, weights_TK, experts_TK, kv_slots_T, gate_up_NGE, down_NEF)
    return y_TE if residual_TE is None else residual_TE + y_TE


def prepare(device: torch.device) -> None:
    """Allocate what the kernels share. Must come before any graph is recorded, or its pool would
    own it.
    """
    if device.type == "cuda" and route_triton is not None:
        route_triton.prepare(torch.empty(0, device=device).device)


@mixture.register_fake
def _(x_TE: Tensor, *_: Any) -> Tensor:
    return x_TE.new_empty(x_TE.shape)


@mixture.register_kernel("cuda")
def _mixture_cuda(
    x_TE: Tensor,
    norm_E: Tensor | None,
    eps: float,
    router_NE: Tensor,
    kv_slots_T: Tensor,
    gate_up_NGE: Tensor,
    down_NEF: Tensor,
    top_k: int,
    normalise: bool,
    residual_TE: Tensor | None,
    pdl: bool,
) -> Tensor:
    assert experts_triton is not None, "CUDA tensors on a machine without Triton"
    y_TE = torch.empty_like(x_TE)
    weights = (gate_up_NGE, down_NEF)
    if x_TE.shape[0] == 1:
        x_TE, chosen = route_triton.route_one(x_TE, norm_E, eps, router_NE, top_k, normalise, pdl)
        experts_triton.one_token(x_TE, chosen, kv_slots_T, *weights, residual_TE, y_TE, pdl)
        return y_TE
    if norm_E is not None:
        normed_TE = torch.empty_like(x_TE)
        fused_triton.rms_norm(x_TE, norm_E, eps, normed_TE, pdl)
        x_TE = normed_TE
    choice = choose_experts(len(x_TE), top_k, len(router_NE))
    most_tiles = num_tiles(len(x_TE), top_k, len(router_NE), choice.block_m)
    routing = route_triton.route(
        x_TE, router_NE, kv_slots_T, top_k, normalise, choice.block_m, most_tiles, pdl
    )
    experts_triton.many_tokens(x_TE, routing, kv_slots_T, *weights, residual_TE, y_TE, choice, pdl)
    return y_TE
