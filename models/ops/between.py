"""Operator of all that lies between two attentions of a dense decode step: one kernel where that
was measured to be faster, the operators of its parts elsewhere.

Knows nothing of attention or of how layers are numbered. The kernel is in between_gluon.py.

Legend: T tokens, E hidden, F ffn, Q columns of qkv, A columns of attention's result.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, library

from models.ops.linear import fused_linear
from models.ops.linear_table import between_rows

_missing = ""
try:
    from models.ops import between_gluon
except ImportError as error:  # no Triton, or another one than the kernel is written for
    between_gluon = None  # type: ignore[assignment]
    _missing = str(error)


def _one_by_one(
    o_TA: Tensor,
    x_TE: Tensor,
    o: Tensor,
    o_bias: Tensor | None,
    post_norm: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    next_norm: Tensor | None,
    qkv: Tensor | None,
    qkv_bias: Tensor | None,
    eps: float,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """The rest of a layer behind attention, and what the next layer gives to its own.

    Args:
        o_TA: attention's result. x_TE: the hidden state before the layer. Both contiguous.
        o: [E, A]. gate_up: [2 F, E], gate rows first. down: [E, F]. Biases may be absent.
        post_norm: [E], of the RMS norm before gate_up.
        next_norm, qkv, qkv_bias: [E], [Q, E], [Q] of the next layer, absent behind the last.
        pdl: programmatic dependent launch, which the one kernel always has; no effect on a CPU.

    Returns:
        The hidden state after the layer [T, E], and qkv [T, Q] of the next one, or [0]; contiguous,
        of x's dtype.
    """
    x_TE = fused_linear(o_TA, o, o_bias, None, 0.0, False, x_TE, pdl)
    mid_TF = fused_linear(x_TE, gate_up, gate_up_bias, post_norm, eps, True, None, pdl)
    x_TE = fused_linear(mid_TF, down, down_bias, None, 0.0, False, x_TE, pdl)
    if qkv is None:
        return x_TE, x_TE.new_empty(0)
    return x_TE, fused_linear(x_TE, qkv, qkv_bias, next_norm, eps, False, None, pdl)


between_attentions = library.custom_op(
    "fullgraph::between_attentions", _one_by_one, mutates_args=(), device_types="cpu"
)


@between_attentions.register_fake
def _(
    _o: Any, x_TE: Tensor, _w: Any, _o_bias: Any, _norm: Any, _gate_up: Any, _gate_up_bias: Any,
    _down: Any, _down_bias: Any, _next_norm: Any, qkv: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (0,) if qkv is None else (x_TE.shape[0], qkv.shape[0])
    return torch.empty_like(x_TE), x_TE.new_empty(shape)


@between_attentions.register_kernel("cuda")
def _between_cuda(*given: Any) -> tuple[Tensor, Tensor]:
    o_TA, x_TE, o, o_bias, post_norm, gate_up, gate_up_bias, down, down_bias, *then = given
    next_norm, qkv, qkv_bias, eps, _ = then
    biases = (o_bias, gate_up_bias, down_bias, qkv_bias)
    shape = (x_TE.shape[1], o_TA.shape[1], down.shape[1], None if qkv is None else qkv.shape[0])
    plain = x_TE.dtype == torch.bfloat16 and all(bias is None for bias in biases)
    if plain and x_TE.shape[0] in between_rows(*shape) and _one_kernel(x_TE.device):
        norm = post_norm if next_norm is None else next_norm
        weights = between_gluon.Weights(o, post_norm, gate_up, down, norm, qkv)
        return between_gluon.run(o_TA, x_TE, weights, eps, _counters(x_TE.device))
    return _one_by_one(*given)


def prepare(device: torch.device) -> str:
    """Allocate what programs meet by. Must come before any graph is recorded, or its pool would own
    it.

    Returns:
        Why a GPU that could does not have the kernel, or nothing.
    """
    if device.type != "cuda":
        return ""
    device = torch.empty(0, device=device).device
    if _one_kernel(device):
        _counters(device)
    return _missing if torch.cuda.get_device_capability(device) == (9, 0) else ""


@functools.cache
def _one_kernel(device: torch.device) -> bool:
    """Whether this GPU has the kernel's instructions, and room for all of its programs."""
    properties = torch.cuda.get_device_properties(device)
    hopper = (properties.major, properties.minor) == (9, 0)
    return (
        between_gluon is not None
        and hopper
        and properties.multi_processor_count >= between_gluon.PROGRAMS
    )


@functools.cache
def _counters(device: torch.device) -> Tensor:
    # One set for all streams: two launches never run at once, for neither leaves the other room.
    return torch.zeros(between_gluon.NUM_COUNTERS, dtype=torch.int32, device=device)
