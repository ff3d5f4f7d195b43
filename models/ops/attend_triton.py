"""Device functions of the decode kernel: attend to a chunk, begin with the new token, join chunks.

Scores are kept as [tokens, queries] and results as [D, queries], so that the few queries of a kv
head are the narrow side of the tensor cores' products. One warp does all of a chunk: nothing has to
be synchronised, and many programs fit on a multiprocessor.

Called by decode_triton.py's kernel. Importing it needs Triton.

Legend: H query heads, K kv heads, G = H / K, D head dim, Q = G padded, B tokens of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(ptr, mask):
    """Ask for the lines `ptr` points at, where `mask` is set, to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [ptr, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def page_of(
    table_row_ptr, first, stop, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Pages of the tile of tokens from `first`: one where tiles lie in a page, else [B]."""
    if PAGE % BLOCK == 0:
        # Beyond the last tile: page 0.
        return tl.load(table_row_ptr + first // PAGE, mask=first < stop, other=0)
    else:
        token = first + tl.arange(0, BLOCK)
        return tl.load(table_row_ptr + token // PAGE, mask=token < stop, other=0)


@triton.jit
def place(
    page, first, head, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Where a tile's keys for a kv head begin in the layer, and what to add for each of its tokens,
    [B]. Values are PAGE * K * D further.
    """
    tile = tl.arange(0, BLOCK)
    if PAGE % BLOCK == 0:
        # One number of 64 bits a tile, and offsets that never change.
        begin = page.to(tl.int64) * (2 * PAGE * K * D) + (first % PAGE) * (K * D) + head * D
        return begin, tile * (K * D)
    else:
        at = page.to(tl.int64) * (2 * PAGE * K * D) + (first + tile) % PAGE * (K * D)
        return (head * D).to(tl.int64), at


@triton.jit
def attend(
    acc, high, total, q_low, q_high, kv_ptr, table_row_ptr, page, head, begin, stop, scale,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add the softmax attention over tokens [begin, stop), not yet divided.

    acc: [D, Q]; high: [Q], maximum of the scores, base 2; total: [B, Q], sums by place in a tile.
    q_low, q_high: halves of the queries, [D / 2, Q]. page: `page_of` the first tile. ALIGNED:
    `begin` is a multiple of BLOCK.
    """
    half = tl.arange(0, D // 2)
    d = tl.arange(0, D)
    start = begin
    if not ALIGNED:
        start = begin // BLOCK * BLOCK
    # A tile's page is read a tile ahead, so that its keys need not wait for it.
    for t in tl.range(start, stop, BLOCK, num_stages=STAGES):
        at, tokens = place(page, t, head, K, D, PAGE, BLOCK)
        page = page_of(table_row_ptr, t + BLOCK, stop, PAGE, BLOCK)
        token = t + tl.arange(0, BLOCK)
        mask = token < stop
        if not ALIGNED:
            mask = mask & (token >= begin)
        k_ptr = kv_ptr + at
        k_low = tl.load(k_ptr + (tokens[:, None] + half[None, :]))
        k_high = tl.load(k_ptr + D // 2 + (tokens[:, None] + half[None, :]))
        # What lies behind a row's last token may be anything, and 0 * NaN is NaN.
        v_ptr = k_ptr + PAGE * K * D + (tokens[None, :] + d[:, None])
        v = tl.load(v_ptr, mask=mask[None, :], other=0.0)
        s = tl.dot(k_low, q_low)
        s = tl.dot(k_high, q_high, s) * scale
        s = tl.where(mask[:, None], s, float("-inf"))
        new_high = tl.maximum(high, tl.max(s, 0))
        p = tl.exp2(s - new_high[None, :])
        fade = tl.exp2(high - new_high)[None, :]
        total = total * fade + p
        acc = tl.dot(v, p.to(v.dtype), acc * fade)
        high = new_high
    return acc, high, total


@triton.jit
def halves(ptr, mask, D: tl.constexpr):
    """The low and high halves of heads whose low halves `ptr` [N, D / 2] points at."""
    return tl.load(ptr, mask=mask, other=0.0), tl.load(ptr + D // 2, mask=mask, other=0.0)


@triton.jit
def rotated(low, high, low_weight, high_weight, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Norm and rotate heads [N, D / 2] twice: (low, high), float32. The rest is [1, D / 2]."""
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(low * low + high * high, 1) / D + eps)[:, None]
        low *= factor * low_weight.to(tl.float32)
        high *= factor * high_weight.to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def padded(x, ROWS: tl.constexpr):
    """The rows of x [G, N] over and over, [ROWS, N]."""
    if x.shape[0] == ROWS:
        return x
    else:
        size: tl.constexpr = [ROWS // x.shape[0], x.shape[0], x.shape[1]]
        return tl.reshape(tl.broadcast_to(x[None], size), [ROWS, x.shape[1]])


@triton.jit
def begin_new(
    q_low, q_high, k_low, k_high, v, kv_ptr, place, scale,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Write the new token's key and value to the cache; attention to it: acc, high, total."""
    half = tl.arange(0, D // 2)
    key_ptr = kv_ptr + place * D
    tl.store(key_ptr + half[None, :], k_low)
    tl.store(key_ptr + D // 2 + half[None, :], k_high)
    tl.store(key_ptr + PAGE * K * D + tl.arange(0, D), v)
    products = q_low.to(tl.float32) * k_low.to(tl.float32)
    products += q_high.to(tl.float32) * k_high.to(tl.float32)
    s = tl.sum(products, 1, keep_dims=True) * scale
    acc = tl.broadcast_to(v.to(tl.float32)[:, None], [D, BLOCK_Q])
    at_first = (tl.arange(0, BLOCK) == 0)[:, None]
    total = tl.broadcast_to(tl.where(at_first, 1.0, 0.0), [BLOCK, BLOCK_Q])
    return acc, tl.reshape(padded(s, BLOCK_Q), [BLOCK_Q]), total


@triton.jit
def join(
    out_ptr, partial_ptr, stats_ptr, first, count, head,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Join the chunks first .. first + count of a (row, kv head) into `out_ptr` [G, D], WIDE of
    them at a time, whose loads are under way together.
    """
    c = tl.arange(0, WIDE)[:, None]
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, D)
    high = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    y = tl.zeros([BLOCK_G, D], tl.float32)
    for start in range(0, count, WIDE):
        at = ((first + start + c) * K + head) * G + g[None, :]
        valid = (start + c < count) & (g < G)[None, :]
        tile = tl.load(
            partial_ptr + at[:, :, None] * D + d[None, None, :],
            mask=valid[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        x = tl.load(stats_ptr + 2 * at, mask=valid, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(stats_ptr + 2 * at + 1, mask=valid, other=0.0, cache_modifier=".cg")
        new_high = tl.maximum(high, tl.max(x, 0))
        fade = tl.exp2(high - new_high)
        weight = tl.exp2(x - new_high[None, :])
        total = total * fade + tl.sum(part * weight, 0)
        y = y * fade[:, None] + tl.sum(tile * weight[:, :, None], 0)
        high = new_high
    y = (y / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + g[:, None] * D + d[None, :], y, mask=(g < G)[:, None])
