"""How many KV pages there are: configured on a CPU, measured on a GPU; and what to set when memory
runs out.

Knows nothing of who uses the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from engine.errors import ConfigError
from engine.resolve import ResolvedConfig
from models.config import ModelConfig
from models.inputs import TensorParallel
from models.sharding import local_heads

# Ranks whose free memory differs by more have something else on a GPU, or another GPU.
MAX_IMBALANCE = 2 * 2**30

_GIB = 1 << 30
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def kv_page_bytes(
    model: ModelConfig, tp: TensorParallel, page_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one page's keys and values over all layers on one rank."""
    heads = local_heads(model, tp)[1]
    return model.num_layers * 2 * page_size * heads * model.head_dim * dtype.itemsize


def smallest_free(free: Sequence[int]) -> int:
    """Bytes that every rank has free.

    Args:
        free: by rank.

    Raises:
        ConfigError: they differ by more than MAX_IMBALANCE; names the ranks.
    """
    least, most = min(free), max(free)
    if most - least > MAX_IMBALANCE:
        few = [str(rank) for rank, value in enumerate(free) if most - value > MAX_IMBALANCE]
        raise ConfigError(
            f"parallel.tp: the GPU of rank {', '.join(few)} has {least / 2**30:.1f} GiB free after "
            f"the weights, that of rank {free.index(most)} has {most / 2**30:.1f} GiB; allowed: a "
            f"difference of {MAX_IMBALANCE / 2**30:.0f} GiB (does something else run there?)"
        )
    return least


def num_kv_pages(
    config: ResolvedConfig, page_bytes: int, free: Sequence[int] = (), step: int = 0
) -> int:
    """Pages to allocate: those that requests can use, and the dummy page 0.

    `kv.num_pages` decides if given. Otherwise `kv.bytes` on a CPU, and on a GPU `kv.memory_ratio`
    of what is left when everything else has its memory.

    Args:
        page_bytes: of one page.
        free: by rank, bytes of its GPU's memory, now that weights and state are allocated.
        step: bytes that steps and their graphs will take of it.

    Raises:
        ConfigError: no page for requests fits, or ranks differ too much.
    """
    kv = config.kv
    if kv.num_pages is not None:
        return kv.num_pages + 1
    if config.device == "cpu":
        for_pages, advice = int(kv.bytes), f"give kv.bytes more than {_size(kv.bytes)}"
    else:
        least = smallest_free(free)
        for_pages = int(max(0, least - step) * kv.memory_ratio)
        advice = (
            f"{_size(least)} are free beside the weights and steps take {_size(step)}: give "
            f"kv.memory_ratio more than {kv.memory_ratio:g}, or {_smaller_steps(config)}"
        )
    if for_pages < 2 * page_bytes:
        raise ConfigError(
            f"kv: {for_pages // page_bytes} pages of {page_bytes} bytes fit; "
            f"at least 2 are needed ({advice})"
        )
    return for_pages // page_bytes


def free_bytes(device: torch.device) -> int:
    """Of a GPU's memory, with torch's own reserves given back; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@contextmanager
def explained(part: str, config: ResolvedConfig, num_pages: int = 0) -> Iterator[None]:
    """Around what allocates at start: running out of memory becomes a ConfigError.

    Args:
        part: "weights", "state", "kv" or "steps": what is being allocated.
        num_pages: of the part "kv".

    Raises:
        ConfigError: says which part did not fit and what to set.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if not isinstance(error, MemoryError) and not any(t in text for t in _OUT_OF_MEMORY):
            raise
        raise ConfigError(_advice(part, config, num_pages)) from error


def _advice(part: str, config: ResolvedConfig, num_pages: int) -> str:
    room = "this machine"
    if config.device != "cpu" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        room = f"the GPU ({_size(total)}, {_size(free)} free)"
    pages = "kv.num_pages" if config.kv.num_pages is not None else "kv.memory_ratio"
    if config.device == "cpu" and config.kv.num_pages is None:
        pages = "kv.bytes"
    words = {
        "weights": "model.path: the weights do not fit into {}: take a smaller model, model.dtype "
        "bfloat16, or more ranks (parallel.tp)",
        "state": "scheduler.max_running: the sampling state of {running} requests does not fit "
        "into {}: set scheduler.max_running lower",
        "kv": "{pages}: {num} KV pages do not fit into {}: set it lower",
        "steps": "steps and their graphs do not fit into {}: set {pages} lower, or {smaller}",
    }
    running, smaller = config.scheduler.max_running, _smaller_steps(config)
    return "out of memory: " + words[part].format(
        room, running=running, pages=pages, num=num_pages, smaller=smaller
    )


def _smaller_steps(config: ResolvedConfig) -> str:
    scheduler = config.scheduler
    return (
        f"scheduler.max_step_tokens (now {scheduler.max_step_tokens}) or "
        f"scheduler.max_running (now {scheduler.max_running}) less"
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
