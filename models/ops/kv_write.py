"""Operator that writes a step's keys and values into their pages. The CPU implementation and the
fake stand here.

Knows nothing of attention or of who owns a page.

Legend: T tokens, K kv heads, D head dim, N flat token places of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("fullgraph::kv_write", mutates_args=("kv_layer",), device_types="cpu")
def kv_write(k_TKD: Tensor, v_TKD: Tensor, kv_layer: Tensor, kv_slots_T: Tensor) -> None:
    """kv_layer[page, 0, offset] = k; kv_layer[page, 1, offset] = v, where slot = page * page_size +
    offset.

    Args:
        k_TKD / v_TKD: [T, K, D] of the cache's dtype, D contiguous.
        kv_layer: [pages, 2, page_size, K, D], contiguous; mutated.
        kv_slots_T: int32 [T]; a slot of -1 is padding and not written. Other slots are distinct.
    """
    page_size = kv_layer.shape[2]
    rows_NKD = kv_layer.view(-1, *kv_layer.shape[3:])
    slots = kv_slots_T.tolist()
    if -1 in slots:
        kept = [token for token, slot in enumerate(slots) if slot >= 0]
        index = torch.tensor(kept, dtype=torch.int64, device=kv_layer.device)
        k_TKD, v_TKD = k_TKD.index_select(0, index), v_TKD.index_select(0, index)
        slots = [slots[token] for token in kept]
    # Values of a page follow its keys: page * 2 * page_size + offset.
    rows = [slot + slot // page_size * page_size for slot in slots]
    key_rows_T = torch.tensor(rows, dtype=torch.int64, device=kv_layer.device)
    rows_NKD.index_copy_(0, key_rows_T, k_TKD)
    rows_NKD.index_copy_(0, key_rows_T + page_size, v_TKD)


@kv_write.register_fake
def _(k_TKD: Tensor, v_TKD: Tensor, kv_layer: Tensor, kv_slots_T: Tensor) -> None:
    return None
