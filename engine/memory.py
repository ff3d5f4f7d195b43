"""How many KV pages there are: configured on a CPU, measured on a GPU.

Knows nothing of who uses the pages.
"""

from __future__ import annotations

import torch

from engine.resolve import ResolvedConfig
from models.config import ModelConfig
from models.inputs import TensorParallel


def kv_page_bytes(
    model: ModelConfig, tp: TensorParallel, page_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one page's keys and values over all layers on one rank."""
    heads = max(1, model.num_kv_heads // tp.size)
    return model.num_layers * 2 * page_size * heads * model.head_dim * dtype.itemsize


def num_kv_pages(config: ResolvedConfig, page_bytes: int, device: torch.device) -> int:
    """Pages to allocate: those that requests can use, and the dummy page 0.

    `kv.num_pages` decides if given. Otherwise `kv.bytes` on a CPU; on a GPU `kv.memory_ratio` of
    what is free now (weights and state are allocated), less what the largest step and the graphs
    will take.
    """
    if config.kv.num_pages is not None:
        return config.kv.num_pages + 1
    if device.type == "cpu":
        return int(config.kv.bytes) // page_bytes
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * config.kv.memory_ratio) // page_bytes
