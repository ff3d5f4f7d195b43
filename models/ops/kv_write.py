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
    slots_T = kv_slots_T.to(torch.int64)
    # Values of a page follow its keys: page * 2 * page_size + offset.
    key_rows_T = slots_T + slots_T.div(page_size, rounding_mode="floor") * page_size
    if int(slots_T.min()) < 0:
        kept = (slots_T >= 0).nonzero().squeeze(1)
        key_rows_T, k_TKD, v_TKD = key_rows_T[kept], k_TKD[kept], v_TKD[kept]
    rows_NKD.index_copy_(0, key_rows_T, k_TKD)
    rows_NKD.index_copy_(0, key_rows_T + page_size, v_TKD)


@kv_write.register_fake
def _(k_TKD: Tensor, v_TKD: Tensor, kv_layer: Tensor, kv_slots_T: Tensor) -> None:
    return None
