"""The kernels of a mixture of experts in Triton's interpreter, against a loop over tokens.

Run by test_experts_interpreted.py in a process of its own, for Triton reads TRITON_INTERPRET when
it is imported. No GPU; programmatic dependent launch does nothing here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.runtime.interpreter
from torch import Tensor

from models.ops import experts_triton, route_triton
from models.ops.experts import top_experts
from models.ops.experts_table import Choice, Tiles, num_tiles

TALL = Choice(16, True, Tiles(32, 32), Tiles(32, 32))
WIDE = Choice(16, False, Tiles(32, 32), Tiles(32, 32))


class Case(NamedTuple):
    """Sizes, and what is special."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    choice: Choice = TALL
    padding: int = 0
    skewed: bool = False
    normalise: bool = True
    residual: bool = True


CASES = (
    Case(1, 64, 48, 8, 2),
    Case(1, 72, 40, 8, 3, normalise=False, residual=False),
    Case(1, 64, 40, 8, 3, padding=1),
    Case(2, 64, 48, 8, 2),
    Case(7, 72, 40, 8, 3, WIDE, skewed=True, normalise=False, residual=False),
    Case(33, 64, 48, 8, 2, padding=11),
    Case(70, 64, 40, 8, 2, WIDE, padding=9, skewed=True),
    Case(130, 64, 32, 6, 2, WIDE, padding=130),
    Case(200, 64, 32, 16, 4, padding=70),
)


def scalars_are_indices() -> None:
    """Let a loop's bound be a value in a kernel: NumPy no longer makes a number of an array of one
    element, and the interpreter relies on it.
    """
    interpreter: Any = triton.runtime.interpreter
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: np.asarray(self.handle.data).item())

    interpreter._patch_lang_tensor = patched


def check_routing(
    case: Case, routing: route_triton.Routing, experts_TK: Tensor, slots: Tensor
) -> None:
    """Pairs are those of real tokens by expert and token; tiles cover them and nothing else."""
    real = [
        (int(experts_TK[t, k]), t)
        for t in range(case.tokens)
        if slots[t] >= 0
        for k in range(case.top_k)
    ]
    pairs = routing.pairs_P[: len(real)].long()
    got = [(int(experts_TK.flatten()[pair]), int(pair) // case.top_k) for pair in pairs]
    assert got == sorted(real), case
    place = 0
    for expert, begin, end, _ in routing.tiles.tolist():
        if expert >= 0:
            assert begin == place and 0 < end - begin <= case.choice.block_m, case
            assert {got[i][0] for i in range(begin, end)} == {expert}, case
            place = end
    assert place == len(real), case


def check(case: Case) -> None:
    """One mixture, and where its router sent the tokens."""
    torch.manual_seed(case.tokens + case.hidden)
    x, norm = torch.randn(case.tokens, case.hidden), torch.rand(case.hidden) + 0.5
    router = torch.randn(case.experts, case.hidden) * 0.3
    if case.skewed:
        x, router[1] = x + 1, router[1] + 1
    gate_up = torch.randn(case.experts, 2 * case.ffn, case.hidden) * 0.1
    down = torch.randn(case.experts, case.hidden, case.ffn) * 0.1
    slots = torch.arange(case.tokens, dtype=torch.int32)
    slots[case.tokens - case.padding :] = -1
    residual = torch.randn_like(x) if case.residual else None
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * norm
    weights, experts = top_experts(normed @ router.t(), case.top_k, case.normalise)
    expected = torch.zeros_like(x) if residual is None else residual.clone()
    for t in range(case.tokens - case.padding):
        for weight, n in zip(weights[t], experts[t], strict=True):
            gate, up = (gate_up[n] @ normed[t]).chunk(2)
            expected[t] += weight * (down[n] @ (F.silu(gate) * up))
    y = torch.full_like(x, torch.nan)
    if case.tokens == 1:
        got_x, chosen = route_triton.route_one(
            x, norm, 1e-5, router, case.top_k, case.normalise, False
        )
        torch.testing.assert_close(got_x, normed)
        experts_triton.one_token(got_x, chosen, slots, gate_up, down, residual, y, False)
    else:
        block_m = case.choice.block_m
        most = num_tiles(case.tokens, case.top_k, case.experts, block_m)
        routing = route_triton.route(
            normed, router, slots, case.top_k, case.normalise, block_m, most, False
        )
        check_routing(case, routing, experts, slots)
        experts_triton.many_tokens(
            normed, routing, slots, gate_up, down, residual, y, case.choice, False
        )
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4, msg=str(case))


if __name__ == "__main__":
    scalars_are_indices()
    for each in CASES:
        check(each)
        print(each, flush=True)
