"""Triton kernels around attention: page lists for FlashInfer and XQA, and a paged decode attention of our own.

All of them find a row's pages in the page table on the device, so no work on the host grows with a sequence.
A row is a decode row if it has one token and that token's index is the row's: decode rows come first in a step.

Programmatic dependent launch (PDL): a kernel waits for the one before it, then lets the next one start. So what was
written two kernels earlier may be read before the wait, and only that.

Knows nothing of torch.library or of plans. Importing it needs Triton.

Legend: T tokens, R rows, S slots, P pages of a sequence, H query heads, K kv heads, G = H / K, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_BLOCK_PAGES = 256


def fill_page_lists(
    page_table_SP: Tensor,
    row_slots_R: Tensor,
    row_starts_R: Tensor,
    row_lens_R: Tensor,
    row_offsets_R: Tensor,
    page_size: int,
    chunks: bool,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    qo_indptr: Tensor | None,
) -> None:
    """FlashInfer's compressed page lists of the first len(last_page_len) rows, all int32, on the device.

    chunks False: decode rows have their pages, every other row has one page, page 0, of one token.
    chunks True: decode rows have no pages, every other row has those of its context and its own tokens; qo_indptr
    gets the rows' offsets.
    """
    num_rows = last_page_len.shape[0]
    _page_lists_kernel[(num_rows,)](
        page_table_SP,
        row_slots_R,
        row_starts_R,
        row_lens_R,
        row_offsets_R,
        kv_indptr,
        kv_indices,
        last_page_len,
        kv_indptr if qo_indptr is None else qo_indptr,
        page_table_SP.stride(0),
        num_rows,
        PAGE=page_size,
        CHUNKS=chunks,
        BLOCK_R=triton.next_power_of_2(num_rows),
        BLOCK_P=_BLOCK_PAGES,
    )


@triton.jit
def _page_lists_kernel(
    table_ptr,
    slots_ptr,
    starts_ptr,
    lens_ptr,
    offsets_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    last_page_len_ptr,
    qo_indptr_ptr,
    table_stride,
    num_rows,
    PAGE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0)
    rows = tl.arange(0, BLOCK_R)
    inside = rows < num_rows
    starts = tl.load(starts_ptr + rows, mask=inside, other=0)
    lens = tl.load(lens_ptr + rows, mask=inside, other=0)
    offsets = tl.load(offsets_ptr + rows, mask=inside, other=-1)
    decodes = (lens == 1) & (offsets == rows)
    kv_lens = tl.where(decodes, 0, starts + lens) if CHUNKS else tl.where(decodes, starts + 1, 1)
    kv_lens = tl.where(inside, kv_lens, 0)
    pages = (kv_lens + PAGE - 1) // PAGE
    before = rows < row
    mine = rows == row
    begin = tl.sum(tl.where(before, pages, 0))
    num_pages = tl.sum(tl.where(mine, pages, 0))
    kv_len = tl.sum(tl.where(mine, kv_lens, 0))
    is_decode = tl.sum(tl.where(mine & decodes, 1, 0))
    tl.store(kv_indptr_ptr + row, begin)
    tl.store(last_page_len_ptr + row, kv_len - tl.maximum(num_pages - 1, 0) * PAGE)
    if row == num_rows - 1:
        tl.store(kv_indptr_ptr + num_rows, begin + num_pages)
    if CHUNKS:
        q_begin = tl.sum(tl.where(before, lens, 0))
        tl.store(qo_indptr_ptr + row, q_begin)
        if row == num_rows - 1:
            tl.store(qo_indptr_ptr + num_rows, q_begin + tl.sum(tl.where(mine, lens, 0)))
        keep = 1
    else:
        keep = is_decode
    slot = tl.load(slots_ptr + row).to(tl.int64)
    for p in range(0, num_pages, BLOCK_P):
        columns = p + tl.arange(0, BLOCK_P)
        mask = columns < num_pages
        page = tl.load(table_ptr + slot * table_stride + columns, mask=mask, other=0)
        tl.store(kv_indices_ptr + begin + columns, page * keep, mask=mask)


def fill_block_table(
    page_table_SP: Tensor,
    row_slots_R: Tensor,
    row_starts_R: Tensor,
    row_lens_R: Tensor,
    row_offsets_R: Tensor,
    page_size: int,
    block_table_RP: Tensor,
    kv_lens_R: Tensor,
) -> None:
    """XQA's block table and lengths of the first len(kv_lens_R) rows; rows that do not decode: length 1, page 0."""
    _block_table_kernel[(kv_lens_R.shape[0],)](
        page_table_SP,
        row_slots_R,
        row_starts_R,
        row_lens_R,
        row_offsets_R,
        block_table_RP,
        kv_lens_R,
        page_table_SP.stride(0),
        block_table_RP.stride(0),
        PAGE=page_size,
        BLOCK_P=_BLOCK_PAGES,
    )


@triton.jit
def _block_table_kernel(
    table_ptr,
    slots_ptr,
    starts_ptr,
    lens_ptr,
    offsets_ptr,
    block_table_ptr,
    kv_lens_ptr,
    table_stride,
    block_stride,
    PAGE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    is_decode = (tl.load(lens_ptr + row) == 1) & (tl.load(offsets_ptr + row) == row)
    kv_len = tl.where(is_decode, tl.load(starts_ptr + row) + 1, 1)
    tl.store(kv_lens_ptr + row, kv_len)
    num_pages = (kv_len + PAGE - 1) // PAGE
    for p in range(0, num_pages, BLOCK_P):
        columns = p + tl.arange(0, BLOCK_P)
        mask = columns < num_pages
        page = tl.load(table_ptr + slot * table_stride + columns, mask=mask, other=0)
        target = block_table_ptr + row.to(tl.int64) * block_stride + columns
        tl.store(target, tl.where(is_decode, page, 0), mask=mask)


def copy_decode_rows(
    source_RHD: Tensor, row_lens_R: Tensor, row_offsets_R: Tensor, out_THD: Tensor
) -> None:
    """out[r] = source[r] for every decode row r < len(source); both contiguous."""
    num_rows, heads, dim = source_RHD.shape
    width = heads * dim
    _copy_rows_kernel[(num_rows,)](
        source_RHD, row_lens_R, row_offsets_R, out_THD, width, BLOCK=triton.next_power_of_2(width)
    )


@triton.jit
def _copy_rows_kernel(source_ptr, lens_ptr, offsets_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if (tl.load(lens_ptr + row) == 1) & (tl.load(offsets_ptr + row) == row):
        columns = tl.arange(0, BLOCK)
        mask = columns < width
        at = row.to(tl.int64) * width + columns
        tl.store(out_ptr + at, tl.load(source_ptr + at, mask=mask), mask=mask)


class DecodeShape(NamedTuple):
    """How the decode kernel cuts a row's tokens: parts at most, least tokens of a part, tokens of a tile."""

    splits: int
    min_chunk: int
    block: int = 64
    stages: int = 3
    warps: int = 4


def decode_shape(num_rows: int, num_kv_heads: int, extend: bool) -> DecodeShape:
    """How to cut rows of unknown length: more programs for few rows, none of them shorter than a tile.

    The number of programs is fixed when a graph is captured; those a row is too short for end at once.
    """
    programs = num_rows * num_kv_heads
    splits = max(1, min(32, 2048 // programs))
    splits = 1 << (splits.bit_length() - 1)
    if extend:  # few of the rows decode, and those may be long
        splits = max(splits, 4)
    min_chunk = 64 if programs <= 64 else 256 if programs <= 512 else 512
    return DecodeShape(splits, min_chunk)


def decode(
    q_THD: Tensor,
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
    partial: Tensor,
    stats: Tensor,
    counters: Tensor,
    out_THD: Tensor,
    pdl: bool,
) -> None:
    """Attention of the decode rows among the first `num_rows`, straight from the page table; no plan.

    Split over the row's tokens; the last program of a (row, kv head) to finish joins the parts (flash decoding).
    A row that does not decode: left alone if `extend`, else written as zeros.

    Args:
        q_THD: rows' strides are free, heads are dense. kv_layer: [pages, 2, page, K, D], contiguous.
        partial: float32, at least num_rows * H * splits * D. stats: float32, num_rows * H * splits * 2.
        counters: int32 zeros, num_rows * K; zeros again when the kernel ends.
        out_THD: contiguous.
    """
    _, _, page_size, num_kv_heads, head_dim = kv_layer.shape
    group = q_THD.shape[1] // num_kv_heads
    splits, min_chunk, block, stages, warps = shape
    _decode_kernel[(num_kv_heads, num_rows, splits)](
        q_THD,
        kv_layer,
        page_table_SP,
        row_slots_R,
        row_starts_R,
        row_lens_R,
        row_offsets_R,
        out_THD,
        partial,
        stats,
        counters,
        scale * 1.4426950408889634,
        q_THD.stride(0),
        page_table_SP.stride(0),
        K=num_kv_heads,
        G=group,
        D=head_dim,
        PAGE=page_size,
        WINDOW=window,
        SPLITS=splits,
        MIN_CHUNK=min_chunk,
        BLOCK=block,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_S=max(2, splits),
        STAGES=stages,
        EXTEND=extend,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


@triton.jit
def _attend(
    q, kv_ptr, table_row_ptr, head, begin, end, scale,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax attention of q [BLOCK_G, D] over tokens [begin, end), not yet divided: acc, max (log2), sum."""
    d = tl.arange(0, D)
    high = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, D], tl.float32)
    for t in tl.range(begin, end, BLOCK, num_stages=STAGES):
        token = t + tl.arange(0, BLOCK)
        mask = token < end
        page = tl.load(table_row_ptr + token // PAGE, mask=mask, other=0).to(tl.int64)
        at = page * (2 * PAGE * K * D) + (token % PAGE) * (K * D) + head * D
        at = at[:, None] + d[None, :]
        k = tl.load(kv_ptr + at, mask=mask[:, None], other=0.0)
        v = tl.load(kv_ptr + at + PAGE * K * D, mask=mask[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(mask[None, :], s, float("-inf"))
        new_high = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - new_high[:, None])
        fade = tl.exp2(high - new_high)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc)
        high = new_high
    return acc, high, total


@triton.jit
def _join(
    out_ptr, partial_ptr, stats_ptr, part, row, head, active,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Join a (row, kv head)'s parts: weights 2 ** (max - max of maxima), as in flash decoding."""
    d = tl.arange(0, D)
    s = tl.arange(0, BLOCK_S)
    valid = s < active
    for g in tl.static_range(G):
        at = (part * SPLITS + s) * G + g
        high = tl.load(stats_ptr + 2 * at, mask=valid, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(stats_ptr + 2 * at + 1, mask=valid, other=0.0, cache_modifier=".cg")
        weight = tl.exp2(high - tl.max(high, 0))
        tile = tl.load(
            partial_ptr + at[:, None] * D + d[None, :],
            mask=valid[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        y = tl.sum(tile * weight[:, None], 0) / tl.sum(total * weight, 0)
        o = out_ptr + (row * K * G + head * G + g) * D + d
        tl.store(o, y.to(out_ptr.dtype.element_ty))


@triton.jit
def _decode_kernel(
    q_ptr, kv_ptr, table_ptr, slots_ptr, starts_ptr, lens_ptr, offsets_ptr,
    out_ptr, partial_ptr, stats_ptr, counters_ptr, scale, q_stride, table_stride,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr, EXTEND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    kv_len = tl.load(starts_ptr + row) + 1
    is_decode = (tl.load(lens_ptr + row) == 1) & (tl.load(offsets_ptr + row) == row)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    low = 0
    if WINDOW > 0:
        low = tl.maximum(kv_len - WINDOW, 0)
    count = kv_len - low
    chunk = (count + SPLITS - 1) // SPLITS
    chunk = tl.maximum((chunk + BLOCK - 1) // BLOCK * BLOCK, MIN_CHUNK)
    active = (count + chunk - 1) // chunk
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, D)
    row64 = row.to(tl.int64)
    out_at = (row64 * K * G + head * G + g)[:, None] * D + d[None, :]
    heads = (g < G)[:, None]
    if is_decode:
        if split < active:
            begin = low + split * chunk
            q_at = row64 * q_stride + (head * G + g)[:, None] * D + d[None, :]
            q = tl.load(q_ptr + q_at, mask=heads, other=0.0)
            acc, high, total = _attend(
                q, kv_ptr, table_ptr + slot * table_stride, head, begin,
                tl.minimum(begin + chunk, kv_len), scale,
                K, D, PAGE, BLOCK, BLOCK_G, STAGES,
            )  # fmt: skip
            if active == 1:
                y = acc / total[:, None]
                tl.store(out_ptr + out_at, y.to(out_ptr.dtype.element_ty), mask=heads)
            else:
                part = row64 * K + head
                at = (part * SPLITS + split) * G + g
                tl.store(partial_ptr + at[:, None] * D + d[None, :], acc, mask=heads)
                tl.store(stats_ptr + 2 * at, high, mask=g < G)
                tl.store(stats_ptr + 2 * at + 1, total, mask=g < G)
                tl.debug_barrier()  # all threads' stores come before the release below
                if tl.atomic_add(counters_ptr + part, 1, sem="acq_rel") == active - 1:
                    tl.debug_barrier()
                    _join(
                        out_ptr, partial_ptr, stats_ptr, part, row64, head, active,
                        K, G, D, SPLITS, BLOCK_S,
                    )  # fmt: skip
                    tl.store(counters_ptr + part, 0)
    elif not EXTEND:  # noqa: SIM102
        if split == 0:  # not `and`: one is a constant, one is not
            zeros = tl.zeros([BLOCK_G, D], tl.float32)
            tl.store(out_ptr + out_at, zeros.to(out_ptr.dtype.element_ty), mask=heads)
