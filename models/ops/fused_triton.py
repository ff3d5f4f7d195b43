"""Triton kernels of the small work between a layer's matrices: heads (norm, rotation, KV write), KV
write, RMS norm, SwiGLU. models/ops/fused.py says what they compute.

Knows nothing of how operators are defined. Importing it needs Triton.

Legend: T tokens, H query heads, K kv heads, D head dim, E hidden, F ffn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def heads(
    qkv: Tensor,
    rope_TD: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_layer: Tensor,
    kv_slots_T: Tensor,
    pdl: bool,
) -> Tensor:
    """`fullgraph::qk_norm_rope_kv_write`."""
    num_tokens = qkv.shape[0]
    q_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    total = num_heads + 2 * num_kv_heads
    block = 4 if num_tokens <= 256 else 8  # heads of a program
    _heads_kernel[(num_tokens, triton.cdiv(total, block))](
        qkv,
        rope_TD,
        rope_TD if q_norm is None else q_norm,
        rope_TD if k_norm is None else k_norm,
        kv_layer,
        kv_slots_T,
        q_THD,
        qkv.stride(0),
        rope_TD.stride(0),
        eps,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        PAGE=kv_layer.shape[2],
        NORM=q_norm is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return q_THD


@triton.jit
def _heads_kernel(
    qkv_ptr, rope_ptr, q_norm_ptr, k_norm_ptr, kv_ptr, slots_ptr, out_ptr,
    qkv_stride, rope_stride, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    d = tl.arange(0, HALF)[None, :]
    half = D // 2
    inside = (d < half) & (head < H + 2 * K)
    is_q = head < H
    is_v = head >= H + K
    # Not written by the kernel before: may be read ahead of it.
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if NORM:
        mask = inside & ~is_v
        weight_ptr = tl.where(is_q, q_norm_ptr + d, k_norm_ptr + d)
        low_w = tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
        high_w = tl.load(weight_ptr + half, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = token * qkv_stride + head * D + d
    low = tl.load(qkv_ptr + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv_ptr + at + half, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(rope_ptr + token * rope_stride + d, mask=d < half, other=0.0)
    sin = tl.load(rope_ptr + token * rope_stride + half + d, mask=d < half, other=0.0)
    x, y = low, high
    if NORM:
        square = tl.sum(low * low + high * high, 1)[:, None]
        scale = tl.rsqrt(square / D + eps)
        x, y = x * scale * low_w, y * scale * high_w
    x, y = x * cos - y * sin, y * cos + x * sin
    x = tl.where(is_v, low, x)
    y = tl.where(is_v, high, y)
    q_at = (token * H + head) * D + d
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + q_at, x.to(dtype), mask=inside & is_q)
    tl.store(out_ptr + q_at + half, y.to(dtype), mask=inside & is_q)
    # A page holds keys [PAGE, K, D], then values.
    place = slot // PAGE * 2 * PAGE + slot % PAGE + tl.where(is_v, PAGE, 0)
    kv_at = (place * K + head - H - tl.where(is_v, K, 0)) * D + d
    mask = inside & ~is_q & (slot >= 0)
    tl.store(kv_ptr + kv_at, x.to(dtype), mask=mask)
    tl.store(kv_ptr + kv_at + half, y.to(dtype), mask=mask)


def kv_write(k_TKD: Tensor, v_TKD: Tensor, kv_layer: Tensor, kv_slots_T: Tensor) -> None:
    """Keys and values to their pages; tokens' strides are free, heads are dense."""
    num_tokens, num_kv_heads, head_dim = k_TKD.shape
    width = num_kv_heads * head_dim
    _kv_write_kernel[(num_tokens,)](
        k_TKD,
        v_TKD,
        kv_layer,
        kv_slots_T,
        k_TKD.stride(0),
        v_TKD.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        PAGE=kv_layer.shape[2],
    )


@triton.jit
def _kv_write_kernel(
    k_ptr, v_ptr, kv_ptr, slots_ptr, k_stride, v_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        i = tl.arange(0, BLOCK)
        mask = i < WIDTH
        at = (slot // PAGE * 2 * PAGE + slot % PAGE) * WIDTH + i
        tl.store(kv_ptr + at, tl.load(k_ptr + token * k_stride + i, mask=mask), mask=mask)
        at += PAGE * WIDTH
        tl.store(kv_ptr + at, tl.load(v_ptr + token * v_stride + i, mask=mask), mask=mask)


def rms_norm(x_TE: Tensor, weight: Tensor, eps: float, out_TE: Tensor, pdl: bool) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, a row per program; both contiguous."""
    num_tokens, width = x_TE.shape
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_tokens,)](
        x_TE,
        weight,
        out_TE,
        width,
        eps,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(1, min(8, block // 256)),
        launch_pdl=pdl,
    )


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < width
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + token * width + i, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
    tl.store(out_ptr + token * width + i, y.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up_TF: Tensor, out_TF: Tensor, pdl: bool) -> None:
    """out = silu(first half) * second half of each row; both contiguous."""
    num_tokens, width = out_TF.shape
    block = 1024
    _silu_mul_kernel[(num_tokens, triton.cdiv(width, block))](
        gate_up_TF, out_TF, width, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
    )


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(x_ptr + token * 2 * width + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (token * 2 + 1) * width + i, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * width + i, y.to(out_ptr.dtype.element_ty), mask=mask)
