"""The draw: one token per row by Gumbel-max, argmax(logit / T + g(u)).

u is a hash of (seed, position, token id) and of nothing else, so that a draw never depends on batch
mates, padding, bucket or device (up to float rounding). Knows nothing of penalties, slots or which
filters gave the threshold.

Legend: L logit rows, V vocab.
"""

from __future__ import annotations

import math

import torch
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
        ids_L[sampled] = _draw_sampled(*(row[sampled] for row in rows))
    return ids_L, tops_L.float().abs() < math.inf


@draw.register_fake
def _fake(logits_LV: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    num_rows = logits_LV.shape[0]
    ids_L = logits_LV.new_empty((num_rows,), dtype=torch.int64)
    return ids_L, logits_LV.new_empty((num_rows,), dtype=torch.bool)


@draw.register_kernel("cuda")
def _(logits_LV: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
    assert draw_triton is not None, "CUDA tensors on a machine without Triton"
    out = _fake(logits_LV)
    draw_triton.launch(logits_LV, rows, out, MIN_TEMPERATURE)
    return out


def _draw_sampled(
    logits_LV: Tensor, threshold_L: Tensor, temperature_L: Tensor, *noise_of_L: Tensor
) -> Tensor:
    """Ids int64 [L] of rows that are not greedy: `draw` in torch operators, the reference of the
    kernels in models/ops/draw_triton.py.

    Differences to a maximum are exact where it matters, so that no temperature overflows or loses
    the noise.
    """
    logits_LV = logits_LV.float()
    ids_V = torch.arange(logits_LV.shape[1], device=logits_LV.device)
    noise_LV = _gumbel(ids_V, *_row_keys(*noise_of_L))
    below_LV = logits_LV - logits_LV.amax(dim=1, keepdim=True)
    scores_LV = below_LV * (1.0 / temperature_L).unsqueeze(1) + noise_LV
    kept_LV = logits_LV >= threshold_L.unsqueeze(1)
    return torch.where(kept_LV, scores_LV, -math.inf).argmax(dim=1)


def _row_keys(seed_lo_L: Tensor, seed_hi_L: Tensor, positions_L: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit keys per row, int64 [L, 1], from the 64-bit seed and the position.

    With one seed, the first key of two positions is never the same.
    """
    seed_lo = seed_lo_L.long() & _WORD
    seed_hi = seed_hi_L.long() & _WORD
    position = positions_L.long() & _WORD
    key0 = _mix(_mix(_mix(seed_lo ^ 0x3C6EF372) ^ seed_hi) ^ position)
    key1 = _mix(key0 ^ seed_lo) ^ position
    return key0.unsqueeze(1), key1.unsqueeze(1)


def _mix(x: Tensor, key: Tensor | None = None) -> Tensor:
    """lowbias32 of 32 bits held in int64; `key` is mixed in between the two multiplications."""
    x = ((x ^ (x >> 16)) * _MULTIPLY_1) & _WORD
    x = x ^ (x >> 15)
    if key is not None:
        x = x ^ key
    x = (x * _MULTIPLY_2) & _WORD
    return x ^ (x >> 16)


def _gumbel(ids_V: Tensor, key0_L1: Tensor, key1_L1: Tensor) -> Tensor:
    """Standard Gumbel noise float32 [L, V], finite.

    The hash is the uniform's distance from 1, so that large noise, which decides between unlikely
    tokens, comes in steps of 2^-32.
    """
    bits = _mix(ids_V ^ key0_L1, key1_L1)
    complement = (bits.float() + 0.5) * 2.0**-32
    complement = complement.clamp(max=1.0 - 2.0**-24)  # rounding may have made it 1
    return -torch.log(-torch.log1p(-complement))
