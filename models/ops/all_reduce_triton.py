"""All-reduce of small 16-bit messages over NVLink in one kernel, the residual added in float32.

A rank writes its words of two numbers into every peer's buffer and reads its own until no word is
empty, so that it needs no barrier: empty is a word that nobody sends (two negative zeros; zeros are
sent in their place), and what was read is made empty again (TensorRT-LLM calls such a protocol
Lamport's). Two buffers alternate: a rank that sends a word the n-th time has ended the call of time
n - 1, in which it saw the peer's; so the peer has ended the call of time n - 2 and emptied its own.

Which buffer it is is counted on the device, for a CUDA graph replays the same arguments: by each
program, for it has the same words in every call. Knows nothing of how operators are defined.
Importing it needs Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EMPTY = -0x7FFF8000  # the bits 0x8000, 0x8000
_EMPTY = tl.constexpr(EMPTY)
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Launch(NamedTuple):
    """How the kernel is launched.

    Attributes:
        block: words of a program.
        warps: of a program.
        pdl: programmatic dependent launch (Hopper and later) where there are several rows. Behind
            kernels of one row, which start the next one early themselves, it costs 1 us.
    """

    block: int = 256
    warps: int = 1
    pdl: bool = False


class Exchange(NamedTuple):
    """What the calls of one rank share.

    Attributes:
        words: this rank's own of the buffers.
        buffers: int64 [size] on the device: addresses of every rank's words, int32
            [2, size, num_words] of EMPTY in memory that all of them can write.
        state: int32 zeros [1 + programs of the largest call] on the device: whether to wait no
            more, then the calls of each program so far.
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
    pdl = pdl and x.shape[0] > 1
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
    with torch.cuda.stream(torch.cuda.Stream(exchange.state.device)):  # kernels may not start
        exchange.state[:1].copy_(torch.ones(1, dtype=torch.int32))


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
def _received(words_ptr, released_ptr, mask):
    """A peer's words once none is empty, or after `release`; leaves them empty."""
    words = tl.load(words_ptr, mask, other=0, volatile=True)
    released = tl.load(released_ptr, volatile=True)
    while (tl.sum((words == _EMPTY).to(tl.int32)) != 0) & (released == 0):
        words = tl.load(words_ptr, mask, other=0, volatile=True)
        released = tl.load(released_ptr, volatile=True)
    tl.store(words_ptr, _EMPTY, mask)
    return words


@triton.jit
def _words_of(buffers_ptr, rank: tl.constexpr):
    """A rank's buffer."""
    return tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def all_reduce_kernel(
    x_ptr, residual_ptr, out_ptr, buffers_ptr, state_ptr, num_words, room, RANK: tl.constexpr,
    SIZE: tl.constexpr, ADD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    words_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = words_n < num_words
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    count_ptr = state_ptr + 1 + tl.program_id(0)
    call = tl.load(count_ptr, volatile=True)
    mine = tl.load(x_ptr + words_n, mask, other=0)
    mine = tl.where(mine == _EMPTY, 0, mine)
    half = (call & 1) * SIZE * room
    for step in tl.static_range(1, SIZE):
        peer = _words_of(buffers_ptr, (RANK + step) % SIZE)
        tl.store(peer + half + RANK * room + words_n, mine, mask)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + words_n, mask, other=0)
    own = _words_of(buffers_ptr, RANK) + half
    for rank in tl.static_range(SIZE):  # in this order on every rank: their sums are the same
        words = mine
        if rank != RANK:
            words = _received(own + rank * room + words_n, state_ptr, mask)
        low += _low(words, DTYPE)
        high += _high(words, DTYPE)
    if ADD:
        low += _low(residual, DTYPE)
        high += _high(residual, DTYPE)
    tl.store(out_ptr + words_n, _bits(low, DTYPE) | (_bits(high, DTYPE) << 16), mask)
    tl.debug_barrier()  # every thread has read the count by itself
    tl.store(count_ptr, call + 1)
