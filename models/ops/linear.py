"""Operator of a matrix applied to few rows, with the work before and after it fused in, and which
kernel it takes.

`fullgraph::fused_linear` is opaque to the compiler, so that it sees the real number of rows of a
bucket where the compiler sees a symbol: one compile serves all buckets and each gets its own
kernel. Which kernel is best for a shape was measured (linear_table.py); where nothing was, it is
guessed from the shape.

Knows nothing of layers or buckets. The kernels for CUDA are in linear_triton.py.

Legend: M rows of x, N columns of y, K inner dimension.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from models.ops.linear_table import choose_linear
from models.ops.plain import rms_norm

try:
    from models.ops import fused_triton, linear_triton
except ImportError:  # no Triton: a CPU
    fused_triton = linear_triton = None  # type: ignore[assignment]


class Kernels(NamedTuple):
    """Which kernels of ours a decode step uses; static when it is traced.

    Attributes:
        fused: layers are made of fused operators (`fused_linear`, `qk_norm_rope_kv_write`) instead
            of plain torch.
        pdl: programmatic dependent launch between our kernels (Hopper and later).
    """

    fused: bool = False
    pdl: bool = False


@library.custom_op("fullgraph::fused_linear", mutates_args=(), device_types="cpu")
def fused_linear(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    norm_K: Tensor | None,
    eps: float,
    act: bool,
    residual_MN: Tensor | None,
    pdl: bool,
) -> Tensor:
    """y = residual + act(bias + norm(x) @ w.T); any of the four may be absent.

    Args:
        x_MK: [M, K], contiguous.
        w_NK: [N, K], or [2 N, K] with `act`: gate rows, then up rows; contiguous.
        bias_N: as long as w has rows.
        norm_K: weight of an RMS norm over K with `eps`.
        act: silu(gate) * up.
        residual_MN: added to the result.
        pdl: programmatic dependent launch; no effect on a CPU.

    Returns:
        [M, N], contiguous, of x's dtype.
    """
    if norm_K is not None:
        x_MK = rms_norm(x_MK, norm_K, eps)
    y = F.linear(x_MK, w_NK, bias_N)
    if act:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual_MN is None else residual_MN + y


@fused_linear.register_fake
def _(
    x_MK: Tensor, w_NK: Tensor, _bias: Any, _norm: Any, _eps: float, act: bool, *_: Any
) -> Tensor:
    return x_MK.new_empty((x_MK.shape[0], w_NK.shape[0] // (2 if act else 1)))


@fused_linear.register_kernel("cuda")
def _fused_linear_cuda(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    norm_K: Tensor | None,
    eps: float,
    act: bool,
    residual_MN: Tensor | None,
    pdl: bool,
) -> Tensor:
    assert linear_triton is not None, "CUDA tensors on a machine without Triton"
    num_rows, inner = x_MK.shape
    columns = w_NK.shape[0] // (2 if act else 1)
    choice = choose_linear(num_rows, columns, inner, act)
    if choice is None or (norm_K is not None and not choice.fuse_norm):
        x_MK, norm_K = _norm(x_MK, norm_K, eps, pdl), None
    if choice is None:
        return _with_cublas(x_MK, w_NK, bias_N, act, residual_MN, pdl)
    y_MN = torch.empty((num_rows, columns), dtype=x_MK.dtype, device=x_MK.device)
    given = (x_MK, w_NK, bias_N, norm_K, eps, act, residual_MN, y_MN)
    linear_triton.run(*given, choice, _workspace(x_MK.device), pdl)
    return y_MN


def prepare(device: torch.device) -> None:
    """Allocate what the kernels share. Must come before any graph is recorded, or its pool would
    own it.
    """
    if device.type == "cuda" and linear_triton is not None:
        _workspace(torch.empty(0, device=device).device)


def decode_kernels(device: torch.device, wanted: bool) -> Kernels:
    """The kernels of a decode step on this device; `wanted` is what the configuration says."""
    if device.type != "cuda" or linear_triton is None or not wanted:
        return Kernels()
    return Kernels(True, torch.cuda.get_device_capability(device) >= (9, 0))


@functools.cache
def _workspace(device: torch.device) -> linear_triton.Workspace:
    return linear_triton.Workspace.of(device)


def _norm(x_MK: Tensor, norm_K: Tensor | None, eps: float, pdl: bool) -> Tensor:
    if norm_K is None:
        return x_MK
    out_MK = torch.empty_like(x_MK)
    fused_triton.rms_norm(x_MK, norm_K, eps, out_MK, pdl)
    return out_MK


def _with_cublas(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    act: bool,
    residual_MN: Tensor | None,
    pdl: bool,
) -> Tensor:
    if residual_MN is not None and bias_N is None and not act:
        return torch.addmm(residual_MN, x_MK, w_NK.t())
    y_MN = F.linear(x_MK, w_NK, bias_N)
    if act:
        gate_up = y_MN
        y_MN = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        fused_triton.silu_mul(gate_up, y_MN, pdl)
    return y_MN if residual_MN is None else residual_MN + y_MN
