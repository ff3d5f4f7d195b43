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
LOG2E = tl.constexpr(1.4426950408889634)
MULTIPLIER = tl.constexpr(0x846CA68B)  # the second of `mix`


def launch(
    logits_LV: Tensor, rows: tuple[Tensor, ...], out: tuple[Tensor, Tensor], min_temperature: float
) -> None:
    """Fill `out`: ids and whether rows are finite. `rows` are threshold, temperature, the seed's
    halves and the position of each. Vectors may be strided, a row of logits may not.
    """
    num_rows, vocab = logits_LV.shape
    assert logits_LV.stride(1) == 1, logits_LV.stride()
    block = 2048
    while block > 512 and num_rows * triton.cdiv(vocab, block) < _PROGRAMS:
        block //= 2
    chunks = triton.cdiv(vocab, block)
    scores = torch.empty((num_rows, chunks, 2), dtype=torch.float32, device=logits_LV.device)
    ids = torch.empty((num_rows, chunks), dtype=torch.int32, device=logits_LV.device)
    temperature_L, strides = rows[1], [row.stride(0) for row in rows]
    _chunk_kernel[(chunks, num_rows)](
        *(logits_LV, *rows, scores, ids, vocab, logits_LV.stride(0), *strides, chunks),
        MIN_TEMPERATURE=min_temperature,
        BLOCK=block,
        num_warps=4,
    )
    _row_kernel[(num_rows,)](
        *(scores, ids, temperature_L, *out, temperature_L.stride(0), chunks),
        MIN_TEMPERATURE=min_temperature,
        BLOCK=triton.next_power_of_2(chunks),
        num_warps=1,
    )


@triton.jit
def mix(x, key, multiplier):
    """lowbias32, `key` mixed in between the two multiplications; uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ (x >> 15) ^ key
    x = x * multiplier
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed_lo, seed_hi, position):
    """The two keys that a row's hashes begin with, of its seed and position as int32."""
    seed_lo = seed_lo.to(tl.uint32, bitcast=True)
    seed_hi = seed_hi.to(tl.uint32, bitcast=True)
    position = position.to(tl.uint32, bitcast=True)
    key0 = mix(seed_lo ^ 0x3C6EF372, 0, MULTIPLIER)
    key0 = mix(mix(key0 ^ seed_hi, 0, MULTIPLIER) ^ position, 0, MULTIPLIER)
    return key0, mix(key0 ^ seed_lo, 0, MULTIPLIER) ^ position


@triton.jit
def _log2(x):
    """The GPU's own logarithm of positive numbers; Triton's is 20 instructions long."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def noise(bits):
    """Minus the Gumbel noise of a hash, in bits and but for a constant: float32, finite."""
    c = bits.to(tl.float32) * 2.0**-32 + 2.0**-33
    c = tl.minimum(c, 1.0 - 2.0**-24)  # rounding may have made it 1
    # -log2(1 - c): the logarithm of a number near 1 is not exact enough, the series there is.
    series = c * (LOG2E + c * (LOG2E / 2 + c * (LOG2E / 3 + c * (LOG2E / 4))))
    return _log2(tl.where(c < 0.015625, series, -_log2(1.0 - c)))


@triton.jit
def larger(a, b):
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
    seed_lo = tl.load(seed_lo_ptr + row * seed_lo_stride)
    seed_hi = tl.load(seed_hi_ptr + row * seed_hi_stride)
    position = tl.load(positions_ptr + row * positions_stride)
    threshold = tl.load(threshold_ptr + row * threshold_stride)
    x = tl.load(logits_ptr + row * logits_stride + ids, mask=ids < V, other=float("-inf"))
    x = x.to(tl.float32)
    top = tl.reduce(x, 0, larger)
    # A chunk of nothing but -inf would give NaN differences.
    score = x - tl.where(top == float("-inf"), 0.0, top)
    if temperature >= MIN_TEMPERATURE:
        key0, key1 = row_keys(seed_lo, seed_hi, position)
        bits = mix(ids.to(tl.uint32) ^ key0, key1, MULTIPLIER)
        score = score * (LOG2E / temperature) - noise(bits)
        score = tl.where(x < threshold, float("-inf"), score)
    best = tl.max(score, 0)
    where = tl.min(tl.where(score == best, ids, V - 1), 0)
    at = row * chunks + chunk
    tl.store(scores_ptr + 2 * at, best)
    tl.store(scores_ptr + 2 * at + 1, top)
    tl.store(ids_ptr + at, where)


@triton.jit
def join(best, tops, ids, top, temperature, MIN_TEMPERATURE: tl.constexpr):
    """A row's id, of each chunk's best score relative to its largest logit, that logit, and id."""
    total = tops
    if temperature >= MIN_TEMPERATURE:
        total = best + (tops - top) * (LOG2E / temperature)
    # Chunks are in the order of ids: the least of those that tie.
    return tl.min(tl.where(total == tl.max(total, 0), ids, 0x7FFFFFFF), 0)


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
    top = tl.reduce(tops, 0, larger)
    out = join(best, tops, ids, top, temperature, MIN_TEMPERATURE)
    finite = tl.abs(top) < float("inf")
    tl.store(out_ptr + row, tl.where(finite, out, 0).to(tl.int64))
    tl.store(finite_ptr + row, finite)
