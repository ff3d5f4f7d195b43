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
from typing import Any

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


class Program:
    """One step function, compiled or not, that is called on the inputs of any bucket of its kind: a
    CPU, where there is nothing to record, and tests that should start at once.
    """

    def __init__(self, step: StepFunction, tensors: StepTensors) -> None:
        self._step = step
        self._tensors = tensors

    def warm(self, bucket: Bucket, inputs: StepInputs) -> None:
        """Compile and record for this bucket.

        `inputs` are the static views that `run` will be given.
        """
        self.run(bucket, inputs)

    def run(self, bucket: Bucket, inputs: StepInputs) -> Tensor:
        """Enqueue the step; the packed outputs, valid until the next run of any program."""
        return self._call(inputs)

    def close(self) -> None:
        """Destroy the graphs; must come before the process group goes, or NCCL's teardown hangs."""

    def _call(self, inputs: StepInputs) -> Tensor:
        t = self._tensors
        out = self._step(t.params, t.kv_cache, t.state, t.sampling_state, inputs)
        return out.packed_LC


class _Recorded(Program):
    """A program that is recorded into CUDA graphs.

    Args:
        primer: runs a few layers of the same step uncompiled.
        dynamic: one compile serves all buckets of more than one token.
    """

    def __init__(
        self, step: StepFunction, tensors: StepTensors, primer: Program, dynamic: bool
    ) -> None:
        super().__init__(step, tensors)
        self._primer = primer
        self._dynamic = dynamic
        self._loaded: set[int] = set()

    def _load(self, bucket: Bucket, inputs: StepInputs) -> None:
        """Compile, load kernels and let every library take its workspaces: nothing of it may happen
        within a recording.
        """
        # Of the sizes that share a compile one stands for all; a single token shares with none.
        compiled = 2 if self._dynamic and bucket.num_tokens > 1 else bucket.num_tokens
        if compiled not in self._loaded:
            self._call(inputs)
            self._loaded.add(compiled)
        else:  # kernels that only this bucket has
            self._primer.run(bucket, inputs)
        torch.cuda.synchronize()


class TreesProgram(_Recorded):
    """`torch.compile(mode="reduce-overhead")`: Inductor's CUDA graph trees record and replay."""

    def warm(self, bucket: Bucket, inputs: StepInputs) -> None:
        self._load(bucket, inputs)
        # Inductor would run each size once more before it records it.
        with inductor_config.patch({"triton.skip_cudagraph_warmup": True}):
            self.run(bucket, inputs)
        torch.cuda.synchronize()

    def close(self) -> None:
        """Those of all programs of this thread."""
        cudagraph_trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")
        cudagraph_trees.reset_cudagraph_trees()

    def _call(self, inputs: StepInputs) -> Tensor:
        # Without the mark, outputs of the step before count as live and the tree grows for ever.
        torch.compiler.cudagraph_mark_step_begin()
        return super()._call(inputs)


class ManualProgram(_Recorded):
    """A compiled step function captured by hand into one CUDA graph per bucket, all in one memory
    `pool`.
    """

    def __init__(
        self,
        step: StepFunction,
        tensors: StepTensors,
        primer: Program,
        dynamic: bool,
        pool: Any,
    ) -> None:
        super().__init__(step, tensors, primer, dynamic)
        self._pool = pool
        self._graphs: dict[Bucket, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def warm(self, bucket: Bucket, inputs: StepInputs) -> None:
        self._load(bucket, inputs)
        graph = torch.cuda.CUDAGraph()
        # Threads of others (NCCL's watchdog) may ask the device something meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            packed = self._call(inputs)
        self._graphs[bucket] = (graph, packed)

    def run(self, bucket: Bucket, inputs: StepInputs) -> Tensor:
        graph, packed = self._graphs[bucket]
        graph.replay()
        return packed

    def close(self) -> None:
        self._graphs.clear()
