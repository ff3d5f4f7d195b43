"""Collectives of tensor parallelism that can be traced: functional, so that nothing is mutated
behind the compiler.

With one rank they return their argument, so that no collective is in the graph. Knows nothing of
layers or meshes.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed._functional_collectives as functional
from torch import Tensor

# torch 2.13's name for what was all_gather_tensor.
_all_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


def all_reduce(x: Tensor, size: int, group: str) -> Tensor:
    """Sum over the ranks of the group, on all of them.

    Args:
        x: any shape, equal on all ranks.
        size: ranks in the group.
        group: name of the process group.
    """
    return x if size == 1 else functional.all_reduce(x, "sum", cast(Any, group))


def all_gather_last(x: Tensor, size: int, group: str) -> Tensor:
    """[..., n] on each rank -> [..., size * n] on all, in rank order."""
    if size == 1:
        return x
    gathered: Tensor = _all_gather(x, x.dim() - 1, group)
    return gathered
