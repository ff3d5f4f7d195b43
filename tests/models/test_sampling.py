"""What `sample` draws, and what it does to the last tokens; against sampling_reference.

Seeds are fixed, and a draw is a pure function of its seed: the distribution tests cannot flake.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.scheduler import batch as scheduled
from models import sampling
from models.sampling import sample
from tests.models.sampling_reference import (
    Row,
    assert_distributed,
    draw,
    make_inputs,
    make_state,
    random_logits,
    reference_gumbel,
    reference_probs,
)


def test_columns_are_the_scheduler_s() -> None:
    names = "TEMPERATURE TOP_P MIN_P REPETITION FREQUENCY PRESENCE TOP_K SEED_LO SEED_HI FLAGS"
    for name in (*names.split(), "FLAG_MASK_STOP", "FLAG_COUNT", "FLAG_GUIDED"):
        assert getattr(sampling, name) == getattr(scheduled, name), name


@pytest.mark.parametrize("vocab", [2, 5, 257, 1229, 3072, 49153])
def test_draw_is_the_gumbel_argmax_of_the_whole_row(vocab: int) -> None:
    logits = random_logits(6, vocab)
    rows = [
        Row(temperature=t, seed=(k << 40) + 3 * k, position=k)
        for k, t in enumerate([1.0, 0.3, 2.0, 1e-5, 50.0, 1e6])
    ]
    for id_, row, x in zip(draw(logits, rows), rows, logits.double().numpy(), strict=True):
        x = (x - x.max()) / row.temperature
        score = x + reference_gumbel(row.seed, row.position, vocab)
        assert score[id_] >= score.max() - 1e-4


COMBINATIONS = [
    Row(temperature=1.0),
    Row(temperature=0.4),
    Row(temperature=4.0),
    Row(temperature=1.0, top_k=5),
    Row(temperature=1.0, top_p=0.8),
    Row(temperature=1.0, min_p=0.1),
    Row(temperature=1.7, top_k=12, top_p=0.7),
    Row(temperature=1.7, top_k=20, top_p=0.95, min_p=0.05),
    Row(temperature=1e6),
]


@pytest.mark.parametrize("row", COMBINATIONS)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(row: Row, vary: str) -> None:
    vocab, num = 40, 10_000
    logits = random_logits(1, vocab, seed=1, scale=1.5)
    row = replace(row, seed=11, position=5)
    rows = [replace(row, **{vary: i}) for i in range(num)]
    drawn = draw(logits.expand(num, vocab), rows)
    assert_distributed(drawn, reference_probs(logits[0].double().numpy(), row))


def test_unlikely_tokens_are_drawn_as_often_as_they_should() -> None:
    """A coarse uniform would cut off the tail: 500 tokens that share a mass of 0.02."""
    vocab, num = 501, 20_000
    logits = torch.full((1, vocab), math.log(0.02 / 500))
    logits[0, 0] = math.log(0.98)
    drawn = draw(logits.expand(num, vocab), [Row(temperature=1.0, seed=i) for i in range(num)])
    tail = sum(id_ > 0 for id_ in drawn)
    assert abs(tail - 400) < 4 * math.sqrt(400)
    assert len({id_ for id_ in drawn if id_ > 0}) > 250


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_neighbours_are_independent(vary: str) -> None:
    """Pairs of draws at consecutive seeds or positions fill an 8 x 8 table evenly."""
    num = 20_000
    rows = [Row(temperature=1.0, **{vary: i}) for i in range(num)]
    drawn = draw(torch.zeros(num, 8), rows)
    pairs = [8 * a + b for a, b in zip(drawn, drawn[1:], strict=False)]
    assert_distributed(pairs, np.full(64, 1 / 64))


def test_flat_row_is_uniform_over_ids() -> None:
    num, vocab = 10_000, 256
    drawn = draw(torch.zeros(num, vocab), [Row(temperature=1.0, seed=i << 32) for i in range(num)])
    assert_distributed(drawn, np.full(vocab, 1 / vocab))


def test_draw_does_not_depend_on_batch_mates_or_order() -> None:
    logits = random_logits(12, 1229)
    rows = [
        Row(
            temperature=[0.0, 0.7, 1.5][i % 3],
            top_k=[0, 8][i % 2],
            top_p=[1.0, 0.9, 1.0, 0.5][i % 4],
            seed=i,
            position=100 + i,
        )
        for i in range(12)
    ]
    together = draw(logits, rows)
    assert [draw(logits[i : i + 1], rows[i : i + 1])[0] for i in range(12)] == together
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = draw(logits[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]
    assert draw(logits, rows) == together
    other = draw(logits, [replace(r, seed=r.seed + 1000) for r in rows])
    assert other != together
    assert other[::3] == together[::3], "greedy rows have no seed"


def test_all_64_bits_of_the_seed_count() -> None:
    logits = torch.zeros(1, 5000)
    ids = [draw(logits, [Row(temperature=1.0, seed=1 << bit)])[0] for bit in range(64)]
    assert len(set(ids)) > 60


@pytest.mark.parametrize("vocab", [257, 3072, 49153])
def test_greedy_is_the_lowest_argmax(vocab: int) -> None:
    logits = random_logits(4, vocab)
    logits[1, [vocab - 1, vocab // 2, 3]] = 100.0
    logits[2] = 0.25
    logits[3] = torch.arange(vocab).float() * 1e-30
    rows = [Row(), Row(), Row(seed=5, top_k=2, top_p=0.1), Row()]
    expected = [int(logits[0].argmax()), 3, 0, vocab - 1]
    assert draw(logits, rows) == expected
    beside = torch.cat([random_logits(1, vocab, 9), logits])
    assert draw(beside, [Row(temperature=1.0), *rows])[1:] == expected


def test_tiny_temperature_is_a_fair_choice_between_equals() -> None:
    num = 4000
    logits = random_logits(1, 60)
    logits[0, [7, 50]] = 30.0
    for temperature in (1e-5, 1e-3):
        drawn = draw(
            logits.expand(num, 60), [Row(temperature=temperature, seed=i) for i in range(num)]
        )
        assert_distributed(drawn, np.eye(60)[7] / 2 + np.eye(60)[50] / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_plain_takes_half_precision(dtype: torch.dtype) -> None:
    logits = random_logits(8, 1229).to(dtype)
    rows = [Row(temperature=[0.0, 1.0][i % 2], top_k=3 * (i % 3), seed=i) for i in range(8)]
    assert draw(logits, rows) == draw(logits.float(), rows)


def test_rows_without_a_finite_maximum_are_minus_one_and_alone() -> None:
    vocab = 1229  # two chunks, so that the last row has one with nothing finite
    logits = random_logits(6, vocab)
    rows = [
        Row(temperature=t, top_k=k, top_p=p, slot=i, seed=i)
        for i, (t, k, p) in enumerate(
            [(1.0, 5, 0.9), (1.0, 5, 0.9), (0.0, 0, 1.0), (1.0, 0, 1.0), (0.0, 0, 1.0), (1, 0, 1)]
        )
    ]
    good = draw(logits[:1], rows[:1])
    logits[1, 17] = math.nan
    logits[2, vocab - 1] = math.nan
    logits[3] = -math.inf
    logits[4, 0] = math.inf
    logits[5, : vocab - 1] = -math.inf
    state, _ = make_state(6, vocab)
    out = sample("plain", logits, make_inputs(rows), state, None, 0)
    assert out.packed_LC[:, 0].tolist() == [*good, -1, -1, -1, -1, vocab - 1]
    assert state.last_token_S.tolist() == [*good, 0, 0, 0, 0, vocab - 1, 7]


def test_last_tokens_are_written_only_by_rows_that_draw_for_their_slot() -> None:
    state, _ = make_state(4, 50)
    logits = random_logits(4, 50)
    rows = [Row(slot=2), Row(slot=0, target=-2), Row(slot=1, target=33), Row(slot=4, target=-2)]
    out = sample("plain", logits, make_inputs(rows), state, None, 0)
    best = logits.argmax(1).tolist()
    assert out.packed_LC[:, 0].tolist() == [best[0], best[1], 33, best[3]]
    assert state.last_token_S[:4].tolist() == [7, 7, best[0], 7]
