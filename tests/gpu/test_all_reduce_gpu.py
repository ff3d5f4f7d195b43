"""The all-reduce over shared buffers on one GPU: one rank of two whose peer is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

all_reduce_triton: Any = pytest.importorskip("models.ops.all_reduce_triton")  # needs Triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROOM = 8192


def test_waiting_calls_are_released() -> None:
    """They wait for the other rank, and end once they are let go, in a graph, too."""
    empty = all_reduce_triton.EMPTY
    words = [torch.full((4 * ROOM,), empty, dtype=torch.int32, device="cuda") for _ in range(2)]
    buffers = torch.tensor([w.data_ptr() for w in words], dtype=torch.int64, device="cuda")
    launch = all_reduce_triton.Launch()
    state = torch.zeros(1 + ROOM // launch.block, dtype=torch.int32, device="cuda")
    exchange = all_reduce_triton.Exchange(words[0], buffers, state, 0, 2, ROOM, launch)
    x = torch.ones(2, 512, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(x)
    others = torch.zeros_like(state)
    other = all_reduce_triton.Exchange(words[1], buffers, others, 1, 2, ROOM, launch)
    # Kernels must be loaded before one of them waits, and wait for nobody then.
    for side in (exchange, other):
        all_reduce_triton.release(side)
        all_reduce_triton.run(x, None, out, side)
        all_reduce_triton.run(x, x, out, side)
        torch.cuda.synchronize()
    for buffer in words:
        buffer.fill_(empty)
    for counts in (state, others):
        counts.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # the peer takes part in the first call alone
        all_reduce_triton.run(x, None, torch.empty_like(x), other)
    all_reduce_triton.run(x, x, out, exchange)
    torch.cuda.synchronize()
    assert bool((out == 3).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            all_reduce_triton.run(x, x, out, exchange)
    graph.replay()
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    all_reduce_triton.release(exchange)
    event.synchronize()
    assert state[:2].tolist() == [1, 4]
