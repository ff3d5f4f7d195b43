"""Sampling written the straightforward way, in numpy and float64, for models/sampling.py to meet.

Also calls `sample` on logit rows that are each described by one small record. Shared by the CPU and
GPU tests. Knows nothing of chunks, thresholds or compilers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.inputs import SamplingState, StepInputs, StepState
from models.sampling import init_sampling_state, sample

F64 = NDArray[np.float64]
LOWEST = -9999.0
TOP_LOGPROBS = 5


@dataclass(frozen=True)
class Row:
    """Settings of one logit row; the defaults are those of a greedy row that draws."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    seed: int = 0
    position: int = 0
    flags: int = 0
    target: int = -1
    slot: int = 0


@dataclass
class Slot:
    """What a slot was admitted with, for `reference_logits`."""

    seen: set[int] = field(default_factory=set)
    counts: dict[int, int] = field(default_factory=dict)
    bias: dict[int, float] = field(default_factory=dict)
    stop: set[int] = field(default_factory=set)


def make_inputs(rows: list[Row], device: str = "cpu") -> StepInputs:
    """StepInputs whose logit fields hold `rows`; the rest is empty."""

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(torch.int32).to(device)

    def signed(word: int) -> int:
        return word - (1 << 32) if word >= 1 << 31 else word

    empty = torch.zeros(0, dtype=torch.int32, device=device)
    fields = dict.fromkeys(StepInputs._fields, empty)
    fields["logit_slots_L"] = ints([r.slot for r in rows])
    fields["logit_targets_L"] = ints([r.target for r in rows])
    fields["logit_positions_L"] = ints([r.position for r in rows])
    fields["sampling_floats_LF"] = torch.tensor(
        [[r.temperature, r.top_p, r.min_p, r.repetition, r.frequency, r.presence] for r in rows],
        device=device,
    )
    fields["sampling_ints_LI"] = ints(
        [
            value
            for r in rows
            for value in (r.top_k, signed(r.seed & 0xFFFFFFFF), signed(r.seed >> 32), r.flags)
        ]
    ).view(len(rows), 4)
    return StepInputs(**fields)


def make_state(
    num_slots: int, vocab: int, device: str = "cpu", max_bias: int = 8, max_stop: int = 4
) -> tuple[StepState, SamplingState]:
    """Empty state with room for `num_slots` slots; last tokens start at 7."""
    state = StepState(
        torch.zeros(num_slots + 1, 1, dtype=torch.int32, device=device),
        torch.full((num_slots + 1,), 7, dtype=torch.int32, device=device),
    )
    return state, init_sampling_state(num_slots, vocab, max_bias, max_stop, device)


def reference_logits(
    logits: F64, row: Row, slot: Slot, allowed: set[int] | None, *, mask_stop: bool
) -> F64:
    """Penalties, bias and masks of a row that draws, one token at a time."""
    out = logits.copy()
    for token in slot.seen | set(slot.counts):
        out[token] = out[token] / row.repetition if out[token] > 0 else out[token] * row.repetition
    for token, count in slot.counts.items():
        out[token] -= row.frequency * count + row.presence
    for token, value in slot.bias.items():
        out[token] += value
    if mask_stop:
        out[list(slot.stop)] = -np.inf
    if allowed is not None:
        out[[token for token in range(len(out)) if token not in allowed]] = -np.inf
    return out


def reference_probs(logits: F64, row: Row) -> F64:
    """The distribution a row draws from, by sorting."""
    p = _softmax(logits / row.temperature)
    vocab = len(logits)
    if 0 < row.top_k < vocab:
        p = np.where(logits >= np.sort(logits)[-row.top_k], p, 0.0)
        p /= p.sum()
    if row.top_p < 1:
        order = np.argsort(-logits, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        edge = logits[order][before < row.top_p][-1]
        p = np.where(logits >= edge, p, 0.0)
    p = np.where(p >= row.min_p * p.max(), p, 0.0)
    out: F64 = p / p.sum()
    return out


def log_softmax(logits: F64) -> F64:
    """With the floor that reported logprobs have."""
    top = logits.max()
    out: F64 = np.maximum(logits - top - np.log(np.exp(logits - top).sum()), LOWEST)
    return out


def _softmax(x: F64) -> F64:
    e: F64 = np.exp(x - x.max())
    return e / e.sum()  # type: ignore[no-any-return]


def reference_gumbel(seed: int, position: int, vocab: int) -> F64:
    """The noise of a row, with Python and numpy integers that do not overflow."""
    low, high = seed & 0xFFFFFFFF, seed >> 32

    def mix(x: NDArray[np.uint64], key: int = 0) -> NDArray[np.uint64]:
        word = np.uint64(0xFFFFFFFF)
        x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & word
        x = ((x ^ (x >> np.uint64(15)) ^ np.uint64(key)) * np.uint64(0x846CA68B)) & word
        return x ^ (x >> np.uint64(16))

    def mix1(x: int) -> int:
        return int(mix(np.array([x], np.uint64))[0])

    key0 = mix1(mix1(mix1(low ^ 0x3C6EF372) ^ high) ^ position)
    key1 = mix1(key0 ^ low) ^ position
    bits = mix(np.arange(vocab, dtype=np.uint64) ^ np.uint64(key0), key1)
    complement = np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    gumbel: F64 = -np.log(-np.log1p(-complement))
    return gumbel


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits_LV: Tensor, rows: list[Row]) -> list[int]:
    """Ids of the plain variant."""
    state, _ = make_state(1, logits_LV.shape[1])
    out = sample("plain", logits_LV, make_inputs(rows), state, None, 0)
    assert out.packed_LC.dtype == torch.int32
    ids: list[int] = out.packed_LC[:, 0].tolist()
    return ids


def full(
    logits_LV: Tensor,
    rows: list[Row],
    state: StepState,
    sampling_state: SamplingState,
) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Ids, logprobs [L], top ids and top logprobs [L, K] of the full variant."""
    inputs = make_inputs(rows)
    out = sample("full", logits_LV, inputs, state, sampling_state, TOP_LOGPROBS)
    packed = out.packed_LC
    assert packed.shape == (len(rows), 2 + 2 * TOP_LOGPROBS)
    top = 2 + TOP_LOGPROBS
    floats = packed.view(torch.float32)
    return packed[:, 0].tolist(), floats[:, 1], packed[:, 2:top], floats[:, top:]


def chi_square_limit(dof: int) -> float:
    """The 99.99 % point (Wilson and Hilferty's approximation)."""
    return dof * (1 - 2 / (9 * dof) + 3.72 * math.sqrt(2 / (9 * dof))) ** 3


def assert_distributed(drawn: list[int], probs: F64) -> None:
    """Chi-square of `drawn` against `probs`; ids of probability 0 must not occur at all."""
    counts = np.bincount(drawn, minlength=len(probs)).astype(np.float64)
    assert counts[probs == 0].sum() == 0
    expected = probs * len(drawn)
    common = expected >= 10
    rest = expected[~common].sum()
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    if rest >= 10:
        statistic += (counts[~common].sum() - rest) ** 2 / rest
    dof = int(common.sum()) - 1 + int(rest >= 10)
    assert statistic < chi_square_limit(max(dof, 1))


def assert_threshold(
    logits: F64, threshold: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """`threshold` is what top-k, top-p and min-p leave of a row of finite logits.

    Exact where only the order of logits matters; a mass may be off by float32 summation, which
    matters where two neighbouring logits both are an answer within it.
    """
    by_k, by_p, by_min = 0 < top_k < len(logits), top_p < 1, min_p > 0
    low = high = float(np.sort(logits)[-top_k]) if by_k else -np.inf
    if by_p:
        kept = np.sort(logits[logits >= low])[::-1]
        mass = np.cumsum(_softmax(kept / temperature))
        low, high = (
            float(kept[min(int((mass < p).sum()), len(kept) - 1)])
            for p in (top_p + 2e-6, top_p - 2e-6)
        )
    if by_min:
        least = float(logits.max() + temperature * np.log(min_p))
        slack = 1e-6 * max(1.0, abs(least))
        low, high = max(low, least - slack), max(high, least + slack)
    assert low <= threshold <= min(high, logits.max())
