"""The kernels of `fullgraph::head_draw`, for Hopper; models/head_draw.py says what they compute.

The first multiplies tiles of rows with tiles of the vocabulary, a loop of programs that stay, and
scores a tile's logits while they are in registers: of each row and tile it stores the largest logit
and the best score, relative to that. Logits go to memory for rows with filters only. The second
joins a row's tiles; of a row with filters it finds the threshold and draws from those tiles that
hold a logit above it.

Knows nothing of how operators are defined. Importing it needs Triton with Gluon.

Legend: L logit rows, V vocab, E hidden, C tiles of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from models.ops import gluon_version  # noqa: F401
from models.ops.draw_triton import LOG2E, MULTIPLIER, join, larger, mix, noise, row_keys
from models.ops.sampling_triton import is_filtered, kth_largest, row_threshold
from models.ops.tiles_gluon import make_bars, mma_layout, tiled

# With 24 rows cuBLAS and the draw are as fast, with fewer faster; more were not measured.
MIN_ROWS, MAX_ROWS = 33, 256
BLOCK_E = 64
# Rows and ids of a tile, depth of the pipeline, programs a multiprocessor: best of 15 at 40 to 256
# rows (bench/NOTES.md).
_ROWS, _IDS, _STAGES, _PROGRAMS = 64, 128, 4, 2
_LANES = 2048  # of the search for a threshold
# Parts of a step's one buffer, anywhere in it: not another kernel for every place.
_SETTINGS = ("floats_ptr", "ints_ptr", "positions_ptr")


def launch(
    x_LE: Tensor,
    weight_VE: Tensor,
    settings: tuple[Tensor, ...],
    out: tuple[Tensor, Tensor],
    min_temperature: float,
) -> None:
    """Fill `out`: ids and whether rows are finite. The settings are `head_draw`'s floats, ints and
    positions; E is a multiple of BLOCK_E; all are contiguous.
    """
    (num_rows, inner), vocab, device = x_LE.shape, weight_VE.shape[0], x_LE.device
    assert all(t.is_contiguous() for t in (x_LE, weight_VE, *settings))
    tiles, row_tiles = triton.cdiv(vocab, _IDS), triton.cdiv(num_rows, _ROWS)
    logits_LV = torch.empty((num_rows, vocab), dtype=torch.float32, device=device)
    tops_LC, best_LC = (
        torch.empty((num_rows, tiles), dtype=torch.float32, device=device) for _ in range(2)
    )
    ids_LC = torch.empty((num_rows, tiles), dtype=torch.int32, device=device)
    shared = (logits_LV, tops_LC, best_LC, ids_LC, *settings)
    sizes = (settings[0].shape[1], settings[1].shape[1], min_temperature, _IDS)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    columns = max(1, min(_PROGRAMS * processors // row_tiles, tiles))
    _head_kernel[(columns * row_tiles,)](
        *(tiled(x_LE, _ROWS, BLOCK_E), tiled(weight_VE, _IDS, BLOCK_E), *shared, num_rows),
        *(vocab, inner, *sizes, _ROWS, BLOCK_E, _STAGES),
        num_warps=4,
    )
    _row_kernel[(num_rows,)](
        *(*shared, *out, vocab, tiles),
        *(*sizes, triton.next_power_of_2(tiles), _LANES),
        num_warps=_LANES // 128,
    )


@gluon.jit
def _refill(pipe, place, at, PARTS: gl.constexpr):
    """Ask for part `at` of the program's work, PARTS of which make a tile."""
    x_desc, w_desc, bars, xs, ws = pipe
    row, first, step, total = place
    slot = at % xs.shape[0]
    more = at < total
    bar = bars.index(slot)
    e = at % PARTS * xs.shape[2]
    hopper.mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes, pred=more)
    w_at = [(first + at // PARTS * step) * ws.shape[1], e]
    hopper.tma.async_copy_global_to_shared(w_desc, w_at, bar, ws.index(slot), pred=more)
    hopper.tma.async_copy_global_to_shared(x_desc, [row, e], bar, xs.index(slot), pred=more)


@gluon.jit
def _product(pipe, place, t, PARTS: gl.constexpr):
    """The logits of the program's tile `t`, float32; parts of the next are asked for."""
    _, _, bars, xs, ws = pipe
    STAGES: gl.constexpr = xs.shape[0]
    BV: gl.constexpr = ws.shape[1]
    acc = hopper.warpgroup_mma_init(gl.zeros([64, BV], gl.float32, mma_layout(BV)))
    at = t * PARTS
    for i in range(PARTS):
        slot = at % STAGES
        hopper.mbarrier.wait(bars.index(slot), at // STAGES & 1)
        acc = hopper.warpgroup_mma(
            xs.index(slot), ws.index(slot).permute((1, 0)), acc, is_async=True
        )
        # The slot before is free once its product is done; this one's is under way meanwhile.
        acc = hopper.warpgroup_mma_init(hopper.warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        if i > 0:
            _refill(pipe, place, at - 1 + STAGES, PARTS)
        at += 1
    x = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    _refill(pipe, place, at - 1 + STAGES, PARTS)
    return x


@triton.jit
def _row_settings(
    floats_ptr, ints_ptr, positions_ptr, row, some, F: tl.constexpr, INTS: tl.constexpr
):
    """Of each row: temperature, top-k, top-p and min-p; the two keys of its hashes."""
    temperature = tl.load(floats_ptr + row * F, mask=some, other=0.0)
    p = tl.load(floats_ptr + row * F + 1, mask=some, other=1.0)
    min_p = tl.load(floats_ptr + row * F + 2, mask=some, other=0.0)
    k = tl.load(ints_ptr + row * INTS, mask=some, other=0)
    seed_lo = tl.load(ints_ptr + row * INTS + 1, mask=some, other=0)
    seed_hi = tl.load(ints_ptr + row * INTS + 2, mask=some, other=0)
    position = tl.load(positions_ptr + row, mask=some, other=0)
    return (temperature, k, p, min_p), row_keys(seed_lo, seed_hi, position)


@gluon.jit
def _scores(x, top, column, offsets, keys, multiplier, scale):
    """Minus the scores of logits x [BL, BV] of the ids from `column` on, relative to `top`."""
    # A NaN's bits would spoil a row that is spoilt; without them the compiler makes the hashes
    # ahead of the product, which needs the registers.
    never = (top.to(gl.uint32, bitcast=True) == 0xFFFFFFFF).to(gl.uint32)
    begin = (column.to(gl.uint32) ^ keys[0] ^ never)[:, None] ^ offsets.to(gl.uint32)[None, :]
    bits = mix(begin, keys[1][:, None], multiplier[:, None])
    # A tile of nothing but -inf would give NaN differences.
    base = gl.where(top == float("-inf"), 0.0, top)
    return (x - base[:, None]) * scale[:, None] + noise(bits)


@gluon.jit(do_not_specialize=["L"], do_not_specialize_on_alignment=_SETTINGS)
def _head_kernel(
    x_desc, w_desc, logits_ptr, tops_ptr, best_ptr, ids_ptr, floats_ptr, ints_ptr, positions_ptr,
    L, V: gl.constexpr, E: gl.constexpr, F: gl.constexpr, INTS: gl.constexpr,
    MIN_TEMPERATURE: gl.constexpr, BV: gl.constexpr, BL: gl.constexpr, BE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    # BV is a power of two: ids of a tile are column | offset, and so are their hashes' beginnings.
    PARTS: gl.constexpr = E // BE
    TILES: gl.constexpr = (V + BV - 1) // BV
    layout: gl.constexpr = mma_layout(BV)
    row_tiles = (L + BL - 1) // BL
    row = gl.program_id(0) % row_tiles * BL
    first = gl.program_id(0) // row_tiles
    step = gl.num_programs(0) // row_tiles
    num_tiles = (TILES - first + step - 1) // step
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BL, BE], x_desc.layout)
    ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BV, BE], w_desc.layout)
    pipe = x_desc, w_desc, make_bars(STAGES), xs, ws
    place = row, first, step, num_tiles * PARTS
    for i in gl.static_range(STAGES):
        _refill(pipe, place, i, PARTS)

    m = row + gl.arange(0, BL, gl.SliceLayout(1, layout))
    some = m < L
    filters, keys = _row_settings(floats_ptr, ints_ptr, positions_ptr, m, some, F, INTS)
    temperature, k, p, min_p = filters
    filtered = is_filtered(temperature, k, p, min_p, V, MIN_TEMPERATURE)
    any_filtered = gl.max(filtered.to(gl.int32), 0) != 0
    # Greedy: one hash for all ids, and a scale at which its noise is nothing.
    greedy = temperature < MIN_TEMPERATURE
    scale = -gl.where(greedy, 2.0**96, LOG2E / gl.where(greedy, 1.0, temperature))
    multiplier = gl.where(greedy, 0, MULTIPLIER - 2**32).to(gl.uint32, bitcast=True)
    offsets = gl.arange(0, BV, gl.SliceLayout(0, layout))
    for t in range(num_tiles):
        x = _product(pipe, place, t, PARTS)
        column = (first + t * step) * BV
        inside = (column + offsets < V)[None, :]
        if V % BV != 0:
            x = gl.where(inside, x, float("-inf"))
        if any_filtered:
            to = (m.to(gl.int64) * V + column)[:, None] + offsets[None, :]
            gl.store(logits_ptr + to, x, mask=filtered[:, None] & inside)
        top = gl.reduce(x, 1, larger)
        scores = _scores(x, top, column, offsets, keys, multiplier, scale)
        best = gl.min(scores, 1)
        where = gl.min(gl.where(scores == best[:, None], offsets[None, :], BV - 1), 1)
        at = m * TILES + first + t * step
        gl.store(tops_ptr + at, top, mask=some)
        gl.store(best_ptr + at, -best, mask=some)
        gl.store(ids_ptr + at, column + where, mask=some)


@triton.jit
def _list(list_ptr, tiles, kept):
    """Store the tiles that are kept, in order, for all threads to read; how many they are."""
    tl.debug_barrier()  # a list before this one may still be read
    tl.store(list_ptr + tl.cumsum(kept.to(tl.int32)) - 1, tiles, mask=kept)
    tl.debug_barrier()
    return tl.sum(kept.to(tl.int32))


@triton.jit
def _gather(logits_ptr, list_ptr, count, V, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Move the listed tiles to the row's beginning. None is overwritten before it is read: the n-th
    listed is the n-th of all, or a later one.
    """
    offsets = tl.arange(0, TILE)[None, :]
    for start in range(0, count, GROUP):
        n = start + tl.arange(0, GROUP)
        ids = tl.load(list_ptr + n, mask=n < count, other=0)[:, None] * TILE + offsets
        x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
        tl.debug_barrier()
        tl.store(logits_ptr + n[:, None] * TILE + offsets, x, mask=(n < count)[:, None])
    tl.debug_barrier()


@triton.jit
def _draw_listed(
    logits_ptr, list_ptr, count, gathered, top, threshold, scale, keys, V,
    TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The id drawn from the logits of the listed tiles that reach `threshold`."""
    out = tl.full([], 0, tl.int32)
    highest = tl.full([], float("-inf"), tl.float32)
    offsets = tl.arange(0, TILE)[None, :]
    for start in range(0, count, GROUP):
        n = start + tl.arange(0, GROUP)
        tiles = tl.load(list_ptr + n, mask=n < count, other=0x7FFFFFFF // TILE)
        ids = tiles[:, None] * TILE + offsets
        at = tl.where(gathered, n, tiles)[:, None] * TILE + offsets
        x = tl.load(logits_ptr + at, mask=ids < V, other=float("-inf"))
        score = (x - top) * scale - noise(mix(ids.to(tl.uint32) ^ keys[0], keys[1], MULTIPLIER))
        score = tl.where((x >= threshold) & (ids < V), score, float("-inf"))
        best = tl.max(score)
        if best > highest:
            highest = best
            out = tl.min(tl.where(score == best, ids, V - 1))
    return out


@triton.jit(do_not_specialize_on_alignment=_SETTINGS)
def _row_kernel(
    logits_ptr, tops_ptr, best_ptr, ids_ptr, floats_ptr, ints_ptr, positions_ptr,
    out_ptr, finite_ptr, V, num_tiles, F: tl.constexpr, INTS: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    some = tiles < num_tiles
    at = row * num_tiles + tiles
    tops = tl.load(tops_ptr + at, mask=some, other=float("-inf"))
    filters, keys = _row_settings(floats_ptr, ints_ptr, positions_ptr, row, True, F, INTS)
    temperature, k, p, min_p = filters
    top = tl.reduce(tops, 0, larger)
    finite = tl.abs(top) < float("inf")
    if finite & is_filtered(temperature, k, p, min_p, V, MIN_TEMPERATURE):
        logits_ptr += row * V
        list_ptr = ids_ptr + row * num_tiles  # in place of the ids, for which it has no use
        GROUP: tl.constexpr = LANES // TILE
        count = num_tiles
        if (k > 0) & (k < num_tiles):
            # k tiles hold a logit of `bound` or more each: the k largest are in such tiles.
            bound = kth_largest(tops, k, top)
            count = _list(list_ptr, tiles, some & (tops >= bound))
        gathered = count < num_tiles
        if gathered:
            _gather(logits_ptr, list_ptr, count, V, TILE, GROUP)
        length = tl.minimum(count * TILE, V)
        threshold = row_threshold(logits_ptr, length, temperature, k, p, min_p, LANES)
        if not gathered:
            count = _list(list_ptr, tiles, some & (tops >= threshold))
        scale = LOG2E / temperature
        out = _draw_listed(
            logits_ptr, list_ptr, count, gathered, top, threshold, scale, keys, V, TILE, GROUP
        )
    else:
        best = tl.load(best_ptr + at, mask=some, other=float("-inf"))
        ids = tl.load(ids_ptr + at, mask=some, other=0x7FFFFFFF)
        out = join(best, tops, ids, top, temperature, MIN_TEMPERATURE)
    tl.store(out_ptr + row, tl.where(finite, out, 0).to(tl.int64))
    tl.store(finite_ptr + row, finite)
