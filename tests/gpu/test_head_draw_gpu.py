"""LM head and draw in one on a GPU, against product, threshold and draw one after the other.

Where logits are the same bits in both, so are the ids: products of integers are exact.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models import head_draw as ours
from models.head_draw import head_draw
from models.inputs import StepInputs
from models.ops.lm_head import lm_head
from tests.gpu.test_sampling_gpu import random_rows
from tests.models.sampling_reference import Row, make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

Drawn = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def settings(inputs: StepInputs) -> tuple[Tensor, ...]:
    return inputs.sampling_floats_LF, inputs.sampling_ints_LI, inputs.logit_positions_L


def both(x_LE: Tensor, weight_VE: Tensor, rows: list[Row]) -> tuple[Drawn, Drawn]:
    """(ids, finite) of the kernels, and of the three operators."""
    assert ours._in_one(x_LE)
    given = (x_LE, weight_VE, *settings(make_inputs(rows, "cuda")))
    got, expected = head_draw(*given), ours._head_draw(*given)
    assert torch.equal(got[1], expected[1])
    return got, expected


def integers(*shape: int) -> Tensor:
    return torch.randint(-1, 2, shape, device="cuda").bfloat16()


@pytest.mark.parametrize("vocab", [100, 130, 5003, 151936])
@pytest.mark.parametrize("num", [33, 64, 65, 104, 129, 192, 256])
def test_ids(num: int, vocab: int) -> None:
    """Many filters, temperatures and ties; rows that are not finite, which spoil no other."""
    x, weight = integers(num, 256), integers(vocab, 256)
    x[1, 7] = math.nan
    x[num // 2, 3] = math.inf
    rows = [replace(row, seed=3 * row.seed) for row in random_rows(num, vocab)]  # the sign bit, too
    (got, finite), (expected, _) = both(x, weight, rows)
    assert not finite[1]
    assert torch.equal(got[finite], expected[finite])


@pytest.mark.parametrize("inner", [64, 576, 1024, 5120])
def test_rounding_decides_rarely(inner: int) -> None:
    vocab, num = 49152, 128
    x = torch.randn(num, inner, device="cuda").bfloat16()
    weight = (torch.randn(vocab, inner, device="cuda") * inner**-0.5 * 3).bfloat16()
    rows = random_rows(num, inner)
    (got, _), (expected, _) = both(x, weight, rows)
    # Temperatures of 1e-5 magnify it.
    assert (got != expected).sum() <= 3
    greedy = torch.tensor([row.temperature == 0 for row in rows], device="cuda")
    logits = lm_head(x, weight)[greedy]
    chosen = logits.gather(1, got[greedy].unsqueeze(1)).squeeze(1)
    assert (chosen >= logits.amax(1) - 1e-4).all()


def test_a_tile_of_nothing_but_minus_infinity() -> None:
    x, weight = integers(40, 64), integers(1000, 64)
    x[:, 0] = 1.0
    weight[:512, 0] = -math.inf
    weight[513:, 0] = -math.inf
    rows = [Row(temperature=float(i % 2), top_k=i // 2 % 2, seed=i) for i in range(40)]
    (got, finite), _ = both(x, weight, rows)
    assert finite.all()
    assert (got == 512).all()


def test_one_graph_replays() -> None:
    x, weight = integers(40, 128), integers(5003, 128)
    given = (x, weight, *settings(make_inputs(random_rows(40, 3), "cuda")))
    head_draw(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _ = head_draw(*given)
    for _ in range(3):
        x.copy_(integers(40, 128))
        graph.replay()
        assert torch.equal(ids, ours._head_draw(*given)[0])
