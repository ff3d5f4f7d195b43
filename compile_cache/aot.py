"""A function compiled once and kept as a blob: a start that finds it runs neither Dynamo nor
Inductor's compiler.

    cold: torch.compile(function).aot_compile(args) -> blob       (Dynamo, AOTAutograd, Inductor)
    warm: blob -> callable                                        (0.1 s for 30 layers, after
        imports)

What torch's FX graph cache saves is Inductor's part only; Dynamo still traces the whole function, 5
s for 30 layers. Knows nothing of what the function computes. Imports torch when called.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Mapping
from typing import Any

from compile_cache.session import Session, Warn

# What loading a blob imports, in this order: 2 s that `preload` can spend beside the reading of
# weights.
_MODULES = (
    "torch._dynamo.aot_compile",
    "torch._functorch._aot_autograd.aot_autograd_result",
    "torch._inductor.codecache",
    "torch._inductor.async_compile",
    "torch._inductor.select_algorithm",
)


def preload() -> None:
    """Import what loading needs. For a thread that runs while the engine waits for the disk."""
    for name in _MODULES:
        with contextlib.suppress(ImportError):  # another torch: loading will import what it has
            importlib.import_module(name)


def settle_triton() -> None:
    """Give Triton the assembler that Inductor will give it once it compiles a kernel of its own.

    The assembler is part of what Triton keeps a kernel under: those of ours that are built before
    Inductor's first, or in a process without one, would not be found again.
    """
    with contextlib.suppress(ImportError):
        tasks = importlib.import_module("torch._inductor.runtime.compile_tasks")
        for name in ("_set_triton_ptxas_path", "_set_triton_libdevice_path"):
            getattr(tasks, name, lambda: None)()


class AotFunction:
    """A compiled function. Calling it evaluates no guard: ask `accepts` once for each new kind of
    arguments.

    Attributes:
        loaded: it came from the cache; nothing was compiled.
    """

    def __init__(self, compiled: Any, loaded: bool) -> None:
        self._compiled = compiled
        self._run: Callable[..., Any] = compiled.fn
        self.loaded = loaded

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def accepts(self, *args: Any) -> bool:
        """Whether the arguments are of the types, dtypes, devices and static sizes it was compiled
        for (0.1 ms).
        """
        return bool(self._compiled.guard_check(*args))


def compile_or_load(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    session: Session,
    name: str,
    *,
    mark: Callable[[], None] = lambda: None,
    cudagraphs: bool = False,
    options: Mapping[str, Any] | None = None,
    warn: Warn,
) -> Callable[..., Any]:
    """The compiled form of a function of positional arguments, from the cache if it is there.

    Args:
        function: defined in a module that the next process can import; a closure may hold what
            pickle takes.
        args: an example; sizes that must vary need `mark`.
        session: the opened cache entry; the blob is kept by its next `seal`.
        name: of the blob, below "aot/"; one per function, variant, size class and rank.
        mark: called before a compile only, to `mark_dynamic` and `mark_static_address` tensors of
            `args`. A tensor that is marked dynamic while loading would fail the guards of what was
            compiled.
        cudagraphs: record with CUDA graph trees, as mode="reduce-overhead" does. Static addresses
            are part of the blob.
        options: Inductor's options.
        warn: told why something could not be loaded or kept.

    Returns:
        An AotFunction; where torch cannot compile ahead of time, what torch.compile returns.

    Raises:
        Whatever torch.compile raises for a function that it cannot compile.
    """
    blob = f"aot/{name}"
    data = session.get(blob)
    if data is not None:
        try:
            return AotFunction(_load(data, cudagraphs), loaded=True)
        except Exception as error:  # another torch, a class that moved: pickle may raise anything
            warn(f"compile cache: {blob} cannot be loaded and is built again ({_line(error)})")
    import torch
    import torch._dynamo.config as dynamo_config

    unmark = _snapshot(args)
    mark()
    assert not _has_constants(args), "mark_static_address(guard=True): a blob cannot hold constants"
    settings = {**(options or {}), **({"triton.cudagraphs": True} if cudagraphs else {})}
    with dynamo_config.patch(enable_aot_compile=True):  # the default from torch 2.12 on
        compiled = torch.compile(function, fullgraph=True, options=settings)
    try:
        ahead: Any = compiled.aot_compile((args, {}))  # type: ignore[attr-defined]
        session.put(blob, type(ahead).serialize(ahead).serialized_data)
    except Exception as error:
        warn(f"compile cache: {blob} cannot be kept, every start traces it anew ({_line(error)})")
        return compiled
    unmark()
    return AotFunction(ahead, loaded=False)


def _has_constants(args: tuple[Any, ...]) -> bool:
    # Such a tensor becomes part of the graph: what was compiled runs, but what is loaded lacks it.
    from torch.utils._pytree import tree_leaves

    return any(getattr(t, "_dynamo_static_input_type", "") == "guarded" for t in tree_leaves(args))


def _snapshot(args: tuple[Any, ...]) -> Callable[[], None]:
    """Remembers what Dynamo's marks hang on the tensors of `args`; calling it takes newer marks
    off.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    before = [(t, set(vars(t))) for t in tree_leaves(args) if isinstance(t, torch.Tensor)]

    def restore() -> None:
        for tensor, names in before:
            for name in set(vars(tensor)) - names:
                delattr(tensor, name)

    return restore


def _load(data: bytes, cudagraphs: bool) -> Any:
    import torch
    import torch._inductor.config as inductor_config
    from torch._dynamo.convert_frame import get_compile_id
    from torch._dynamo.utils import get_metrics_context
    from torch._guards import CompileContext, compile_context

    # Whether it records is decided by the setting at the time of loading, not by the blob; the two
    # contexts are those that torch itself loads compiled modules in.
    with (
        inductor_config.patch({"triton.cudagraphs": cudagraphs}),
        compile_context(CompileContext(get_compile_id({}))),
        get_metrics_context(),
    ):
        return torch.compiler.load_compiled_function(io.BytesIO(data))


def _line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:200]
