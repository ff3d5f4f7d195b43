"""Times on a GPU: calls under graph replay, and whatever a stream is given; what an H200 can do.

Knows nothing of what is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

BANDWIDTH = 4.3e12  # bytes a second of an H200, measured by a device copy
FLOPS = 790e12  # a second, bfloat16, of a large matrix product there


def elapsed_ms(run: Callable[[], object]) -> float:
    """Milliseconds on the GPU of what `run` enqueues; waits for it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def replay_us(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Microseconds of one call, all of them captured in one graph that is replayed."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = [elapsed_ms(graph.replay) for _ in range(repeats)]
    return float(np.median(times)) * 1e3 / len(calls)
