"""The Triton kernels of `fullgraph::draw`; models/draw.py says what they compute.

One program per row and chunk of ids finds the chunk's best score relative to the chunk's largest
logit; a second kernel takes the best chunk. The hash works on 32 bits, scores are counted in bits,
and the logarithms are the GPU's own: some 35 instructions an id.

Knows nothing of how operators are defined. Importing it needs Triton.

Legend: L logit rows, V vocab, C chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 512  # as many as keep the GPU busy, if the row is long enough
_LOG2E = tl.constexpr(1.4426950408889634)


def launch(
    logits_LV: Tensor,
    threshold_L: Tensor,
    temperature_L: Tensor,
    seed_lo_L: Tensor,
    seed_hi_L: Tensor,
    positions_L: Tensor,
    ids_L: Tensor,
    finite_L: Tensor,
    min_temperature: float,
) -> None:
    """Fill `ids_L` and `finite_L`. Vectors may be strided, a row of logits may not."""
    num_rows, vocab = logits_LV.shape
    assert logits_LV.stride(1) == 1, logits_LV.stride()
    block = 2048
    while block > 512 and num_rows * triton.cdiv(vocab, block) < _PROGRAMS:
        block //= 2
    chunks = triton.cdiv(vocab, block)
    scores = torch.empty((num_rows, chunks, 2), dtype=torch.float32, device=logits_LV.device)
    ids = torch.empty((num_rows, chunks), dtype=torch.int32, device=logits_LV.device)
    _chunk_kernel[(chunks, num_rows)](
        logits_LV,
        threshold_L,
        temperature_L,
        seed_lo_L,
        seed_hi_L,
        positions_L,
        scores,
        ids,
        vocab,
        logits_LV.stride(0),
        threshold_L.stride(0),
        temperature_L.stride(0),
        seed_lo_L.stride(0),
        seed_hi_L.stride(0),
        positions_L.stride(0),
        chunks,
        MIN_TEMPERATURE=min_temperature,
        BLOCK=block,
        num_warps=4,
    )
    _row_kernel[(num_rows,)](
        scores,
        ids,
        temperature_L,
        ids_L,
        finite_L,
        temperature_L.stride(0),
        chunks,
        MIN_TEMPERATURE=min_temperature,
        BLOCK=triton.next_power_of_2(chunks),
        num_warps=1,
    )


@triton.jit
def _mix(x, key):
    """lowbias32, `key` mixed in between the two multiplications; uint32."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15) ^ key
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _log2(x):
    """The GPU's own logarithm of positive numbers; Triton's is 20 instructions long."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _noise(ids, seed_lo, seed_hi, position):
    """Minus the Gumbel noise of ids [BLOCK], in bits and but for a constant: float32, finite."""
    zero = tl.full([], 0, tl.uint32)
    key0 = _mix(seed_lo ^ tl.full([], 0x3C6EF372, tl.uint32), zero)
    key0 = _mix(_mix(key0 ^ seed_hi, zero) ^ position, zero)
    key1 = _mix(key0 ^ seed_lo, zero) ^ position
    bits = _mix(ids.to(tl.uint32) ^ key0, key1)
    c = bits.to(tl.float32) * 2.0**-32 + 2.0**-33
    c = tl.minimum(c, 1.0 - 2.0**-24)  # rounding may have made it 1
    # -log2(1 - c): the logarithm of a number near 1 is not exact enough, the series there is.
    series = c * (_LOG2E + c * (_LOG2E / 2 + c * (_LOG2E / 3 + c * (_LOG2E / 4))))
    return _log2(tl.where(c < 0.015625, series, -_log2(1.0 - c)))


@triton.jit
def _larger(a, b):
    """The larger one, or NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _chunk_kernel(
    logits_ptr, threshold_ptr, temperature_ptr, seed_lo_ptr, seed_hi_ptr, positions_ptr,
    scores_ptr, ids_ptr, V, logits_stride, threshold_stride, temperature_stride, seed_lo_stride,
    seed_hi_stride, positions_stride, chunks, MIN_TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    # All loads come first, lest one wait for another.
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    seed_lo = tl.load(seed_lo_ptr + row * seed_lo_stride).to(tl.uint32, bitcast=True)
    seed_hi = tl.load(seed_hi_ptr + row * seed_hi_stride).to(tl.uint32, bitcast=True)
    position = tl.load(positions_ptr + row * positions_stride).to(tl.uint32, bitcast=True)
    threshold = tl.load(threshold_ptr + row * threshold_stride)
    x = tl.load(logits_ptr + row * logits_stride + ids, mask=ids < V, other=float("-inf"))
    x = x.to(tl.float32)
    top = tl.reduce(x, 0, _larger)
    # A chunk of nothing but -inf would give NaN differences.
    score = x - tl.where(top == float("-inf"), 0.0, top)
    if temperature >= MIN_TEMPERATURE:
        score = score * (_LOG2E / temperature) - _noise(ids, seed_lo, seed_hi, position)
        score = tl.where(x < threshold, float("-inf"), score)
    best = tl.max(score, 0)
    where = tl.min(tl.where(score == best, ids, V - 1), 0)
    at = row * chunks + chunk
    tl.store(scores_ptr + 2 * at, best)
    tl.store(scores_ptr + 2 * at + 1, top)
    tl.store(ids_ptr + at, where)


@triton.jit
def _row_kernel(
    scores_ptr, ids_ptr, temperature_ptr, out_ptr, finite_ptr, temperature_stride, chunks,
    MIN_TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    at = row * chunks + c
    best = tl.load(scores_ptr + 2 * at, mask=c < chunks, other=float("-inf"))
    tops = tl.load(scores_ptr + 2 * at + 1, mask=c < chunks, other=float("-inf"))
    ids = tl.load(ids_ptr + at, mask=c < chunks, other=0x7FFFFFFF)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    top = tl.reduce(tops, 0, _larger)
    total = tops
    if temperature >= MIN_TEMPERATURE:
        total = best + (tops - top) * (_LOG2E / temperature)
    highest = tl.max(total, 0)
    # Chunks are in the order of ids: the least of those that tie.
    out = tl.min(tl.where(total == highest, ids, 0x7FFFFFFF), 0)
    finite = tl.abs(top) < float("inf")
    tl.store(out_ptr + row, tl.where(finite, out, 0).to(tl.int64))
    tl.store(finite_ptr + row, finite)
