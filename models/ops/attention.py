"""Operator of causal attention over paged keys and values: the fake, and the implementation in
torch.

The torch implementation is what a CPU serves with and what every other implementation is checked
against. CUDA kernels register themselves on `paged_attention` from their own modules. Knows nothing
of schedulers, layers or plans.

Legend: T tokens of the step, R rows (a row is one request's tokens), G rows of a group, N pages, S
key positions, H query heads, K kv heads, Q query heads per kv head, D head dim, P page-table
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from models.ops import cpu_kernels
from models.ops.define import define

# Kernel of each dtype that there is one for; it takes the rows of one token.
_NATIVE = {
    torch.float32: "fullgraph_attend_float",
    torch.bfloat16: "fullgraph_attend_bfloat16",
}
# Keys and values that may be read in vain before it is cheaper to start another group: a group's
# small operators take about 60 us, in which a core reads this much.
_GROUP_BYTES = 512 * 1024


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
        _attend_chunks(q_THD, kv_layer, page_table_SP, rows, scale, window, o_THD)
    return o_THD


def _attend_chunks(
    q_THD: Tensor,
    kv_layer: Tensor,
    page_table_SP: Tensor,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    window: int,
    o_THD: Tensor,
) -> None:
    """Write the attention of rows of several tokens into `o_THD`."""
    for row in _rows(*rows, window, kv_layer.shape[2]):
        if row.length > 1:
            tokens = slice(row.offset, row.offset + row.length)
            o_THD[tokens] = _chunk(q_THD[tokens], kv_layer, page_table_SP, row, scale, window)


define("paged_attention", library.infer_schema(attend_on_cpu, mutates_args=()), attend_on_cpu)
paged_attention = torch.ops.fullgraph.paged_attention.default


@library.register_fake("fullgraph::paged_attention")
def _(
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
    return q_THD.new_empty(q_THD.shape)


class _Row(NamedTuple):
    """A row: slot, tokens [offset, offset + length), and the positions [first, end) it reads."""

    slot: int
    offset: int
    length: int
    first: int
    end: int


def _rows(
    row_slots_R: Tensor,
    row_starts_R: Tensor,
    row_lens_R: Tensor,
    row_offsets_R: Tensor,
    window: int,
    page_size: int,
) -> list[_Row]:
    """The rows that have tokens."""
    rows = []
    for slot, start, length, offset in zip(
        row_slots_R.tolist(),
        row_starts_R.tolist(),
        row_lens_R.tolist(),
        row_offsets_R.tolist(),
        strict=True,
    ):
        if length:
            seen = max(0, start - window + 1) if window else 0
            rows.append(_Row(slot, offset, length, seen // page_size * page_size, start + length))
    return rows


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
    rows = _rows(row_slots_R, row_starts_R, row_lens_R, row_offsets_R, window, kv_layer.shape[2])
    singles = [row for row in rows if row.length == 1]
    if len(singles) == len(q_THD):
        groups = _groups(singles, kv_layer)
        if len(groups) == 1 and [row.offset for row in singles] == list(range(len(singles))):
            return _decode(q_THD, kv_layer, page_table_SP, singles, scale, window)
    o_THD = q_THD.new_zeros(q_THD.shape)
    for row in rows:
        if row.length > 1:
            tokens = slice(row.offset, row.offset + row.length)
            o_THD[tokens] = _chunk(q_THD[tokens], kv_layer, page_table_SP, row, scale, window)
    for group in _groups(singles, kv_layer):
        tokens_G = torch.tensor([row.offset for row in group], device=q_THD.device)
        o_THD[tokens_G] = _decode(q_THD[tokens_G], kv_layer, page_table_SP, group, scale, window)
    return o_THD


def _groups(rows: Sequence[_Row], kv_layer: Tensor) -> list[list[_Row]]:
    """Rows of similar length together: a group is padded to its longest row."""
    if not rows:
        return []
    token_bytes = 2 * kv_layer.stride(2) * kv_layer.element_size()
    ordered = sorted(rows, key=lambda row: row.first - row.end)
    longest = ordered[0].end - ordered[0].first
    groups: list[list[_Row]] = [[]]
    for index, row in enumerate(ordered):
        length = row.end - row.first
        # Every row from here on would be padded by at least this much.
        if (longest - length) * (len(ordered) - index) * token_bytes > _GROUP_BYTES:
            groups.append([])
            longest = length
        groups[-1].append(row)
    # A single group keeps the order it came in, so that nothing has to be gathered.
    return groups if len(groups) > 1 else [list(rows)]


def _gather(kv_layer: Tensor, pages_N: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the pages, copied: [N * page_size, K, D] each."""
    k, v = kv_layer.unbind(1)  # twice as fast as one gather and a split
    return k.index_select(0, pages_N).flatten(0, 1), v.index_select(0, pages_N).flatten(0, 1)


def _chunk(
    q_THD: Tensor, kv_layer: Tensor, page_table_SP: Tensor, row: _Row, scale: float, window: int
) -> Tensor:
    """One row of several tokens: [T, H, D]."""
    page_size = kv_layer.shape[2]
    num_tokens, _, head_dim = q_THD.shape
    columns = slice(row.first // page_size, -(-row.end // page_size))
    length = row.end - row.first
    num_kv_heads = kv_layer.shape[3]
    q_KQTD = q_THD.view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    k_KQSD, v_KQSD = (
        x[:length].transpose(0, 1)[:, None].expand(-1, q_KQTD.shape[1], -1, -1)
        for x in _gather(kv_layer, page_table_SP[row.slot, columns])
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


def _decode(
    q_GHD: Tensor,
    kv_layer: Tensor,
    page_table_SP: Tensor,
    rows: Sequence[_Row],
    scale: float,
    window: int,
) -> Tensor:
    """Rows of one token each, padded to the longest: [G, H, D], contiguous.

    The query heads of a kv head stand where query positions usually do: no key or value is
        repeated.
    """
    num_rows, _, head_dim = q_GHD.shape
    num_kv_heads = kv_layer.shape[3]
    k_GSKD, v_GSKD, mask = _padded_kv(kv_layer, page_table_SP, rows, window)
    q_GKQD = q_GHD.view(num_rows, num_kv_heads, -1, head_dim)
    o_GKQD = F.scaled_dot_product_attention(
        q_GKQD, k_GSKD.transpose(1, 2), v_GSKD.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return o_GKQD.reshape(q_GHD.shape).contiguous()


def _padded_kv(
    kv_layer: Tensor, page_table_SP: Tensor, rows: Sequence[_Row], window: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values [G, S, K, D], bool mask [G, 1, 1, S] of what a row sees (None: all)."""
    page_size = kv_layer.shape[2]
    device = kv_layer.device
    lengths = [row.end - row.first for row in rows]
    longest = max(lengths)
    num_pages = -(-longest // page_size)
    slots_G = torch.tensor([row.slot for row in rows], device=device)
    if len(rows) == 1 or all(row.first == 0 for row in rows):
        first = rows[0].first // page_size
        pages_GN = page_table_SP[:, first : first + num_pages].index_select(0, slots_G)
    else:
        firsts_G = torch.tensor([row.first // page_size for row in rows], device=device)
        columns_GN = firsts_G[:, None] + torch.arange(num_pages, device=device)
        columns_GN = columns_GN.clamp_(max=page_table_SP.shape[1] - 1)
        pages_GN = page_table_SP[slots_G[:, None], columns_GN]
    uniform = all(length == longest for length in lengths)
    if not uniform:
        # Past a row's own pages the table may hold anything: read the dummy page, which is zero.
        pages_each_G = torch.tensor([-(-length // page_size) for length in lengths], device=device)
        pages_GN = pages_GN * (torch.arange(num_pages, device=device) < pages_each_G[:, None])
    shape = (len(rows), num_pages * page_size, *kv_layer.shape[3:])
    k, v = _gather(kv_layer, pages_GN.reshape(-1))
    k_GSKD, v_GSKD = k.view(shape), v.view(shape)
    starts = [max(0, length - window) if window else 0 for length in lengths]
    if uniform:
        return k_GSKD[:, starts[0] : longest], v_GSKD[:, starts[0] : longest], None
    _clear_tails(k, v, lengths, page_size)
    positions_S = torch.arange(num_pages * page_size, device=device)
    mask_GS = positions_S < torch.tensor(lengths, device=device)[:, None]
    if window:
        mask_GS &= positions_S >= torch.tensor(starts, device=device)[:, None]
    return k_GSKD, v_GSKD, mask_GS[:, None, None]


def _clear_tails(k: Tensor, v: Tensor, lengths: Sequence[int], page_size: int) -> None:
    """Zero what lies past each row's end in its last page: an old NaN would survive a mask.

    k, v: [G * S, K, D], mutated.
    """
    padded = len(k) // len(lengths)
    tails: list[int] = []
    for row, length in enumerate(lengths):
        tails += range(row * padded + length, row * padded - (-length // page_size) * page_size)
    if tails:
        index = torch.tensor(tails, device=k.device)
        k.index_fill_(0, index, 0)
        v.index_fill_(0, index, 0)
