"""Mixtures of experts on a GPU against the reference in float32: skewed routings, sizes that no
tile divides, padding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.ops.experts import grouped_experts, mixture, top_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

TOLERANCE = 1e-2  # relative, of bfloat16 arithmetic against float32
# hidden, ffn, experts, experts per token
SHAPES = [(256, 96, 16, 4), (2048, 768, 128, 8), (72, 40, 6, 2), (512, 192, 8, 1)]
TOKENS = (1, 2, 7, 33, 64, 65, 300, 1025)


def error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|; NaN fails every comparison."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def draw(tokens: int, shape: tuple[int, int, int, int], skew: str) -> dict[str, Any]:
    """Random operands. `skew`: "none", "one" (an expert that all want), "half" (the others get
    none). bfloat16 values, routers far from ties.
    """
    hidden, ffn, experts, top_k = shape
    generator = torch.Generator("cuda").manual_seed(tokens + hidden)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", generator=generator)

    x, router = normal(tokens, hidden), normal(experts, hidden) / hidden**0.5 * 3
    if skew != "none":
        x[:, 0] = 8  # a direction that the router sees
        router[:, 0] = 0
        favoured = slice(0, 1) if skew == "one" else slice(0, max(top_k, experts // 2))
        router[favoured, 0] = 4
    return {
        "x_TE": x.bfloat16(),
        "norm_E": (normal(hidden) * 0.1 + 1).bfloat16(),
        "eps": 1e-6,
        "router_NE": router.bfloat16(),
        "kv_slots_T": torch.arange(tokens, device="cuda", dtype=torch.int32),
        "gate_up_NGE": (normal(experts, 2 * ffn, hidden) / hidden**0.5).bfloat16(),
        "down_NEF": (normal(experts, hidden, ffn) / ffn**0.5).bfloat16(),
        "top_k": top_k,
        "normalise": skew == "none",
        "residual_TE": None,
        "pdl": True,
    }


def expected_of(args: dict[str, Any]) -> Tensor:
    """In float32 on the GPU, expert by expert. The normed x is rounded as bfloat16 would be: what
    the experts are asked is not this test's affair.
    """
    x = args["x_TE"].float()
    if args["norm_E"] is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + args["eps"]) * args["norm_E"].float()
        x = x.bfloat16().float()
    weights, experts = top_experts(
        x @ args["router_NE"].float().t(), args["top_k"], args["normalise"]
    )
    y = torch.zeros_like(x)
    real = args["kv_slots_T"] >= 0
    for n in range(len(args["router_NE"])):
        tokens, k = torch.nonzero((experts == n) & real[:, None], as_tuple=True)
        gate, up = (x[tokens] @ args["gate_up_NGE"][n].float().t()).chunk(2, -1)
        out = (torch.nn.functional.silu(gate) * up) @ args["down_NEF"][n].float().t()
        y.index_add_(0, tokens, out * weights[tokens, k][:, None])
    return y if args["residual_TE"] is None else args["residual_TE"].float() + y


@pytest.fixture(autouse=True)
def exact_reference() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("skew", ["none", "one", "half"])
@pytest.mark.parametrize("shape", SHAPES)
def test_mixture(shape: tuple[int, int, int, int], skew: str) -> None:
    for tokens in TOKENS:
        args = draw(tokens, shape, skew)
        torch.empty(1 << 22, device="cuda").fill_(float("nan"))  # what the allocator hands out next
        got = mixture(*args.values())
        expected = expected_of(args)
        assert error(got, expected) < TOLERANCE, tokens
        again = mixture(*args.values())
        assert torch.equal(got, again), f"{tokens}: not the same twice"


@pytest.mark.parametrize("tokens", TOKENS)
def test_padding_costs_no_expert(tokens: int) -> None:
    """Padded rows are the residual, real ones what they are alone; NaN in padding goes nowhere."""
    args = draw(tokens, SHAPES[0], "none")
    args["residual_TE"] = torch.randn_like(args["x_TE"])
    padding = torch.rand(tokens, device="cuda") < 0.5
    padding[0] = tokens == 1
    args["kv_slots_T"][padding] = -1
    expected = expected_of(args)
    args["x_TE"][padding] = float("nan")
    got = mixture(*args.values())
    assert torch.equal(got[padding], args["residual_TE"][padding])
    assert error(got, expected) < TOLERANCE


def test_without_norm_as_an_extend_step_does() -> None:
    args = draw(300, SHAPES[1], "none") | {"norm_E": None}
    assert error(mixture(*args.values()), expected_of(args)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_float32_is_exact(tokens: int) -> None:
    """Tensor cores round float32 unless told to compute in three parts."""
    args = draw(tokens, SHAPES[0], "none") | {"norm_E": None}
    args = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in args.items()}  # fmt: skip
    assert error(mixture(*args.values()), expected_of(args)) < 1e-5


@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_nan_stays_in_its_row(tokens: int) -> None:
    args = draw(tokens, SHAPES[0], "none")
    expected = expected_of(args)
    args["x_TE"][tokens // 2] = float("nan")
    got = mixture(*args.values())
    assert got[tokens // 2].isnan().all()
    others = torch.arange(tokens, device="cuda") != tokens // 2
    if tokens > 1:
        assert error(got[others], expected[others]) < TOLERANCE


def test_replay_follows_the_routing() -> None:
    """One captured graph serves every routing."""
    args = draw(64, SHAPES[0], "none")
    mixture(*args.values())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture(*args.values())
    for skew in ("half", "one", "none"):
        other = draw(64, SHAPES[0], skew) | {"normalise": True}
        for name in ("x_TE", "router_NE", "norm_E", "gate_up_NGE", "down_NEF"):
            args[name].copy_(other[name])
        args["kv_slots_T"][40:] = -1 if skew == "one" else 1
        graph.replay()
        assert error(out, expected_of(args)) < TOLERANCE, skew


def test_torchs_grouped_products() -> None:
    """The way taken without kernels of ours."""
    args = draw(300, SHAPES[1], "none") | {"norm_E": None}
    args["kv_slots_T"][250:] = -1
    weights, experts = top_experts(
        args["x_TE"].float() @ args["router_NE"].float().t(), 8, args["normalise"]
    )
    got = grouped_experts(
        args["x_TE"],
        weights,
        experts,
        args["kv_slots_T"],
        args["gate_up_NGE"],
        args["down_NEF"],
    )
    assert error(got, expected_of(args)) < TOLERANCE
