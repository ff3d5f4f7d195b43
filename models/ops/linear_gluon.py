"""Matrices applied to 33 to 256 rows in Gluon, for Hopper: y = residual + x @ w.T.

Between two attentions a decode step is a chain of short kernels, each bound by how soon its first
tiles arrive and by how many are under way. So tiles come through tensor descriptors (TMA), as many
as shared memory holds, and those of the weights are asked for before the kernel waits for the one
before it (programmatic dependent launch); only tiles of x come after that. Triton's own pipeline
asks for both at once.

K is not cut: parts that the last program adds up cost more than they save where tiles are deep.
Knows nothing of operators or of which tiles are best when. Importing it needs Triton.

Legend: M rows of x, N columns of y, K inner dimension.
"""

from __future__ import annotations

import triton
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.ops.linear_table import Choice


def run(x_MK: Tensor, w_NK: Tensor, residual_MN: Tensor | None, y_MN: Tensor, t: Choice) -> None:
    """y = residual + x @ w.T, the residual may be absent; elements of two bytes, contiguous."""
    (num_rows, inner), columns = x_MK.shape, y_MN.shape[1]
    assert columns % t.block_n == 0 and inner % t.block_k == 0, t
    _tiles_kernel[(columns // t.block_n, triton.cdiv(num_rows, t.block_m))](
        _tiled(x_MK, t.block_m, t.block_k),
        _tiled(w_NK, t.block_n, t.block_k),
        x_MK if residual_MN is None else residual_MN,
        y_MN,
        num_rows,
        N=columns,
        K=inner,
        BM=t.block_m,
        BN=t.block_n,
        BK=t.block_k,
        STAGES=min(t.stages, inner // t.block_k),
        RESIDUAL=residual_MN is not None,
        num_warps=t.warps,
        launch_pdl=True,
    )


def _tiled(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


@gluon.jit(do_not_specialize=["M"])
def _tiles_kernel(
    x_desc, w_desc, residual_ptr, y_ptr, M,
    N: gl.constexpr, K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, RESIDUAL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    column = gl.program_id(0) * BN
    first = gl.program_id(1) * BM
    BYTES: gl.constexpr = 2 * BK * (BM + BN)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), BYTES)
        tma.async_copy_global_to_shared(w_desc, [column, i * BK], bars.index(i), ws.index(i))
    gdc_wait()
    gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x_desc, [first, i * BK], bars.index(i), xs.index(i))
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BN, 16])
    m = first + gl.arange(0, BM, gl.SliceLayout(1, layout))[:, None]
    n = gl.arange(0, BN, gl.SliceLayout(0, layout))[None, :]
    some = (m < M) & (n >= 0)
    y_at = m * N + column + n
    if RESIDUAL:
        residual = gl.load(residual_ptr + y_at, mask=some, other=0.0)
    acc = warpgroup_mma_init(gl.zeros([BM, BN], gl.float32, layout))
    mbarrier.wait(bars.index(0), 0)
    acc = warpgroup_mma(xs.index(0), ws.index(0).permute((1, 0)), acc, is_async=True)
    for i in range(1, K // BK):
        slot = i % STAGES
        mbarrier.wait(bars.index(slot), i // STAGES & 1)
        acc = warpgroup_mma(xs.index(slot), ws.index(slot).permute((1, 0)), acc, is_async=True)
        # The slot before is free once its product is done; this one's is under way meanwhile.
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        slot = (i - 1) % STAGES
        k = (i - 1 + STAGES) * BK
        more = k < K
        bar = bars.index(slot)
        mbarrier.expect(bar, BYTES, pred=more)
        tma.async_copy_global_to_shared(w_desc, [column, k], bar, ws.index(slot), pred=more)
        tma.async_copy_global_to_shared(x_desc, [first, k], bar, xs.index(slot), pred=more)
    y = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if RESIDUAL:
        y += residual.to(gl.float32)
    gl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=some)
