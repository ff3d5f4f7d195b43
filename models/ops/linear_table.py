"""Which kernel a matrix applied to few rows takes: measured where it was, guessed elsewhere. Data, no torch.

Measured on an H200 by bench/kernels.py, weights rotated out of the caches. None is cuBLAS.

Legend: M rows of x, N columns of y, K inner dimension.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_ROWS = 64  # more rows are cuBLAS's


class Choice(NamedTuple):
    """Launch of a kernel in linear_triton.py.

    Attributes:
        block_n: rows of w of a tile (with SwiGLU half of them gate, half up). block_k: inner elements of a tile.
        split: parts that the inner dimension is cut into. stages: depth of the pipeline. warps: of a program.
        fuse_norm: an RMS norm before the matrix is 0: a kernel of its own, 1: applied to x, 2: applied to w.
    """

    block_n: int
    block_k: int
    split: int = 1
    stages: int = 1
    warps: int = 4
    fuse_norm: int = 1


# (rows up to, N, K, act) -> choice; of a shape the entry with the least rows that holds M counts.
Shape = tuple[int, int, bool]
TABLE: dict[Shape, tuple[tuple[int, Choice | None], ...]] = {}


def choose_linear(num_rows: int, columns: int, inner: int, act: bool) -> Choice | None:
    """The kernel for y[M, N] = x[M, K] @ w.T (with `act`, w has 2 N rows), or None for cuBLAS."""
    if num_rows > MAX_ROWS:
        return None
    for most_rows, choice in TABLE.get((columns, inner, act), ()):
        if num_rows <= most_rows:
            return choice
    return _gemv(inner, act) if num_rows == 1 else _skinny(num_rows, columns, inner, act)


def _gemv(inner: int, act: bool) -> Choice:
    """One row: a program takes a few whole rows of w, about 4096 elements at a time."""
    block_k = max(128, min(2048, 1 << (inner - 1).bit_length()))
    return Choice(max(1, 4096 // block_k // (2 if act else 1)), block_k)


def _skinny(num_rows: int, columns: int, inner: int, act: bool) -> Choice | None:
    """A few rows: tiles of 64 columns, cut along K until there are about as many programs as multiprocessors."""
    block_n, tiles = 64, columns // (32 if act else 64)
    block_k = next((k for k in (128, 64) if inner % k == 0), None)
    if block_k is None or columns * inner > 32 << 20:
        return None
    split = 1
    while (
        tiles * split * 2 <= 160
        and inner % (split * 2 * block_k) == 0
        and inner // (split * 2) >= 2 * block_k
    ):
        split *= 2
    return Choice(block_n, block_k, split, 4)
