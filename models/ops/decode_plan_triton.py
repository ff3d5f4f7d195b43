"""How the rows of a decode step are cut into pieces of work for the decode kernel, on the device.

Rows are cut into chunks of about one size, chosen so that there are a given number of chunks beyond
one a row; those of a row are equal. Large chunks come first, so that the programs that start last
are short. Done once a step, by its first layer; every layer's kernel reads the result.

Knows nothing of how operators are defined. Importing it needs Triton.

Legend: R rows, S slots, P pages of a sequence, I pieces of work (items).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

FIELDS = 8  # row, slot, begin, stop, end, apart, first, chunks
MAX_CHUNKS = 64  # of one row, which one program joins


def plan_items(
    row_slots_R: Tensor,
    row_starts_R: Tensor,
    row_lens_R: Tensor,
    row_offsets_R: Tensor,
    window: int,
    num_rows: int,
    extend: bool,
    extra: int,
    min_chunk: int,
    block: int,
    apart: int,
    apart_extra: int,
    items: Tensor,
) -> None:
    """Fill `items`, int32 [I, FIELDS], for the decode rows among the first `num_rows` tokens.

    An item's fields: row (-1: there is no such item), slot, its tokens [begin, stop), end of the
    row's tokens (0: padding, to be written as zeros), whether its heads are apart, number of the
    row's first item, number of the row's chunks.

    Args:
        extend: rows that do not decode get no item, instead of one of no tokens.
        extra: chunks beyond one a row; I must be num_rows + extra.
        min_chunk: tokens of a chunk at least, a multiple of `block`.
        apart, apart_extra: see decode_triton.DecodeShape.
    """
    assert len(items) == num_rows + extra, (items.shape, num_rows, extra)
    _plan_kernel[(len(items),)](
        row_slots_R, row_starts_R, row_lens_R, row_offsets_R, items, num_rows, extra, min_chunk,
        apart, apart_extra,
        BLOCK=block, BLOCK_R=max(16, triton.next_power_of_2(num_rows)), MAX_CHUNKS=MAX_CHUNKS,
        FIELDS=FIELDS, WINDOW=window, EXTEND=extend, num_warps=1 if num_rows <= 64 else 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "extra", "min_chunk", "apart", "apart_extra"])
def _plan_kernel(
    slots_ptr, starts_ptr, lens_ptr, offsets_ptr, items_ptr, num_rows, extra, min_chunk, apart,
    apart_extra,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, MAX_CHUNKS: tl.constexpr, FIELDS: tl.constexpr,
    WINDOW: tl.constexpr, EXTEND: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    rows = tl.arange(0, BLOCK_R)
    inside = rows < num_rows
    lens = tl.load(lens_ptr + rows, mask=inside, other=0)
    offsets = tl.load(offsets_ptr + rows, mask=inside, other=-1)
    decodes = (lens == 1) & (offsets == rows)
    ends = tl.where(decodes, tl.load(starts_ptr + rows, mask=inside, other=0) + 1, 0)
    counts = ends
    if WINDOW > 0:
        counts = tl.minimum(counts, WINDOW)
    heads_apart = tl.max(counts) <= apart
    extra = tl.maximum(tl.where(heads_apart, apart_extra, extra), 1)
    chunk = tl.maximum(
        (tl.sum(counts) + extra - 1) // extra, (tl.max(counts) + MAX_CHUNKS - 1) // MAX_CHUNKS
    )
    chunk = tl.maximum((chunk + BLOCK - 1) // BLOCK * BLOCK, min_chunk)
    chunks = tl.maximum((counts + chunk - 1) // chunk, 1)
    size = tl.maximum(((counts + chunks - 1) // chunks + BLOCK - 1) // BLOCK, 1) * BLOCK
    chunks = (counts + size - 1) // size
    if not EXTEND:
        chunks = tl.where(inside, tl.maximum(chunks, 1), 0)  # padding is written, too
    # Where each row's items begin: rows by the quarter of `chunk` that their size is in.
    quarter = tl.minimum(size * 4 // chunk, 3)
    start = tl.zeros([BLOCK_R], tl.int32)
    before = 0
    for i in tl.static_range(4):
        some = tl.where(quarter == 3 - i, chunks, 0)
        start = tl.where(quarter == 3 - i, before + tl.cumsum(some) - some, start)
        before += tl.sum(some)
    here = (start <= item) & (item < start + chunks)
    row = tl.sum(tl.where(here, rows, 0)) + tl.where(item < before, 0, num_rows)
    end = tl.sum(tl.where(here, ends, 0))
    count = tl.sum(tl.where(here, counts, 0))
    num_chunks = tl.sum(tl.where(here, chunks, 0))
    first = tl.sum(tl.where(here, start, 0))
    size = tl.sum(tl.where(here, size, 0))
    begin = end - count + (item - first) * size
    stop = tl.minimum(begin + size, end)
    is_item = row < num_rows
    slot = tl.load(slots_ptr + row, mask=is_item, other=0)
    item_ptr = items_ptr + item * FIELDS
    tl.store(item_ptr, tl.where(is_item, row, -1))
    tl.store(item_ptr + 1, slot)
    tl.store(item_ptr + 2, begin)
    tl.store(item_ptr + 3, stop)
    tl.store(item_ptr + 4, end)
    tl.store(item_ptr + 5, heads_apart.to(tl.int32))
    tl.store(item_ptr + 6, first)
    tl.store(item_ptr + 7, num_chunks)
