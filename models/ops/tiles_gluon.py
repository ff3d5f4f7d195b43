"""Products of a tile of 64 rows in Gluon, for Hopper: one warp brings tiles by tensor copies (TMA),
four multiply them, both step through the same slots of shared memory.

Knows nothing of layers or of who else computes what. Importing it needs Triton.

Legend: K inner dimension, BK inner elements and BN columns of a tile, STAGES slots; A a third of
the gate columns, and of the up columns, of a program.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def tiled(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What copies tiles of a bfloat16 matrix to shared memory as products want them."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


@gluon.jit
def make_bars(COUNT: gl.constexpr):
    """Barriers in shared memory that one arrival, or the bytes of one, completes."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def ask(w_desc, row, ws, full):
    """Ask for the first tiles of a matrix; those of x come by `bring`."""
    STAGES: gl.constexpr = ws.shape[0]
    BK: gl.constexpr = w_desc.block_shape[1]
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), 2 * BK * (64 + w_desc.block_shape[0]))
        tma.async_copy_global_to_shared(w_desc, [row, i * BK], full.index(i), ws.index(i))


@gluon.jit
def bring(x_desc, w_desc, first, row, xs, ws, full, empty, K: gl.constexpr, FLIP: gl.constexpr):
    """Bring the tiles of x beside those of `ask`, then all others; ends when all are used.

    Every barrier of `full` and `empty` is in its first phase, with FLIP in its second.
    """
    STAGES: gl.constexpr = xs.shape[0]
    BK: gl.constexpr = x_desc.block_shape[1]
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x_desc, [first, i * BK], full.index(i), xs.index(i))
    for i in range(STAGES, K // BK):
        slot = i % STAGES
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), i // STAGES - 1 + FLIP & 1)
        mbarrier.expect(bar, 2 * BK * (64 + w_desc.block_shape[0]))
        tma.async_copy_global_to_shared(w_desc, [row, i * BK], bar, ws.index(slot))
        tma.async_copy_global_to_shared(x_desc, [first, i * BK], bar, xs.index(slot))
    LAST: gl.constexpr = K // BK - 1
    mbarrier.wait(empty.index(LAST % STAGES), LAST // STAGES + FLIP & 1)


@gluon.jit
def multiply(xs, ws, full, empty, K: gl.constexpr, FLIP: gl.constexpr):
    """x @ w.T of the tiles that `bring` brings: float32 [64, BN]."""
    STAGES: gl.constexpr = xs.shape[0]
    STEPS: gl.constexpr = K // xs.shape[2]
    BN: gl.constexpr = ws.shape[1]
    y = warpgroup_mma_init(gl.zeros([64, BN], gl.float32, mma_layout(BN)))
    for i in range(0, STEPS):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES + FLIP & 1)
        y = warpgroup_mma(xs.index(slot), ws.index(slot).permute((1, 0)), y, is_async=True)
        # A slot is free once its product is done; the next one's is under way meanwhile.
        y = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(y,)))
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
    y = warpgroup_mma_wait(num_outstanding=0, deps=(y,))
    mbarrier.arrive(empty.index((STEPS - 1) % STAGES))
    return y


@gluon.jit
def _ask_gate_up(desc, small_desc, member, k, bar, halves, small_halves, slot, F: gl.constexpr):
    A: gl.constexpr = small_desc.block_shape[0]
    row = member * (3 * A)
    tma.async_copy_global_to_shared(desc, [row, k], bar, halves.index(2 * slot))
    tma.async_copy_global_to_shared(desc, [F + row, k], bar, halves.index(2 * slot + 1))
    row += 2 * A
    tma.async_copy_global_to_shared(small_desc, [row, k], bar, small_halves.index(2 * slot))
    tma.async_copy_global_to_shared(small_desc, [F + row, k], bar, small_halves.index(2 * slot + 1))


@gluon.jit
def ask_gate_up(desc, small_desc, member, halves, small_halves, full, F: gl.constexpr):
    """`ask` for gate_up [2 F, K]: two thirds of the program's gate columns and of its up columns
    are one tile, the last third of both another, for tiles are powers of two.
    """
    STAGES: gl.constexpr = halves.shape[0] // 2
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), 128 * (64 + 6 * small_desc.block_shape[0]))
        _ask_gate_up(desc, small_desc, member, i * 64, full.index(i), halves, small_halves, i, F)


@gluon.jit
def bring_gate_up(
    x_desc, desc, small_desc, first, member, xs, halves, small_halves, full, empty,
    K: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """`bring` for gate_up, with barriers in their first phase, where they are again at its end."""
    STAGES: gl.constexpr = xs.shape[0]
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x_desc, [first, i * 64], full.index(i), xs.index(i))
    for i in range(STAGES, K // 64):
        slot = i % STAGES
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), i // STAGES - 1 & 1)
        mbarrier.expect(bar, 128 * (64 + 6 * small_desc.block_shape[0]))
        _ask_gate_up(desc, small_desc, member, i * 64, bar, halves, small_halves, slot, F)
        tma.async_copy_global_to_shared(x_desc, [first, i * 64], bar, xs.index(slot))
    LAST: gl.constexpr = K // 64 - 1
    mbarrier.wait(empty.index(LAST % STAGES), LAST // STAGES & 1)


@gluon.jit
def multiply_gate_up(xs, ws, smalls, full, empty, K: gl.constexpr):
    """`multiply` of both tiles of gate_up: float32 [64, 4 A] and [64, 2 A], gate left of up."""
    STAGES: gl.constexpr = xs.shape[0]
    STEPS: gl.constexpr = K // 64
    WIDE: gl.constexpr = ws.shape[1]
    SMALL: gl.constexpr = smalls.shape[1]
    a = warpgroup_mma_init(gl.zeros([64, WIDE], gl.float32, mma_layout(WIDE)))
    b = warpgroup_mma_init(gl.zeros([64, SMALL], gl.float32, mma_layout(SMALL)))
    for i in range(0, STEPS):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        x = xs.index(slot)
        a = warpgroup_mma(x, ws.index(slot).permute((1, 0)), a, is_async=True)
        b = warpgroup_mma(x, smalls.index(slot).permute((1, 0)), b, is_async=True)
        a, b = warpgroup_mma_wait(num_outstanding=2, deps=(a, b))
        a, b = warpgroup_mma_init(a), warpgroup_mma_init(b)
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
    a, b = warpgroup_mma_wait(num_outstanding=0, deps=(a, b))
    mbarrier.arrive(empty.index((STEPS - 1) % STAGES))
    return a, b


@gluon.jit
def swiglu(gate_up, scale, WIDTH: gl.constexpr):
    """silu(gate) * up of a tile [64, 2 WIDTH] whose rows are still to be scaled."""
    gate, up = gl.split(gate_up.reshape([64, 2, WIDTH]).permute((0, 2, 1)))
    scale = gl.convert_layout(scale, gl.SliceLayout(1, gate.type.layout))[:, None]
    gate *= scale
    # The GPU's own power of two and reciprocal: exact ones take longer than the products.
    sigmoid = gl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
        }""",
        "=f,f",
        [gate],
        gl.float32,
        True,
        1,
    )
    return gate * sigmoid * (up * scale)


@gluon.constexpr_function
def mma_layout(columns):
    """A product of 64 rows by four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _store_layout(columns):
    """The same for stores: each warp keeps its rows, a thread has as many columns of one side by
    side as the four threads of a row can share, at most eight.
    """
    each = min(8, columns // 4)
    registers = [[0, 1 << i] for i in range(each.bit_length() - 1)]
    registers += [[0, n] for n in (32, 64) if n < columns]
    lanes = [[0, each], [0, 2 * each], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [*registers, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, columns]
    )


@gluon.jit
def store(ptr, y, first, column, M, STRIDE: gl.constexpr):
    """A tile to a bfloat16 matrix of M rows."""
    WIDTH: gl.constexpr = y.shape[1]
    layout: gl.constexpr = _store_layout(WIDTH)
    m = first + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    n = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    y = gl.convert_layout(y.to(gl.bfloat16), layout)
    gl.store(ptr + m * STRIDE + n, y, mask=(m < M) & (n >= 0))
