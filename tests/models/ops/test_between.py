"""The operator of all that lies between two attentions: its schema and fake, and when it is one
kernel. What it computes is in tests/models/test_fused_layer.py and tests/gpu/test_ops_gpu.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import library

from models.ops.between import between_attentions
from models.ops.linear_table import between_rows


@pytest.mark.parametrize("last", [False, True])
def test_operator(last: bool) -> None:
    r = torch.randn
    before: list[Any] = [r(3, 6), r(3, 8), r(8, 6), None, r(8), r(20, 8), None, r(8, 10), None]
    after = [None, None, None] if last else [r(8), r(12, 8), None]
    library.opcheck(between_attentions, (*before, *after, 1e-6, True))


def test_rows_of_one_kernel() -> None:
    assert 33 in between_rows(1024, 2048, 3072, None)
    assert 256 in between_rows(1024, 2048, 3072, 4096)
    for rows in (32, 257):
        assert rows not in between_rows(1024, 2048, 3072, 4096)
    assert not between_rows(1024, 2048, 3072, 4097)
