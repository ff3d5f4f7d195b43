"""Which tokens a row may draw: top-k, top-p and min-p as one threshold, on a GPU without a sort.

The op `fullgraph::filter_threshold` reads each row's logits and returns the lowest logit that is
kept. Rows without filters cost one scalar load each, so that a graph can always hold the op. Real
and fake stand side by side; the CUDA kernel is in sampling_triton.py. Knows nothing of penalties,
seeds, or how the draw is made.

Legend: L logit rows, V vocab.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, library

try:
    from models.ops import sampling_triton
except ImportError:  # no Triton on this machine: then there is no CUDA device to run it on either
    sampling_triton = None  # type: ignore[assignment]

# A temperature below this is greedy. (1e-5 for a user; float32 of 1e-5 must still be sampled.)
MIN_TEMPERATURE = 0.99e-5

# On a CPU a nucleus is first sought among this many most likely tokens, then in the whole row.
_NUCLEUS_GUESS = 1024


@library.custom_op("fullgraph::filter_threshold", mutates_args=(), device_types="cpu")
def filter_threshold(
    logits_LV: Tensor, temperature_L: Tensor, top_k_L: Tensor, top_p_L: Tensor, min_p_L: Tensor
) -> Tensor:
    """The lowest logit that each row keeps after top-k, then top-p, then min-p.

    With p = softmax(logits / temperature):
        top-k: the k largest logits (all that tie with the k-th);
        top-p: of those, renormalised, the fewest most likely ones whose mass reaches top_p (ties at
            the end all kept);
        min-p: of those, the ones with p >= min_p * max(p).

    Args:
        logits_LV: float32, bfloat16 or float16 [L, V], before temperature, row stride >= V, column
            stride 1.
        temperature_L: float32 [L]; below MIN_TEMPERATURE the row is greedy and nothing is filtered.
        top_k_L: int32 [L]; <= 0 or >= V is off.
        top_p_L: float32 [L] in (0, 1]; >= 1 is off.
        min_p_L: float32 [L] in [0, 1]; <= 0 is off.

    Returns:
        float32 [L]: keep `logits >= threshold`; -inf where every filter is off or the row's maximum
        is not finite (a row with a NaN may get anything). Never above the row's maximum.
    """
    num_rows, _ = logits_LV.shape
    threshold_L = torch.full((num_rows,), -math.inf, dtype=torch.float32)
    settings = zip(
        temperature_L.tolist(), top_k_L.tolist(), top_p_L.tolist(), min_p_L.tolist(), strict=True
    )
    for row, (temperature, top_k, top_p, min_p) in enumerate(settings):
        if temperature >= MIN_TEMPERATURE:
            threshold_L[row] = _row_threshold(logits_LV[row], temperature, top_k, top_p, min_p)
    return threshold_L


@filter_threshold.register_fake
def _(logits_LV: Tensor, *_: Any) -> Tensor:
    return logits_LV.new_empty((logits_LV.shape[0],), dtype=torch.float32)


@filter_threshold.register_kernel("cuda")
def _(logits_LV: Tensor, *rows: Tensor) -> Tensor:
    assert sampling_triton is not None, "CUDA tensors on a machine without Triton"
    threshold_L = logits_LV.new_empty((logits_LV.shape[0],), dtype=torch.float32)
    sampling_triton.launch(logits_LV, rows, threshold_L, MIN_TEMPERATURE)
    return threshold_L


def _row_threshold(
    logits_V: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> float:
    """`filter_threshold` of one row that is not greedy, on a CPU."""
    vocab = logits_V.shape[0]
    by_k, by_p, by_min = 0 < top_k < vocab, top_p < 1.0, min_p > 0.0
    if not (by_k or by_p or by_min):
        return -math.inf
    logits_V = logits_V.float()
    top = logits_V.max().item()
    if not math.isfinite(top):
        return -math.inf
    threshold = -math.inf
    if by_k:
        threshold = _kth_largest(logits_V, top_k)
    if by_p:
        kept = logits_V[logits_V >= threshold] if by_k else logits_V
        threshold = _nucleus_edge(kept, top, temperature, top_p)
    if by_min:
        # Rounded to float32 as the kernel does; min_p = 1 gives the maximum itself.
        threshold = max(threshold, top + temperature * math.log(min(min_p, 1.0)))
    return min(threshold, top)


def _kth_largest(logits_V: Tensor, k: int) -> float:
    vocab = logits_V.shape[0]
    if k <= vocab // 4:
        return logits_V.topk(k, sorted=False).values.min().item()
    return logits_V.kthvalue(vocab - k + 1).values.item()


def _nucleus_edge(logits_N: Tensor, top: float, temperature: float, top_p: float) -> float:
    """The largest of `logits_N` that, with all above it, holds at least `top_p` of their mass."""
    need = top_p * ((logits_N - top) / temperature).exp().sum(dtype=torch.float64)
    num = logits_N.shape[0]
    for guess in (min(num, _NUCLEUS_GUESS), num):
        sorted_N = logits_N.topk(guess).values if guess < num else logits_N.sort(descending=True)[0]
        mass_N = ((sorted_N - top) / temperature).exp().cumsum(0, dtype=torch.float64)
        edge = int(torch.searchsorted(mass_N, need).item())
        if edge < guess:
            return sorted_N[edge].item()
    return sorted_N[-1].item()  # rounding left the whole row's mass just below top_p
