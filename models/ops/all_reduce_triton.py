"""All-reduce of small 16-bit messages over NVLink in one kernel, the residual added in float32.

Every 4 bytes of data travel in an 8-byte word with the number of the call beside them (NCCL calls
such a protocol LL), so that a rank needs no barrier: it writes its words into every peer's buffer
and reads its own until all of them carry this call's number. Two buffers alternate: a rank that is
in call n has seen every peer's words of call n - 1, so every peer has left call n - 2.

The number is counted on the device, for a CUDA graph replays the same arguments. Knows nothing of
how operators are defined. Importing it needs Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Launch(NamedTuple):
    """How the kernel is launched.

    Attributes:
        block: words of a program.
        warps: of a program.
        pdl: programmatic dependent launch (Hopper and later): the matrix that follows fetches its
            weights while this waits.
    """

    block: int = 1024
    warps: int = 8
    pdl: bool = False


class Exchange(NamedTuple):
    """What the calls of one rank share.

    Attributes:
        words: this rank's own of the buffers.
        buffers: int64 [size] on the device: addresses of every rank's words, int64 zeros
            [2, size, num_words] in memory that all of them can write.
        state: int32 zeros [2] on the device: calls so far, programs of this call that are done.
        rank, size: this rank's place.
        num_words: room for as many 4-byte words per rank.
        launch: of the kernel.
    """

    words: Tensor
    buffers: Tensor
    state: Tensor
    rank: int
    size: int
    num_words: int
    launch: Launch


def fits(x: Tensor, exchange: Exchange) -> bool:
    """Whether the message can take this way."""
    words, odd = divmod(x.numel(), 2)
    return x.dtype in _TYPES and not odd and words <= exchange.num_words and x.is_contiguous()


def run(x: Tensor, residual: Tensor | None, out: Tensor, exchange: Exchange) -> None:
    """out = residual + sum of x over the ranks; all contiguous and of one shape and dtype."""
    block, warps, pdl = exchange.launch
    num_words = x.numel() // 2
    launch: Any = all_reduce_kernel[(triton.cdiv(num_words, block),)]
    launch(
        *(t.view(torch.int32) for t in (x, x if residual is None else residual, out)),
        exchange.buffers,
        exchange.state,
        num_words,
        exchange.num_words,
        RANK=exchange.rank,
        SIZE=exchange.size,
        ADD=residual is not None,
        DTYPE=_TYPES[x.dtype],
        BLOCK=block,
        PDL=pdl,
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )


def release(exchange: Exchange) -> None:
    """Have calls that wait for a rank that is gone, and all to come, go on with nonsense."""
    words = exchange.words
    with torch.cuda.stream(torch.cuda.Stream(words.device)):  # copies only: kernels may not start
        words.copy_(torch.full(words.shape, int(exchange.state.cpu()[0] + 2**30) << 32))


@triton.jit
def _low(words, DTYPE: tl.constexpr):
    """The first of the two numbers in each word, as float32."""
    return (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, DTYPE: tl.constexpr):
    return ((words >> 16) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _bits(values, DTYPE: tl.constexpr):
    return values.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _received(words_ptr, call, mask):
    """Words that carry the call's number, or a later one (`release`); waits for them."""
    words = tl.load(words_ptr, mask, other=0, volatile=True)
    while tl.sum((mask & ((words >> 32).to(tl.int32) - call < 0)).to(tl.int32)) != 0:
        words = tl.load(words_ptr, mask, other=0, volatile=True)
    return words.to(tl.int32)


@triton.jit
def all_reduce_kernel(
    x_ptr, residual_ptr, out_ptr, buffers_ptr, state_ptr, num_words, room, RANK: tl.constexpr,
    SIZE: tl.constexpr, ADD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    words_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = words_n < num_words
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    call = tl.load(state_ptr, volatile=True) + 1
    mine = tl.load(x_ptr + words_n, mask, other=0)
    half = (call & 1).to(tl.int64) * SIZE * room
    tagged = (call.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    for step in tl.static_range(1, SIZE):
        peer = tl.load(buffers_ptr + (RANK + step) % SIZE).to(tl.pointer_type(tl.int64))
        tl.store(peer + half + RANK * room + words_n, tagged, mask)
    own = tl.load(buffers_ptr + RANK).to(tl.pointer_type(tl.int64)) + half
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):  # in this order on every rank: their sums are the same
        words = mine
        if rank != RANK:
            words = _received(own + rank * room + words_n, call, mask)
        low += _low(words, DTYPE)
        high += _high(words, DTYPE)
    if ADD:
        residual = tl.load(residual_ptr + words_n, mask, other=0)
        low += _low(residual, DTYPE)
        high += _high(residual, DTYPE)
    tl.store(out_ptr + words_n, _bits(low, DTYPE) | (_bits(high, DTYPE) << 16), mask)
    if tl.atomic_add(state_ptr + 1, 1) == tl.num_programs(0) - 1:  # all have read the number
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, call)
