"""Operator that writes a step's keys and values into their pages. The CPU implementation and the
fake stand here.

Knows nothing of attention or of who owns a page.

Legend: T tokens, K kv heads, D head dim, N flat token places of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.ops import cpu_kernels
from models.ops.define import define


def write_on_cpu(k_TKD: Tensor, v_TKD: Tensor, kv_layer: Tensor, kv_slots_T: Tensor) -> None:
    """kv_layer[page, 0, offset] = k; kv_layer[page, 1, offset] = v, where slot = page * page_size +
    offset.

    Args:
        k_TKD / v_TKD: [T, K, D] of the cache's dtype, D contiguous.
        kv_layer: [pages, 2, page_size, K, D], contiguous; mutated.
        kv_slots_T: int32 [T]; a slot of -1 is padding and not written. Other slots are distinct.
    """
    native = cpu_kernels.compiled()
    page_size, num_heads, head_dim = kv_layer.shape[2:]
    token = (head_dim, 1)
    if native is None or k_TKD.stride()[1:] != token or v_TKD.stride()[1:] != token:
        reference_write(k_TKD, v_TKD, kv_layer, kv_slots_T)
        return
    assert kv_layer.is_contiguous() and kv_slots_T.is_contiguous()
    size = kv_layer.element_size()
    native.fullgraph_kv_write(
        k_TKD.data_ptr(),
        v_TKD.data_ptr(),
        kv_layer.data_ptr(),
        kv_slots_T.data_ptr(),
        len(kv_slots_T),
        k_TKD.stride(0) * size,
        v_TKD.stride(0) * size,
        num_heads * head_dim * size,
        page_size,
    )


def reference_write(k_TKD: Tensor, v_TKD: Tensor, kv_layer: Tensor, kv_slots_T: Tensor) -> None:
    """`kv_write` in torch, on any device (on a GPU it waits for the slots)."""
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


kv_write = define("kv_write", write_on_cpu, fake=lambda *_: None, mutates=("kv_layer",))
