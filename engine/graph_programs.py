"""How a step function becomes something that can be replayed: eager, compiled, reduce-overhead
trees, captured by hand.

Each Program wraps one step function (one kind, one variant) and answers `run(bucket)`; the tensors
it reads stay where they are. Knows nothing of batches, pinned buffers or plans: graph_runner.py
prepares those.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

from engine.step_inputs import Bucket
from models.inputs import KVCache, SamplingState, StepInputs, StepOutputs, StepState

StepFunction = Callable[..., StepOutputs]


@dataclass(frozen=True, eq=False)
class StepTensors:
    """What every step reads or mutates besides its inputs.

    Allocated once; addresses never change.
    """

    params: Any
    kv_cache: KVCache
    state: StepState
    sampling_state: SamplingState
    grammar_LW: Tensor | None = None


@dataclass
class Counters:
    """What may not happen while serving. All stay 0 after the warm-up on a graph backend.

    Attributes:
        eager_steps: steps that ran without a recorded or compiled graph.
        recompiles: frames that Dynamo compiled after the warm-up.
        cudagraph_skips: calls that Inductor ran without its CUDA graph.
    """

    eager_steps: int = 0
    recompiles: int = 0
    cudagraph_skips: int = 0
    _frames: int = field(default=0, repr=False)
    _skips: int = field(default=0, repr=False)

    def start(self) -> None:
        """Forget what was compiled so far: from here on the server serves."""
        self._frames, self._skips = _frames_compiled(), _cudagraph_skips()
        self.eager_steps = 0

    def refresh(self) -> None:
        """Read torch's own counters."""
        self.recompiles = _frames_compiled() - self._frames
        self.cudagraph_skips = _cudagraph_skips() - self._skips


def _frames_compiled() -> int:
    return int(torch._dynamo.utils.counters["frames"]["total"])


def _cudagraph_skips() -> int:
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


class Program(Protocol):
    """One step function, ready to run on the inputs of any bucket of its kind."""

    def warm(self, bucket: Bucket, inputs: StepInputs) -> None:
        """Compile and record for this bucket.

        `inputs` are the static views that `run` will be given.
        """

    def run(self, bucket: Bucket, inputs: StepInputs) -> Tensor:
        """Enqueue the step; the packed outputs, valid until the next run of any program."""


class EagerProgram:
    """The step function as it is: without a compiler, or for tests that should start at once."""

    def __init__(self, step: StepFunction, tensors: StepTensors) -> None:
        self._step = step
        self._tensors = tensors

    def warm(self, bucket: Bucket, inputs: StepInputs) -> None:
        self.run(bucket, inputs)

    def run(self, bucket: Bucket, inputs: StepInputs) -> Tensor:
        t = self._tensors
        out = self._step(t.params, t.kv_cache, t.state, t.sampling_state, t.grammar_LW, inputs)
        return out.packed_LC


class CompiledProgram(EagerProgram):
    """A compiled step function, called directly: a CPU, where there is nothing to record."""


def _compiled_for(bucket: Bucket, dynamic: bool) -> int:
    """A number of tokens that the bucket shares its compile with; a single one is never shared."""
    return 2 if dynamic and bucket.num_tokens > 1 else bucket.num_tokens


class TreesProgram(EagerProgram):
    """`torch.compile(mode="reduce-overhead")`: Inductor's CUDA graph trees record and replay.

    Args:
        primer: runs a few layers of the same step uncompiled.
        dynamic: one compile serves all buckets of more than one token.
    """

    def __init__(
        self, step: StepFunction, tensors: StepTensors, primer: EagerProgram, dynamic: bool
    ) -> None:
        super().__init__(step, tensors)
        self._primer = primer
        self._dynamic = dynamic
        self._loaded: set[int] = set()

    def warm(self, bucket: Bucket, inputs: StepInputs) -> None:
        compiled = _compiled_for(bucket, self._dynamic)
        if compiled not in self._loaded:
            # Loads every kernel that all buckets share: nothing may be loaded within a recording.
            self.run(bucket, inputs)
            torch.cuda.synchronize()
            self._loaded.add(compiled)
        else:  # those that only this bucket has
            self._primer.run(bucket, inputs)
        # Inductor would run each size once more before it records it.
        with inductor_config.patch({"triton.skip_cudagraph_warmup": True}):
            self.run(bucket, inputs)
        torch.cuda.synchronize()

    def run(self, bucket: Bucket, inputs: StepInputs) -> Tensor:
        # Without the mark, outputs of the step before count as live and the tree grows for ever.
        torch.compiler.cudagraph_mark_step_begin()
        return super().run(bucket, inputs)

    def close(self) -> None:
        """Destroy the graphs of all programs of this thread, before the process group as below."""
        cudagraph_trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")
        cudagraph_trees.reset_cudagraph_trees()


class ManualProgram(EagerProgram):
    """A compiled step function captured by hand into one CUDA graph per bucket, all in one memory
    pool.

    Args:
        primer: runs a few layers of the same step uncompiled.
        dynamic: one compile serves all buckets of more than one token.
        pool: of CUDA graphs.
    """

    def __init__(
        self,
        step: StepFunction,
        tensors: StepTensors,
        primer: EagerProgram,
        dynamic: bool,
        pool: Any,
    ) -> None:
        super().__init__(step, tensors)
        self._primer = primer
        self._dynamic = dynamic
        self._pool = pool
        self._loaded: set[int] = set()
        self._graphs: dict[Bucket, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def warm(self, bucket: Bucket, inputs: StepInputs) -> None:
        # Compile, load kernels and let every library take its workspaces outside the recording.
        compiled = _compiled_for(bucket, self._dynamic)
        if compiled not in self._loaded:
            super().run(bucket, inputs)
            self._loaded.add(compiled)
        else:
            self._primer.run(bucket, inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads of others (NCCL's watchdog) may ask the device something meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            packed = super().run(bucket, inputs)
        self._graphs[bucket] = (graph, packed)

    def run(self, bucket: Bucket, inputs: StepInputs) -> Tensor:
        graph, packed = self._graphs[bucket]
        graph.replay()
        return packed

    def close(self) -> None:
        """Destroy the graphs; must come before the process group goes, or NCCL's teardown hangs."""
        self._graphs.clear()
