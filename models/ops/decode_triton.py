"""Paged attention of one token a row in Triton: flash decoding that plans itself on the device.

Every program reads the lengths of all rows, and from them works out how all rows are cut into chunks of equal size and
which (row, kv head, chunk) is its own. So long rows spread over the GPU beside short ones, whatever lengths come, in
one captured launch and with nothing planned on the host. Chunks of a row are joined by the last of them to finish.

With FUSED the kernel also does what precedes attention: q/k norm and rotation of the new token, whose key and value
go to the cache from the one program that reads them.

Programmatic dependent launch (PDL): a kernel waits for the one before it, then lets the next one start. So what was
written two kernels earlier may be read before the wait, and only that: lengths and the page table, not q or the new
key. Old keys and values are brought into the L2 cache before the wait.

Knows nothing of torch.library. Importing it needs Triton.

Legend: R rows, S slots, P pages of a sequence, H query heads, K kv heads, G = H / K, D head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2E = 1.4426950408889634
_MAX_CHUNKS = 64  # of one row: what the join holds in registers


class DecodeShape(NamedTuple):
    """How rows are cut: programs beyond one per (row, kv head), least tokens of a chunk, tokens of a tile."""

    extra: int
    min_chunk: int = 64
    block: int = 64
    stages: int = 3
    warps: int = 4


class Scratch(NamedTuple):
    """Partial results and counters of one launch; shared by all buckets and windows.

    partial: float32 [programs * G * D]; stats: float32 [programs * G * 2], max and sum; counters: int32 zeros [R * K],
    zeros again when the kernel ends.
    """

    partial: Tensor
    stats: Tensor
    counters: Tensor

    @classmethod
    def of(
        cls, num_rows: int, heads: int, kv_heads: int, dim: int, device: torch.device
    ) -> Scratch:
        """Enough for every bucket of up to `num_rows` rows."""
        programs = max(
            num_programs(rows, kv_heads, decode_shape(rows, kv_heads))
            for rows in range(1, num_rows + 1)
        )
        group = heads // kv_heads
        floats = {"dtype": torch.float32, "device": device}
        return cls(
            torch.empty(programs * group * dim, **floats),
            torch.empty(programs * group * 2, **floats),
            torch.zeros(num_rows * kv_heads, dtype=torch.int32, device=device),
        )


class NewToken(NamedTuple):
    """What the fused kernel reads instead of queries: see models.ops.fused.qk_norm_rope_kv_write."""

    qkv: Tensor
    rope_RD: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    kv_slots_R: Tensor


def decode_shape(num_rows: int, num_kv_heads: int) -> DecodeShape:
    """How to cut `num_rows` rows of lengths unknown on the host."""
    return DecodeShape(256 if num_rows * num_kv_heads <= 64 else 512)


def num_programs(num_rows: int, num_kv_heads: int, shape: DecodeShape) -> int:
    """Programs that a launch needs: each row may end in a chunk that is not full."""
    return (num_rows + triton.cdiv(shape.extra, num_kv_heads)) * num_kv_heads


def decode(
    query: Tensor | NewToken,
    kv_layer: Tensor,
    page_table_SP: Tensor,
    row_slots_R: Tensor,
    row_starts_R: Tensor,
    row_lens_R: Tensor,
    row_offsets_R: Tensor,
    scale: float,
    window: int,
    num_rows: int,
    extend: bool,
    shape: DecodeShape,
    scratch: Scratch,
    out_RHD: Tensor,
    pdl: bool,
) -> None:
    """Attention of the decode rows among the first `num_rows` tokens.

    A row that does not decode is left alone if `extend`, else written as zeros.

    Args:
        query: [tokens, H, D], heads dense; or the new tokens' projections.
        kv_layer: [pages, 2, page_size, K, D], contiguous; the new tokens' places are written with `NewToken`.
        out_RHD: contiguous, at least num_rows.
    """
    _, _, page_size, num_kv_heads, head_dim = kv_layer.shape
    group = out_RHD.shape[1] // num_kv_heads
    new = query if isinstance(query, NewToken) else None
    q = query.qkv if isinstance(query, NewToken) else query
    normed = new is not None and new.q_norm is not None
    _decode_kernel[(num_programs(num_rows, num_kv_heads, shape),)](
        q,
        kv_layer,
        page_table_SP,
        row_slots_R,
        row_starts_R,
        row_lens_R,
        row_offsets_R,
        out_RHD,
        *scratch,
        q if new is None else new.rope_RD,
        q if new is None or new.q_norm is None else new.q_norm,
        q if new is None or new.k_norm is None else new.k_norm,
        row_slots_R if new is None else new.kv_slots_R,
        0.0 if new is None else new.eps,
        scale * _LOG2E,
        q.stride(0),
        page_table_SP.stride(0),
        num_rows,
        **_constants(num_rows, num_kv_heads, group, head_dim, page_size, shape),
        WINDOW=window,
        EXTEND=extend,
        FUSED=new is not None,
        NORM=normed,
        PDL=pdl,
        num_warps=shape.warps,
        launch_pdl=pdl,
    )


def _constants(
    num_rows: int, num_kv_heads: int, group: int, dim: int, page_size: int, shape: DecodeShape
) -> dict[str, Any]:
    return {
        "K": num_kv_heads,
        "G": group,
        "D": dim,
        "PAGE": page_size,
        "EXTRA": triton.cdiv(shape.extra, num_kv_heads),
        "MIN_CHUNK": shape.min_chunk,
        "MAX_CHUNKS": _MAX_CHUNKS,
        "BLOCK": shape.block,
        "BLOCK_G": max(16, triton.next_power_of_2(group)),
        "BLOCK_R": max(16, triton.next_power_of_2(num_rows)),
        "STAGES": shape.stages,
    }


@triton.jit
def _prefetch(ptr, mask):
    """Ask for the lines that `ptr` points at, where `mask` is set, to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [ptr, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _places(table_row_ptr, token, mask, head, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Offset into the layer of each token's key for a kv head; its value is PAGE * K * D further."""
    page = tl.load(table_row_ptr + token // PAGE, mask=mask, other=0).to(tl.int64)
    return page * (2 * PAGE * K * D) + (token % PAGE) * (K * D) + head * D


@triton.jit
def _attend(
    q_low, q_high, kv_ptr, table_row_ptr, head, begin, end, scale,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax attention over tokens [begin, end), not yet divided: acc, max (of log2), sum.

    q_low, q_high: halves of the queries, [BLOCK_G, D / 2].
    """
    half = tl.arange(0, D // 2)
    d = tl.arange(0, D)
    high = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, D], tl.float32)
    for t in tl.range(begin, end, BLOCK, num_stages=STAGES):
        token = t + tl.arange(0, BLOCK)
        mask = token < end
        at = _places(table_row_ptr, token, mask, head, K, D, PAGE)[:, None]
        k_low = tl.load(kv_ptr + at + half[None, :], mask=mask[:, None], other=0.0)
        k_high = tl.load(kv_ptr + at + D // 2 + half[None, :], mask=mask[:, None], other=0.0)
        v = tl.load(kv_ptr + at + PAGE * K * D + d[None, :], mask=mask[:, None], other=0.0)
        s = tl.dot(q_low, tl.trans(k_low))
        s = tl.dot(q_high, tl.trans(k_high), s) * scale
        s = tl.where(mask[None, :], s, float("-inf"))
        new_high = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - new_high[:, None])
        fade = tl.exp2(high - new_high)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        high = new_high
    return acc, high, total


@triton.jit
def _rotated(x_ptr, rope_ptr, weight_ptr, mask, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Norm and rotate heads whose low halves `x_ptr` [N, D / 2] points at: (low, high), float32."""
    half = tl.arange(0, D // 2)
    low = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + D // 2, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(low * low + high * high, 1) / D + eps)[:, None]
        low *= factor * tl.load(weight_ptr + half).to(tl.float32)[None, :]
        high *= factor * tl.load(weight_ptr + D // 2 + half).to(tl.float32)[None, :]
    cos = tl.load(rope_ptr + half)[None, :]
    sin = tl.load(rope_ptr + D // 2 + half)[None, :]
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _add_new(
    acc, high, total, q_low, q_high, qkv_ptr, rope_ptr, k_norm_ptr, kv_ptr, place, head, eps, scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Write the new token's key and value to the cache and add them to the row's attention."""
    half = tl.arange(0, D // 2)
    d = tl.arange(0, D)
    k_ptr = qkv_ptr + (K * G + head) * D
    low, high_half = _rotated(
        k_ptr + half[None, :], rope_ptr, k_norm_ptr, half[None, :] < D, eps, D, NORM
    )
    dtype = kv_ptr.dtype.element_ty
    k_low, k_high = low.to(dtype), high_half.to(dtype)
    v = tl.load(k_ptr + K * D + d)
    key_ptr = kv_ptr + place * D
    tl.store(key_ptr + half[None, :], k_low)
    tl.store(key_ptr + D // 2 + half[None, :], k_high)
    tl.store(key_ptr + PAGE * K * D + d, v)
    s = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32), 1)
    s = (s + tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32), 1)) * scale
    new_high = tl.maximum(high, s)
    p = tl.exp2(s - new_high)
    fade = tl.exp2(high - new_high)
    total = total * fade + p
    acc = acc * fade[:, None] + p[:, None] * v.to(tl.float32)[None, :]
    return acc, new_high, total


@triton.jit
def _join(
    out_ptr, partial_ptr, stats_ptr, first, count, head,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Join the chunks first .. first + count of a (row, kv head) into `out_ptr` [G, D]."""
    d = tl.arange(0, D)
    every = tl.arange(0, MAX_CHUNKS)
    some = tl.arange(0, 16)
    for g in tl.static_range(G):
        all_ptr = stats_ptr + 2 * (((first + every) * K + head) * G + g)
        highs = tl.load(all_ptr, mask=every < count, other=float("-inf"), cache_modifier=".cg")
        high = tl.max(highs, 0)
        total = tl.zeros([16], tl.float32)
        y = tl.zeros([D], tl.float32)
        for c in range(0, count, 16):
            at = ((first + c + some) * K + head) * G + g
            valid = c + some < count
            x = tl.load(stats_ptr + 2 * at, mask=valid, other=float("-inf"), cache_modifier=".cg")
            weight = tl.exp2(x - high)
            part = tl.load(stats_ptr + 2 * at + 1, mask=valid, other=0.0, cache_modifier=".cg")
            total += part * weight
            tile = tl.load(
                partial_ptr + at[:, None] * D + d[None, :],
                mask=valid[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            y += tl.sum(tile * weight[:, None], 0)
        y = (y / tl.sum(total, 0)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + g * D + d, y)


@triton.jit
def _decode_kernel(
    q_ptr, kv_ptr, table_ptr, slots_ptr, starts_ptr, lens_ptr, offsets_ptr, out_ptr,
    partial_ptr, stats_ptr, counters_ptr, rope_ptr, q_norm_ptr, k_norm_ptr, kv_slots_ptr, eps,
    scale, q_stride, table_stride, num_rows,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, EXTRA: tl.constexpr,
    MIN_CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, EXTEND: tl.constexpr,
    FUSED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) // K
    head = tl.program_id(0) % K
    rows = tl.arange(0, BLOCK_R)
    inside = rows < num_rows
    lens = tl.load(lens_ptr + rows, mask=inside, other=0)
    offsets = tl.load(offsets_ptr + rows, mask=inside, other=-1)
    decodes = (lens == 1) & (offsets == rows)
    ends = tl.where(decodes, tl.load(starts_ptr + rows, mask=inside, other=0) + 1, 0)
    counts = ends
    if WINDOW > 0:
        counts = tl.minimum(counts, WINDOW)
    # As many chunks in excess of one a row as there are extra programs.
    chunk = tl.maximum(
        (tl.sum(counts) + EXTRA - 1) // EXTRA, (tl.max(counts) + MAX_CHUNKS - 1) // MAX_CHUNKS
    )
    chunk = tl.maximum((chunk + BLOCK - 1) // BLOCK * BLOCK, MIN_CHUNK)
    chunks = (counts + chunk - 1) // chunk
    if not EXTEND:
        chunks = tl.where(inside, tl.maximum(chunks, 1), 0)  # padding is written, too
    upto = tl.cumsum(chunks)
    row = tl.sum(tl.where(upto <= item, 1, 0))
    here = rows == row
    end = tl.sum(tl.where(here, ends, 0))
    count = tl.sum(tl.where(here, counts, 0))
    num_chunks = tl.sum(tl.where(here, chunks, 0))
    first = tl.sum(tl.where(here, upto, 0)) - num_chunks
    is_item = row < num_rows
    row = tl.minimum(row, num_rows - 1).to(tl.int64)
    begin = end - count + (item - first) * chunk
    stop = tl.minimum(begin + chunk, end)
    is_last = stop == end
    slot = tl.load(slots_ptr + row).to(tl.int64)
    table_row_ptr = table_ptr + slot * table_stride
    g = tl.arange(0, BLOCK_G)
    heads = (g < G)[:, None]
    half = tl.arange(0, D // 2)
    if FUSED:
        kv_slot = tl.load(kv_slots_ptr + row).to(tl.int64)
    if PDL:
        token = begin + tl.arange(0, BLOCK)
        old = (token < stop) & is_item
        line_at = _places(table_row_ptr, token, old, head, K, D, PAGE)
        for line in tl.static_range(0, D, 64):
            _prefetch(kv_ptr + line_at + line, old)
            _prefetch(kv_ptr + line_at + PAGE * K * D + line, old)
        gdc_wait()
        gdc_launch_dependents()
    out_row_ptr = out_ptr + (row * K + head) * G * D
    if is_item & (count > 0):
        q_row_ptr = q_ptr + row * q_stride
        q_at = q_row_ptr + (head * G + g)[:, None] * D + half[None, :]
        rope_row_ptr = rope_ptr + row * D
        dtype = kv_ptr.dtype.element_ty
        if FUSED:
            q_low, q_high = _rotated(q_at, rope_row_ptr, q_norm_ptr, heads, eps, D, NORM)
            q_low, q_high = q_low.to(dtype), q_high.to(dtype)
        else:
            q_low = tl.load(q_at, mask=heads, other=0.0)
            q_high = tl.load(q_at + D // 2, mask=heads, other=0.0)
        acc, high, total = _attend(
            q_low, q_high, kv_ptr, table_row_ptr, head, begin,
            tl.minimum(stop, end - 1) if FUSED else stop, scale,
            K, D, PAGE, BLOCK, BLOCK_G, STAGES,
        )  # fmt: skip
        if FUSED:  # noqa: SIM102 (one is a constant)
            if is_last:
                place = (kv_slot // PAGE * 2 * PAGE + kv_slot % PAGE) * K + head
                acc, high, total = _add_new(
                    acc, high, total, q_low, q_high, q_row_ptr, rope_row_ptr, k_norm_ptr,
                    kv_ptr, place, head, eps, scale, K, G, D, PAGE, NORM,
                )  # fmt: skip
        d = tl.arange(0, D)
        if num_chunks == 1:
            y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_row_ptr + g[:, None] * D + d[None, :], y, mask=heads)
        else:
            at = (item * K + head) * G + g
            tl.store(partial_ptr + at[:, None] * D + d[None, :], acc, mask=heads)
            tl.store(stats_ptr + 2 * at, high, mask=g < G)
            tl.store(stats_ptr + 2 * at + 1, total, mask=g < G)
            tl.debug_barrier()  # all threads' stores come before the release below
            counter_ptr = counters_ptr + row * K + head
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_chunks - 1:
                tl.debug_barrier()
                _join(
                    out_row_ptr, partial_ptr, stats_ptr, first, num_chunks, head,
                    K, G, D, MAX_CHUNKS,
                )  # fmt: skip
                tl.store(counter_ptr, 0)
    elif is_item:
        d = tl.arange(0, D)
        zeros = tl.zeros([BLOCK_G, D], out_ptr.dtype.element_ty)
        tl.store(out_row_ptr + g[:, None] * D + d[None, :], zeros, mask=heads)
