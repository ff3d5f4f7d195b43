"""Which launches the kernels of a mixture of experts take: measured where it was, guessed
elsewhere. Host arithmetic only; imports neither torch nor Triton.

Legend: T tokens, N experts, K experts per token, P = T * K pairs of a token and one of its experts,
E hidden, F ffn of an expert.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """Launch of one product: rows of weights and inner elements of a tile, depth of the pipeline,
    warps.
    """

    block_n: int
    block_k: int
    stages: int = 4
    warps: int = 4


class Choice(NamedTuple):
    """Launches for a number of tokens.

    Attributes:
        block_m: pairs of a tile.
        tall: weights are the tall side of the product (few pairs an expert), else the pairs are.
        up / down: of the first product (with SwiGLU) and the second.
    """

    block_m: int
    tall: bool
    up: Tiles
    down: Tiles


def choose_experts(num_tokens: int, top_k: int, num_experts: int) -> Choice:
    """The launches for `num_tokens` > 1, by the pairs that an expert gets on average."""
    average = num_tokens * top_k / num_experts
    if average <= 10:
        return Choice(16, True, Tiles(64, 128), Tiles(64, 128))
    if average <= 22:
        return Choice(32, True, Tiles(64, 128), Tiles(64, 128))
    if average <= 80:
        return Choice(64, False, Tiles(64, 64, 4, 4), Tiles(128, 64, 4, 4))
    return Choice(128, False, Tiles(128, 64, 4, 8), Tiles(256, 64, 4, 8))


def choose_one(top_k: int, ffn: int) -> tuple[Tiles, Tiles]:
    """The launches of both products for one token; their loops are unrolled. The second's stages
    are tiles that its programs hold in registers before they wait for the first.
    """
    block_k = 256
    while top_k * ffn > 64 * block_k:
        block_k *= 2
    return Tiles(1, 2048, 1, 1), Tiles(8, block_k, 4608 // block_k, 8)


def num_tiles(num_tokens: int, top_k: int, num_experts: int, block_m: int) -> int:
    """Most tiles of `block_m` pairs of one expert that any routing needs."""
    pairs = num_tokens * top_k
    touched = min(num_experts, pairs)
    return (pairs + touched * (block_m - 1)) // block_m


def block_of(inner: int, most: int) -> int:
    """A power of two of 16 to `most` elements that divides `inner`, or the smallest power of two
    that is not less than it.
    """
    block = most
    while block > 16 and inner % block:
        block //= 2
    if inner % block or block < 64:
        block = 16
        while block < min(inner, most):
            block *= 2
    return block
