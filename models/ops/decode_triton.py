"""Paged attention of one token a row in Triton: flash decoding over pieces of work planned on the
device.

decode_plan_triton.py cuts all rows into chunks of one size once a step; every program takes one
chunk of one kv head. So long rows spread over the GPU beside short ones, whatever lengths come, in
one captured launch and with nothing planned on the host. Chunks of a row are joined by the last of
them to finish.

With FUSED the kernel also does what precedes attention: q/k norm and rotation of the new token,
whose key and value go to the cache from the one program that reads them.

Programmatic dependent launch (PDL): this kernel waits for the one before it, then lets the next one
start; kernels of one row may let the next one start before they wait. So what was there when the
layer before attended may be read ahead of the wait, and only that: the plan (except in the first
layer, which runs right behind it) and the page table, not q or the new key. The programs that start
first bring old keys and values into the L2 cache before the wait.

Knows nothing of how operators are defined. Importing it needs Triton.

Legend: R rows, S slots, P pages of a sequence, H query heads, K kv heads, G = H / K, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.ops.attend_triton import (
    attend,
    begin_new,
    halves,
    join,
    padded,
    page_of,
    place,
    prefetch,
    rotated,
)
from models.ops.decode_plan_triton import FIELDS, plan_items

_LOG2E = 1.4426950408889634
_FIRST_PROGRAMS = 1056  # about what can start while the kernel before still runs
_BRING = 1  # tiles that each of them brings into the L2 cache


class DecodeShape(NamedTuple):
    """How rows are cut.

    Attributes:
        extra: chunks beyond one a row. min_chunk: least tokens of a chunk. block: of a tile.
        stages, warps: of a program.
        apart: the query heads of a kv head are programs of their own when no row has more tokens.
            Then a head's keys are read for each of them, from the L2 cache.
        apart_extra: `extra` in that case, at most that. All programs should find room at once, or
            the kernel that follows starts late.
    """

    extra: int
    min_chunk: int = 64
    block: int = 16
    stages: int = 4
    warps: int = 1
    apart: int = 0
    apart_extra: int = 0


class Scratch(NamedTuple):
    """Partial results and counters of one launch; shared by all buckets and windows.

    partial: float32 [items * H * D]; stats: float32 [items * H * 2], max and sum; counters:
        int32 zeros [R * H], zeros again when the kernel ends.
    """

    partial: Tensor
    stats: Tensor
    counters: Tensor

    @classmethod
    def of(
        cls, num_rows: int, heads: int, kv_heads: int, dim: int, device: torch.device
    ) -> Scratch:
        """Enough for every bucket of up to `num_rows` rows."""
        items = max(
            r + decode_shape(r, kv_heads, heads // kv_heads).extra for r in range(1, num_rows + 1)
        )
        return cls(
            torch.empty(items * heads * dim, dtype=torch.float32, device=device),
            torch.empty(items * heads * 2, dtype=torch.float32, device=device),
            torch.zeros(num_rows * heads, dtype=torch.int32, device=device),
        )


class NewToken(NamedTuple):
    """What the fused kernel reads instead of queries; see ops.fused.qk_norm_rope_kv_write."""

    qkv: Tensor
    rope_RD: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    kv_slots_R: Tensor


def decode_shape(num_rows: int, num_kv_heads: int, group: int) -> DecodeShape:
    """How to cut `num_rows` rows of lengths unknown on the host, `group` query heads a kv head;
    measured on an H200.
    """
    rows = num_rows * num_kv_heads
    if rows <= 64:
        shape = DecodeShape(triton.cdiv(256, num_kv_heads), min_chunk=32)
        if rows > 8 or group == 1:
            return shape
        # The GPU is not full, and one warp would join the chunks of a whole group.
        most = min(shape.extra, _FIRST_PROGRAMS // (num_kv_heads * group) - num_rows)
        return shape._replace(apart=32768 // rows, apart_extra=max(1, most))
    if rows <= 192:
        return DecodeShape(triton.cdiv(512, num_kv_heads))
    if rows < 512:
        return DecodeShape(triton.cdiv(1024, num_kv_heads))
    # So many rows fill the GPU by themselves; those of a few hundred tokens stay whole.
    return DecodeShape(triton.cdiv(2048, num_kv_heads), min_chunk=128)


class Cut(NamedTuple):
    """How a bucket's rows are cut: the shape, the plan (see decode_plan_triton.py), the window."""

    shape: DecodeShape
    items: Tensor
    window: int

    @classmethod
    def of(cls, num_rows: int, window: int, shape: DecodeShape, device: torch.device) -> Cut:
        """With room for the plan of `num_rows` rows."""
        size = (num_rows + shape.extra, FIELDS)
        return cls(shape, torch.empty(size, dtype=torch.int32, device=device), window)


def plan(
    row_slots_R: Tensor,
    row_starts_R: Tensor,
    row_lens_R: Tensor,
    row_offsets_R: Tensor,
    num_rows: int,
    extend: bool,
    cut: Cut,
) -> None:
    """Cut the step's rows; must come before the first layer's `decode`."""
    rows = (row_slots_R, row_starts_R, row_lens_R, row_offsets_R)
    shape = cut.shape
    sizes = (shape.extra, shape.min_chunk, shape.block, shape.apart, shape.apart_extra)
    plan_items(*rows, cut.window, num_rows, extend, *sizes, cut.items)


def decode(
    query: Tensor | NewToken,
    kv_layer: Tensor,
    page_table_SP: Tensor,
    cut: Cut,
    scratch: Scratch,
    scale: float,
    first_layer: bool,
    out_RHD: Tensor,
    pdl: bool,
) -> None:
    """Attention of the planned rows; others are left alone, padding in the plan becomes zeros.

    Args:
        query: [tokens, H, D], heads dense; or the new tokens' projections.
        kv_layer: [pages, 2, page_size, K, D], contiguous; the new tokens' places are written with
            `NewToken`.
        first_layer: the plan was made by the kernel just before.
        out_RHD: contiguous, at least the rows planned.
    """
    _, _, page_size, num_kv_heads, head_dim = kv_layer.shape
    group = out_RHD.shape[1] // num_kv_heads
    new = query if isinstance(query, NewToken) else None
    q = query.qkv if isinstance(query, NewToken) else query
    apart = cut.shape.apart > 0
    # Items that lead: all there are if heads are apart, else the programs of a group take the rest.
    lead = len(cut.items) - (cut.shape.extra - cut.shape.apart_extra if apart else 0)
    assert lead * group >= len(cut.items), cut.shape
    # Registers a thread that hold chunks to be joined.
    joined = 128 if apart and group >= 4 and head_dim <= 128 else 64
    _decode_kernel[(lead * num_kv_heads * (group if apart else 1),)](
        q, kv_layer, page_table_SP, cut.items, out_RHD, *scratch, q if new is None else new.rope_RD,
        q if new is None or new.q_norm is None else new.q_norm,
        q if new is None or new.k_norm is None else new.k_norm,
        cut.items if new is None else new.kv_slots_R, 0.0 if new is None else new.eps,
        scale * _LOG2E, q.stride(0), page_table_SP.stride(0), int(first_layer), len(cut.items),
        K=num_kv_heads, G=group, D=head_dim, PAGE=page_size, BLOCK=cut.shape.block,
        BLOCK_G=triton.next_power_of_2(group), JOINED=joined * 32 * cut.shape.warps, APART=apart,
        STAGES=cut.shape.stages, FUSED=new is not None,
        NORM=new is not None and new.q_norm is not None, PDL=pdl, FIELDS=FIELDS,
        FIRST=_FIRST_PROGRAMS, BRING=_BRING, ALIGNED=cut.window == 0, num_warps=cut.shape.warps,
        launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _bring(
    kv_ptr, table_row_ptr, head, begin, stop, K: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Bring the first tiles of keys and values into the L2 cache."""
    for i in tl.static_range(TILES):
        first = begin // BLOCK * BLOCK + i * BLOCK
        page = page_of(table_row_ptr, first, stop, PAGE, BLOCK)
        at, tokens = place(page, first, head, K, D, PAGE, BLOCK)
        mask = first + tl.arange(0, BLOCK) < stop
        for line in tl.static_range(0, D, 64):  # 128 bytes
            prefetch(kv_ptr + at + line + tokens, mask)
            prefetch(kv_ptr + at + PAGE * K * D + line + tokens, mask)


@triton.jit
def _finish(
    acc, high, total, out_ptr, partial_ptr, stats_ptr, counter_ptr, index, first, num_chunks, head,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_G: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Write a chunk's result: to `out_ptr` [G, D] if the row has no other, else to be joined."""
    g = tl.arange(0, BLOCK_Q)
    d = tl.arange(0, D)
    heads = (g < G)[None, :]
    sums = tl.sum(total, 0)
    if num_chunks == 1:
        y = (acc * (1.0 / sums)[None, :]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + g[None, :] * D + d[:, None], y, mask=heads)
    else:
        at = (index * K + head) * G + g
        tl.store(partial_ptr + at[None, :] * D + d[:, None], acc, mask=heads)
        tl.store(stats_ptr + 2 * at, high, mask=g < G)
        tl.store(stats_ptr + 2 * at + 1, sums, mask=g < G)
        tl.debug_barrier()  # all threads' stores come before the release below
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_chunks - 1:
            tl.debug_barrier()
            wide: tl.constexpr = max(1, JOINED // (BLOCK_G * D))
            join(
                out_ptr, partial_ptr, stats_ptr, first, num_chunks, head, K, G, D, BLOCK_G, wide
            )  # fmt: skip
            tl.store(counter_ptr, 0)


@triton.jit
def _attend_item(
    q_row_ptr, kv_ptr, table_row_ptr, out_row_ptr, partial_ptr, stats_ptr, counter_ptr, rope_ptr,
    q_norm_ptr, k_norm_ptr, kv_slot_ptr, eps, scale, page, begin, stop, end, index, first,
    num_chunks, head, heads,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ALL: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr, JOINED: tl.constexpr,
    FUSED: tl.constexpr, NORM: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A chunk's attention of the `heads`-th G of ALL query heads, of kv head `head`."""
    BLOCK_Q: tl.constexpr = max(8, BLOCK_G)
    g = tl.arange(0, BLOCK_G)[:, None]
    half = tl.arange(0, D // 2)[None, :]
    q_low, q_high = halves(q_row_ptr + (heads * G + g) * D + half, g < G, D)
    high = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK, BLOCK_Q], tl.float32)
    acc = tl.zeros([D, BLOCK_Q], tl.float32)
    if FUSED:
        # All loads first: each that waits for another costs as much as a tile.
        k_ptr = q_row_ptr + (ALL + head) * D
        k_low, k_high = halves(k_ptr + half, half < D, D)
        v = tl.load(k_ptr + K * D + tl.arange(0, D))
        kv_slot = tl.load(kv_slot_ptr).to(tl.int64)
        cos, sin = halves(rope_ptr + half, half < D, D)
        q_low_w, q_high_w = halves(q_norm_ptr + half, half < D, D)
        k_low_w, k_high_w = halves(k_norm_ptr + half, half < D, D)
        dtype = kv_ptr.dtype.element_ty
        low, high_half = rotated(q_low, q_high, q_low_w, q_high_w, cos, sin, eps, D, NORM)
        q_low, q_high = low.to(dtype), high_half.to(dtype)
        if stop == end:
            key_low, key_high = rotated(k_low, k_high, k_low_w, k_high_w, cos, sin, eps, D, NORM)
            kv_place = (kv_slot // PAGE * 2 * PAGE + kv_slot % PAGE) * K + head
            acc, high, total = begin_new(
                q_low, q_high, key_low.to(dtype), key_high.to(dtype), v, kv_ptr, kv_place,
                scale, K, D, PAGE, BLOCK, BLOCK_Q,
            )  # fmt: skip
            stop = end - 1
    acc, high, total = attend(
        acc, high, total, tl.trans(padded(q_low, BLOCK_Q)), tl.trans(padded(q_high, BLOCK_Q)),
        kv_ptr, table_row_ptr, page, head, begin, stop, scale, K, D, PAGE, BLOCK, STAGES, ALIGNED,
    )  # fmt: skip
    _finish(
        acc, high, total, out_row_ptr + heads * G * D, partial_ptr, stats_ptr, counter_ptr + heads,
        index, first, num_chunks, heads, ALL // G, G, D, BLOCK_Q, BLOCK_G, JOINED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_layer", "num_items"])
def _decode_kernel(
    q_ptr, kv_ptr, table_ptr, items_ptr, out_ptr, partial_ptr, stats_ptr, counters_ptr,
    rope_ptr, q_norm_ptr, k_norm_ptr, kv_slots_ptr, eps, scale, q_stride, table_stride,
    first_layer, num_items,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr, JOINED: tl.constexpr, APART: tl.constexpr, STAGES: tl.constexpr,
    FUSED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, FIELDS: tl.constexpr,
    FIRST: tl.constexpr, BRING: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = K * G
    SPLIT: tl.constexpr = G if APART else 1
    head = tl.program_id(0) // SPLIT % K
    nth = tl.program_id(0) % SPLIT  # query head, or which of G items
    index = tl.program_id(0) // (K * SPLIT)
    if PDL:  # noqa: SIM102 (one is a constant)
        if first_layer != 0:
            gdc_wait()
    whole = True
    if APART:
        whole = tl.load(items_ptr + 5) == 0
        index += tl.where(whole, nth * (tl.num_programs(0) // (K * SPLIT)), 0)
    item_ptr = items_ptr + tl.minimum(index, num_items - 1) * FIELDS
    row = tl.where(index < num_items, tl.load(item_ptr), -1).to(tl.int64)
    slot = tl.load(item_ptr + 1).to(tl.int64)
    begin = tl.load(item_ptr + 2)
    stop = tl.load(item_ptr + 3)
    end = tl.load(item_ptr + 4)
    first = tl.load(item_ptr + 6)
    num_chunks = tl.load(item_ptr + 7)
    table_row_ptr = table_ptr + slot * table_stride
    page = page_of(table_row_ptr, begin // BLOCK * BLOCK, stop, PAGE, BLOCK)
    if PDL:
        if (tl.program_id(0) < FIRST) & (row >= 0):
            _bring(kv_ptr, table_row_ptr, head, begin, stop, K, D, PAGE, BLOCK, BRING)
        gdc_wait()
        gdc_launch_dependents()
    q_row_ptr = q_ptr + row * q_stride
    out_row_ptr = out_ptr + row * H * D
    counter_ptr = counters_ptr + row * H
    rope_row_ptr = rope_ptr + row * D
    if (row >= 0) & (end > 0):
        if whole:
            _attend_item(
                q_row_ptr, kv_ptr, table_row_ptr, out_row_ptr, partial_ptr, stats_ptr, counter_ptr,
                rope_row_ptr, q_norm_ptr, k_norm_ptr, kv_slots_ptr + row, eps, scale, page, begin,
                stop, end, index, first, num_chunks, head, head,
                K, G, D, H, PAGE, BLOCK, BLOCK_G, STAGES, JOINED, FUSED, NORM, ALIGNED,
            )  # fmt: skip
        else:
            _attend_item(
                q_row_ptr, kv_ptr, table_row_ptr, out_row_ptr, partial_ptr, stats_ptr, counter_ptr,
                rope_row_ptr, q_norm_ptr, k_norm_ptr, kv_slots_ptr + row, eps, scale, page, begin,
                stop, end, index, first, num_chunks, head, head * G + nth,
                K, 1, D, H, PAGE, BLOCK, 1, STAGES, JOINED, FUSED, NORM, ALIGNED,
            )  # fmt: skip
    elif (row >= 0) & (whole | (nth == 0)):
        g = tl.arange(0, BLOCK_G)[:, None]
        zeros = tl.zeros([BLOCK_G, D], out_ptr.dtype.element_ty)
        at = (head * G + g) * D + tl.arange(0, D)[None, :]
        tl.store(out_row_ptr + at, zeros, mask=g < G)
