"""The LM head's operator: float32 of bfloat16 on the CPU too, and what a trace is told of it."""

from __future__ import annotations

import torch
from torch import library

from models.ops.lm_head import lm_head


def test_operator() -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(100, 64).bfloat16()
    logits = torch.ops.fullgraph.lm_head(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T)
    library.opcheck(torch.ops.fullgraph.lm_head.default, (x, weight))


def test_a_cpu_keeps_the_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.randn(3, 64, dtype=dtype), torch.randn(100, 64, dtype=dtype)
        assert torch.equal(lm_head(x, weight), torch.nn.functional.linear(x, weight))
