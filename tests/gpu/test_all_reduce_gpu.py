"""The all-reduce over shared buffers on one GPU: two ranks, and one whose peer is gone."""

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


def pair(num_words: int, launch: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Both ranks' buffers, and what they share, on one GPU."""
    empty = all_reduce_triton.EMPTY
    words = [torch.full((4 * num_words,), empty, dtype=torch.int32, device="cuda") for _ in "ab"]
    buffers = torch.tensor([w.data_ptr() for w in words], dtype=torch.int64, device="cuda")
    sides = []
    for rank in range(2):
        state = torch.zeros(1 + num_words // launch.block, dtype=torch.int32, device="cuda")
        place = (rank, 2, num_words, launch)
        sides.append(all_reduce_triton.Exchange(words[rank], buffers, state, *place))
    torch.cuda.synchronize()  # `release` writes from another stream
    return words, sides


def reset(words: list[torch.Tensor], sides: list[Any]) -> None:
    """As if nobody had called."""
    for buffer, side in zip(words, sides, strict=True):
        buffer.fill_(all_reduce_triton.EMPTY)
        side.state.zero_()
    torch.cuda.synchronize()


@pytest.mark.parametrize("warps", [1, 8])
def test_many_calls_of_two_ranks(warps: int) -> None:
    """Each on a stream of its own, messages of all sizes in turns."""
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    words, sides = pair(2**19, all_reduce_triton.Launch(256 * warps, warps, hopper))
    messages = [
        [torch.randn(rows, 5120, dtype=torch.bfloat16, device="cuda") for _ in sides]
        for rows in (1, 64, 3, 200)
    ]
    outs = [[torch.empty_like(x) for x in pair] for pair in messages]
    streams = [torch.cuda.Stream() for _ in sides]

    def calls(repeats: int) -> None:
        torch.cuda.synchronize()
        for rank, (side, stream) in enumerate(zip(sides, streams, strict=True)):
            with torch.cuda.stream(stream):
                for _ in range(repeats):
                    for x, out in zip(messages, outs, strict=True):
                        all_reduce_triton.run(x[rank], x[0], out[rank], side)
        torch.cuda.synchronize()

    for side in sides:
        all_reduce_triton.release(side)
    calls(1)  # kernels must be loaded before one of them waits
    reset(words, sides)
    calls(100)
    for x, out in zip(messages, outs, strict=True):
        expected = (x[0].float() + x[1].float() + x[0].float()).bfloat16()
        assert torch.equal(out[0], expected) and torch.equal(out[1], expected)
    assert all(bool((buffer == all_reduce_triton.EMPTY).all()) for buffer in words)


def test_waiting_calls_are_released() -> None:
    """They wait for the other rank, and end once they are let go, in a graph, too."""
    words, (exchange, other) = pair(ROOM, all_reduce_triton.Launch())
    x = torch.ones(2, 512, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(x)
    # Kernels must be loaded before one of them waits, and wait for nobody then.
    for side in (exchange, other):
        all_reduce_triton.release(side)
        all_reduce_triton.run(x, None, out, side)
        all_reduce_triton.run(x, x, out, side)
        torch.cuda.synchronize()
    reset(words, [exchange, other])
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
    assert exchange.state[:2].tolist() == [1, 4]
