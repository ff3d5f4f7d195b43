"""Triton kernels for matrices applied to few rows, with what comes before and after fused in.

y = epilogue(prologue(x) @ w.T): the prologue may be an RMS norm, the epilogue a bias, SwiGLU or the
residual sum. The norm costs nothing: its scale is one number a row, so it is applied to the dot
product, and only its weight to x.

Two kernels. `gemv` (one row) multiplies on CUDA cores, each program whole rows of w. `skinny` uses
tensor cores with w as the tall side of the product, and cuts the inner dimension into parts if the
outer one gives too few programs; the last program of a tile to finish adds the parts up, always in
the same order.

With programmatic dependent launch the weights are on their way (registers, or the L2 cache) before
the kernel waits for the one before it. `gemv` lets the next one start before that wait, so that its
weights come, too; decode_triton.py says what the next one may read then.

Knows nothing of operators or of which kernel is best when. Importing it needs Triton.

Legend: M rows of x, N columns of y, K inner dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.ops.attend_triton import prefetch
from models.ops.linear_table import Choice


class Workspace(NamedTuple):
    """Scratch of `skinny`: float32 parts and int32 counters, which are zero between kernels."""

    parts: Tensor
    counters: Tensor

    @classmethod
    def of(cls, device: torch.device) -> Workspace:
        """Enough for every launch that `fits`."""
        return cls(
            torch.empty(_PARTS, dtype=torch.float32, device=device),
            torch.zeros(_COUNTERS, dtype=torch.int32, device=device),
        )


_PARTS, _COUNTERS = 8 << 20, 1 << 14


def fits(num_rows: int, columns: int, act: bool, tiles: Choice) -> bool:
    """Whether the workspace holds a launch of `skinny`."""
    block_m = _block_m(num_rows, tiles)
    programs = triton.cdiv(columns, tiles.block_n // 2 if act else tiles.block_n)
    programs *= triton.cdiv(num_rows, block_m)
    tile = (tiles.block_n + 1) * block_m
    return programs <= _COUNTERS and (tiles.split == 1 or programs * tiles.split * tile <= _PARTS)


def _block_m(num_rows: int, tiles: Choice) -> int:
    return min(tiles.block_m, max(16, triton.next_power_of_2(num_rows)))


def run(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    norm_K: Tensor | None,
    eps: float,
    act: bool,
    residual_MN: Tensor | None,
    y_MN: Tensor,
    tiles: Choice,
    workspace: Workspace,
    pdl: bool,
) -> None:
    """y = residual + silu_mul(bias + norm(x) @ w.T); each of the four may be absent. All
    contiguous.

    Args:
        w_NK: [N, K], or [2 N, K] if `act`: gate rows, then up rows.
    """
    operands = (
        x_MK,
        w_NK,
        w_NK if bias_N is None else bias_N,
        w_NK if norm_K is None else norm_K,
        w_NK if residual_MN is None else residual_MN,
        y_MN,
    )
    flags = {
        "NORM": 0 if norm_K is None else tiles.fuse_norm,
        "ACT": act,
        "BIAS": bias_N is not None,
        "RESIDUAL": residual_MN is not None,
        "PDL": pdl,
        "launch_pdl": pdl,
        "num_warps": tiles.warps,
    }
    if x_MK.shape[0] == 1:
        _launch_gemv(operands, eps, tiles, flags)
    else:
        _launch_skinny(operands, eps, tiles, flags, workspace)


def _launch_gemv(
    operands: tuple[Tensor, ...], eps: float, tiles: Choice, flags: dict[str, Any]
) -> None:
    columns, inner = operands[-1].shape[1], operands[0].shape[1]
    assert tiles.split == 1, tiles
    _gemv_kernel[(triton.cdiv(columns, tiles.block_n),)](
        *operands, eps, N=columns, K=inner, BN=tiles.block_n, BK=tiles.block_k, AHEAD=tiles.ahead,
        LINES=triton.next_power_of_2(max(1, inner // 64)), **flags,
    )  # fmt: skip


def _launch_skinny(
    operands: tuple[Tensor, ...],
    eps: float,
    tiles: Choice,
    flags: dict[str, Any],
    workspace: Workspace,
) -> None:
    num_rows, inner = operands[0].shape
    columns, act = operands[-1].shape[1], flags["ACT"]
    assert fits(num_rows, columns, act, tiles), (num_rows, columns, tiles)
    assert inner % (tiles.split * tiles.block_k) == 0, (inner, tiles)
    block_m = _block_m(num_rows, tiles)
    tile_columns = tiles.block_n // 2 if act else tiles.block_n
    grid = (triton.cdiv(columns, tile_columns), tiles.split, triton.cdiv(num_rows, block_m))
    _skinny_kernel[grid](
        *operands,
        *workspace,
        eps,
        num_rows,
        N=columns,
        K=inner,
        BM=block_m,
        BN=tiles.block_n,
        BK=tiles.block_k,
        SPLIT=tiles.split,
        STAGES=tiles.stages,
        LINES=triton.next_power_of_2(max(1, inner // tiles.split // 64)),
        **flags,
    )


@triton.jit
def _ask_ahead(
    w_ptr, n, valid, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Ask for what is left of rows `n` of w, and for rows of programs that start later."""
    line = tl.arange(0, LINES)[None, :] * 64  # 128 bytes
    prefetch(w_ptr + n[:, None].to(tl.int64) * K + line, valid & (line >= BK) & (line < K))
    half = tl.num_programs(0) // 2
    other = (n + half * BN)[:, None]
    some = (other < N) & (tl.program_id(0) < half) & (line < K)
    prefetch(w_ptr + other.to(tl.int64) * K + line, some)


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, eps,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
    ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
    AHEAD: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row = n[:, None].to(tl.int64) * K + k[None, :]
    valid = (n < N)[:, None]
    mask = valid & (k < K)[None, :]
    # The first tile of weights is under way before the wait.
    w = tl.load(w_ptr + row, mask=mask, other=0.0, eviction_policy="evict_first")
    if ACT:
        up = tl.load(w_ptr + N * K + row, mask=mask, other=0.0, eviction_policy="evict_first")
    if NORM:
        scale = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        if AHEAD:
            _ask_ahead(w_ptr, n, valid, N, K, BN, BK, LINES)
        gdc_wait()
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if NORM:
        squares = x * x
        x = x * scale
    acc = w.to(tl.float32) * x[None, :]
    if ACT:
        up_acc = up.to(tl.float32) * x[None, :]
    for i in tl.range(BK, K, BK):
        inside = k < K - i
        mask = valid & inside[None, :]
        w = tl.load(w_ptr + row + i, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + k + i, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * tl.load(norm_ptr + k + i, mask=inside, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if ACT:
            up = tl.load(
                w_ptr + N * K + row + i, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            up_acc += up.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    inside = n < N
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= factor
    if BIAS:
        y += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    if ACT:
        z = tl.sum(up_acc, 1)
        if NORM:
            z *= factor
        if BIAS:
            z += tl.load(bias_ptr + N + n, mask=inside, other=0.0).to(tl.float32)
        y = y * tl.sigmoid(y) * z
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _prefetch(ptr):
    """Ask for the lines that `ptr` points at to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptr],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _join_parts(
    acc, squares, parts_ptr, counters_ptr, row, dm,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Leave this part of a tile for the last of its programs: (sums of all parts, whether this is
    the last).
    """
    place = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    base_ptr = parts_ptr + place * SPLIT * (BN + 1) * BM
    at = row[:, None] * BM + dm[None, :]
    part_ptr = base_ptr + tl.program_id(1) * (BN + 1) * BM
    tl.store(part_ptr + at, acc)
    if NORM:
        tl.store(part_ptr + BN * BM + dm, squares)
    tl.debug_barrier()  # all threads' stores come before the release below
    last = tl.atomic_add(counters_ptr + place, 1, sem="acq_rel") == SPLIT - 1
    if last:
        tl.debug_barrier()
        acc = tl.zeros([BN, BM], tl.float32)
        squares = tl.zeros([BM], tl.float32)
        for s in tl.static_range(SPLIT):
            from_ptr = base_ptr + s * (BN + 1) * BM
            acc += tl.load(from_ptr + at, cache_modifier=".cg")
            if NORM:
                squares += tl.load(from_ptr + BN * BM + dm, cache_modifier=".cg")
        tl.store(counters_ptr + place, 0)
    return acc, squares, last


@triton.jit
def _write_tile(
    acc, squares, bias_ptr, residual_ptr, y_ptr, eps, w_row, m, some,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, NORM: tl.constexpr,
    ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Norm, bias, SwiGLU and residual of a tile's sums [BN, BM], written to y."""
    if NORM:
        acc *= tl.rsqrt(squares / K + eps)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + w_row).to(tl.float32)[:, None]
    if ACT:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BO, BM]), [1, 2, 0]))
        y = gate * tl.sigmoid(gate) * up
    else:
        y = acc
    n = tl.program_id(0) * BO + tl.arange(0, BO)
    mask = (n < N)[:, None] & some
    y_at = m[None, :] * N + n[:, None]
    if RESIDUAL:
        y += tl.load(residual_ptr + y_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _skinny_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, parts_ptr, counters_ptr,
    eps, M, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr,
    NORM: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    KS: tl.constexpr = K // SPLIT
    BO: tl.constexpr = BN // 2 if ACT else BN
    begin = part * KS
    # Rows of w: those of the tile's columns of y; with ACT the gate rows, then the up rows.
    row = tl.arange(0, BN)
    column = tile * BO + row % BO
    valid = (column < N)[:, None]
    w_row = tl.minimum(column, N - 1) + tl.where(row < BO, 0, N)
    w_at = w_row[:, None].to(tl.int64) * K + begin
    dm = tl.arange(0, BM)
    m = tl.program_id(2) * BM + dm
    k = tl.arange(0, BK)
    x_at = m[None, :] * K + begin + k[:, None]
    some = (m < M)[None, :]
    if PDL:
        if tl.program_id(2) == 0:
            line = tl.minimum(tl.arange(0, LINES), KS // 64 - 1)  # 64 elements: 128 bytes
            _prefetch(w_ptr + w_at + line[None, :] * 64)
        gdc_wait()
        gdc_launch_dependents()
    w_at += k[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    for i in tl.range(0, KS, BK, num_stages=STAGES):
        w = tl.load(w_ptr + w_at + i, mask=valid, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + x_at + i, mask=some, other=0.0)
        if NORM:
            x_float = x.to(tl.float32)
            squares += tl.sum(x_float * x_float, 0)
            scale = tl.load(norm_ptr + begin + k + i)
            if NORM == 1:
                x = (x_float * scale.to(tl.float32)[:, None]).to(x.dtype)
            else:
                w = w * scale[None, :]
        acc = tl.dot(w, x, acc)
    last = True
    if SPLIT > 1:
        acc, squares, last = _join_parts(
            acc, squares, parts_ptr, counters_ptr, row, dm, BM, BN, SPLIT, NORM
        )  # fmt: skip
    if last:
        _write_tile(
            acc, squares, bias_ptr, residual_ptr, y_ptr, eps, w_row, m, some,
            N, K, BM, BO, NORM, ACT, BIAS, RESIDUAL,
        )  # fmt: skip
