"""One rank of a tensor parallel run: a process of its own, started by test_tensor_parallel.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from models.inputs import TensorParallel
from models.ops.linear import Kernels
from tests.models.harness import Chunks, Harness, load

# The last two are decode steps, of plain layers and of fused ones.
CHUNKS: tuple[Chunks, ...] = (
    {0: list(range(20)), 1: [262, 131, 7]},
    {0: [3], 1: [9]},
    {0: [11], 1: [200]},
)


def run_rank(rank: int, size: int, store: str, folders: Sequence[str]) -> None:
    """Compute the chunks on every checkpoint; save each step's logits as <rank>.<step>.pt."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    tp = TensorParallel(rank, size, dist.group.WORLD.group_name)
    for folder in map(Path, folders):
        harness = Harness(*load(folder, tp=tp), tp=tp)
        for step, chunks in enumerate(CHUNKS):
            kind = "decode" if step > 0 else "extend"
            logits = harness.logits(chunks, kind, Kernels(fused=step == 2))
            torch.save(logits, folder / f"{rank}.{step}.pt")
    dist.barrier()  # a rank that leaves early can abort one that still talks
    # Gloo's threads abort a process now and then that takes leave of them.
    os._exit(0)
