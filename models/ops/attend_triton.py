"""Device functions of the decode kernel: attend to a chunk, add the new token, join chunks.

Called by decode_triton.py's kernel. Importing it needs Triton.

Legend: H query heads, K kv heads, G = H / K, D head dim.
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
def places(table_row_ptr, token, mask, head, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Offset of each token's key for a kv head in the layer; its value is PAGE * K * D further."""
    page = tl.load(table_row_ptr + token // PAGE, mask=mask, other=0).to(tl.int64)
    return page * (2 * PAGE * K * D) + (token % PAGE) * (K * D) + head * D


@triton.jit
def attend(
    q_low, q_high, kv_ptr, table_row_ptr, head, begin, end, scale,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax attention over tokens [begin, end), not yet divided: acc, max (of log2), sum.

    q_low, q_high: halves of the queries, [BLOCK_G, D / 2].
    """
    half = tl.arange(0, D // 2)
    d = tl.arange(0, D)
    high = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, D], tl.float32)
    for t in tl.range(begin, end, BLOCK, num_stages=STAGES):
        token = t + tl.arange(0, BLOCK)
        mask = token < end
        at = places(table_row_ptr, token, mask, head, K, D, PAGE)[:, None]
        k_low = tl.load(kv_ptr + at + half[None, :], mask=mask[:, None], other=0.0)
        k_high = tl.load(kv_ptr + at + D // 2 + half[None, :], mask=mask[:, None], other=0.0)
        v = tl.load(kv_ptr + at + PAGE * K * D + d[None, :], mask=mask[:, None], other=0.0)
        s = tl.dot(q_low, tl.trans(k_low))
        s = tl.dot(q_high, tl.trans(k_high), s) * scale
        s = tl.where(mask[None, :], s, float("-inf"))
        new_high = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - new_high[:, None])
        fade = tl.exp2(high - new_high)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        high = new_high
    return acc, high, total


@triton.jit
def rotated(x_ptr, rope_ptr, weight_ptr, mask, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Norm and rotate heads whose low halves `x_ptr` [N, D / 2] points at: (low, high), float32."""
    half = tl.arange(0, D // 2)
    low = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + D // 2, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(low * low + high * high, 1) / D + eps)[:, None]
        low *= factor * tl.load(weight_ptr + half).to(tl.float32)[None, :]
        high *= factor * tl.load(weight_ptr + D // 2 + half).to(tl.float32)[None, :]
    cos = tl.load(rope_ptr + half)[None, :]
    sin = tl.load(rope_ptr + D // 2 + half)[None, :]
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def add_new(
    acc, high, total, q_low, q_high, qkv_ptr, rope_ptr, k_norm_ptr, kv_ptr, place, head, eps, scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Write the new token's key and value to the cache and add them to the row's attention."""
    half = tl.arange(0, D // 2)
    d = tl.arange(0, D)
    k_ptr = qkv_ptr + (K * G + head) * D
    low, high_half = rotated(
        k_ptr + half[None, :], rope_ptr, k_norm_ptr, half[None, :] < D, eps, D, NORM
    )
    dtype = kv_ptr.dtype.element_ty
    k_low, k_high = low.to(dtype), high_half.to(dtype)
    v = tl.load(k_ptr + K * D + d)
    key_ptr = kv_ptr + place * D
    tl.store(key_ptr + half[None, :], k_low)
    tl.store(key_ptr + D // 2 + half[None, :], k_high)
    tl.store(key_ptr + PAGE * K * D + d, v)
    s = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32), 1)
    s = (s + tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32), 1)) * scale
    new_high = tl.maximum(high, s)
    p = tl.exp2(s - new_high)
    fade = tl.exp2(high - new_high)
    total = total * fade + p
    acc = acc * fade[:, None] + p[:, None] * v.to(tl.float32)[None, :]
    return acc, new_high, total


@triton.jit
def join(
    out_ptr, partial_ptr, stats_ptr, first, count, head,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Join the chunks first .. first + count of a (row, kv head) into `out_ptr` [G, D]."""
    d = tl.arange(0, D)
    every = tl.arange(0, MAX_CHUNKS)
    some = tl.arange(0, 16)
    for g in tl.static_range(G):
        all_ptr = stats_ptr + 2 * (((first + every) * K + head) * G + g)
        highs = tl.load(all_ptr, mask=every < count, other=float("-inf"), cache_modifier=".cg")
        high = tl.max(highs, 0)
        total = tl.zeros([16], tl.float32)
        y = tl.zeros([D], tl.float32)
        for c in range(0, count, 16):
            at = ((first + c + some) * K + head) * G + g
            valid = c + some < count
            x = tl.load(stats_ptr + 2 * at, mask=valid, other=float("-inf"), cache_modifier=".cg")
            weight = tl.exp2(x - high)
            part = tl.load(stats_ptr + 2 * at + 1, mask=valid, other=0.0, cache_modifier=".cg")
            total += part * weight
            tile = tl.load(
                partial_ptr + at[:, None] * D + d[None, :],
                mask=valid[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            y += tl.sum(tile * weight[:, None], 0)
        y = (y / tl.sum(total, 0)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + g * D + d, y)
