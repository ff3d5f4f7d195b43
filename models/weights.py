"""Loads a checkpoint tensor by tensor into this rank's parameters.

The files are checked against the specs before anything is read. They are memory-mapped, and a fused
parameter is filled in place, so that weights are in memory once. Knows nothing of what the
parameters compute or of how a checkpoint is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.checkpoint import Checkpoint, resolve_checkpoint, some_names
from models.config import ModelConfig
from models.errors import CheckpointError
from models.gguf import GgufFile, dequantise, hf_names, read_header, unpermute
from models.inputs import TensorParallel
from models.param_spec import ParamSpec, Part, Tree, init_part, leaves, map_tree
from models.param_spec import Path as TreePath
from models.registry import param_specs
from models.rope import rope_table
from models.sharding import AxisSlice, local_shape, part_slices

__all__ = ["Checkpoint", "hollow_params", "load_params", "resolve_checkpoint"]

Progress = Callable[[str, int, int], None]

# Mapped pages count as resident: a file is mapped anew after this much was read from it.
_REMAP_BYTES = 256 * 1024**2


def load_params(
    model: ModelConfig,
    tp: TensorParallel,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    *,
    seed: int = 0,
    num_positions: int | None = None,
) -> Tree:
    """This rank's parameters, and under "rope" the table of cosines and sines (float32 [positions,
    D]); with several ranks under "first_id" the first id of the vocabulary here (int32 []).

    Args:
        model: the configuration.
        tp: this rank's place; only its slices are read.
        checkpoint: from `resolve_checkpoint`.
        dtype: of all parameters but the rope table.
        device: where they go.
        progress: called with (tensor name, tensors done, tensors in all).
        seed: of random weights.
        num_positions: rows of the rope table; default model.max_position.

    Raises:
        CheckpointError: tensors missing, unknown or of another shape, all named; or an unreadable
            file.
        UnsupportedModel: the heads cannot be shared out among the ranks.
    """
    model.check_ranks(tp.size)
    specs = param_specs(model, dtype)
    source = _open_source(checkpoint, model, seed, device)
    _check_tensors(source, specs, model, checkpoint)
    total = sum(len(spec.parts) for _, spec in leaves(specs))
    done = 0

    def load(_: TreePath, spec: ParamSpec) -> Tensor:
        nonlocal done
        param = torch.empty(local_shape(model, tp, spec), dtype=dtype, device=device)
        flat = param.flatten(0, 1) if spec.stack else param
        offset = 0
        for part in spec.parts:
            _report(progress, part.source, done, total)
            slices = part_slices(model, tp, part)
            values = source.read(spec, part, slices)
            into = flat.narrow(0, offset, slices[0].size)
            if values.shape != into.shape:  # the ranks do not divide this axis
                into.zero_()
            into[tuple(slice(0, size) for size in values.shape)].copy_(values)
            offset += slices[0].size
            done += 1
        return param

    params: Tree = map_tree(load, specs)
    _add_tables(params, model, tp, num_positions or model.max_position)
    _report(progress, "", total, total)
    return params


def _add_tables(params: Tree, model: ModelConfig, tp: TensorParallel, num_positions: int) -> None:
    """What no checkpoint holds; the first id of this rank's share of the vocabulary is a tensor, so
    that all ranks compile the same.
    """
    embed = params["embed"]
    table = rope_table(model.rope, model.head_dim, num_positions, model.max_position)
    params["rope"] = table.to(embed.device)
    if tp.size > 1:
        first = tp.rank * embed.shape[0]
        params["first_id"] = torch.tensor(first, dtype=torch.int32, device=embed.device)


def hollow_params(
    model: ModelConfig,
    tp: TensorParallel,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
) -> Tree:
    """A tree of load_params' shapes, dtypes and strides in no more memory than its largest
    parameter takes: for compiling, which reads no value.
    """
    shapes = [local_shape(model, tp, spec) for _, spec in leaves(param_specs(model, dtype))]
    memory = torch.zeros(max(math.prod(shape) for shape in shapes), dtype=dtype, device=device)

    def make(_: TreePath, spec: ParamSpec) -> Tensor:
        shape = local_shape(model, tp, spec)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        # Not a view: those are traced in another way.
        param = torch.empty(0, dtype=dtype, device=device)
        return param.set_(memory.untyped_storage(), 0, shape, strides)

    params: Tree = map_tree(make, param_specs(model, dtype))
    _add_tables(params, model, tp, num_positions)
    return params


def _report(progress: Progress | None, name: str, done: int, total: int) -> None:
    if progress is not None:
        progress(name, done, total)


class _Source(Protocol):
    """Where tensors come from."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """Of every tensor there is; None if there is no file to check."""

    def read(self, spec: ParamSpec, part: Part, slices: Sequence[AxisSlice]) -> Tensor:
        """The part's elements [start, stop) of every dim, on any device, of any dtype."""


def _open_source(
    checkpoint: Checkpoint, model: ModelConfig, seed: int, device: torch.device
) -> _Source:
    if checkpoint.kind == "safetensors":
        return _Safetensors(checkpoint.files)
    if checkpoint.kind == "gguf":
        return _Gguf(read_header(checkpoint.files[0]), model)
    return _Random(seed, device)


def _index(slices: Sequence[AxisSlice]) -> tuple[slice, ...]:
    return tuple(slice(s.start, s.stop) for s in slices)


class _Random:
    """Draws every part whole and takes the slice: all ranks agree on the model."""

    shapes = None

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device

    def read(self, spec: ParamSpec, part: Part, slices: Sequence[AxisSlice]) -> Tensor:
        return init_part(spec, part, self._seed, self._device)[_index(slices)]


class _Safetensors:
    """One or more safetensors files, one of them mapped at a time."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            with _open(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())
                    self._file_of[name] = file
        self._mapped: Path | None = None
        self._handle: Any = None
        self._bytes = 0

    def read(self, spec: ParamSpec, part: Part, slices: Sequence[AxisSlice]) -> Tensor:
        file = self._file_of[part.source]
        if file != self._mapped or self._bytes > _REMAP_BYTES:
            self._handle = _open(file)
            self._mapped, self._bytes = file, 0
        values: Tensor = self._handle.get_slice(part.source)[_index(slices)]
        self._bytes += values.nbytes
        return values


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file: {error}") from error


class _Gguf:
    """A GGUF file: each tensor is dequantised whole, then sliced."""

    def __init__(self, file: GgufFile, model: ModelConfig) -> None:
        self._file = file
        self._names = hf_names(file)
        self._model = model
        self.shapes = {hf: file.tensors[name].shape for hf, name in self._names.items()}
        self._permuted = file.metadata["general.architecture"] == "llama"

    def read(self, spec: ParamSpec, part: Part, slices: Sequence[AxisSlice]) -> Tensor:
        values = dequantise(self._file, self._names[part.source])
        if self._permuted and ".q_proj." in part.source:
            values = unpermute(values, self._model.num_heads)
        if self._permuted and ".k_proj." in part.source:
            values = unpermute(values, self._model.num_kv_heads)
        return torch.from_numpy(values[_index(slices)])


def _check_tensors(
    source: _Source, specs: Tree, model: ModelConfig, checkpoint: Checkpoint
) -> None:
    """Every tensor of the specs is there in its shape, and no other."""
    if source.shapes is None:
        return
    wanted = {part.source: part.shape for _, spec in leaves(specs) for part in spec.parts}
    missing = [name for name in wanted if name not in source.shapes]
    extra = [name for name in source.shapes if name not in wanted and not _known(name, model)]
    misshaped = [
        f"{name} {list(source.shapes[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if source.shapes.get(name, shape) != shape
    ]
    problems = [
        f"{len(names)} {what}: {some_names(names)}"
        for what, names in (("missing", missing), ("misshaped", misshaped), ("unknown", extra))
        if names
    ]
    if problems:
        where = checkpoint.files[0] if len(checkpoint.files) == 1 else checkpoint.root
        raise CheckpointError(f"{where}: tensors do not fit config.json; " + "; ".join(problems))


def _known(name: str, model: ModelConfig) -> bool:
    """Tensors that some checkpoints carry and that are no parameters of ours."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    return model.tie_embeddings and name == "lm_head.weight"
