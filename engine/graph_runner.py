"""Compile, warm and replay one graph per bucket: ScheduledBatch in, a Pending result out, nothing
waits in between.

    launch(batch): pick the bucket -> pack into a host buffer -> plan attention -> one copy in ->
    graph -> one copy out Pending.wait(): the only place that waits for the device

On a CPU the same steps run on one worker thread, so that the next step is prepared while this one
runs. Knows nothing of requests, schedulers or weights on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.attention_plan import AttentionPlanner
from engine.compile_jobs import VARIANTS, hint
from engine.compiled import CompileLog
from engine.graph_programs import Counters, Program, StepTensors
from engine.scheduler.batch import I32, Kind, ScheduledBatch, StepResult, Variant
from engine.step_inputs import Bucket, empty_batch, pack, views
from models.inputs import StepInputs
from models.sampling import admit, allow

_POLL_S = 0.02


class Pending(Protocol):
    """A step that was launched."""

    def wait(self) -> StepResult:
        """Block until the step is done."""

    def poll(self) -> bool:
        """Whether it is done; may wait for some milliseconds, on a CPU."""


def parse_result(packed: I32, num_rows: int, variant: Variant) -> StepResult:
    """int32 [L, C] as StepOutputs.packed_LC lays it out -> StepResult of `num_rows` rows."""
    packed = packed[:num_rows]
    ids = packed[:, 0].copy()
    if variant == "plain":
        return StepResult(ids)
    k = (packed.shape[1] - 2) // 2
    floats = packed.copy().view(np.float32)
    return StepResult(ids, floats[:, 1], packed[:, 2 : 2 + k].copy(), floats[:, 2 + k :])


@dataclass(frozen=True, eq=False)
class _CpuPending:
    future: Future[StepResult]

    def wait(self) -> StepResult:
        return self.future.result()

    def poll(self) -> bool:
        return bool(wait([self.future], _POLL_S).done)


@dataclass(frozen=True, eq=False)
class _CudaPending:
    event: torch.cuda.Event
    packed: I32
    num_rows: int
    variant: Variant

    def wait(self) -> StepResult:
        self.event.synchronize()
        return parse_result(self.packed, self.num_rows, self.variant)

    def poll(self) -> bool:
        return bool(self.event.query())


class GraphRunner:
    """Every bucket's graph, and the buffers that feed them.

    Args:
        programs: one per (kind, variant).
        tensors: what the programs read and mutate.
        buckets: of both kinds, in ascending order of tokens within a kind.
        device: where the tensors are.
        planner: attention's host work; None on a CPU.
        is_graph: the programs replay compiled graphs (False for `compile.backend: eager`).
        log: of what the programs compile.
    """

    def __init__(
        self,
        programs: dict[tuple[Kind, Variant], Program],
        tensors: StepTensors,
        buckets: Sequence[Bucket],
        device: torch.device,
        planner: AttentionPlanner | None,
        is_graph: bool,
        log: CompileLog,
    ) -> None:
        self.counters = Counters()
        self._programs = programs
        self._tensors = tensors
        self._device = device
        self._planner = planner
        self._is_graph = is_graph
        self.log = log
        self._buckets: dict[Kind, list[Bucket]] = {"decode": [], "extend": []}
        for bucket in buckets:
            self._buckets[bucket.kind].append(bucket)
        cuda = device.type == "cuda"
        length = max(b.buffer_length for b in buckets)
        self._host = [torch.zeros(length, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._turn = 0
        self._ready: set[tuple[Bucket, Variant]] = set()
        self._warm_variants: set[Variant] = set()
        self._left: list[tuple[Bucket, Variant]] = []
        self._closed = False
        self._background: threading.Thread | None = None
        if cuda:
            self._buffer = torch.zeros(length, dtype=torch.int32, device=device)
            self._inputs = [{b: views(self._buffer, b) for b in buckets}] * 2
            self._copied = [torch.cuda.Event() for _ in range(2)]
            self._out: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        else:
            self._inputs = [{b: views(host, b) for b in buckets} for host in self._host]
            # One thread runs every step: compiled state and OpenMP pools belong to a thread.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="step")

    def bucket_for(self, batch: ScheduledBatch) -> Bucket:
        """The smallest bucket that holds the batch."""
        for bucket in self._buckets[batch.kind]:
            if bucket.fits(batch):
                return bucket
        raise AssertionError(
            f"no {batch.kind} bucket holds {batch.num_tokens} tokens, {batch.num_rows} rows, "
            f"{batch.num_logit_rows} logit rows, {len(batch.update_slots)} updates"
        )

    def warm(
        self, progress: Callable[[str, int, int], None], variants: Sequence[Variant] = VARIANTS
    ) -> None:
        """Compile and record every bucket of the variants, largest first; the others are left to
        `warm_next`.

        Blocks; progress(name, done, total).
        """
        every = [
            (bucket, variant)
            for variant in VARIANTS
            for kind in self._buckets
            for bucket in _warm_order(self._buckets[kind])
        ]
        jobs = [job for job in every if job[1] in variants]
        self._left = [job for job in every if job[1] not in variants]
        for done, (bucket, variant) in enumerate(jobs):
            progress(f"{bucket.kind} {bucket.num_tokens} {variant}", done, len(jobs))
            self.warm_bucket(bucket.kind, bucket.num_tokens, variant)
        progress("", len(jobs), len(jobs))
        self.counters.start()

    def warm_next(self) -> bool:
        """Compile and record one of the buckets that `warm` left, between two steps; whether there
        was one.
        """
        if not self._left:
            return False
        bucket, variant = self._left.pop(0)
        self.warm_bucket(bucket.kind, bucket.num_tokens, variant)
        return True

    def warm_bucket(self, kind: Kind, size: int, variant: Variant) -> None:
        """Compile and record one bucket."""
        bucket = next(b for b in self._buckets[kind] if b.num_tokens == size)
        inputs = self._inputs[0][bucket]
        self._on_step_thread(self._warm_one, bucket, variant, self._host[0], inputs)

    def warm_in_background(
        self,
        variants: Sequence[Variant],
        prepare: Callable[[], bool],
        done: Callable[[], object],
    ) -> None:
        """Warm further variants while steps of the others run; `is_ready` says when they may come.

        CPU only: a GPU records its graphs with nothing else going on. Padded steps touch no page
        and no slot but the dummies, so that they can run beside real ones.

        Args:
            variants: those that `warm` left out.
            prepare: called in the background thread first; may take long. False: the engine ends.
            done: called in the background thread at the end.
        """
        assert self._device.type == "cpu"

        def warm() -> None:
            host = torch.zeros_like(self._host[0])
            if not prepare():
                return
            for variant in variants:
                for bucket in (b for k in self._buckets for b in _warm_order(self._buckets[k])):
                    if self._closed:
                        return
                    self._warm_one(bucket, variant, host, views(host, bucket))
            self.forbid_recompiles()
            done()

        self._background = threading.Thread(target=warm, name="warm", daemon=True)
        self._background.start()

    def is_ready(self, variant: Variant) -> bool:
        """Whether every bucket of the variant is warm."""
        return variant in self._warm_variants

    def forbid_recompiles(self) -> None:
        """From now on a shape that was not warmed is an error instead of a silent compile."""
        self.log.freeze()
        if self._is_graph:
            torch.compiler.set_stance("fail_on_recompile")

    def launch(self, batch: ScheduledBatch) -> Pending:
        """Enqueue one step. Returns at once on a GPU and after packing on a CPU."""
        bucket = self.bucket_for(batch)
        if not self._is_graph or (bucket, batch.variant) not in self._ready:
            self.counters.eager_steps += 1
        turn, self._turn = self._turn, 1 - self._turn
        if self._device.type == "cuda":
            return self._launch_cuda(bucket, batch, turn)
        pack(batch, bucket, self._host[turn].numpy())
        return _CpuPending(self._thread.submit(self._run_cpu, bucket, batch, turn))

    def close(self) -> None:
        """Free the graphs (before any process group) and stop the worker thread."""
        self._closed = True
        if self._background is not None:
            self._background.join()  # torch compiles in one thread at a time
        if self._is_graph:  # the stance is the process's: another runner may want to compile
            torch.compiler.set_stance("default")
        if self._planner is not None:
            self._planner.close()
        for program in self._programs.values():
            program.close()
        if self._device.type != "cuda":
            self._thread.shutdown()

    def _on_step_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._device.type == "cuda":
            return function(*args)
        return self._thread.submit(function, *args).result()

    @torch.no_grad()
    def _warm_one(self, bucket: Bucket, variant: Variant, host: Tensor, inputs: StepInputs) -> None:
        batch = empty_batch(bucket)
        pack(batch, bucket, host.numpy())
        if self._device.type == "cuda":
            self._buffer.copy_(host)
        if self._planner is not None:
            self._planner.plan(bucket, batch)
        program = self._programs[bucket.kind, variant]
        program.warm(bucket, inputs)
        if self._device.type == "cuda":  # pinned memory is taken now, not while serving
            packed = program.run(bucket, inputs)
            for turn in range(2):
                self._out_buffer(turn, packed)
        self._ready.add((bucket, variant))
        if all((b, variant) in self._ready for kind in self._buckets.values() for b in kind):
            self._warm_variants.add(variant)

    @torch.no_grad()
    def _run_cpu(self, bucket: Bucket, batch: ScheduledBatch, turn: int) -> StepResult:
        self._admit(batch)
        packed = self._programs[bucket.kind, batch.variant].run(bucket, self._inputs[turn][bucket])
        return parse_result(packed.numpy(), batch.num_logit_rows, batch.variant)

    @torch.no_grad()
    def _launch_cuda(self, bucket: Bucket, batch: ScheduledBatch, turn: int) -> Pending:
        length = bucket.buffer_length
        host = self._host[turn]
        self._copied[turn].synchronize()  # the copy of two steps ago: long done
        pack(batch, bucket, host.numpy())
        if self._planner is not None:
            self._planner.plan(bucket, batch)
        self._buffer[:length].copy_(host[:length], non_blocking=True)
        self._copied[turn].record()
        self._admit(batch)
        packed = self._programs[bucket.kind, batch.variant].run(bucket, self._inputs[0][bucket])
        out = self._out_buffer(turn, packed)
        out.copy_(packed, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return _CudaPending(done, out.numpy(), batch.num_logit_rows, batch.variant)

    def _out_buffer(self, turn: int, packed: Tensor) -> Tensor:
        key = (turn, tuple(packed.shape))
        if key not in self._out:
            self._out[key] = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True)
        return self._out[key]

    def _admit(self, batch: ScheduledBatch) -> None:
        """The per-slot state that the step begins with."""
        for a in batch.admissions:
            admit(
                self._tensors.sampling_state,
                a.slot,
                a.prompt_ids,
                a.output_ids,
                a.bias_ids,
                a.bias_values,
                a.stop_ids,
            )
        if batch.masks:
            slots = np.array([mask.slot for mask in batch.masks], np.int32)
            words = np.stack([mask.words for mask in batch.masks])
            allow(self._tensors.sampling_state, slots, words)


def _warm_order(buckets: Sequence[Bucket]) -> list[Bucket]:
    """A middle size first (its size is the hint that Inductor tunes for), then from the largest
    down.
    """
    first = hint([b.num_tokens for b in buckets])
    rest = (b for b in reversed(buckets) if b.num_tokens != first)
    return [next(b for b in buckets if b.num_tokens == first), *rest]
