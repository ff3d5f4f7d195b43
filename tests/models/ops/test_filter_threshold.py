"""fullgraph::filter_threshold on a CPU, held against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, library

from models.ops.sampling import filter_threshold
from tests.models.sampling_reference import F64, assert_threshold, random_logits


def threshold(
    logits_LV: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """The same settings for every row, as columns of matrices, which is how a step passes them."""
    num = logits_LV.shape[0]
    floats = torch.tensor([[temperature, top_p, min_p]]).repeat(num, 1)
    ints = torch.tensor([[top_k, 0]], dtype=torch.int32).repeat(num, 1)
    out: Tensor = filter_threshold(logits_LV, floats[:, 0], ints[:, 0], floats[:, 1], floats[:, 2])
    return out


@settings(max_examples=200, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 7, 257, 1500, 5003]),
    scale=st.sampled_from([0.01, 1.0, 5.0]),
    rounded=st.booleans(),
    temperature=st.sampled_from([1e-5, 0.6, 1.0, 3.0, 1e6]),
    top_k=st.sampled_from([-1, 0, 1, 2, 20, 256, 1000, 1 << 30]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.95, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    seed=st.integers(0, 1000),
)
def test_is_the_definition(
    vocab: int,
    scale: float,
    rounded: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    logits = random_logits(1, vocab, seed, scale)
    logits = logits.round() if rounded else logits  # ties
    got = threshold(logits, temperature, top_k, top_p, min_p).item()
    row: F64 = logits[0].double().numpy()
    assert_threshold(row, got, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("vocab", [300, 49153])
def test_named_cases(vocab: int) -> None:
    logits = torch.full((1, vocab), -20.0)
    logits[0, [5, 9, 200, 201]] = torch.tensor([4.0, 3.0, 2.0, 2.0])
    assert threshold(logits).item() == -math.inf
    assert threshold(logits, top_k=1).item() == 4.0
    assert threshold(logits, top_k=3).item() == 2.0
    assert threshold(logits, top_k=vocab - 1).item() == -20.0
    assert threshold(logits, top_k=vocab).item() == -math.inf
    # Masses of the four: 0.610, 0.225, 0.083, 0.083.
    assert threshold(logits, top_p=0.6).item() == 4.0
    assert threshold(logits, top_p=0.62).item() == 3.0
    assert threshold(logits, top_p=0.9).item() == 2.0
    # top-p counts the mass that top-k left: e^4 / (e^4 + e^3) = 0.731.
    assert threshold(logits, top_p=0.73, top_k=2).item() == 4.0
    assert threshold(logits, top_p=0.74, top_k=2).item() == 3.0
    assert threshold(logits, min_p=0.36).item() == pytest.approx(4 + math.log(0.36))
    assert threshold(logits, min_p=0.36, temperature=2.0).item() == pytest.approx(
        4 + 2 * math.log(0.36)
    )
    assert threshold(logits, temperature=0.0, top_k=1, top_p=0.1, min_p=1.0).item() == -math.inf


def test_rows_without_a_finite_maximum_are_off() -> None:
    logits = torch.zeros(4, 50)
    logits[0] = -math.inf
    logits[1, 3] = math.nan
    logits[2, 3] = math.inf
    logits[3, 1:] = -math.inf
    got = threshold(logits, top_k=5, top_p=0.5, min_p=0.1)
    assert got[:3].tolist() == [-math.inf] * 3
    assert got[3] == 0.0


def test_rows_do_not_mix() -> None:
    logits = random_logits(6, 700)
    temperature = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 2.0])
    top_k = torch.tensor([0, 5, 5, 0, 0, 40], dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.5, 1.0, 0.8, 1.0, 0.9])
    min_p = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.2, 0.01])
    together = filter_threshold(logits, temperature, top_k, top_p, min_p)
    for i in range(6):
        row = slice(i, i + 1)
        alone = filter_threshold(logits[row], temperature[row], top_k[row], top_p[row], min_p[row])
        assert alone.item() == together[i].item()
    assert np.isneginf(together[:2].numpy()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opcheck(dtype: torch.dtype) -> None:
    floats = torch.rand(3, 6)
    ints = torch.randint(0, 9, (3, 4), dtype=torch.int32)
    logits = random_logits(3, 100).to(dtype)
    arguments = (logits, floats[:, 0], ints[:, 0], floats[:, 1], floats[:, 2])
    library.opcheck(filter_threshold, arguments)
