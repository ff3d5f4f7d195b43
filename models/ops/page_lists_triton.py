"""Triton kernels that turn the page table into what FlashInfer and XQA read: page lists, block
tables.

They find a row's pages on the device, so that no work on the host grows with a sequence. A row is a
decode row if it has one token and that token's index is the row's: decode rows come first in a
step.

Knows nothing of how operators are defined or of plans. Importing it needs Triton.

Legend: T tokens, R rows, S slots, P pages of a sequence, H query heads, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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
    """FlashInfer's compressed page lists of the first len(last_page_len) rows, all int32, on the
    device.

    chunks False: decode rows have their pages, every other row has one page, page 0, of one token.
    chunks True: decode rows have no pages, every other row has those of its context and its own
        tokens; qo_indptr gets the rows' offsets, but 0 for decode rows: the last of them has all
        their tokens.
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
        tl.store(qo_indptr_ptr + row, q_begin * (1 - is_decode))
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
    """XQA's block table and lengths of the first len(kv_lens_R) rows; rows that do not decode:
    length 1, page 0.
    """
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


def clear_padding(out_THD: Tensor, row_lens_R: Tensor) -> None:
    """Zero the tokens of `out_THD` (contiguous) of no row: those after the sum of the lengths."""
    num_tokens, heads, dim = out_THD.shape
    num_rows, block = row_lens_R.shape[0], 4
    _clear_padding_kernel[(triton.cdiv(num_tokens, block),)](
        out_THD,
        row_lens_R,
        num_tokens,
        heads * dim,
        num_rows,
        BLOCK=block,
        WIDTH=triton.next_power_of_2(heads * dim),
        BLOCK_R=triton.next_power_of_2(num_rows),
    )


@triton.jit
def _clear_padding_kernel(
    out_ptr, lens_ptr, num_tokens, width, num_rows,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK_R)
    used = tl.sum(tl.load(lens_ptr + rows, mask=rows < num_rows, other=0))
    first = tl.program_id(0) * BLOCK
    if first + BLOCK > used:
        token = (first + tl.arange(0, BLOCK))[:, None]
        i = tl.arange(0, WIDTH)[None, :]
        mask = (token >= used) & (token < num_tokens) & (i < width)
        zeros = tl.zeros([BLOCK, WIDTH], out_ptr.dtype.element_ty)
        tl.store(out_ptr + token.to(tl.int64) * width + i, zeros, mask=mask)
