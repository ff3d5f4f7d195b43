"""The Triton kernel of `fullgraph::filter_threshold`; models/ops/sampling.py says what it computes.

One program per row. Floats are compared as integers of the same order, so that a search by halving
ends at an exact logit. A first pass keeps the four largest logits of each of BLOCK interleaved
lanes in registers; every logit above `floor`, the largest of the fourth ones, is then in registers,
and a threshold found above `floor` is exact without reading the row again. Otherwise (k in the
thousands, a very flat row) the search goes on over the row itself, which stays in L2, in quarters.
Rows without filters stop after their settings are read.

Knows nothing of how operators are defined. Importing it needs Triton.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from models.ops.draw_triton import LOG2E

_MAX_BLOCK = 4096

_LOWEST = tl.constexpr(-2139095041)  # _order(-inf)


def launch(
    logits_LV: Tensor, rows: tuple[Tensor, ...], threshold_L: Tensor, min_temperature: float
) -> None:
    """Fill `threshold_L`. `rows` are temperature, top-k, top-p and min-p of each. Vectors may be
    strided (columns of a matrix), a row of logits may not.
    """
    num_rows, vocab = logits_LV.shape
    assert logits_LV.stride(1) == 1, logits_LV.stride()
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocab))
    strides = (logits_LV.stride(0), *(row.stride(0) for row in rows))
    _filter_threshold_kernel[(num_rows,)](
        *(logits_LV, *rows, threshold_L, vocab, *strides),
        MIN_TEMPERATURE=min_temperature,
        BLOCK=block,
        num_warps=max(1, block // 128),
    )


@triton.jit
def _order(x):
    """float32 -> int32 of the same order (no NaN)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The inverse of `_order`, of an int64 that holds an int32."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load(row_ptr, columns, V):
    x = tl.load(row_ptr + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _insert(a, b, c, d, x):
    """a >= b >= c >= d with x put in its place and the least of the five dropped."""
    lower = tl.minimum(a, x)
    a = tl.maximum(a, x)
    x = tl.minimum(b, lower)
    b = tl.maximum(b, lower)
    lower = tl.minimum(c, x)
    c = tl.maximum(c, x)
    d = tl.maximum(d, lower)
    return a, b, c, d


@triton.jit
def _lane_tops(row_ptr, V, BLOCK: tl.constexpr):
    """The four largest logits of every lane, [BLOCK, 2, 2], and the largest of the fourth ones."""
    lanes = tl.arange(0, BLOCK)
    a = tl.full([BLOCK], float("-inf"), tl.float32)
    b = a
    c = a
    d = a
    for start in range(0, V, BLOCK * 4):
        # Four loads in flight before the first is used.
        x0 = _load(row_ptr, start + lanes, V)
        x1 = _load(row_ptr, start + BLOCK + lanes, V)
        x2 = _load(row_ptr, start + 2 * BLOCK + lanes, V)
        x3 = _load(row_ptr, start + 3 * BLOCK + lanes, V)
        a, b, c, d = _insert(a, b, c, d, x0)
        a, b, c, d = _insert(a, b, c, d, x1)
        a, b, c, d = _insert(a, b, c, d, x2)
        a, b, c, d = _insert(a, b, c, d, x3)
    return tl.join(tl.join(a, b), tl.join(c, d)), tl.max(d, 0)


@triton.jit
def _weigh(x, top, scale, MASS: tl.constexpr):
    """exp((x - top) / temperature) with scale = log2(e) / temperature; 1 each to count."""
    if MASS:
        return tl.exp2((x - top) * scale)
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _search_lanes(keys, weights, need, low, high):
    """The largest key in [low, high] at or above which the weights sum to `need`, else `low`."""
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        mass = tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0))
        low = tl.where(mass >= need, middle, low)
        high = tl.where(mass >= need, high, middle - 1)
    return low


@triton.jit
def kth_largest(x, k, top):
    """The k-th largest of x, which has as many and whose largest is `top`."""
    low = tl.full([], _LOWEST, tl.int64)
    ones = tl.full(x.shape, 1.0, tl.float32)
    return _value(_search_lanes(_order(x), ones, k.to(tl.float32), low, _order(top).to(tl.int64)))


@triton.jit
def _row_mass(row_ptr, V, key, top, scale, BLOCK: tl.constexpr):
    """The mass of the row's logits at or above `key`."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK * 2):
        x0 = _load(row_ptr, start + lanes, V)
        x1 = _load(row_ptr, start + BLOCK + lanes, V)
        total += tl.where(_order(x0) >= key.to(tl.int32), _weigh(x0, top, scale, True), 0.0)
        total += tl.where(_order(x1) >= key.to(tl.int32), _weigh(x1, top, scale, True), 0.0)
    return tl.sum(total)


@triton.jit
def _search_row(row_ptr, V, need, low, high, top, scale, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """_search_lanes over the whole row: a pass reads it once and keeps a quarter of the range."""
    lanes = tl.arange(0, BLOCK)
    while low < high:
        step = (high - low + 3) >> 2
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        mass1 = tl.zeros([BLOCK], tl.float32)
        mass2 = tl.zeros([BLOCK], tl.float32)
        mass3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            columns = start + lanes
            x = _load(row_ptr, columns, V)
            keys = _order(x)
            weights = tl.where(columns < V, _weigh(x, top, scale, MASS), 0.0)
            mass1 += tl.where(keys >= first.to(tl.int32), weights, 0.0)
            mass2 += tl.where(keys >= second.to(tl.int32), weights, 0.0)
            mass3 += tl.where(keys >= third.to(tl.int32), weights, 0.0)
        if tl.sum(mass3) >= need:
            low = third
        elif tl.sum(mass2) >= need:
            low = second
            high = third - 1
        elif tl.sum(mass1) >= need:
            low = first
            high = second - 1
        else:
            high = first - 1
    return low


@triton.jit
def _edge(row_ptr, V, temperature, k, p, BLOCK: tl.constexpr):
    """The key of the lowest logit kept by top-k and top-p, and the row's maximum."""
    tops, floor = _lane_tops(row_ptr, V, BLOCK)
    top = tl.max(tops)
    keys = _order(tops)
    floor_key = _order(floor).to(tl.int64)
    high = _order(top).to(tl.int64)
    low = tl.full([], _LOWEST, tl.int64)
    scale = LOG2E / temperature
    finite = (top > float("-inf")) & (top < float("inf"))
    if finite & (k > 0) & (k < V):
        need = k.to(tl.float32)
        low = _search_lanes(keys, _weigh(tops, top, scale, False), need, low, high)
        if low <= floor_key:
            low = _search_row(row_ptr, V, need, low, floor_key, top, scale, False, BLOCK)
    if finite & (p < 1.0):
        weights = _weigh(tops, top, scale, True)
        total = tl.sum(tl.where(keys >= low.to(tl.int32), weights, 0.0))
        if low <= floor_key:
            total = _row_mass(row_ptr, V, low, top, scale, BLOCK)
        need = total * p
        low = _search_lanes(keys, weights, need, low, high)
        if low <= floor_key:
            low = _search_row(row_ptr, V, need, low, floor_key, top, scale, True, BLOCK)
    return low, top, finite


@triton.jit
def is_filtered(temperature, k, p, min_p, V, MIN_TEMPERATURE: tl.constexpr):
    """Whether any filter of the row is on, and it is not greedy."""
    return (temperature >= MIN_TEMPERATURE) & (((k > 0) & (k < V)) | (p < 1.0) | (min_p > 0.0))


@triton.jit
def row_threshold(row_ptr, V, temperature, k, p, min_p, BLOCK: tl.constexpr):
    """The lowest logit kept of a row that is filtered; -inf if its maximum is not finite."""
    key, top, finite = _edge(row_ptr, V, temperature, k, p, BLOCK)
    threshold = tl.full([], float("-inf"), tl.float32)
    if finite:
        threshold = _value(key)
        if min_p > 0.0:
            by_min = top + temperature * tl.log(tl.minimum(min_p, 1.0))
            threshold = tl.maximum(threshold, by_min)
    return threshold


@triton.jit
def _filter_threshold_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, threshold_ptr, V, logits_stride,
    temperature_stride, top_k_stride, top_p_stride, min_p_stride, MIN_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    k = tl.load(top_k_ptr + row * top_k_stride)
    p = tl.load(top_p_ptr + row * top_p_stride)
    min_p = tl.load(min_p_ptr + row * min_p_stride)
    threshold = tl.full([], float("-inf"), tl.float32)
    if is_filtered(temperature, k, p, min_p, V, MIN_TEMPERATURE):
        row_ptr = logits_ptr + row * logits_stride
        threshold = row_threshold(row_ptr, V, temperature, k, p, min_p, BLOCK)
    tl.store(threshold_ptr + row, threshold)
