"""How parameters are split over the ranks of tensor parallelism: one table, and the slices that
follow from it.

Every rank holds the same shapes, so that all compile the same graph: an axis that the ranks do not
divide (vocab, ffn) is padded with zeros at its end, which change no result. Heads are never split;
key and value heads are repeated when there are more ranks than heads. Knows nothing of files or of
collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from models.config import ModelConfig
from models.inputs import TensorParallel
from models.param_spec import ParamSpec, Part

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# Logical axis -> is it split over the tp axis of the mesh? The only table there is.
SHARDED: dict[str, bool] = {
    "vocab": True,
    "heads": True,
    "kv_heads": True,
    "ffn": True,
    "embed": False,
    "head_dim": False,
    "experts": False,
}


class AxisSlice(NamedTuple):
    """A rank's share of one axis: elements [start, stop) of the whole, zero-padded to `size`."""

    start: int
    stop: int
    size: int


def placement(spec: ParamSpec) -> Placement:
    """DTensor's placement of the parameter on the tp axis; fused ones are split part by part."""
    # Half a second to import, and one rank needs none of it.
    from torch.distributed.tensor import Replicate, Shard

    for dim, axis in enumerate(spec.parts[0].axes):
        if SHARDED[axis]:
            return Shard(dim + 1 if spec.stack else dim)
    return Replicate()


def local_heads(model: ModelConfig, tp: TensorParallel) -> tuple[int, int]:
    """(query heads, key-value heads) on each rank."""
    return model.num_heads // tp.size, max(1, model.num_kv_heads // tp.size)


def axis_slice(model: ModelConfig, tp: TensorParallel, axis: str, length: int) -> AxisSlice:
    """This rank's share of an axis of `length` elements."""
    if not SHARDED[axis] or tp.size == 1:
        return AxisSlice(0, length, length)
    if axis == "kv_heads":
        width = length // model.num_kv_heads
        count = local_heads(model, tp)[1] * width
        start = tp.rank * model.num_kv_heads // tp.size * width
        return AxisSlice(start, start + count, count)
    size = -(-length // tp.size)
    start = min(tp.rank * size, length)
    return AxisSlice(start, min(start + size, length), size)


def part_slices(model: ModelConfig, tp: TensorParallel, part: Part) -> tuple[AxisSlice, ...]:
    """This rank's share of each dim of a checkpoint tensor."""
    return tuple(
        axis_slice(model, tp, axis, length)
        for axis, length in zip(part.axes, part.shape, strict=True)
    )


def local_shape(model: ModelConfig, tp: TensorParallel, spec: ParamSpec) -> tuple[int, ...]:
    """Shape of the parameter on each rank, padding included."""
    parts = [part_slices(model, tp, part) for part in spec.parts]
    rows = sum(slices[0].size for slices in parts)
    return spec.stacked(rows, tuple(s.size for s in parts[0][1:]))
