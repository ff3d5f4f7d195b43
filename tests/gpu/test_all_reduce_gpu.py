"""The all-reduce over shared buffers on one GPU: one rank of two whose peer is gone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.ops import all_reduce_triton
from models.ops.all_reduce_triton import Exchange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROOM = 8192


def run(x: Tensor, residual: Tensor | None, out: Tensor, exchange: Exchange) -> None:
    all_reduce_triton.run(x, residual, None, 0.0, out, out, exchange)


def test_waiting_calls_are_released() -> None:
    """They wait for the other rank, and end once they are let go, in a graph, too."""
    words = [torch.zeros(4 * ROOM, dtype=torch.int64, device="cuda") for _ in range(2)]
    buffers = torch.tensor([w.data_ptr() for w in words], dtype=torch.int64, device="cuda")
    state = torch.zeros(2, dtype=torch.int32, device="cuda")
    exchange = Exchange(buffers, state, 0, 2, ROOM)
    x = torch.ones(2, 512, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(x)
    other = Exchange(buffers, torch.zeros_like(state), 1, 2, ROOM)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # the peer takes part in the first call alone
        run(x, None, torch.empty_like(x), other)
    run(x, x, out, exchange)
    torch.cuda.synchronize()
    assert bool((out == 3).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run(x, x, out, exchange)
    graph.replay()
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    all_reduce_triton.release(words[0], exchange)
    event.synchronize()
    assert state.tolist() == [4, 0]
