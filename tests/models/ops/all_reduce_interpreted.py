"""The all-reduce kernel in Triton's interpreter: ranks are processes that share memory.

Run by test_all_reduce_interpreted.py in a process of its own, for Triton reads TRITON_INTERPRET
when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from models.ops import all_reduce_triton
from models.ops.all_reduce_triton import EMPTY, Exchange, Launch

ROOM, HIDDEN = 4096, 512
ROWS = (1, 3, 2, 7, 1, 4, 5)  # an odd number of calls, of sizes that share places


def draw(rows: int, seed: int) -> Tensor:
    """A message; float16, for the interpreter rounds bfloat16 in its own way."""
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).half()


def run_rank(rank: int, size: int, buffers: Sequence[Tensor]) -> None:
    """Sum messages with the other ranks, every second time onto a residual."""
    launch = Launch(block=256)  # several programs a call
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    state = torch.zeros(1 + ROOM // launch.block, dtype=torch.int32)
    exchange = Exchange(buffers[rank], addresses, state, rank, size, ROOM, launch)
    for call, rows in enumerate(ROWS):
        messages = [draw(rows, 10 * call + r) for r in range(size)]
        residual = draw(rows, 999) if call % 2 else None
        out = torch.full_like(messages[0], torch.nan)
        assert all_reduce_triton.fits(out, exchange)
        all_reduce_triton.run(messages[rank], residual, out, exchange)
        total = torch.zeros(rows, HIDDEN)
        for message in messages:
            total += message.float()
        expected = (total if residual is None else total + residual.float()).half()
        assert torch.equal(out, expected), (rank, call)
    assert exchange.state[:2].tolist() == [0, len(ROWS)]
    assert bool((buffers[rank] == EMPTY).all())


if __name__ == "__main__":
    for size in (2, 3):
        shared = [torch.full((2 * size * ROOM,), EMPTY, dtype=torch.int32) for _ in range(size)]
        spawn(run_rank, (size, [s.share_memory_() for s in shared]), nprocs=size)
        print(f"{size} ranks agree", flush=True)
