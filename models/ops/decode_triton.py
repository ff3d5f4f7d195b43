"""Paged attention of one token a row in Triton: flash decoding that plans itself on the device.

Every program reads the lengths of all rows, and from them works out how all rows are cut into
chunks of equal size and which (row, kv head, chunk) is its own. So long rows spread over the GPU
beside short ones, whatever lengths come, in one captured launch and with nothing planned on the
host. Chunks of a row are joined by the last of them to finish.

With FUSED the kernel also does what precedes attention: q/k norm and rotation of the new token,
whose key and value go to the cache from the one program that reads them.

Programmatic dependent launch (PDL): a kernel waits for the one before it, then lets the next one
start. So what was written two kernels earlier may be read before the wait, and only that: lengths
and the page table, not q or the new key. Old keys and values are brought into the L2 cache before
the wait.

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

from models.ops.attend_triton import add_new, attend, join, places, prefetch, rotated

_LOG2E = 1.4426950408889634
_MAX_CHUNKS = 64  # of one row: what the join holds in registers


class DecodeShape(NamedTuple):
    """How rows are cut: programs beyond one per (row, kv head), least tokens of a chunk, tokens of
    a tile.
    """

    extra: int
    min_chunk: int = 64
    block: int = 64
    stages: int = 3
    warps: int = 4


class Scratch(NamedTuple):
    """Partial results and counters of one launch; shared by all buckets and windows.

    partial: float32 [programs * G * D]; stats: float32 [programs * G * 2], max and sum; counters:
        int32 zeros [R * K],
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
        return cls(
            torch.empty(programs * group * dim, dtype=torch.float32, device=device),
            torch.empty(programs * group * 2, dtype=torch.float32, device=device),
            torch.zeros(num_rows * kv_heads, dtype=torch.int32, device=device),
        )


class NewToken(NamedTuple):
    """What the fused kernel reads instead of queries; see ops.fused.qk_norm_rope_kv_write."""

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
        kv_layer: [pages, 2, page_size, K, D], contiguous; the new tokens' places are written with
            `NewToken`.
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
def _cut(
    item, starts_ptr, lens_ptr, offsets_ptr, num_rows,
    EXTRA: tl.constexpr, MIN_CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr, WINDOW: tl.constexpr, EXTEND: tl.constexpr,
):  # fmt: skip
    """Cut all rows into chunks of one size, and say which chunk is number `item`.

    Returns: row (num_rows or more: no such chunk), tokens [begin, stop) of the chunk, end of the
    row's tokens, number of the row's first chunk, chunks of the row (padding: one of no tokens).
    """
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
    begin = end - count + (item - first) * chunk
    return row, begin, tl.minimum(begin + chunk, end), end, first, num_chunks


@triton.jit
def _bring(
    kv_ptr, table_row_ptr, head, begin, stop,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bring the first tile of keys and values into the L2 cache."""
    token = begin + tl.arange(0, BLOCK)
    mask = token < stop
    at = places(table_row_ptr, token, mask, head, K, D, PAGE)
    for line in tl.static_range(0, D, 64):  # 128 bytes
        prefetch(kv_ptr + at + line, mask)
        prefetch(kv_ptr + at + PAGE * K * D + line, mask)


@triton.jit
def _finish(
    acc, high, total, out_ptr, partial_ptr, stats_ptr, counter_ptr, item, first, num_chunks, head,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write a chunk's result: to `out_ptr` [G, D] if the row has no other, else to be joined."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, D)
    heads = (g < G)[:, None]
    if num_chunks == 1:
        y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + g[:, None] * D + d[None, :], y, mask=heads)
    else:
        at = (item * K + head) * G + g
        tl.store(partial_ptr + at[:, None] * D + d[None, :], acc, mask=heads)
        tl.store(stats_ptr + 2 * at, high, mask=g < G)
        tl.store(stats_ptr + 2 * at + 1, total, mask=g < G)
        tl.debug_barrier()  # all threads' stores come before the release below
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_chunks - 1:
            tl.debug_barrier()
            join(
                out_ptr, partial_ptr, stats_ptr, first, num_chunks, head, K, G, D, MAX_CHUNKS
            )  # fmt: skip
            tl.store(counter_ptr, 0)


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
    row, begin, stop, end, first, num_chunks = _cut(
        item, starts_ptr, lens_ptr, offsets_ptr, num_rows,
        EXTRA, MIN_CHUNK, MAX_CHUNKS, BLOCK, BLOCK_R, WINDOW, EXTEND,
    )  # fmt: skip
    is_item = row < num_rows
    row = tl.minimum(row, num_rows - 1).to(tl.int64)
    stop = tl.where(is_item, stop, begin)
    table_row_ptr = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
    kv_slot = 0
    if FUSED:
        kv_slot = tl.load(kv_slots_ptr + row).to(tl.int64)
    if PDL:
        _bring(kv_ptr, table_row_ptr, head, begin, stop, K, D, PAGE, BLOCK)
        gdc_wait()
        gdc_launch_dependents()
    out_row_ptr = out_ptr + (row * K + head) * G * D
    g = tl.arange(0, BLOCK_G)
    heads = (g < G)[:, None]
    if is_item & (end > 0):
        q_row_ptr = q_ptr + row * q_stride
        q_at = q_row_ptr + (head * G + g)[:, None] * D + tl.arange(0, D // 2)[None, :]
        rope_row_ptr = rope_ptr + row * D
        dtype = kv_ptr.dtype.element_ty
        if FUSED:
            q_low, q_high = rotated(q_at, rope_row_ptr, q_norm_ptr, heads, eps, D, NORM)
            q_low, q_high = q_low.to(dtype), q_high.to(dtype)
        else:
            q_low = tl.load(q_at, mask=heads, other=0.0)
            q_high = tl.load(q_at + D // 2, mask=heads, other=0.0)
        acc, high, total = attend(
            q_low, q_high, kv_ptr, table_row_ptr, head, begin,
            tl.minimum(stop, end - 1) if FUSED else stop, scale,
            K, D, PAGE, BLOCK, BLOCK_G, STAGES,
        )  # fmt: skip
        if FUSED:  # noqa: SIM102 (one is a constant)
            if stop == end:
                place = (kv_slot // PAGE * 2 * PAGE + kv_slot % PAGE) * K + head
                acc, high, total = add_new(
                    acc, high, total, q_low, q_high, q_row_ptr, rope_row_ptr, k_norm_ptr,
                    kv_ptr, place, head, eps, scale, K, G, D, PAGE, NORM,
                )  # fmt: skip
        _finish(
            acc, high, total, out_row_ptr, partial_ptr, stats_ptr, counters_ptr + row * K + head,
            item, first, num_chunks, head, K, G, D, BLOCK_G, MAX_CHUNKS,
        )  # fmt: skip
    elif is_item:
        d = tl.arange(0, D)
        zeros = tl.zeros([BLOCK_G, D], out_ptr.dtype.element_ty)
        tl.store(out_row_ptr + g[:, None] * D + d[None, :], zeros, mask=heads)
