"""Launches of a mixture's kernels: every routing has its tiles, every launch fits the GPU."""

from __future__ import annotations

import random

import pytest

from models.ops.experts_table import Choice, block_of, choose_experts, num_tiles

SHARED_BYTES = 227 << 10  # of a program on Hopper
MIXTURES = [(8, 2), (128, 8), (64, 1), (6, 6), (256, 8)]


def routing(tokens: int, experts: int, top_k: int, skew: float, rng: random.Random) -> list[int]:
    """Pairs of each expert: tokens choose distinct experts, the first ones more often by `skew`."""
    counts = [0] * experts
    for _ in range(tokens):
        left = list(range(experts))
        for _ in range(top_k):
            place = int(len(left) * rng.random() ** (1 + skew))
            counts[left.pop(place)] += 1
    return counts


@pytest.mark.parametrize(("experts", "top_k"), MIXTURES)
@pytest.mark.parametrize("skew", [0.0, 3.0, 50.0])
def test_every_routing_has_its_tiles(experts: int, top_k: int, skew: float) -> None:
    rng = random.Random(0)
    for tokens in (2, 3, 17, 64, 65, 200):
        counts = routing(tokens, experts, top_k, skew, rng)
        assert sum(counts) == tokens * top_k
        for block_m in (16, 32, 64, 128):
            needed = sum(-(-count // block_m) for count in counts)
            assert needed <= num_tiles(tokens, top_k, experts, block_m)


def test_the_bound_on_tiles_is_reached() -> None:
    """By one pair more than whole tiles in every expert but the last."""
    experts, block_m = 8, 16
    counts = [block_m + 1] * experts
    assert num_tiles(sum(counts), 1, experts, block_m) == sum(-(-c // block_m) for c in counts)


def launches() -> list[tuple[int, Choice]]:
    tokens = [2, 3, 7, 8, 16, 33, 64, 100, 128, 200, 256, 300, 512, 1000, 1024, 2048, 4096, 8192]
    return [
        (experts, choose_experts(count, top_k, experts))
        for count in tokens
        for experts, top_k in MIXTURES
    ]


def test_every_launch_fits() -> None:
    for _, choice in launches():
        for tiles, operands in ((choice.up, 2), (choice.down, 1)):
            # A tall first product has gate and up in one tile; a wide one has a tile of each.
            rows = tiles.block_n * (1 if choice.tall else operands)
            assert (rows + choice.block_m) * tiles.block_k * 2 * tiles.stages <= SHARED_BYTES
            accumulators = rows * choice.block_m / (32 * tiles.warps)
            assert accumulators <= 160, (choice, "would spill")
            assert tiles.block_n >= 32 and tiles.block_k >= 16 and choice.block_m >= 16


def test_tiles_grow_with_the_tokens() -> None:
    for experts, top_k in MIXTURES:
        sizes = [choose_experts(count, top_k, experts).block_m for count in range(2, 5000, 50)]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("most", [128, 256, 512])
def test_blocks_of_an_inner_dimension(most: int) -> None:
    for inner in (21, 40, 96, 192, 384, 768, 1000, 14336):
        block = block_of(inner, most)
        assert block & (block - 1) == 0 and 16 <= block <= most
        assert inner % block == 0 or block >= min(inner, most)
    assert block_of(768, 512) == 256
    assert block_of(192, 256) == 64
