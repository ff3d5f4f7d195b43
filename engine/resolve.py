"""Every "auto" of a configuration, decided once: EngineConfig + model + machine -> ResolvedConfig.

A pure function of its arguments; the caller asks torch what the device is. The rules are those in
the comments of configs/default.yaml. `log.progress` stays: the display decides it.

Knows nothing of torch or checkpoints.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, TypeVar

from engine.config import (
    AttentionOptions,
    Buckets,
    CompileOptions,
    EngineConfig,
    ModelOptions,
    ParallelOptions,
    Positive,
    SchedulerOptions,
    validate,
)
from engine.config_errors import value_text
from engine.errors import ConfigError
from engine.machine import Machine, this_machine

logger = logging.getLogger(__name__)

DType = Literal["float32", "bfloat16", "float16"]
DEFAULT_CONTEXT_UNIT = 16384
_SMALLEST_EXTEND_BUCKET = 64
_EXTEND_STEP = 1024
_BUCKET_STEP = 8
_MOST_CPU_WORKERS = 4
_HOPPER = (9, 0)


class ResolvedModel(ModelOptions):
    """`dtype` is that of weights, activations and KV cache; `max_model_len` counts tokens."""

    dtype: DType
    max_model_len: Positive


class ResolvedCompile(CompileOptions):
    """Bucket lists end with max_running and max_step_tokens."""

    backend: Literal["inductor", "eager"]
    unit: Literal["step", "layer"]
    decode_buckets: Buckets
    extend_buckets: Buckets
    skinny_gemm: bool
    threads: Positive


class ResolvedAttention(AttentionOptions):
    """Kernels that this device has."""

    decode: Literal["triton", "fa2", "fa3", "xqa", "reference"]
    extend: Literal["mixed", "fa2", "fa3", "reference"]


class ResolvedParallel(ParallelOptions):
    """`symmetric` only where ranks can have it; a CPU has `gloo`, whatever was asked for."""

    all_reduce: Literal["nccl", "symmetric", "gloo"]  # type: ignore[assignment]


class ResolvedScheduler(SchedulerOptions):
    """All in requests or tokens."""

    max_running: Positive
    max_step_tokens: Positive
    step_budget: Positive
    context_unit: Positive


class ResolvedConfig(EngineConfig):
    """An EngineConfig without "auto" (but `log.progress`)."""

    model: ResolvedModel
    device: Literal["cpu", "cuda"]
    compile: ResolvedCompile
    attention: ResolvedAttention
    scheduler: ResolvedScheduler
    parallel: ResolvedParallel


def decode_buckets(max_running: int) -> tuple[int, ...]:
    """1 2 4 8 16 24 32 ... max_running (requests)."""
    steps = [1, 2, 4, *range(_BUCKET_STEP, max_running, _BUCKET_STEP)]
    return (*(n for n in steps if n < max_running), max_running)


def extend_buckets(max_step_tokens: int) -> tuple[int, ...]:
    """64 128 256 512 1024 2048 3072 ... max_step_tokens (tokens)."""
    buckets = []
    size = _SMALLEST_EXTEND_BUCKET
    while size < max_step_tokens:
        buckets.append(size)
        size += min(size, max(_EXTEND_STEP, max_step_tokens // 8))
    return (*buckets, max_step_tokens)


def chunk_kernel(extend: str, num_tokens: int, wave: int) -> str:
    """The attention kernel of the chunks of a step of so many tokens.

    fa3, twice as fast where chunks keep the whole GPU busy, does not split keys: a shorter chunk
    takes it as long as a wave. fa2 splits them.

    Args:
        extend: the resolved attention.extend.
        wave: see engine.scheduler.limits.TokenBucket.
    """
    if extend != "mixed":
        return extend
    return "fa2" if 2 * num_tokens <= wave else "fa3"


def resolve(
    config: EngineConfig,
    *,
    max_position: int,
    checkpoint_dtype: str | None,
    cuda: bool,
    capability: tuple[int, int] | None = None,
    context_unit: int = DEFAULT_CONTEXT_UNIT,
    machine: Machine | None = None,
    one_host: bool = True,
) -> ResolvedConfig:
    """Fill in every "auto".

    Args:
        config: as loaded.
        max_position: the model's own context limit, in tokens; what is set is not above it.
        checkpoint_dtype: the weights' dtype by name; None where the checkpoint does not say.
        cuda: torch can use a CUDA device.
        capability: its compute capability, (9, 0) for an H200.
        context_unit: the model's own; see models.config.ModelConfig.context_unit.
        machine: where this will run; None: here.
        one_host: all ranks are here.

    Raises:
        ConfigError: a setting that this machine cannot honour.
    """
    device = _device(config, cuda)
    machine = machine or this_machine()
    tree = config.model_dump()
    tree["device"] = device
    tree["model"] |= {
        "dtype": _or(config.model.dtype, _auto_dtype(device, checkpoint_dtype)),
        "max_model_len": _or(config.model.max_model_len, max_position),
    }
    tree["scheduler"] |= _scheduler(config, device)
    tree["scheduler"]["context_unit"] = _or(config.scheduler.context_unit, context_unit)
    tree["compile"] |= _compile(config, device, machine, tree["scheduler"])
    tree["attention"] |= _attention(config, device, capability)
    tree["parallel"]["all_reduce"] = _all_reduce(config.parallel, device, one_host)
    return validate(ResolvedConfig, tree, "configuration", {})


T = TypeVar("T")


def _or(value: Any, default: T) -> T:
    result: T = default if value == "auto" else value
    return result


def _device(config: EngineConfig, cuda: bool) -> str:
    if config.device == "cuda" and not cuda:
        raise ConfigError("device: got cuda, allowed: cpu or auto, for torch sees no CUDA device")
    return _or(config.device, "cuda" if cuda else "cpu")


def _auto_dtype(device: str, checkpoint_dtype: str | None) -> str:
    return "float32" if device == "cpu" else checkpoint_dtype or "bfloat16"


def _scheduler(config: EngineConfig, device: str) -> dict[str, int]:
    options, compile_ = config.scheduler, config.compile
    most = 256 if device == "cuda" else 16
    if compile_.decode_buckets != "auto":
        most = compile_.decode_buckets[-1]
    elif options.max_step_tokens != "auto":
        most = min(most, options.max_step_tokens)
    running = _or(options.max_running, most)
    most = max(8192 if device == "cuda" else 512, running)
    if compile_.extend_buckets != "auto":
        most = compile_.extend_buckets[-1]
    tokens = _or(options.max_step_tokens, most)
    # Not all of it on a GPU: running requests' gaps have room for slow clocks (bench/NOTES.md).
    budget = _or(options.step_budget, tokens * 3 // 4 if device == "cuda" else tokens)
    return {"max_running": running, "max_step_tokens": tokens, "step_budget": budget}


def _compile(
    config: EngineConfig, device: str, machine: Machine, scheduler: dict[str, int]
) -> dict[str, object]:
    options = config.compile
    by_layer = device == "cpu" or options.cudagraphs == "manual"
    backend = _backend(options.backend, device, machine)
    return {
        "backend": backend,
        # One layer compiles in a fraction of a whole step's time. Calling it once a layer costs
        # nothing where the calls are captured as one graph, and 1 ms or 2 of some 50 on a CPU.
        "unit": _or(options.unit, "layer" if by_layer else "step"),
        "decode_buckets": _or(options.decode_buckets, decode_buckets(scheduler["max_running"])),
        "extend_buckets": _or(options.extend_buckets, extend_buckets(scheduler["max_step_tokens"])),
        "skinny_gemm": _or(options.skinny_gemm, device == "cuda"),
        "threads": _or(options.threads, max(1, machine.cores // config.parallel.tp)),
        "workers": _workers(config, backend, device, machine),
    }


def _workers(config: EngineConfig, backend: str, device: str, machine: Machine) -> int:
    if backend == "eager" or not config.compile.cache:
        return 0
    # One rank on a CPU compiles what is needed first itself; several leave it all to processes.
    on_cpu = 1 if config.parallel.tp == 1 else min(machine.cores, _MOST_CPU_WORKERS)
    auto = max(1, 3 * machine.cores // 4) if device == "cuda" else on_cpu
    return _or(config.compile.workers, auto)


def _backend(backend: str, device: str, machine: Machine) -> str:
    if device == "cuda" or machine.compiler is not None:
        return _or(backend, "inductor")
    if backend == "inductor":
        raise ConfigError(
            "compile.backend: got inductor, allowed: eager or auto, for there is no C++ compiler "
            "(install g++ or set CXX)"
        )
    if backend == "auto":
        logger.warning("no C++ compiler (g++, clang++ or $CXX): compile.backend is eager, slower")
    return "eager"


def _all_reduce(options: ParallelOptions, device: str, one_host: bool) -> str:
    if options.all_reduce == "symmetric" and (device == "cpu" or not one_host):
        raise ConfigError(
            "parallel.all_reduce: got symmetric, allowed: nccl or auto, unless all ranks are GPUs "
            "of one host"
        )
    if device == "cpu":
        return "gloo"
    can = one_host and options.tp > 1
    return _or(options.all_reduce, "symmetric" if can else "nccl")


def _attention(
    config: EngineConfig, device: str, capability: tuple[int, int] | None
) -> dict[str, str]:
    options = config.attention
    on_gpu = ("triton", "mixed" if capability == _HOPPER else "fa2")
    decode, extend = on_gpu if device == "cuda" else ("reference", "reference")
    return {"decode": _or(options.decode, decode), "extend": _or(options.extend, extend)}


def settings_of(config: EngineConfig, resolved: ResolvedConfig) -> dict[str, str]:
    """What each "auto" became, by key path, in the tree's order: a table for the log."""
    before, after = _flat(config.model_dump()), _flat(resolved.model_dump())
    return {
        key: _setting_text(after[key])
        for key, value in before.items()
        if value == "auto" and after[key] != "auto"
    }


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        flat |= {f"{prefix}{key}": value} if inner is None else inner
    return flat


def _setting_text(value: object) -> str:
    if isinstance(value, tuple):
        shown = [str(item) for item in value]
        if len(shown) > 8:
            shown = [*shown[:6], "...", shown[-1]]
        return f"{' '.join(shown)} ({len(value)})"
    return value if isinstance(value, str) else value_text(value)
