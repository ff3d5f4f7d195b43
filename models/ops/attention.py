"""Operator of causal attention over paged keys and values: the fake, and the implementation in
torch.

The torch implementation is what a CPU serves with and what every other implementation is checked
against. CUDA kernels register themselves on `paged_attention` from their own modules. Knows nothing
of schedulers, layers or plans.

Legend: T tokens of the step, R rows (a row is one request's tokens), N pages, S key positions, H
query heads, K kv heads, Q query heads per kv head, D head dim, P page-table columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.ops import cpu_kernels
from models.ops.define import define

# Kernel of each dtype that there is one for; it takes the rows of one token.
_NATIVE = {
    torch.float32: "fullgraph_attend_float",
    torch.bfloat16: "fullgraph_attend_bfloat16",
}


def attend_on_cpu(
    q_THD: Tensor,
    kv_layer: Tensor,
    page_table_SP: Tensor,
    row_slots_R: Tensor,
    row_starts_R: Tensor,
    row_lens_R: Tensor,
    row_offsets_R: Tensor,
    scale: float,
    window: int,
    kind: str,
) -> Tensor:
    """softmax(scale * q @ k.T, over the positions the token sees) @ v, for each token of each row.

    The token at position p of a row sees positions 0 .. p, with a window w only p - w + 1 .. p, all
    in the cache already, this step's own included. Query head h reads kv head h // (H / K).

    Args:
        q_THD: [T, H, D], D contiguous.
        kv_layer: [pages, 2, page_size, K, D], keys then values, contiguous.
        page_table_SP: int32 [slots, P]; position p of a slot is in page table[slot, p //
            page_size].
        row_slots_R / row_starts_R / row_lens_R / row_offsets_R: int32 [R]: the row's slot, the
            position of its first token, its number of tokens (0 for padding) and where they begin
            in T.
        scale: of the dot products.
        window: 0 for full attention.
        kind: "decode" if every row has at most one token, else "extend"; kernels may choose by it.

    Returns:
        [T, H, D] like q, contiguous; zero for tokens of no row.
    """
    native = cpu_kernels.compiled()
    name = _NATIVE.get(q_THD.dtype)
    rows = (row_slots_R, row_starts_R, row_lens_R, row_offsets_R)
    if native is None or name is None:
        return reference_attention(q_THD, kv_layer, page_table_SP, *rows, scale, window)
    _, num_heads, head_dim = q_THD.shape
    q_THD = q_THD if q_THD.stride()[1:] == (head_dim, 1) else q_THD.contiguous()
    assert kv_layer.is_contiguous() and page_table_SP.stride(1) == 1
    o_THD = torch.zeros(q_THD.shape, dtype=q_THD.dtype)
    getattr(native, name)(
        q_THD.data_ptr(),
        kv_layer.data_ptr(),
        page_table_SP.data_ptr(),
        *[row.data_ptr() for row in rows],
        o_THD.data_ptr(),
        len(row_slots_R),
        q_THD.stride(0),
        page_table_SP.stride(0),
        num_heads,
        kv_layer.shape[3],
        head_dim,
        kv_layer.shape[2],
        window,
        scale,
    )
    if kind == "extend":
        _attend_rows(q_THD, kv_layer, page_table_SP, rows, scale, window, 2, o_THD)
    return o_THD


paged_attention = define(
    "paged_attention", attend_on_cpu, fake=lambda q_THD, *_: q_THD.new_empty(q_THD.shape)
)


def reference_attention(
    q_THD: Tensor,
    kv_layer: Tensor,
    page_table_SP: Tensor,
    row_slots_R: Tensor,
    row_starts_R: Tensor,
    row_lens_R: Tensor,
    row_offsets_R: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """`paged_attention` in torch, on any device (on a GPU it waits for the row sizes)."""
    o_THD = q_THD.new_zeros(q_THD.shape)
    rows = (row_slots_R, row_starts_R, row_lens_R, row_offsets_R)
    _attend_rows(q_THD, kv_layer, page_table_SP, rows, scale, window, 1, o_THD)
    return o_THD


def _attend_rows(
    q_THD: Tensor,
    kv_layer: Tensor,
    page_table_SP: Tensor,
    rows: tuple[Tensor, ...],
    scale: float,
    window: int,
    least: int,
    o_THD: Tensor,
) -> None:
    """Write the attention of the rows of at least `least` tokens into `o_THD`, row by row."""
    page_size = kv_layer.shape[2]
    for slot, start, length, offset in zip(*(row.tolist() for row in rows), strict=True):
        if length >= least:
            first = max(0, start - window + 1) // page_size if window else 0
            pages_N = page_table_SP[slot, first : -(-(start + length) // page_size)]
            tokens = slice(offset, offset + length)
            seen = start + length - first * page_size
            o_THD[tokens] = _row(q_THD[tokens], kv_layer, pages_N, seen, scale, window)


def _row(
    q_THD: Tensor, kv_layer: Tensor, pages_N: Tensor, length: int, scale: float, window: int
) -> Tensor:
    """One row, whose tokens are the last of the first `length` in the pages: [T, H, D]."""
    num_tokens, _, head_dim = q_THD.shape
    num_kv_heads = kv_layer.shape[3]
    q_KQTD = q_THD.view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    k_KQSD, v_KQSD = (  # twice as fast as one gather and a split
        x.index_select(0, pages_N)
        .flatten(0, 1)[:length]
        .transpose(0, 1)[:, None]
        .expand(-1, q_KQTD.shape[1], -1, -1)
        for x in kv_layer.unbind(1)
    )
    mask_TS = None
    if length != num_tokens or window:
        positions_S = torch.arange(length, device=q_THD.device)
        positions_T = positions_S[-num_tokens:, None]
        mask_TS = positions_S <= positions_T
        if window:
            mask_TS &= positions_S > positions_T - window
    o_KQTD = F.scaled_dot_product_attention(
        q_KQTD, k_KQSD, v_KQSD, attn_mask=mask_TS, is_causal=mask_TS is None, scale=scale
    )
    return o_KQTD.permute(2, 0, 1, 3).reshape(q_THD.shape)
