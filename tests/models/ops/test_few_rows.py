"""few_rows_linear against float64, for sizes that fill no vector and no block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import library

from models.ops import cpu_kernels
from models.ops.few_rows import few_rows_linear


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (5, 7), (49, 100), (300, 576)])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 15, 16, 17])
def test_any_size(
    rows: int, outputs: int, inputs: int, bias: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(cpu_kernels, "compiled", lambda: None)
    torch.manual_seed(0)
    x, w = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    b = torch.randn(outputs) if bias else None
    expected = F.linear(x.double(), w.double(), None if b is None else b.double())
    got = few_rows_linear(x, w, b)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)


def test_strided_rows() -> None:
    w = torch.randn(33, 20)
    wide = torch.randn(4, 60)
    for x in (wide[:, 20:40], wide.T[:4, :4].repeat(1, 5).T.contiguous().T[:, :20]):
        torch.testing.assert_close(few_rows_linear(x, w, None), x @ w.T, atol=1e-5, rtol=0)


def test_a_proper_operator() -> None:
    arguments = (torch.randn(5, 20), torch.randn(33, 20), torch.randn(33))
    library.opcheck(few_rows_linear, arguments)
    library.opcheck(few_rows_linear, (*arguments[:2], None))
