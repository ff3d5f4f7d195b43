"""The draw: one token per row by Gumbel-max, argmax(logit / T + g(u)).

u is a hash of (seed, position, token id) and of nothing else, so that a draw never depends on batch
mates, padding, bucket or device (up to float rounding). Knows nothing of penalties, slots or which
filters gave the threshold.

Legend: L logit rows, V vocab, C chunks of W ids (C * W >= V).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, library

from models.ops.sampling import MIN_TEMPERATURE

try:
    from models.ops import draw_triton
except ImportError:  # no Triton: a CPU
    draw_triton = None  # type: ignore[assignment]

_WORD = 0xFFFFFFFF
# lowbias32 (Chris Wellons' hash prospector): multipliers of a 32-bit mixer. The second is written
# as a signed number so that a product with 32 bits stays inside int64.
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B - (1 << 32)
# Ids per first-stage reduction: what Inductor keeps in registers, so that a chunk is read once.
_MAX_CHUNK = 1024
_MIN_CHUNK = 128


@library.custom_op("fullgraph::draw", mutates_args=(), device_types="cpu")
def draw(
    logits_LV: Tensor,
    threshold_L: Tensor,
    temperature_L: Tensor,
    seed_lo_L: Tensor,
    seed_hi_L: Tensor,
    positions_L: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token per row: argmax(logit / T + Gumbel noise) over the logits kept, argmax at T = 0.

    Args:
        logits_LV: float32, bfloat16 or float16 [L, V], before temperature.
        threshold_L: float32 [L], lowest logit kept (models.ops.sampling.filter_threshold).
        temperature_L: float32 [L]; below MIN_TEMPERATURE the row is greedy.
        seed_lo_L / seed_hi_L / positions_L: int32 [L], which fix the noise.

    Returns:
        ids int64 [L], and bool [L] whether the row's logits allow a draw.

    Opaque to the compiler, which would take half a minute to make loops of the hash. On a CPU noise
    is made for the rows that are not greedy only.
    """
    tops_L, ids_L = logits_LV.max(dim=1)
    sampled = (temperature_L >= MIN_TEMPERATURE).nonzero().squeeze(1)
    if len(sampled):
        rows = (logits_LV, threshold_L, temperature_L, seed_lo_L, seed_hi_L, positions_L)
        ids_L[sampled] = draw_rows(*(row[sampled] for row in rows))[0]
    return ids_L, tops_L.float().abs() < math.inf


@draw.register_fake
def _(
    logits_LV: Tensor,
    threshold_L: Tensor,
    temperature_L: Tensor,
    seed_lo_L: Tensor,
    seed_hi_L: Tensor,
    positions_L: Tensor,
) -> tuple[Tensor, Tensor]:
    num_rows = logits_LV.shape[0]
    ids_L = logits_LV.new_empty((num_rows,), dtype=torch.int64)
    return ids_L, logits_LV.new_empty((num_rows,), dtype=torch.bool)


@draw.register_kernel("cuda")
def _(
    logits_LV: Tensor,
    threshold_L: Tensor,
    temperature_L: Tensor,
    seed_lo_L: Tensor,
    seed_hi_L: Tensor,
    positions_L: Tensor,
) -> tuple[Tensor, Tensor]:
    assert draw_triton is not None, "CUDA tensors on a machine without Triton"
    num_rows, device = logits_LV.shape[0], logits_LV.device
    ids_L = torch.empty(num_rows, dtype=torch.int64, device=device)
    finite_L = torch.empty(num_rows, dtype=torch.bool, device=device)
    rows = (threshold_L, temperature_L, seed_lo_L, seed_hi_L, positions_L)
    draw_triton.launch(logits_LV, *rows, ids_L, finite_L, MIN_TEMPERATURE)
    return ids_L, finite_L


def draw_rows(
    logits_LV: Tensor,
    threshold_L: Tensor,
    temperature_L: Tensor,
    seed_lo_L: Tensor,
    seed_hi_L: Tensor,
    positions_L: Tensor,
) -> tuple[Tensor, Tensor]:
    """`draw` in torch operators, the reference of the kernels in models/ops/draw_triton.py.

    Two stages, as on a GPU: the best of each chunk relative to the chunk's maximum, then the best
    chunk. Differences to a maximum are exact where it matters, so that no temperature overflows or
    loses the noise.
    """
    greedy_L = temperature_L < MIN_TEMPERATURE
    scale_L = 1.0 / torch.where(greedy_L, 1.0, temperature_L)

    logits_LCW, tops_LC, bases_LC = chunked(logits_LV)
    _, num_chunks, width = logits_LCW.shape
    ids_CW = torch.arange(num_chunks * width, device=logits_LV.device).view(num_chunks, width)
    noise_LCW = _gumbel(ids_CW, *row_keys(seed_lo_L, seed_hi_L, positions_L))
    scores_LCW = (logits_LCW - bases_LC.unsqueeze(2)) * scale_L.view(-1, 1, 1)
    scores_LCW = scores_LCW + torch.where(greedy_L.view(-1, 1, 1), 0.0, noise_LCW)
    scores_LCW = torch.where(logits_LCW < threshold_L.view(-1, 1, 1), -math.inf, scores_LCW)
    best_LC, where_LC = scores_LCW.max(dim=2)

    top_L1 = tops_LC.amax(dim=1, keepdim=True)  # NaN wherever the row holds one
    total_LC = best_LC + (tops_LC - top_L1) * scale_L.unsqueeze(1)
    total_LC = torch.where(greedy_L.unsqueeze(1), tops_LC, total_LC)
    chunk_L1 = total_LC.argmax(dim=1, keepdim=True)
    ids_L = (chunk_L1 * width + where_LC.gather(1, chunk_L1)).squeeze(1)
    return ids_L, top_L1.squeeze(1).abs() < math.inf


def chunks(vocab: int) -> tuple[int, int]:
    """(C, W): W divides the vocabulary if a fair divisor exists, else the last chunk is padded."""
    for width in range(min(_MAX_CHUNK, vocab), _MIN_CHUNK - 1, -1):
        if vocab % width == 0:
            return vocab // width, width
    width = min(_MAX_CHUNK, vocab)
    return -(-vocab // width), width


def chunked(logits_LV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 logits [L, C, W], each chunk's maximum [L, C], and that with 0 for -inf."""
    num_chunks, width = chunks(logits_LV.shape[1])
    padded = F.pad(logits_LV, (0, num_chunks * width - logits_LV.shape[1]), value=-math.inf)
    logits_LCW = padded.float().view(-1, num_chunks, width)
    tops_LC = logits_LCW.amax(dim=2)
    # A chunk of nothing but -inf would give NaN differences.
    return logits_LCW, tops_LC, torch.where(tops_LC == -math.inf, 0.0, tops_LC)


def row_keys(seed_lo_L: Tensor, seed_hi_L: Tensor, positions_L: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit keys per row, int64 [L, 1, 1], from the 64-bit seed and the position.

    With one seed, the first key of two positions is never the same.
    """
    seed_lo = seed_lo_L.long() & _WORD
    seed_hi = seed_hi_L.long() & _WORD
    position = positions_L.long() & _WORD
    key0 = _mix(_mix(_mix(seed_lo ^ 0x3C6EF372) ^ seed_hi) ^ position)
    key1 = _mix(key0 ^ seed_lo) ^ position
    return key0.view(-1, 1, 1), key1.view(-1, 1, 1)


def _mix(x: Tensor, key: Tensor | None = None) -> Tensor:
    """lowbias32 of 32 bits held in int64; `key` is mixed in between the two multiplications."""
    x = ((x ^ (x >> 16)) * _MULTIPLY_1) & _WORD
    x = x ^ (x >> 15)
    if key is not None:
        x = x ^ key
    x = (x * _MULTIPLY_2) & _WORD
    return x ^ (x >> 16)


def _gumbel(ids_CW: Tensor, key0_L11: Tensor, key1_L11: Tensor) -> Tensor:
    """Standard Gumbel noise float32 [L, C, W], finite.

    The hash is the uniform's distance from 1, so that large noise, which decides between unlikely
    tokens, comes in steps of 2^-32.
    """
    bits = _mix(ids_CW ^ key0_L11, key1_L11)
    complement = (bits.float() + 0.5) * 2.0**-32
    complement = complement.clamp(max=1.0 - 2.0**-24)  # rounding may have made it 1
    return -torch.log(-torch.log1p(-complement))
