"""How many KV pages there are: configured on a CPU, measured on a GPU.

Knows nothing of who uses the pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.errors import ConfigError
from engine.ranks import Ranks
from engine.resolve import ResolvedConfig
from models.config import ModelConfig
from models.inputs import TensorParallel
from models.sharding import local_heads

# Ranks whose free memory differs by more have something else on a GPU, or another GPU.
MAX_IMBALANCE = 2 * 2**30


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
    config: ResolvedConfig, page_bytes: int, device: torch.device, ranks: Ranks
) -> int:
    """Pages to allocate: those that requests can use, and the dummy page 0.

    `kv.num_pages` decides if given. Otherwise `kv.bytes` on a CPU; on a GPU `kv.memory_ratio` of
    what is free now (weights and state are allocated), less what the largest step and the graphs
    will take, on the rank that has least.
    """
    if config.kv.num_pages is not None:
        return config.kv.num_pages + 1
    if device.type == "cpu":
        return int(config.kv.bytes) // page_bytes
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    free = smallest_free(ranks.gather("free memory", free))
    return int(free * config.kv.memory_ratio) // page_bytes
