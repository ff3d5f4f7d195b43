"""Triton kernels of a mixture's router: logits, the experts of each token, and pairs of a token and
an expert sorted by expert. All on the device, in a fixed order, so that a step repeats.

One token takes one kernel: the last program to have its logit chooses. More take three, or two
where one program holds all tokens: logits, the choice in blocks of tokens, and the place of every
pair. Tokens of no KV slot are padding and get no pair.

Knows nothing of how operators are defined. Importing it needs Triton.

Legend: T tokens, N experts, K experts per token, P = T * K pairs, E hidden.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_SINGLE = 64  # tokens that one program chooses for
_BLOCK_T = 32  # tokens of each of several
_CHUNK = tl.constexpr(64)  # blocks of tokens at a time


class Routing(NamedTuple):
    """Where each token goes.

    weights_TK: float32. pairs_P: int32, token * K + k, ascending by expert, then by token; padding
        has none, so that the end may be unset.
    tiles: int32 [tiles, 4]: expert (-1: nothing to do), first place in pairs_P and the place after
        the last, of up to block_m pairs of one expert.
    """

    weights_TK: Tensor
    pairs_P: Tensor
    tiles: Tensor


def prepare(device: torch.device) -> None:
    """Allocate what launches share; must come before any graph is recorded."""
    _counter(device)


@functools.cache
def _counter(device: torch.device) -> Tensor:
    """Zero between kernels."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def route_one(
    x_TE: Tensor,
    norm_E: Tensor | None,
    eps: float,
    router_NE: Tensor,
    top_k: int,
    normalise: bool,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """One token's (x, normed; [2, K]: float32 weights, and experts as the bits of an int32)."""
    num_experts, hidden = router_NE.shape
    device = x_TE.device
    logits = torch.empty(num_experts, dtype=torch.float32, device=device)
    chosen = torch.empty((2, top_k), dtype=torch.float32, device=device)
    normed = x_TE if norm_E is None else torch.empty_like(x_TE)
    block = triton.next_power_of_2(hidden)
    # One warp needs no barrier; it has room for 2048 elements.
    _route_one_kernel[(num_experts,)](
        x_TE, router_NE if norm_E is None else norm_E, router_NE, normed, logits, chosen,
        _counter(device), eps,
        E=hidden, BE=block, N=num_experts, NP=triton.next_power_of_2(num_experts),
        TOPP=triton.next_power_of_2(top_k), TOP=top_k, NORMALISE=normalise, NORM=norm_E is not None,
        PDL=pdl, num_warps=min(8, max(1, block // 2048)), launch_pdl=pdl,
    )  # fmt: skip
    return normed, chosen


@triton.jit
def _route_one_kernel(
    x_ptr, norm_ptr, router_ptr, normed_ptr, logits_ptr, chosen_ptr, counter_ptr, eps,
    E: tl.constexpr, BE: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, TOPP: tl.constexpr,
    TOP: tl.constexpr, NORMALISE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    i = tl.arange(0, BE)
    inside = i < E
    w = tl.load(router_ptr + n * E + i, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.load(norm_ptr + i, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + i, mask=inside, other=0.0)
    if NORM:
        x_float = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(x_float * x_float, 0) / E + eps)
        x = (x_float * factor * scale).to(x.dtype)
        if n == 0:
            tl.store(normed_ptr + i, x, mask=inside)
    tl.store(logits_ptr + n, tl.sum(w * x.to(tl.float32), 0))
    tl.debug_barrier()  # the store comes before the release below
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == N - 1:
        tl.debug_barrier()
        experts = tl.arange(0, NP)
        logits = tl.load(
            logits_ptr + experts, mask=experts < N, other=float("-inf"), cache_modifier=".cg"
        )
        bits = _clean(logits, experts < N).to(tl.int32, bitcast=True)
        # Integers in the order of the floats: one instruction finds the largest of a warp's.
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        high = 0.0
        total = 0.0
        places = tl.arange(0, TOPP)
        weights = tl.zeros([TOPP], tl.float32)
        chosen = tl.zeros([TOPP], tl.int32)
        for k in tl.static_range(TOP):
            key = tl.max(keys, 0)
            expert = tl.min(tl.where(keys == key, experts, NP), 0)  # ties go to the lower number
            logit = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            if k == 0:
                high = logit
                if not NORMALISE:
                    total = tl.sum(tl.exp(logits - high), 0)
            weight = tl.exp(logit - high)
            if NORMALISE:
                total += weight
            weights = tl.where(places == k, weight, weights)
            chosen = tl.where(places == k, expert, chosen)
            keys = tl.where(experts == expert, -(2**31), keys)
        tl.store(chosen_ptr + places, weights / total, mask=places < TOP)
        bits = chosen.to(tl.float32, bitcast=True)
        tl.store(chosen_ptr + TOP + places, bits, mask=places < TOP)
        tl.store(counter_ptr, 0)


@triton.jit
def _clean(logits, inside):
    """NaN is worst but finite, so that enough distinct experts are found whatever comes; what is
    no expert is worse.
    """
    return tl.where(inside, tl.where(logits > -1e30, logits, -1e30), float("-inf"))


def route(
    x_TE: Tensor,
    router_NE: Tensor,
    kv_slots_T: Tensor,
    top_k: int,
    normalise: bool,
    block_m: int,
    most_tiles: int,
    pdl: bool,
) -> Routing:
    """Of two or more tokens, already normed; see models.ops.experts.mixture."""
    num_tokens, (num_experts, _) = x_TE.shape[0], router_NE.shape
    device = x_TE.device

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    single = num_tokens <= _SINGLE
    block_t = max(16, triton.next_power_of_2(num_tokens)) if single else _BLOCK_T
    blocks = triton.cdiv(num_tokens, block_t)
    padded = triton.next_power_of_2(num_experts)
    logits = _logits(x_TE, router_NE, single, pdl)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
    pairs, tiles = ints(num_tokens * top_k), ints(most_tiles, 4)
    experts, within = (pairs if single else ints(num_tokens, top_k) for _ in range(2))
    counts = pairs if single else ints(blocks, padded)
    sizes = {"N": num_experts, "NP": padded, "TOP": top_k, "BT": block_t, "BM": block_m, "PDL": pdl}
    _choose_kernel[(blocks,)](
        logits, kv_slots_T, weights, experts, within, counts, pairs, tiles, num_tokens, most_tiles,
        SPLIT=logits.shape[0], NORMALISE=normalise, SINGLE=single,
        num_warps=16 if block_t > 32 else 8, launch_pdl=pdl, **sizes,
    )  # fmt: skip
    if not single:
        _place_kernel[(blocks,)](
            kv_slots_T, experts, within, counts, pairs, tiles, num_tokens, most_tiles,
            PAIRS=triton.next_power_of_2(block_t * top_k), num_warps=8, launch_pdl=pdl, **sizes,
        )  # fmt: skip
    return Routing(weights, pairs, tiles)


def _logits(x_TE: Tensor, router_NE: Tensor, few: bool, pdl: bool) -> Tensor:
    """float32 [parts, T, N]; their sum over the parts of E are the logits."""
    num_tokens, hidden = x_TE.shape
    num_experts = router_NE.shape[0]
    block_t = max(16, triton.next_power_of_2(num_tokens)) if few else 64
    block_n = min(16 if few else 128, max(16, triton.next_power_of_2(num_experts)))
    block_k = 128 if few else 64
    programs = triton.cdiv(num_tokens, block_t) * triton.cdiv(num_experts, block_n)
    split = 1
    while programs * split < 100 and split < 4 and hidden >= split * 4 * block_k:
        split *= 2
    logits = torch.empty((split, num_tokens, num_experts), dtype=torch.float32, device=x_TE.device)
    grid = (triton.cdiv(num_tokens, block_t), triton.cdiv(num_experts, block_n), split)
    _logits_kernel[grid](
        x_TE, router_NE, logits, num_tokens,
        N=num_experts, E=hidden, PART=triton.cdiv(triton.cdiv(hidden, split), block_k) * block_k,
        BT=block_t, BN=block_n, BK=block_k, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return logits


@triton.jit(do_not_specialize=["T"])
def _logits_kernel(
    x_ptr, router_ptr, logits_ptr, T,
    N: tl.constexpr, E: tl.constexpr, PART: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    begin = tl.program_id(2) * PART
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BT, BN], tl.float32)
    for i in tl.range(0, PART, BK, num_stages=4):
        k = begin + i + tl.arange(0, BK)
        x = tl.load(
            x_ptr + t[:, None] * E + k[None, :], mask=(t < T)[:, None] & (k < E)[None, :], other=0.0
        )
        w = tl.load(
            router_ptr + n[:, None] * E + k[None, :],
            mask=(n < N)[:, None] & (k < E)[None, :],
            other=0.0,
        )
        acc = tl.dot(x, tl.trans(w), acc, input_precision="tf32x3")
    at = (tl.program_id(2) * T + t[:, None]) * N + n[None, :]
    tl.store(logits_ptr + at, acc, mask=(t < T)[:, None] & (n < N)[None, :])


@triton.jit
def _write_tiles(
    tiles_ptr, totals, begins, T, num_tiles, first, step,
    N: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The `first` and every `step`-th tile of each expert, given its pairs and the place of its
    first; and a share of the entries that stay empty.
    """
    n = tl.arange(0, NP)
    tiles = (totals + BM - 1) // BM
    upto = tl.cumsum(tiles)
    for nth in tl.range(first, (T + BM - 1) // BM, step):  # an expert has at most all tokens
        at = tiles_ptr + (upto - tiles + nth) * 4
        begin = begins + nth * BM
        tl.store(at, n, mask=nth < tiles)
        tl.store(at + 1, begin, mask=nth < tiles)
        tl.store(at + 2, tl.minimum(begin + BM, begins + totals), mask=nth < tiles)
    used = tl.max(upto, 0)
    for start in tl.range(first * NP, num_tiles, step * NP):
        i = start + n
        tl.store(tiles_ptr + i * 4, tl.full([NP], -1, tl.int32), mask=(i >= used) & (i < num_tiles))


@triton.jit(do_not_specialize=["T", "num_tiles"])
def _choose_kernel(
    logits_ptr, slots_ptr, weights_ptr, experts_ptr, within_ptr, counts_ptr, pairs_ptr, tiles_ptr,
    T, num_tiles,
    SPLIT: tl.constexpr, NORMALISE: tl.constexpr, SINGLE: tl.constexpr, N: tl.constexpr,
    NP: tl.constexpr, TOP: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.arange(0, NP)
    real = tl.load(slots_ptr + t, mask=t < T, other=-1) >= 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    inside = (t < T)[:, None] & (n < N)[None, :]
    logits = tl.zeros([BT, NP], tl.float32)
    for s in tl.static_range(SPLIT):
        at = (s * T + t[:, None]) * N + n[None, :]
        logits += tl.load(logits_ptr + at, mask=inside, other=0.0)
    left = _clean(logits, (n < N)[None, :])
    exps = tl.where((n < N)[None, :], tl.exp(logits - tl.max(left, 1)[:, None]), 0.0)
    rank = tl.full([BT, NP], TOP, tl.int32)
    for k in tl.static_range(TOP):
        here = n[None, :] == tl.argmax(left, 1)[:, None]
        rank = tl.where(here, k, rank)
        left = tl.where(here, float("-inf"), left)
    chosen = rank < TOP
    total = tl.sum(tl.where(chosen, exps, 0.0), 1) if NORMALISE else tl.sum(exps, 1)
    pair = t[:, None] * TOP + rank
    some = chosen & (t < T)[:, None]
    tl.store(weights_ptr + pair, exps / total[:, None], mask=some)
    taken = chosen & real[:, None]
    ones = taken.to(tl.int32)
    counts = tl.sum(ones, 0)
    before = tl.cumsum(ones, 0) - ones
    if SINGLE:
        begins = tl.cumsum(counts) - counts
        tl.store(pairs_ptr + begins[None, :] + before, pair, mask=taken)
        _write_tiles(tiles_ptr, counts, begins, T, num_tiles, 0, 1, N, NP, BM)
    else:
        tl.store(counts_ptr + tl.program_id(0) * NP + n, counts)
        tl.store(experts_ptr + pair, tl.broadcast_to(n[None, :], [BT, NP]), mask=some)
        tl.store(within_ptr + pair, before, mask=some)


@triton.jit(do_not_specialize=["T", "num_tiles"])
def _place_kernel(
    slots_ptr, experts_ptr, within_ptr, counts_ptr, pairs_ptr, tiles_ptr, T, num_tiles,
    N: tl.constexpr, NP: tl.constexpr, TOP: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
    PDL: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    block, blocks = tl.program_id(0), tl.num_programs(0)
    n = tl.arange(0, NP)
    pair = block * BT * TOP + tl.arange(0, PAIRS)
    inside = (pair < T * TOP) & (pair < (block + 1) * BT * TOP)
    real = tl.load(slots_ptr + pair // TOP, mask=inside, other=-1) >= 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    totals = tl.zeros([NP], tl.int32)
    before = tl.zeros([NP], tl.int32)
    for start in tl.range(0, blocks, _CHUNK):
        b = start + tl.arange(0, _CHUNK)
        counts = tl.load(
            counts_ptr + b[:, None] * NP + n[None, :], mask=(b < blocks)[:, None], other=0
        )
        totals += tl.sum(counts, 0)
        before += tl.sum(tl.where((b < block)[:, None], counts, 0), 0)
    begins = tl.cumsum(totals) - totals
    expert = tl.load(experts_ptr + pair, mask=real, other=0)
    within = tl.load(within_ptr + pair, mask=real, other=0)
    at = tl.gather(begins + before, expert, 0) + within
    tl.store(pairs_ptr + at, pair, mask=real)
    _write_tiles(tiles_ptr, totals, begins, T, num_tiles, block, blocks, N, NP, BM)
