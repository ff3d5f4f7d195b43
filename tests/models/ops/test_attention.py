"""paged_attention and kv_write against a loop over single tokens in float64."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, library

from models.ops import cpu_kernels
from models.ops.attention import paged_attention
from models.ops.kv_write import kv_write


@pytest.fixture(name="implementation", params=["kernels", "torch"])
def fixture_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The C++ kernels, and torch as on a machine without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_kernels, "compiled", lambda: None)
    elif cpu_kernels.compiled() is None:
        pytest.skip("no C++ compiler")
    return str(request.param)


class Case(NamedTuple):
    """Arguments of paged_attention, and per row the keys and values it may see."""

    arguments: tuple[Any, ...]
    rows: list[tuple[int, int, int, Tensor, Tensor]]  # offset, start, length, k_SKD, v_SKD


def make_case(
    rows: list[tuple[int, int]],
    *,
    page_size: int = 4,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    padding: int = 2,
    seed: int = 0,
) -> Case:
    """Rows of (start, length) on scattered pages; what no row may read is NaN, but page 0."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    columns = max((-(-(start + length) // page_size) for start, length in rows), default=1) + 1
    num_slots = len(rows) + 2
    free = list(range(1, num_slots * columns + 1))
    rng.shuffle(free)
    table = torch.tensor([free[slot * columns : (slot + 1) * columns] for slot in range(num_slots)])
    kv_layer = torch.full((len(free) + 1, 2, page_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    kv_layer[0] = 0
    slots = rng.sample(range(num_slots - 1), len(rows))
    known = []
    offset = 0
    for slot, (start, length) in zip(slots, rows, strict=True):
        end = start + length
        kv = torch.randn(2, end, kv_heads, head_dim, dtype=dtype)
        for position in range(end):
            page = int(table[slot, position // page_size])
            kv_layer[page, :, position % page_size] = kv[:, position]
        known.append((offset, start, length, kv[0], kv[1]))
        offset += length

    def padded(values: list[int], fill: int) -> Tensor:
        return torch.tensor([*values, *[fill] * padding], dtype=torch.int32)

    arguments = (
        torch.randn(offset + padding, heads, head_dim, dtype=dtype),
        kv_layer,
        table.to(torch.int32),
        padded(slots, num_slots - 1),
        padded([start for start, _ in rows], 0),
        padded([length for _, length in rows], 0),
        padded([row[0] for row in known], 0),
        head_dim**-0.5,
        window,
        "decode" if all(length == 1 for _, length in rows) else "extend",
    )
    return Case(arguments, known)


def naive(case: Case) -> Tensor:
    q_THD, *_, scale, window, _ = case.arguments
    o_THD = torch.zeros_like(q_THD, dtype=torch.float64)
    for offset, start, length, k_SKD, v_SKD in case.rows:
        for i in range(length):
            first = max(0, start + i + 1 - window) if window else 0
            for head in range(q_THD.shape[1]):
                kv_head = head * k_SKD.shape[1] // q_THD.shape[1]
                k = k_SKD[first : start + i + 1, kv_head].double()
                v = v_SKD[first : start + i + 1, kv_head].double()
                scores = k @ q_THD[offset + i, head].double() * scale
                o_THD[offset + i, head] = scores.softmax(0) @ v
    return o_THD


MIXES = {
    "one": [(0, 1)],
    "one prompt": [(0, 9)],
    "one chunk": [(5, 6)],
    "decode, equal": [(8, 1), (8, 1), (8, 1)],
    "decode, ragged": [(0, 1), (17, 1), (3, 1), (4, 1), (30, 1)],
    "mixed": [(21, 1), (7, 1), (0, 1), (0, 13), (6, 5), (0, 1)],
    "none": [],
}


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("window", [0, 1, 4, 7])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("mix", MIXES)
def test_any_mix(mix: str, page_size: int, window: int) -> None:
    case = make_case(MIXES[mix], page_size=page_size, window=window)
    o_THD = paged_attention(*case.arguments)
    assert o_THD.is_contiguous()
    torch.testing.assert_close(o_THD.double(), naive(case), atol=2e-6, rtol=0)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("kv_heads", [1, 2, 7, 14])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_head_layouts(kv_heads: int, head_dim: int) -> None:
    case = make_case(MIXES["mixed"], heads=14, kv_heads=kv_heads, head_dim=head_dim)
    o_THD = paged_attention(*case.arguments)
    torch.testing.assert_close(o_THD.double(), naive(case), atol=2e-6, rtol=0)


@pytest.mark.usefixtures("implementation")
def test_no_padding_and_rows_in_order() -> None:
    """The path that takes a decode bucket as it stands."""
    case = make_case(MIXES["decode, ragged"], padding=0)
    torch.testing.assert_close(
        paged_attention(*case.arguments).double(), naive(case), atol=2e-6, rtol=0
    )


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = make_case(MIXES["mixed"], dtype=dtype)
    o_THD = paged_attention(*case.arguments)
    assert o_THD.dtype == dtype
    torch.testing.assert_close(o_THD.double(), naive(case), atol=2e-2, rtol=0)


@pytest.mark.usefixtures("implementation")
def test_long_rows() -> None:
    """Enough work for several threads; scores far below zero."""
    case = make_case([(1500, 1), (10, 1), (700, 1)], page_size=16, head_dim=64)
    case.arguments[0].mul_(20)
    torch.set_num_threads(2)
    try:
        o_THD = paged_attention(*case.arguments)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(o_THD.double(), naive(case), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("implementation")
def test_a_nan_stays_in_its_row() -> None:
    case = make_case(MIXES["decode, ragged"])
    case.arguments[0][2] = torch.nan
    o_THD, expected = paged_attention(*case.arguments), naive(case)
    assert o_THD[2].isnan().all()
    kept = [0, 1, 3, 4]
    torch.testing.assert_close(o_THD[kept].double(), expected[kept], atol=2e-6, rtol=0)


@pytest.mark.usefixtures("implementation")
def test_queries_need_not_be_contiguous() -> None:
    case = make_case(MIXES["mixed"])
    q_THD = case.arguments[0]
    wide = torch.cat((q_THD, torch.randn_like(q_THD)), dim=1)[:, : q_THD.shape[1]]
    assert not wide.is_contiguous()
    o_THD = paged_attention(wide, *case.arguments[1:])
    torch.testing.assert_close(o_THD.double(), naive(case), atol=2e-6, rtol=0)


@pytest.mark.parametrize("mix", ["decode, ragged", "mixed"])
def test_attention_is_a_proper_operator(mix: str) -> None:
    case = make_case(MIXES[mix])
    library.opcheck(paged_attention, case.arguments)


def kv_arguments(slots: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    k_TKD, v_TKD = torch.randn(2, len(slots), 3, 8)
    return k_TKD, v_TKD, torch.zeros(5, 2, 4, 3, 8), torch.tensor(slots, dtype=torch.int32)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("slots", [[4], [7, 18, 4], [9, -1, 19, -1], [-1, -1]])
def test_kv_write(slots: list[int]) -> None:
    k_TKD, v_TKD, kv_layer, kv_slots_T = kv_arguments(slots)
    expected = torch.zeros_like(kv_layer)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // 4, 0, slot % 4] = k_TKD[token]
            expected[slot // 4, 1, slot % 4] = v_TKD[token]
    kv_write(k_TKD, v_TKD, kv_layer, kv_slots_T)
    assert torch.equal(kv_layer, expected)


@pytest.mark.usefixtures("implementation")
def test_kv_write_of_strided_heads() -> None:
    """Values come as a slice of the fused projection, or with heads that are not even adjacent."""
    k_TKD, v_TKD, kv_layer, kv_slots_T = kv_arguments([7, -1, 4])
    plain = kv_layer.clone()
    kv_write(k_TKD, v_TKD, plain, kv_slots_T)
    fused = torch.cat((k_TKD, v_TKD), 1)
    kv_write(fused[:, :3], fused[:, 3:], kv_layer, kv_slots_T)
    assert kv_layer.equal(plain)
    spread = torch.stack((k_TKD, v_TKD), 2)
    kv_write(spread[:, :, 0], spread[:, :, 1], kv_layer.zero_(), kv_slots_T)
    assert kv_layer.equal(plain)


def test_kv_write_is_a_proper_operator() -> None:
    library.opcheck(kv_write, kv_arguments([7, -1, 4]))
