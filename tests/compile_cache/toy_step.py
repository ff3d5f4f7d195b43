"""A step in small for the ahead-of-time tests: an operator that mutates a cache, NamedTuples,
nested parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, library


@dataclass(frozen=True)
class Shape:
    """A compile-time constant, like a model's configuration."""

    layers: int = 1
    hidden: int = 16


class Cache(NamedTuple):
    """One tensor [pages, hidden] a layer."""

    layers: tuple[Tensor, ...]


class Inputs(NamedTuple):
    """x_TE: float32 [T, hidden]; slots_T: int64 [T]."""

    x_TE: Tensor
    slots_T: Tensor


class Outputs(NamedTuple):
    """sum_TE: float32 [T, hidden]."""

    sum_TE: Tensor


@library.custom_op("fullgraph_test::store", mutates_args=("cache",))
def store(cache: Tensor, x_TE: Tensor, slots_T: Tensor) -> Tensor:
    """cache[slot] += x, then what the slots hold."""
    cache.index_add_(0, slots_T, x_TE)
    return cache.index_select(0, slots_T)


@store.register_fake
def _(cache: Tensor, x_TE: Tensor, slots_T: Tensor) -> Tensor:
    return torch.empty_like(x_TE)


def make_step(shape: Shape) -> Callable[..., Outputs]:
    """step(params, cache, inputs), closed over a constant as the engine's steps are."""

    def step(params: dict[str, Any], cache: Cache, inputs: Inputs) -> Outputs:
        x_TE = inputs.x_TE
        for weight_EE, layer in zip(params["layers"], cache.layers, strict=True):
            y_TE = torch.nn.functional.silu(x_TE @ weight_EE) * shape.hidden**-0.5
            x_TE = x_TE + torch.ops.fullgraph_test.store(layer, y_TE, inputs.slots_T)
        return Outputs(x_TE)

    return step


def make_tensors(shape: Shape, pages: int, device: str) -> tuple[dict[str, Any], Cache]:
    """Parameters, always the same, and an empty cache."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.hidden, shape.hidden)
    weights = [torch.randn(size, generator=generator).to(device) for _ in range(shape.layers)]
    layers = [torch.zeros(pages, shape.hidden, device=device) for _ in range(shape.layers)]
    return {"layers": weights}, Cache(tuple(layers))


def make_inputs(shape: Shape, tokens: int, device: str) -> Inputs:
    """Inputs, always the same for a number of tokens."""
    generator = torch.Generator().manual_seed(tokens)
    x_TE = torch.randn(tokens, shape.hidden, generator=generator).to(device)
    return Inputs(x_TE, torch.arange(tokens, device=device) % 4)
