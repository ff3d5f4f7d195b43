"""Operator of an all-reduce through buffers that the GPUs of one host write into each other.

`fullgraph::all_reduce` is opaque to the compiler, so that it sees the real number of rows of a
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
    from models.ops import all_reduce_triton, fused_triton
except ImportError:  # no Triton: a CPU
    all_reduce_triton = fused_triton = None  # type: ignore[assignment]

# Each rank writes a message to every other one: above this over the number of ranks NCCL's ring is
# as fast, and such messages are prompts', where it matters less.
MAX_BYTES = 2**22

_exchanges: dict[str, tuple[all_reduce_triton.Exchange, Tensor] | None] = {}


def share(group: str, rank: int, size: int, device: torch.device) -> None:
    """Allocate the buffers of the group of all ranks; all of them call it, on GPUs of one host.

    Raises:
        RuntimeError: the GPUs cannot reach each other's memory.
    """
    assert all_reduce_triton is not None, "CUDA tensors on a machine without Triton"
    num_words = MAX_BYTES // size // 4
    symmetric_memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
    words = symmetric_memory.empty(2 * size * num_words, dtype=torch.int64, device=device)
    words.zero_()
    handle = symmetric_memory.rendezvous(words, group)
    buffers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
    state = torch.zeros(2, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    dist.barrier()  # all are zero before anybody writes
    pdl = torch.cuda.get_device_capability(device) >= (9, 0)
    exchange = all_reduce_triton.Exchange(buffers, state, rank, size, num_words, pdl)
    _exchanges[group] = (exchange, words)


def pretend(group: str) -> None:
    """For a process that only compiles, and has no other ranks: nothing is summed."""
    _exchanges[group] = None


def release(group: str) -> None:
    """Let go of kernels that wait for a rank of the group that is gone."""
    shared = _exchanges.get(group)
    if shared is not None:
        all_reduce_triton.release(shared[1], shared[0])


def forget(group: str) -> None:
    """Free the group's buffers; no graph that uses them may run again."""
    _exchanges.pop(group, None)


@library.custom_op("fullgraph::all_reduce", mutates_args=(), device_types="cuda")
def all_reduce(
    x: Tensor, residual: Tensor | None, norm_E: Tensor | None, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    """(y, norm of y): y = residual + sum of x over the ranks of the group; the same bits on all.

    Args:
        x: contiguous; equal shapes on all ranks.
        residual: like x; None: nothing is added.
        norm_E: weight of an RMS norm with `eps` of y's rows; None: the second result is empty.
        group: name of a process group that shares buffers.
    """
    shared, normed = _exchanges[group], _normed(x, norm_E)
    if shared is not None and all_reduce_triton.fits(x, shared[0]):
        y = torch.empty_like(x)
        all_reduce_triton.run(x, residual, norm_E, eps, y, normed, shared[0])
        return y, normed
    ops = torch.ops._c10d_functional
    y = x.clone() if shared is None else ops.wait_tensor(ops.all_reduce(x, "sum", group))
    y = y if residual is None else residual + y
    if norm_E is not None:
        fused_triton.rms_norm(y, norm_E, eps, normed, False)
    return y, normed


@all_reduce.register_fake
def _(
    x: Tensor, residual: Tensor | None, norm_E: Tensor | None, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _normed(x, norm_E)


def _normed(x: Tensor, norm_E: Tensor | None) -> Tensor:
    return x.new_empty(0) if norm_E is None else torch.empty_like(x)
