"""Functions of the step, compiled ahead of time: found in the compile cache or compiled and kept.

One function has one compile per size class: a single row (torch makes constants of sizes 0 and 1)
and any larger number, which is symbolic. A call picks by the number of rows alone, so that nothing
is traced, compared or guessed while serving. Knows nothing of batches or of what is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compile_cache.aot import AotFunction, compile_or_load
from compile_cache.session import Session
from engine.scheduler.batch import Kind
from models.inputs import KVCache, StepInputs
from models.layers import Rows


@dataclass(frozen=True)
class CompileSettings:
    """How functions are compiled.

    Attributes:
        session: the opened entry of the compile cache.
        cudagraphs: record with CUDA graph trees (mode="reduce-overhead").
        static: addresses of all tensors never change (a GPU, where graphs are recorded).
        dynamic: the number of rows is symbolic from two rows on, else every bucket has a compile.
        options: Inductor's.
        warn: told of trouble with the cache.
    """

    session: Session
    cudagraphs: bool
    static: bool
    dynamic: bool
    options: dict[str, Any]
    warn: Callable[[str], None]


@dataclass
class CompileLog:
    """What was compiled and what was found. After `freeze` a compile is our own bug."""

    compiled: dict[str, float] = field(default_factory=dict)
    loaded: dict[str, float] = field(default_factory=dict)
    frozen: bool = False

    def freeze(self) -> None:
        """From here on the server serves."""
        self.frozen = True


class CompiledFunction:
    """A function of positional arguments that compiles, or loads, itself for the sizes it meets.

    Args:
        function: pure, at module level or a closure over what pickle takes.
        name: of its blobs in the cache.
        kind: says which sizes vary together.
        settings, log: shared by all functions of an engine.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        kind: Kind,
        settings: CompileSettings,
        log: CompileLog,
    ) -> None:
        self._function, self._name, self._kind = function, name, kind
        self._settings, self._log = settings, log
        self._classes: dict[str, Callable[..., Any]] = {}
        self._by_rows: dict[int, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        rows = num_rows(args)
        run = self._by_rows.get(rows)
        if run is None:
            run = self._by_rows[rows] = self._find(rows, args)
        return run(*args)

    def _find(self, rows: int, args: tuple[Any, ...]) -> Callable[..., Any]:
        for run in self._classes.values():
            if _accepts(run, args):
                return run
        assert not self._log.frozen, f"{self._name} would be compiled for {rows} rows while serving"
        prefix, number = f"{self._name}-{'1' if rows == 1 else 'n'}-", 0
        while True:  # what the cache has under a name may be of another size class
            name, number = f"{prefix}{number}", number + 1
            if name in self._classes:
                continue
            run = self._classes[name] = self._compile(name, args)
            if _accepts(run, args):
                return run
            assert name in self._log.loaded, f"{name} does not take what it was compiled for"

    def _compile(self, name: str, args: tuple[Any, ...]) -> Callable[..., Any]:
        settings = self._settings
        start = time.perf_counter()
        run = compile_or_load(
            self._function,
            args,
            settings.session,
            name,
            mark=lambda: mark(args, self._kind, static=settings.static, dynamic=settings.dynamic),
            cudagraphs=settings.cudagraphs,
            options=settings.options,
            warn=settings.warn,
        )
        found = isinstance(run, AotFunction) and run.loaded
        log = self._log.loaded if found else self._log.compiled
        log[name] = time.perf_counter() - start
        return run


def _accepts(run: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    return run.accepts(*args) if isinstance(run, AotFunction) else True


def num_rows(args: Sequence[Any]) -> int:
    """Size of the dim that tells buckets apart: that of the first tensor, or of the step inputs."""
    for arg in args:
        if isinstance(arg, StepInputs):
            return arg.token_ids_T.shape[0]
        if isinstance(arg, Tensor):
            return arg.shape[0]
    raise AssertionError("a compiled function takes step inputs or a tensor")


def mark(args: Sequence[Any], kind: Kind, *, static: bool, dynamic: bool) -> None:
    """Tell Dynamo which dims vary and which addresses do not, before a compile.

    The pages of a cache are symbolic, so that their number does not decide whether a compiled
    function is found again.
    """
    for tensor in _cache_layers(args):
        torch._dynamo.mark_dynamic(tensor, 0)
    if static:
        for leaf in torch.utils._pytree.tree_leaves(tuple(args)):
            if isinstance(leaf, Tensor):
                torch._dynamo.mark_static_address(leaf, guard=False)
    if not dynamic:
        return
    for tensor in _varying(args, kind):
        if tensor.shape[0] > 1:  # a dim of size 1 is always a constant
            torch._dynamo.mark_dynamic(tensor, 0)


def _cache_layers(args: Sequence[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, KVCache):
            yield from arg.layers
        elif _is_cache_layer(arg):
            yield arg


def _is_cache_layer(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.ndim == 5


def _varying(args: Sequence[Any], kind: Kind) -> Iterator[Tensor]:
    # A decode step has as many rows, logit rows and updates as tokens; an extend step varies in
    # tokens alone.
    suffixes = ("_T", "_R", "_L", "_LF", "_LI", "_U") if kind == "decode" else ("_T",)
    for arg in args:
        if isinstance(arg, StepInputs | Rows):
            fields = zip(arg._fields, arg, strict=True)
            yield from (tensor for name, tensor in fields if name.endswith(suffixes))
        elif isinstance(arg, Tensor) and not _is_cache_layer(arg):
            yield arg
