"""The decode kernel in Triton's interpreter, against the operator in torch.

Run by test_decode_interpreted.py in a process of its own, for Triton reads TRITON_INTERPRET when it
is imported. No GPU; programmatic dependent launch does nothing here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from models.ops import decode_triton
from models.ops.decode_triton import Cut, DecodeShape, NewToken, Scratch
from models.ops.fused import decode_attention
from tests.models.ops.experts_interpreted import scalars_are_indices

PAGE, DIM = 16, 32
FOUR_WARPS = DecodeShape(4, 64, 64, 2, 4)
APART = DecodeShape(8, 32, apart=128, apart_extra=4)


class Case(NamedTuple):
    """Tokens before the new one of each row (-1: padding), heads, and how rows are cut."""

    starts: tuple[int, ...]
    heads: int
    kv_heads: int
    shape: DecodeShape
    window: int = 0
    normed: bool = True


CASES = (
    Case((300,), 8, 1, FOUR_WARPS),
    Case((0,), 8, 1, FOUR_WARPS),
    Case((64, 127, 128, -1), 12, 2, FOUR_WARPS, normed=False),
    Case((63, 0, 300), 4, 1, FOUR_WARPS, window=70),
    Case((300,), 8, 1, DecodeShape(16, 32)),
    Case((300, 5, -1, 63), 6, 2, DecodeShape(8), window=40),
    Case((100, 127, 0, -1, 63), 12, 2, APART),
    Case((100, 128, 300, 127, 0, -1), 12, 2, APART),
    Case((100, 300), 8, 1, APART, window=40, normed=False),
    Case((700,), 8, 1, APART._replace(extra=24, apart_extra=3)),
    Case((16, 700), 2, 2, DecodeShape(40, 16)),
)


def check(case: Case) -> None:
    """Attention of the new tokens and what reaches the cache."""
    torch.manual_seed(0)
    rows, real = len(case.starts), [start >= 0 for start in case.starts]
    columns = max(case.starts) // PAGE + 1
    pages = torch.randperm(rows * columns).view(rows, columns).to(torch.int32) + 1
    cache = torch.randn(rows * columns + 1, 2, PAGE, case.kv_heads, DIM)
    starts = torch.tensor([max(start, 0) for start in case.starts], dtype=torch.int32)
    slots = torch.arange(rows, dtype=torch.int32)
    kv_slots = torch.tensor(
        [
            int(pages[row, start // PAGE]) * PAGE + start % PAGE if start >= 0 else -1
            for row, start in enumerate(case.starts)
        ],
        dtype=torch.int32,
    )
    lens = torch.tensor(real).to(torch.int32)
    offsets = torch.where(lens > 0, slots, -1)
    qkv = torch.randn(rows, (case.heads + 2 * case.kv_heads) * DIM)
    rope = torch.randn(rows, DIM)
    norms = [torch.rand(DIM) + 0.5 for _ in range(2)] if case.normed else [None, None]
    where = (kv_slots, pages, slots, starts, lens, offsets)
    expected_cache = cache.clone()
    expected = decode_attention(
        qkv, rope, *norms, 1e-5, expected_cache, *where, DIM**-0.5, case.window, False
    )
    cut = Cut.of(rows, case.window, case.shape, qkv.device)
    decode_triton.plan(slots, starts, lens, offsets, rows, False, cut)
    places = len(cut.items) * case.heads
    scratch = Scratch(
        torch.full((places * DIM,), torch.nan),
        torch.full((places * 2,), torch.nan),
        torch.zeros(rows * case.heads, dtype=torch.int32),
    )
    out = torch.full((rows, case.heads, DIM), torch.nan)
    new = NewToken(qkv, rope, norms[0], norms[1], 1e-5, kv_slots)
    decode_triton.decode(new, cache, pages, cut, scratch, DIM**-0.5, False, out, False)
    torch.testing.assert_close(out[real], expected[real], atol=1e-5, rtol=1e-5, msg=str(case))
    torch.testing.assert_close(cache, expected_cache, atol=1e-5, rtol=1e-5, msg=str(case))
    assert not out[[not r for r in real]].any(), case
    assert not scratch.counters.any(), case


if __name__ == "__main__":
    scalars_are_indices()
    for case in CASES:
        check(case)
        print(case)
