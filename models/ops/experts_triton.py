"""Triton kernels of a mixture's experts: two grouped products over pairs of a token and an expert,
SwiGLU fused into the first, and a weighted sum per token. Each touched expert's weights are read
once a tile of its pairs.

With few pairs an expert the weights are the tall side of the product (tensor cores want 64 rows);
with many the pairs are. One token multiplies on CUDA cores, and its second product sums over its
experts at once.

Knows nothing of how operators are defined or of which launch is best. Importing it needs Triton.

Legend: T tokens, N experts, K experts per token, P = T * K pairs, E hidden, F ffn of an expert; in
kernels also columns N of a product and its inner dimension K.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.ops.attend_triton import prefetch
from models.ops.experts_table import Choice, Tiles, block_of, choose_one
from models.ops.route_triton import Routing


def one_token(
    x_TE: Tensor,
    chosen: Tensor,
    kv_slots_T: Tensor,
    gate_up_NGE: Tensor,
    down_NEF: Tensor,
    residual_TE: Tensor | None,
    y_TE: Tensor,
    pdl: bool,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> None:
    """The mixture of one token, given what `route_one` chose: two kernels."""
    _, hidden, ffn = down_NEF.shape
    top_k = chosen.shape[1]
    mid = torch.empty((top_k, ffn), dtype=x_TE.dtype, device=x_TE.device)
    up, down = tiles or choose_one(top_k, ffn)
    sizes = {"TOP": top_k, "E": hidden, "F": ffn, "PDL": pdl, "launch_pdl": pdl}
    _up_one_kernel[(triton.cdiv(ffn, up.block_n), top_k)](
        x_TE, chosen, kv_slots_T, gate_up_NGE, mid,
        BN=up.block_n, BK=min(up.block_k, triton.next_power_of_2(hidden)), num_warps=up.warps,
        **sizes,
    )  # fmt: skip
    block = block_of(ffn, down.block_k)
    _down_one_kernel[(triton.cdiv(hidden, down.block_n),)](
        mid, chosen, kv_slots_T, down_NEF, y_TE if residual_TE is None else residual_TE, y_TE,
        BN=down.block_n, BK=block, HELD=min(down.stages, top_k * triton.cdiv(ffn, block)),
        TOPP=triton.next_power_of_2(top_k), LINE=128 // x_TE.element_size(),
        LINES=triton.next_power_of_2(min(16, max(1, ffn * x_TE.element_size() // 128))),
        RESIDUAL=residual_TE is not None, num_warps=down.warps, **sizes,
    )  # fmt: skip


@triton.jit
def _up_one_kernel(
    x_ptr, chosen_ptr, slots_ptr, w_ptr, mid_ptr,
    TOP: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    real = tl.load(slots_ptr) >= 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if real:
        expert = tl.load(chosen_ptr + TOP + k).to(tl.int32, bitcast=True)
        w_ptr += expert.to(tl.int64) * (2 * F * E)
        row = n[:, None] * E + i[None, :]
        gate = tl.zeros([BN, BK], tl.float32)
        up = tl.zeros([BN, BK], tl.float32)
        for j in tl.static_range(0, E, BK):
            mask = (n < F)[:, None] & (i < E - j)[None, :]
            at = row + j
            g = tl.load(w_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
            u = tl.load(w_ptr + F * E + at, mask=mask, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + i + j, mask=i < E - j, other=0.0).to(tl.float32)[None, :]
            gate += g.to(tl.float32) * x
            up += u.to(tl.float32) * x
        y = tl.sum(gate, 1)
        y = y * tl.sigmoid(y) * tl.sum(up, 1)
        tl.store(mid_ptr + k * F + n, y.to(mid_ptr.dtype.element_ty), mask=n < F)


@triton.jit
def _down_one_kernel(
    mid_ptr, chosen_ptr, slots_ptr, w_ptr, residual_ptr, y_ptr,
    TOP: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TOPP: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    TILES: tl.constexpr = (F + BK - 1) // BK  # of an expert
    row = n[:, None] * F + i[None, :]
    acc = tl.zeros([BN, BK], tl.float32)
    real = tl.load(slots_ptr) >= 0
    if real:
        held = ()
        # The choice is two kernels old, and the kernel between started this one after its own wait:
        # weights are asked for ahead of the wait, the first HELD tiles into registers, the other
        # experts' into the L2 cache.
        for t in tl.static_range(HELD):
            expert = tl.load(chosen_ptr + TOP + t // TILES).to(tl.int32, bitcast=True)
            mask = (n < E)[:, None] & (i < F - t % TILES * BK)[None, :]
            at = w_ptr + expert.to(tl.int64) * (E * F) + row + t % TILES * BK
            w = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
            held = held + (w,)  # type: ignore[assignment]
        if PDL:
            k = tl.arange(0, TOPP)
            left = (k >= HELD // TILES) & (k < TOP)
            experts = tl.load(chosen_ptr + TOP + k, mask=left, other=0.0)
            line = tl.arange(0, BN * LINES)
            line_row, part = tl.program_id(0) * BN + line // LINES, line % LINES * LINE
            base = experts.to(tl.int32, bitcast=True).to(tl.int64)[:, None] * (E * F)
            some = left[:, None] & ((line_row < E) & (part < F))[None, :]
            prefetch(w_ptr + base + (line_row * F + part)[None, :], some)
            gdc_launch_dependents()
            gdc_wait()
        # As many copies of x as rows: spread over the threads once, it would pass through shared
        # memory for every tile, and no load could overtake another.
        x_at = tl.broadcast_to(i[None, :], [BN, BK])
        for t in tl.static_range(TOP * TILES):
            inside = (i < F - t % TILES * BK)[None, :]
            if t < HELD:
                w = held[t]
            else:
                expert = tl.load(chosen_ptr + TOP + t // TILES).to(tl.int32, bitcast=True)
                at = w_ptr + expert.to(tl.int64) * (E * F) + row + t % TILES * BK
                mask = (n < E)[:, None] & inside
                w = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
            x_ptr = mid_ptr + (t // TILES * F + t % TILES * BK)
            x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
            acc += w.to(tl.float32) * (x * tl.load(chosen_ptr + t // TILES))
    elif PDL:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.sum(acc, 1)
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=n < E, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < E)


def many_tokens(
    x_TE: Tensor,
    routing: Routing,
    kv_slots_T: Tensor,
    gate_up_NGE: Tensor,
    down_NEF: Tensor,
    residual_TE: Tensor | None,
    y_TE: Tensor,
    choice: Choice,
    pdl: bool,
) -> None:
    """The mixture of routed tokens: two grouped products and a sum."""
    (num_tokens, hidden), top_k = x_TE.shape, routing.weights_TK.shape[1]
    ffn = down_NEF.shape[2]
    pairs = num_tokens * top_k
    assert pairs * max(hidden, ffn) < 2**31, "offsets are 32 bits wide"
    mid_PF = torch.empty((pairs, ffn), dtype=x_TE.dtype, device=x_TE.device)
    product(x_TE, gate_up_NGE, routing, mid_PF, True, choice, choice.up, pdl)
    out_PE = torch.empty((pairs, hidden), dtype=x_TE.dtype, device=x_TE.device)
    product(mid_PF, down_NEF, routing, out_PE, False, choice, choice.down, pdl)
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel[(num_tokens, triton.cdiv(hidden, block))](
        out_PE, routing.weights_TK, kv_slots_T, y_TE if residual_TE is None else residual_TE, y_TE,
        E=hidden, TOP=top_k, BLOCK=block, RESIDUAL=residual_TE is not None, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip


def product(
    x: Tensor,
    w: Tensor,
    routing: Routing,
    y: Tensor,
    up: bool,
    choice: Choice,
    tiles: Tiles,
    pdl: bool,
) -> None:
    """One grouped product.

    Args:
        x: with `up` the tokens [T, E], else the pairs' [P, F] in the order of routing.pairs_P.
        w: [N, 2 F, E], gate rows before up rows, with `up`; else [N, E, F].
        y: with `up` [P, F], silu(gate) * up, in the order of routing.pairs_P; else [P, E], pair by
            pair.
    """
    columns, inner = y.shape[1], w.shape[2]
    wide = x.element_size() > 2
    block_k = min(tiles.block_k, max(16, triton.next_power_of_2(inner)))
    sizes: dict[str, Any] = {
        "TOP": routing.weights_TK.shape[1],
        "N": columns,
        "K": inner,
        "BM": choice.block_m,
        "BN": tiles.block_n,
        "BK": block_k // 2 if wide and block_k > 16 else block_k,
        "STAGES": 2 if wide else tiles.stages,
        "UP": up,
        "PDL": pdl,
        "num_warps": tiles.warps,
        "launch_pdl": pdl,
    }
    num_tiles = routing.tiles.shape[0]
    operands = (x, w, routing.pairs_P, routing.tiles, y)
    if choice.tall:
        block = tiles.block_n // 2 if up else tiles.block_n
        line = 128 // x.element_size()
        lines = {"LINE": line, "LINES": triton.next_power_of_2(min(16, max(1, inner // line)))}
        _tall_kernel[(triton.cdiv(columns, block), num_tiles)](*operands, **lines, **sizes)
        return
    grid = (triton.cdiv(columns, tiles.block_n), num_tiles)
    _wide_kernel[grid](*operands, **sizes)


@triton.jit
def _tall_kernel(
    x_ptr, w_ptr, pairs_ptr, tiles_ptr, y_ptr,
    TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    UP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BO: tl.constexpr = BN // 2 if UP else BN
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    # Rows of w: those of the tile's columns of y; with UP the gate rows, then the up rows.
    row = tl.arange(0, BN)
    column = tl.program_id(0) * BO + row % BO
    valid = (column < N)[:, None]
    at = (column + tl.where(row < BO, 0, N))[:, None] * K
    if PDL:
        if not UP:  # the tiles are two kernels old
            expert = tl.load(tile_ptr)
            line = tl.arange(0, LINES)[None, :] * LINE
            from_ptr = w_ptr + tl.maximum(expert, 0).to(tl.int64) * (N * K)
            prefetch(from_ptr + at + line, valid & (line < K) & (expert >= 0))
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(tile_ptr)
    if expert >= 0:
        w_ptr += expert.to(tl.int64) * ((2 if UP else 1) * N * K)
        m = tl.load(tile_ptr + 1) + tl.arange(0, BM)
        some = m < tl.load(tile_ptr + 2)
        pair = tl.load(pairs_ptr + m, mask=some, other=0)
        x_at = (pair // TOP if UP else m)[None, :] * K
        k = tl.arange(0, BK)
        acc = tl.zeros([BN, BM], tl.float32)
        for i in tl.range(0, K, BK, num_stages=STAGES):
            inside = k < K - i
            w = tl.load(
                w_ptr + at + (i + k)[None, :],
                mask=valid & inside[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            x = tl.load(
                x_ptr + x_at + (i + k)[:, None], mask=some[None, :] & inside[:, None], other=0.0
            )
            acc = tl.dot(w, x, acc, input_precision="tf32x3")
        if UP:
            gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BO, BM]), [1, 2, 0]))
            acc = gate * tl.sigmoid(gate) * up
        n = tl.program_id(0) * BO + tl.arange(0, BO)
        y_at = (m if UP else pair)[None, :] * N + n[:, None]
        mask = (n < N)[:, None] & some[None, :]
        tl.store(y_ptr + y_at, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _wide_kernel(
    x_ptr, w_ptr, pairs_ptr, tiles_ptr, y_ptr,
    TOP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, UP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(tile_ptr)
    if expert >= 0:
        w_ptr += expert.to(tl.int64) * ((2 if UP else 1) * N * K)
        m = tl.load(tile_ptr + 1) + tl.arange(0, BM)
        some = m < tl.load(tile_ptr + 2)
        pair = tl.load(pairs_ptr + m, mask=some, other=0)
        x_at = (pair // TOP if UP else m)[:, None] * K
        k = tl.arange(0, BK)
        w_at = n[:, None] * K + k[None, :]
        acc = tl.zeros([BM, BN], tl.float32)
        up_acc = tl.zeros([BM, BN], tl.float32)
        for i in tl.range(0, K, BK, num_stages=STAGES):
            inside = (k < K - i)[None, :]
            x = tl.load(x_ptr + x_at + (i + k)[None, :], mask=some[:, None] & inside, other=0.0)
            mask = (n < N)[:, None] & inside
            w = tl.load(w_ptr + w_at + i, mask=mask, other=0.0)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="tf32x3")
            if UP:
                w = tl.load(w_ptr + N * K + w_at + i, mask=mask, other=0.0)
                up_acc = tl.dot(x, tl.trans(w), up_acc, input_precision="tf32x3")
        if UP:
            acc = acc * tl.sigmoid(acc) * up_acc
        y_at = (m if UP else pair)[:, None] * N + n[None, :]
        mask = some[:, None] & (n < N)[None, :]
        tl.store(y_ptr + y_at, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(
    out_ptr, weights_ptr, slots_ptr, residual_ptr, y_ptr,
    E: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < E
    real = tl.load(slots_ptr + token) >= 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y = tl.zeros([BLOCK], tl.float32)
    if RESIDUAL:
        y += tl.load(residual_ptr + token * E + i, mask=inside, other=0.0).to(tl.float32)
    if real:
        for k in tl.static_range(TOP):
            pair = token * TOP + k
            out = tl.load(out_ptr + pair * E + i, mask=inside, other=0.0).to(tl.float32)
            y += out * tl.load(weights_ptr + pair)
    tl.store(y_ptr + token * E + i, y.to(y_ptr.dtype.element_ty), mask=inside)
