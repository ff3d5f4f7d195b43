"""What is to be compiled for a configuration, as jobs that processes can share out.

A job is one kind, variant and size class of the step; its first bucket is compiled, for the others
share that compile. Jobs named "kernels" compile nothing of torch's: they run buckets once, so that
Triton builds our own kernels for their sizes. Knows nothing of torch or of how a job is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.resolve import ResolvedConfig
from engine.scheduler.batch import Kind, Variant
from engine.world import launched_rank, ranks_here

VARIANTS: tuple[Variant, ...] = ("plain", "full")
# Decode buckets a process builds kernels for: each size may have a kernel of its own.
_KERNEL_BUCKETS = 9


@dataclass(frozen=True)
class CompileJob:
    """One thing to compile.

    Attributes:
        name: unique; kept in the entry's list of finished jobs.
        kind, variant: of the step.
        buckets: sizes to run, in order; the first is what the compile is specialised for.
        compiled: False: the step runs uncompiled, for its own kernels' sake.
        gpu: number of the GPU, which compiled code has in it; 0 on a CPU.
    """

    name: str
    kind: Kind
    variant: Variant
    buckets: tuple[int, ...]
    compiled: bool = True
    gpu: int = 0


def compile_jobs(config: ResolvedConfig, variants: Sequence[Variant]) -> list[list[CompileJob]]:
    """Groups of jobs; those of a group are for one process, one after the other.

    With several ranks: what all ranks of this host need, which differ in their GPU alone.
    """
    groups = _jobs_of_one(config, variants)
    if config.parallel.tp == 1 and launched_rank() is not None:  # collectives all the same
        groups = [[replace(job, name=f"{job.name} group") for job in group] for group in groups]
    gpus = ranks_here(config.parallel.tp) if config.device == "cuda" else 1
    return groups + [
        [replace(job, name=f"{job.name} cuda{gpu}", gpu=gpu) for job in group]
        for gpu in range(1, gpus)
        for group in groups
    ]


def _jobs_of_one(config: ResolvedConfig, variants: Sequence[Variant]) -> list[list[CompileJob]]:
    options = config.compile
    if options.backend == "eager":
        return []
    sizes: dict[Kind, tuple[int, ...]] = {
        "decode": options.decode_buckets,
        "extend": options.extend_buckets,
    }
    cuda = config.device == "cuda"
    groups: list[list[CompileJob]] = []
    for kind, buckets in sizes.items():
        for number, size_class in enumerate(_size_classes(buckets, options.dynamic)):
            jobs = [
                CompileJob(f"{kind} {_class_name(size_class)} {v}", kind, v, size_class[:1])
                for v in variants
            ]
            if cuda and number == 0 and "full" in variants:
                # After a compile, when those of `plain` are there: few are `full`'s own.
                jobs.append(_kernel_job(kind, "full", buckets))
            parts = [[job for job in jobs if job.variant == variant] for variant in VARIANTS]
            # Where layers are compiled, variants share all but the head.
            groups += [jobs] if options.unit == "layer" else [part for part in parts if part]
    if cuda and "plain" in variants:
        for kind, buckets in sizes.items():
            starts = range(0, len(buckets), _KERNEL_BUCKETS)
            shares = (buckets[start : start + _KERNEL_BUCKETS] for start in starts)
            groups += [[_kernel_job(kind, "plain", share)] for share in shares]
    return groups


def _kernel_job(kind: Kind, variant: Variant, buckets: tuple[int, ...]) -> CompileJob:
    name = f"kernels {kind} {_class_name(buckets)} {variant}"
    return CompileJob(name, kind, variant, buckets, compiled=False)


def hint(buckets: Sequence[int]) -> int:
    """The bucket that a compile for many is specialised for: Inductor tunes for its size."""
    return next((size for size in buckets if size >= 8), buckets[-1])


def _size_classes(buckets: tuple[int, ...], dynamic: bool) -> list[tuple[int, ...]]:
    """Buckets that share a compile; torch makes a constant of size 1."""
    if not dynamic:
        return [(size,) for size in buckets]
    larger = tuple(size for size in buckets if size > 1)
    classes = [(hint(larger), *larger)] if larger else []
    return [*classes, (1,)] if 1 in buckets else classes


def _class_name(sizes: tuple[int, ...]) -> str:
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low}..{high}"
