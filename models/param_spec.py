"""ParamSpec: a parameter before it is a tensor. One tree of specs drives loading, sharding, checks
and random init.

A spec names the checkpoint tensors it is made of, so that a fused parameter (query, key and value;
gate and up) is described in one place. Knows nothing of files or of how axes are placed on ranks.

Legend: H heads, K kv heads, D head dim, E hidden, F ffn, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Path = tuple[str | int, ...]
# Nested dicts and lists; leaves are ParamSpec in a spec tree and Tensor in a parameter tree.
Tree = dict[str, Any]

_INIT_STD = 0.02  # Hugging Face's initializer_range


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor.

    Attributes:
        source: its name in a Hugging Face checkpoint.
        shape: as stored there.
        axes: logical name of each dim: vocab, embed, heads, kv_heads, ffn, head_dim or experts.
    """

    source: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]


@dataclass(frozen=True)
class ParamSpec:
    """A parameter: its parts, one after the other along dim 0.

    Attributes:
        parts: at least one; equal in all dims but the first.
        dtype: of the parameter in memory, whatever the checkpoint's.
        init: "normal" (std 0.02), "ones" or "zeros", for random weights.
        stack: groups into which dim 0 is cut to make a new first dim (one per expert); 0 for none.
    """

    parts: tuple[Part, ...]
    dtype: torch.dtype
    init: str = "normal"
    stack: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter, before sharding."""
        return self.stacked(sum(part.shape[0] for part in self.parts), self.parts[0].shape[1:])

    def stacked(self, rows: int, rest: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the parameter made of `rows` rows of shape `rest`."""
        return (self.stack, rows // self.stack, *rest) if self.stack else (rows, *rest)

    @property
    def axes(self) -> tuple[str, ...]:
        """Logical axes; those of a fused first dim are joined, as in "heads+kv_heads"."""
        first = dict.fromkeys(part.axes[0] for part in self.parts)
        axes = ("+".join(first), *self.parts[0].axes[1:])
        return ("experts", *axes) if self.stack else axes


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, leaf) of a tree of dicts and lists, in the order in which it was built."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


def map_tree(function: Any, tree: Any, path: Path = ()) -> Any:
    """The same tree with `function(path, leaf)` for every leaf."""
    if isinstance(tree, dict):
        return {key: map_tree(function, value, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_tree(function, value, (*path, index)) for index, value in enumerate(tree)]
    return function(path, tree)


def init_part(spec: ParamSpec, part: Part, seed: int, device: torch.device) -> Tensor:
    """Random values of one whole (unsharded) part, in spec.dtype.

    They depend on the seed and the part's name alone, so that every rank of any tensor parallel
    size draws the same model and takes its slice.
    """
    if spec.init == "ones":
        return torch.ones(part.shape, dtype=spec.dtype, device=device)
    if spec.init == "zeros":
        return torch.zeros(part.shape, dtype=spec.dtype, device=device)
    assert spec.init == "normal", spec.init
    generator = torch.Generator(device).manual_seed(_mix(seed, part.source))
    values = torch.empty(part.shape, dtype=spec.dtype, device=device)
    return values.normal_(0.0, _INIT_STD, generator=generator)


def _mix(seed: int, name: str) -> int:
    """A 63-bit seed from a seed and a name (FNV-1a: hash() differs between processes)."""
    value = 0xCBF29CE484222325 ^ seed
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value >> 1
