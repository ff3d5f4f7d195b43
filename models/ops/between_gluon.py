"""Everything between two attentions of a decode step in one Gluon kernel, for 33 to 256 rows on
Hopper: o + residual, norm, gate_up + SwiGLU, down + residual, and the next layer's norm + qkv.

As kernels of their own each of the four matrices fills a pipeline and drains it. Here programs
stay, one a multiprocessor, and meet three times. A tile of 64 rows is a group of programs of its
own, which no other waits for; a program has the same columns of its group's rows in o and in down.
The first tiles of the next matrix are asked for before a meeting, those of x after it. A norm is
split: its weight is applied where x is written, beside the sums of squares of each program's
columns; the row's scale is applied to the product.

All programs must be resident together, or they would wait for ever: there are at most as many as
multiprocessors, and a cooperative launch begins when all find room.

With programmatic dependent launch (PDL), only weights are read before the kernel before has ended.
Knows nothing of operators. Importing it needs Triton.

Legend: M rows, E hidden, F ffn, Q columns of qkv, H columns of attention's result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.ops import gluon_version  # noqa: F401
from models.ops.meeting_gluon import arrive, counted, meet
from models.ops.tiles_gluon import (
    ask,
    ask_gate_up,
    bring,
    bring_gate_up,
    make_bars,
    mma_layout,
    multiply,
    multiply_gate_up,
    store,
    swiglu,
    tiled,
)

PROGRAMS = 128
_ROWS = 64  # of a group
LINE = gl.constexpr(32)  # counters lie on cache lines of their own
_COUNTERS = 4 * 3 * LINE.value  # of four groups with three meetings
# A counter grows by its group's programs and must stay a multiple of them: 128, 64 or 32.
NUM_COUNTERS = 3 * _COUNTERS


class Weights(NamedTuple):
    """Of a layer: o [E, H], post_norm [E], gate_up [2 F, E], down [E, F]; of what comes after it:
    norm [E], and qkv [Q, E] if that is a layer. bfloat16, contiguous.
    """

    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor
    qkv: Tensor | None


class _Launch(NamedTuple):
    """Stages of o and down, of gate_up and of qkv, powers of two, and how many chunks of 8 KiB they
    take at most. What that leaves of a multiprocessor is room for programs of attention.
    """

    narrow: int
    gate_up: int
    qkv: int
    chunks: int


# By the columns that a program has of o and down.
_LAUNCHES = {8: _Launch(8, 8, 8, 18), 16: _Launch(8, 8, 8, 20), 32: _Launch(8, 4, 8, 24)}


def run(
    o_MH: Tensor, x_ME: Tensor, w: Weights, eps: float, counters: Tensor
) -> tuple[Tensor, Tensor]:
    """The hidden state after the layer, and the next layer's qkv [M, Q], or nothing [0].

    Args:
        o_MH: what attention gave. x_ME: the hidden state before it. Both bfloat16, contiguous, of
            at most 256 rows.
        counters: int32 [NUM_COUNTERS], zeros at first, which no other launch uses meanwhile.
    """
    num_rows, hidden = x_ME.shape
    ffn, columns = w.down.shape[1], 0 if w.qkv is None else w.qkv.shape[0]
    groups = triton.cdiv(num_rows, _ROWS)
    whole = groups * _ROWS
    padded_groups = triton.next_power_of_2(groups)
    members = PROGRAMS // padded_groups
    width = hidden // members
    launch = _LAUNCHES[width]
    assert groups <= 4 and columns % members == 0, (num_rows, columns)
    _check(launch, o_MH.shape[1], hidden, ffn)
    out_ME = torch.empty_like(x_ME)
    qkv_MQ = x_ME.new_empty((num_rows, columns) if columns else 0)
    normed, mid = x_ME.new_empty((whole, hidden)), x_ME.new_empty((whole, ffn))
    sums = x_ME.new_empty((whole, members), dtype=torch.float32)
    # Behind the last layer neither this nor `w.norm` is used.
    w_qkv = w.gate_up if w.qkv is None else w.qkv
    tiles = (
        (_with_room(o_MH, whole), _ROWS, 128),
        (normed, _ROWS, 64),
        (mid, _ROWS, 128),
        (w.o, width, 128),
        (w.gate_up, 2 * width, 64),
        (w.gate_up, width, 64),
        (w.down, width, 128),
        (w_qkv, max(columns // members, width), 64),
    )
    _between_kernel[(groups * members,)](
        *(tiled(*tile) for tile in tiles),
        *(x_ME, w.post_norm, w.norm, normed, mid, sums),
        counters[(padded_groups.bit_length() - 1) * _COUNTERS :],
        *(out_ME, qkv_MQ, num_rows, eps),
        H=o_MH.shape[1],
        E=hidden,
        F=ffn,
        Q=columns,
        MEMBERS=members,
        CHUNKS=launch.chunks,
        STAGES=launch.narrow,
        GATE_STAGES=launch.gate_up,
        QKV_STAGES=launch.qkv,
        LAST=w.qkv is None,
        num_warps=4,
        # Of a thread, before the warps that multiply take those of the one that asks.
        maxnreg=128,
        launch_pdl=True,
        launch_cooperative_grid=True,
    )
    return out_ME, qkv_MQ


def _check(launch: _Launch, attended: int, hidden: int, ffn: int) -> None:
    """What the kernel takes for granted of the shape."""
    # A program has three times as many columns of gate and of up as of o and down.
    assert ffn == 3 * hidden, (ffn, hidden)
    # Barriers are in their first phase again behind o and behind gate_up; down has whole rounds.
    narrow, gate_up, qkv, _ = launch
    assert attended % (2 * 128 * narrow) == 0 and ffn % (128 * narrow) == 0, (attended, ffn)
    assert hidden % (2 * 64 * gate_up) == 0 and max(gate_up, qkv) <= narrow, launch


def _with_room(rows: Tensor, count: int) -> Tensor:
    """`count` rows, of which the last may hold anything, if there is memory behind `rows` for them.

    A tile that reaches beyond its matrix is slow to copy: 8 rows took half as long again as 64.
    """
    width = rows.shape[1]
    room = rows.untyped_storage().nbytes() // rows.itemsize - rows.storage_offset()
    return rows.as_strided((count, width), (width, 1)) if room >= count * width else rows


@gluon.jit
def _squares(sums_ptr, first, M, MEMBERS: gl.constexpr):
    """Sums of squares of each row by all programs of the group, [64, MEMBERS]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    m = first + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    member = gl.arange(0, MEMBERS, gl.SliceLayout(0, layout))[None, :]
    # Not from the multiprocessor's own cache, which may hold those of the norm before.
    at = sums_ptr + m * MEMBERS + member
    return gl.load(at, mask=m < M, other=0.0, cache_modifier=".cg")


@gluon.jit
def _hand_on(
    h, weight, normed_ptr, sums_ptr, first, M, member, E: gl.constexpr, MEMBERS: gl.constexpr
):
    """Hidden states times the norm's weight, and their squares' sums over the columns here."""
    A: gl.constexpr = h.shape[1]
    row = first + gl.arange(0, 64, gl.SliceLayout(1, mma_layout(A)))
    gl.store(sums_ptr + row * MEMBERS + member, gl.sum(h * h, 1), mask=row < M)
    store(normed_ptr, h * weight.to(gl.float32), first, member * A, M, E)


@gluon.jit
def _producer(
    o_desc, normed_desc, mid_desc, w_o_desc, gate_up_desc, small_desc, down_desc, qkv_desc,
    os, w_os, gate_xs, gate_halves, small_halves, qkv_xs, w_qkvs, full, empty, met, counter_ptr,
    group, member, H: gl.constexpr, E: gl.constexpr, F: gl.constexpr, MEMBERS: gl.constexpr,
    LAST: gl.constexpr,
):  # fmt: skip
    first = group * 64
    column = member * w_o_desc.block_shape[0]
    ask(w_o_desc, column, w_os, full)
    gdc_wait()
    # Nobody passes a meeting without this program, which has no product yet to arrive with.
    target = (counted(counter_ptr) & -MEMBERS) + MEMBERS
    bring(o_desc, w_o_desc, first, column, os, w_os, full, empty, H, 0)

    ask_gate_up(gate_up_desc, small_desc, member, gate_halves, small_halves, full, F)
    meet(counter_ptr, target)
    mbarrier.arrive(met.index(0))
    bring_gate_up(
        normed_desc, gate_up_desc, small_desc, first, member, gate_xs, gate_halves, small_halves,
        full, empty, E, F,
    )  # fmt: skip

    ask(down_desc, column, w_os, full)
    meet(counter_ptr + LINE, target)
    bring(mid_desc, down_desc, first, column, os, w_os, full, empty, F, 0)
    if not LAST:
        row = member * qkv_desc.block_shape[0]
        ask(qkv_desc, row, w_qkvs, full)
        meet(counter_ptr + 2 * LINE, target)
        mbarrier.arrive(met.index(1))
        FLIP: gl.constexpr = F // 128 // os.shape[0] & 1
        bring(normed_desc, qkv_desc, first, row, qkv_xs, w_qkvs, full, empty, E, FLIP)


@gluon.jit
def _consumer(
    os, w_os, gate_xs, gate_ups, smalls, qkv_xs, w_qkvs, full, empty, met,
    residual_ptr, post_norm_ptr, next_norm_ptr, normed_ptr, mid_ptr, sums_ptr, counter_ptr,
    out_ptr, qkv_ptr, group, member, M, eps, H: gl.constexpr, E: gl.constexpr, F: gl.constexpr,
    Q: gl.constexpr, MEMBERS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    first = group * 64
    A: gl.constexpr = w_os.shape[1]
    m = first + gl.arange(0, 64, gl.SliceLayout(1, mma_layout(A)))[:, None]
    n = member * A + gl.arange(0, A, gl.SliceLayout(0, mma_layout(A)))[None, :]
    post_norm = gl.load(post_norm_ptr + n)
    next_norm = gl.load(next_norm_ptr + n)
    gdc_wait()
    residual = gl.load(residual_ptr + m * E + n, mask=(m < M) & (n >= 0), other=0.0)

    h = multiply(os, w_os, full, empty, H, 0) + residual.to(gl.float32)
    h = h.to(gl.bfloat16).to(gl.float32)
    _hand_on(h, post_norm, normed_ptr, sums_ptr, first, M, member, E, MEMBERS)
    arrive(counter_ptr)

    mbarrier.wait(met.index(0), 0)
    squares = _squares(sums_ptr, first, M, MEMBERS)
    a, b = multiply_gate_up(gate_xs, gate_ups, smalls, full, empty, E)
    scale = gl.rsqrt(gl.sum(squares, 1) / E + eps)
    store(mid_ptr, swiglu(a, scale, 2 * A), first, member * 3 * A, M, F)
    store(mid_ptr, swiglu(b, scale, A), first, member * 3 * A + 2 * A, M, F)
    arrive(counter_ptr + LINE)

    h += multiply(os, w_os, full, empty, F, 0)
    h = h.to(gl.bfloat16).to(gl.float32)
    if not LAST:
        _hand_on(h, next_norm, normed_ptr, sums_ptr, first, M, member, E, MEMBERS)
    arrive(counter_ptr + 2 * LINE)
    store(out_ptr, h, first, member * A, M, E)
    if not LAST:
        mbarrier.wait(met.index(1), 0)
        gdc_launch_dependents()
        squares = _squares(sums_ptr, first, M, MEMBERS)
        FLIP: gl.constexpr = F // 128 // os.shape[0] & 1
        qkv = multiply(qkv_xs, w_qkvs, full, empty, E, FLIP)
        B: gl.constexpr = w_qkvs.shape[1]
        scale = gl.rsqrt(gl.sum(squares, 1) / E + eps)
        scale = gl.convert_layout(scale, gl.SliceLayout(1, mma_layout(B)))[:, None]
        store(qkv_ptr, qkv * scale, first, member * B, M, Q)


@gluon.jit(do_not_specialize=["M"])
def _between_kernel(
    o_desc, normed_desc, mid_desc, w_o_desc, gate_up_desc, small_desc, down_desc, qkv_desc,
    residual_ptr, post_norm_ptr, next_norm_ptr, normed_ptr, mid_ptr, sums_ptr, counters_ptr,
    out_ptr, qkv_ptr, M, eps, H: gl.constexpr, E: gl.constexpr, F: gl.constexpr, Q: gl.constexpr,
    MEMBERS: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, GATE_STAGES: gl.constexpr,
    QKV_STAGES: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    group = gl.program_id(0) // MEMBERS
    member = gl.program_id(0) % MEMBERS
    counter_ptr = counters_ptr + group * (3 * LINE)
    # Each matrix has the pool to itself: tiles of x, then tiles of w.
    A: gl.constexpr = w_o_desc.block_shape[0]
    B: gl.constexpr = qkv_desc.block_shape[0]
    bf16: gl.constexpr = gl.bfloat16
    swizzled: gl.constexpr = normed_desc.layout
    pool = gl.allocate_shared_memory(bf16, [CHUNKS, 64, 64], swizzled)
    os = pool._reinterpret(bf16, [STAGES, 64, 128], o_desc.layout)
    w_os = pool.index(2 * STAGES)._reinterpret(bf16, [STAGES, A, 128], w_o_desc.layout)
    gate_xs = pool._reinterpret(bf16, [GATE_STAGES, 64, 64], swizzled)
    ups = pool.index(GATE_STAGES)
    gate_ups = ups._reinterpret(bf16, [GATE_STAGES, 4 * A, 64], swizzled)
    gate_halves = ups._reinterpret(bf16, [2 * GATE_STAGES, 2 * A, 64], swizzled)
    ups = pool.index(GATE_STAGES + GATE_STAGES * A // 16)
    smalls = ups._reinterpret(bf16, [GATE_STAGES, 2 * A, 64], swizzled)
    small_halves = ups._reinterpret(bf16, [2 * GATE_STAGES, A, 64], swizzled)
    qkv_xs = pool._reinterpret(bf16, [QKV_STAGES, 64, 64], swizzled)
    w_qkvs = pool.index(QKV_STAGES)._reinterpret(bf16, [QKV_STAGES, B, 64], swizzled)
    full, empty, met = make_bars(STAGES), make_bars(STAGES), make_bars(2)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    os, w_os, gate_xs, gate_ups, smalls, qkv_xs, w_qkvs, full, empty, met,
                    residual_ptr, post_norm_ptr, next_norm_ptr, normed_ptr, mid_ptr, sums_ptr,
                    counter_ptr, out_ptr, qkv_ptr, group, member, M, eps, H, E, F, Q, MEMBERS, LAST,
                ),
            ),
            (
                _producer,
                (
                    o_desc, normed_desc, mid_desc, w_o_desc, gate_up_desc, small_desc, down_desc,
                    qkv_desc, os, w_os, gate_xs, gate_halves, small_halves, qkv_xs, w_qkvs, full,
                    empty, met, counter_ptr, group, member, H, E, F, MEMBERS, LAST,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
