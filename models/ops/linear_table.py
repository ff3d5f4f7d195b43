"""Which kernel a matrix applied to few rows takes: measured where it was, guessed elsewhere. Data.

Measured on an H200 by bench/kernels.py, weights rotated out of the caches. None is cuBLAS.

Legend: M rows of x, N columns of y, K inner dimension.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_ROWS = 256  # more rows are cuBLAS's
_GUESSED_ROWS = 64  # and so are more than these of a shape that was not measured


class Choice(NamedTuple):
    """Launch of a kernel in linear_triton.py.

    Attributes:
        block_n: rows of w of a tile (with SwiGLU half of them gate, half up). block_k: inner
            elements of a tile.
        split: parts that the inner dimension is cut into. stages: depth of the pipeline. warps: of
            a program.
        fuse_norm: an RMS norm before the matrix is 0: a kernel of its own, 1: applied to x,
            2: applied to w.
        block_m: rows of x of a tile at most.
        ahead: one row: the programs that find room while the kernel before still runs bring the
            weights of others into the L2 cache.
    """

    block_n: int
    block_k: int
    split: int = 1
    stages: int = 1
    warps: int = 4
    fuse_norm: int = 1
    block_m: int = 64
    ahead: bool = False


_GEMV = 1, Choice(4, 512)
# (N, K, act) -> (rows up to, choice) in ascending order.
TABLE: dict[tuple[int, int, bool], tuple[tuple[int, Choice | None], ...]] = {
    # Qwen3-0.6B: qkv, o, gate_up, down; on Hopper one kernel from 33 rows on, see `between_rows`.
    (4096, 1024, False): (
        _GEMV,
        (32, Choice(64, 64, 4, 5, 4, 2)),
        (64, Choice(64, 128, 1, 4, 4, 0)),
    ),
    (1024, 2048, False): (
        (1, Choice(8, 2048)),
        (16, Choice(32, 128, 4, 4)),
        (32, Choice(64, 64, 4, 5)),
        (64, Choice(64, 128, 4, 4, 8)),
    ),
    (3072, 1024, True): (_GEMV, (64, Choice(64, 128, 1, 4, 4, 0))),
    (1024, 3072, False): (
        (1, Choice(4, 2048, warps=8)),
        (16, Choice(64, 128, 4, 4)),
        (32, Choice(32, 128, 4, 4)),
        (64, Choice(64, 128, 4, 4, 8)),
    ),
    # Qwen3-30B-A3B: qkv, o.
    (5120, 2048, False): ((1, Choice(4, 1024)),),
    (2048, 4096, False): ((1, Choice(1, 2048, warps=2, ahead=True)),),
    # Qwen3-14B, one row; more are cuBLAS's.
    (7168, 5120, False): ((1, Choice(8, 1024)),),
    (5120, 5120, False): ((1, Choice(2, 2048)),),
    (17408, 5120, True): ((1, Choice(4, 1024)),),
    (5120, 17408, False): ((1, Choice(4, 512)),),
    # Its halves, of two ranks; more rows are cuBLAS's.
    (3584, 5120, False): ((1, Choice(8, 1024)),),
    (5120, 2560, False): ((1, Choice(4, 1024)), (64, None)),
    (8704, 5120, True): ((1, Choice(2, 1024)),),
    (5120, 8704, False): ((1, Choice(4, 512)),),
    # Llama-3-8B, whose qkv and o are Qwen3-8B's, too.
    (6144, 4096, False): ((1, Choice(16, 512)),),
    (4096, 4096, False): ((1, Choice(2, 2048)),),
    (14336, 4096, True): ((1, Choice(4, 1024)),),
    (4096, 14336, False): ((1, Choice(4, 2048)),),
}


# (hidden, columns of attention's result, ffn, columns of qkv) -> rows of which one kernel of
# between_gluon.py, all that lies between two attentions, was measured to be faster than its parts.
_BETWEEN = {(1024, 2048, 3072, 4096): range(33, 257)}  # Qwen3-0.6B


def between_rows(hidden: int, attended: int, ffn: int, qkv: int | None) -> range:
    """For which numbers of rows it is; `qkv` is None behind the last layer."""
    for shape, rows in _BETWEEN.items():
        if shape[:3] == (hidden, attended, ffn) and qkv in (None, shape[3]):
            return rows
    return range(0)


def choose_linear(num_rows: int, columns: int, inner: int, act: bool) -> Choice | None:
    """The kernel for y[M, N] = x[M, K] @ w.T (with `act`, w has 2 N rows), or None for cuBLAS."""
    if num_rows > MAX_ROWS:
        return None
    for most_rows, choice in TABLE.get((columns, inner, act), ()):
        if num_rows <= most_rows:
            return choice
    if num_rows > _GUESSED_ROWS:
        return None
    return _gemv(inner, act) if num_rows == 1 else _skinny(columns, inner, act)


def _gemv(inner: int, act: bool) -> Choice:
    """One row: a program takes four rows of w."""
    if act or inner >= 4096:
        return Choice(4, 1024)
    return Choice(4, 512) if inner < 2048 else Choice(4, 2048, warps=8)


def _skinny(columns: int, inner: int, act: bool) -> Choice | None:
    """A few rows: tiles of 64 rows of w, cut along K only until there are 64 programs.

    Large matrices are cuBLAS's, which is near the memory bandwidth there.
    """
    block_k = next((k for k in (128, 64) if inner % k == 0), None)
    if columns * inner > 16 << 20 or block_k is None:
        return None
    tiles = columns // (32 if act else 64)
    split = 1
    while tiles * split < 64 and inner % (split * 2 * block_k) == 0:
        split *= 2
    return Choice(64, block_k, split, 4, 4, 0)
