"""Collectives of tensor parallelism that can be traced: functional, so that nothing is mutated
behind the compiler.

Without a group they return their argument, so that no collective is in the graph. Knows nothing of
layers or meshes.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed._functional_collectives as functional
from torch import Tensor

from models.ops import symmetric

# torch 2.13's name for what was all_gather_tensor.
_all_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


def all_reduce(x: Tensor, size: int, group: str) -> Tensor:
    """Sum over the ranks of the group, on all of them.

    Args:
        x: any shape, equal on all ranks.
        size: ranks in the group.
        group: name of the process group; empty: there is one rank.
    """
    return functional.all_reduce(x, "sum", cast(Any, group)) if group else x


def all_reduce_add(
    x: Tensor, residual: Tensor, size: int, group: str, symmetric_buffers: bool
) -> Tensor:
    """residual + the sum over the ranks; in one kernel where the ranks share buffers."""
    if symmetric_buffers:
        y: Tensor = symmetric.all_reduce_add(x, residual, group)
        return y
    return residual + all_reduce(x, size, group)


def all_gather_last(x: Tensor, size: int, group: str) -> Tensor:
    """[..., n] on each rank -> [..., size * n] on all, in rank order."""
    if not group:
        return x
    gathered: Tensor = _all_gather(x, x.dim() - 1, group)
    return gathered
