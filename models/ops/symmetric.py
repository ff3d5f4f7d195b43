"""Operator of an all-reduce through buffers that the GPUs of one host write into each other.

`fullgraph::all_reduce_add` is opaque to the compiler, so that it sees the real number of rows of a
bucket: small messages take our kernel (all_reduce_triton.py), large ones NCCL.

Buffers belong to a process group and are found by its name, as attention's plans are found by
bucket: made by `share` before anything is traced, kept until `forget`. Knows nothing of layers.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, library

try:
    from models.ops import all_reduce_triton
except ImportError:  # no Triton: a CPU
    all_reduce_triton = None  # type: ignore[assignment]

# Each rank writes a message to every other one: above this over the number of ranks NCCL's ring is
# as fast, and such messages are prompts', where it matters less.
MAX_BYTES = 2**22

_exchanges: dict[str, all_reduce_triton.Exchange | None] = {}


def share(
    group: str,
    rank: int,
    size: int,
    device: torch.device,
    launch: all_reduce_triton.Launch | None = None,
) -> None:
    """Allocate the buffers of the group of all ranks; all of them call it, on GPUs of one host.

    Args:
        launch: another than the usual one, to be measured.

    Raises:
        RuntimeError: the GPUs cannot reach each other's memory.
    """
    assert all_reduce_triton is not None, "CUDA tensors on a machine without Triton"
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    launch = launch or all_reduce_triton.Launch(pdl=hopper)
    num_words = MAX_BYTES // size // 4 // launch.block * launch.block
    symmetric_memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
    words = symmetric_memory.empty(2 * size * num_words, dtype=torch.int32, device=device)
    words.fill_(all_reduce_triton.EMPTY)
    handle = symmetric_memory.rendezvous(words, group)
    buffers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
    state = torch.zeros(1 + num_words // launch.block, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    dist.barrier()  # all are empty before anybody writes
    exchange = (words, buffers, state, rank, size, num_words)
    _exchanges[group] = all_reduce_triton.Exchange(*exchange, launch)


def pretend(group: str) -> None:
    """For a process that only compiles, and has no other ranks: nothing is summed."""
    _exchanges[group] = None


def release(group: str) -> None:
    """Let go of kernels that wait for a rank of the group that is gone."""
    exchange = _exchanges.get(group)
    if exchange is not None:
        all_reduce_triton.release(exchange)


def forget(group: str) -> None:
    """Free the group's buffers; no graph that uses them may run again."""
    _exchanges.pop(group, None)


@library.custom_op("fullgraph::all_reduce_add", mutates_args=(), device_types="cuda")
def all_reduce_add(x: Tensor, residual: Tensor | None, group: str) -> Tensor:
    """residual + sum of x over the ranks of the group, the same bits on all of them.

    Args:
        x: contiguous; equal shapes on all ranks.
        residual: like x; None: nothing is added.
        group: name of a process group that shares buffers.
    """
    exchange = _exchanges[group]
    if exchange is not None and all_reduce_triton.fits(x, exchange):
        out = torch.empty_like(x)
        all_reduce_triton.run(x, residual, out, exchange)
        return out
    ops = torch.ops._c10d_functional
    y = x.clone() if exchange is None else ops.wait_tensor(ops.all_reduce(x, "sum", group))
    return y if residual is None else residual + y


@all_reduce_add.register_fake
def _(x: Tensor, residual: Tensor | None, group: str) -> Tensor:
    return torch.empty_like(x)
