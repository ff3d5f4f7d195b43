"""Operator x @ w.T + bias in float32 on a CPU, fast for the few rows of a decode step (2 to 16).

There BLAS libraries take two to three times as long as the weights take to be read from memory (one
core, 135M parameters, 8 rows: 80 ms against 50). Knows nothing of layers.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.ops import cpu_kernels
from models.ops.define import define

# At one row a BLAS is as fast; past 16 it is faster (measured, AVX-512).
_FEWEST, _MOST = 2, 16


def multiply_on_cpu(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """float32 [M, N] = x [M, K] @ w [N, K].T + bias [N]."""
    native = cpu_kernels.compiled()
    rows, inputs = x_MK.shape
    if native is None or not _FEWEST <= rows <= _MOST:
        return F.linear(x_MK, w_NK, bias_N)
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    assert w_NK.is_contiguous() and (bias_N is None or bias_N.is_contiguous())
    y_MN = torch.empty(rows, len(w_NK))
    native.fullgraph_linear(
        x_MK.data_ptr(),
        w_NK.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        y_MN.data_ptr(),
        rows,
        len(w_NK),
        inputs,
        x_MK.stride(0),
    )
    return y_MN


few_rows_linear = define(
    "few_rows_linear",
    multiply_on_cpu,
    fake=lambda x_MK, w_NK, bias_N: x_MK.new_empty(x_MK.shape[0], w_NK.shape[0]),
)
