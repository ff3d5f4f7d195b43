"""Collectives of tensor parallelism that can be traced: functional, so that nothing is mutated
behind the compiler.

Without a group they return their argument, so that no collective is in the graph. Knows nothing of
layers or meshes.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor

from models.ops import symmetric


def all_reduce(x: Tensor, group: str, symmetric_buffers: bool = False) -> Tensor:
    """Sum over the ranks of the group, on all of them.

    Args:
        x: any shape, equal on all ranks.
        group: name of the process group; empty: there is one rank.
        symmetric_buffers: the ranks share buffers, and messages are small often enough.
    """
    if symmetric_buffers:
        y: Tensor = symmetric.all_reduce_add(x, None, group)
        return y
    return functional.all_reduce(x, "sum", cast(Any, group)) if group else x


def all_reduce_add(x: Tensor, residual: Tensor, group: str, symmetric_buffers: bool) -> Tensor:
    """residual + the sum over the ranks; in one kernel where the ranks share buffers."""
    if symmetric_buffers:
        y: Tensor = symmetric.all_reduce_add(x, residual, group)
        return y
    return residual + all_reduce(x, group)


def all_gather_last(x: Tensor, size: int, group: str) -> Tensor:
    """[rows, n] on each rank -> [rows, size * n] on all, in rank order."""
    if not group:
        return x
    # The operators themselves: torch 2.11 cannot trace its own function of a last dim.
    ops: Any = torch.ops._c10d_functional
    gathered: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(x, size, group))
    return gathered.view(size, *x.shape).transpose(0, 1).flatten(1)
