"""Every CUDA operator against its CPU reference in float32, on random rows: mixed, padded,
windowed, replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention_plan import AttentionPlanner
from engine.flashinfer_plan import AttentionShape
from engine.scheduler.batch import Kind, ScheduledBatch
from engine.step_inputs import Bucket, empty_batch, pack, views
from models.inputs import StepInputs
from models.ops import between
from models.ops.attention import paged_attention, reference_attention
from models.ops.between import between_attentions
from models.ops.fused import decode_attention, qk_norm_rope_kv_write
from models.ops.kv_write import kv_write
from models.ops.linear import fused_linear
from models.ops.lm_head import lm_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SLOTS, PAGES, PAGE = 16, 400, 16
TOLERANCE = 1e-2  # relative, of bfloat16 arithmetic against float32

Row = tuple[int, int]  # tokens in the cache, tokens in this step
DECODE_ROWS: tuple[Row, ...] = ((0, 1), (15, 1), (16, 1), (700, 1), (1023, 1), (64, 1), (5, 1))
MIXED_ROWS: tuple[Row, ...] = ((300, 1), (17, 1), (1, 1), (0, 40), (33, 70), (200, 1), (16, 16))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|; NaN fails every comparison."""
    return float((got.double().cpu() - expected.double()).norm() / expected.double().norm())


def decode_bucket(rows: int) -> Bucket:
    return Bucket("decode", rows, rows, rows, rows, SLOTS)


def extend_bucket(tokens: int) -> Bucket:
    return Bucket("extend", tokens, SLOTS, SLOTS, 4, SLOTS)


def batch_of(kind: Kind, rows: tuple[Row, ...], bucket: Bucket) -> ScheduledBatch:
    """A batch with these rows on the first slots; only what attention reads is filled in."""
    starts = np.array([start for start, _ in rows], np.int32)
    lens = np.array([length for _, length in rows], np.int32)
    num_tokens = int(lens.sum())
    tokens = np.zeros(num_tokens, np.int32)
    slots = np.arange(len(rows), dtype=np.int32)[::-1].copy()
    return replace(
        empty_batch(bucket),
        token_ids=tokens,
        positions=tokens,
        token_slots=tokens,
        kv_slots=tokens,
        row_slots=slots,
        row_starts=starts,
        row_lens=lens,
        num_decode_rows=int((lens == 1).sum()),
    )


class World(NamedTuple):
    """A layer's cache and a page table."""

    cache: Tensor
    table: Tensor

    @classmethod
    def make(cls, num_kv_heads: int, head_dim: int) -> World:
        cache = torch.randn(PAGES, 2, PAGE, num_kv_heads, head_dim, device="cuda").bfloat16()
        cache[0] = 0
        columns = PAGES // SLOTS
        table = torch.zeros(SLOTS + 1, columns * 4, dtype=torch.int32, device="cuda")
        # Rows share pages: attention does not care, and long rows fit.
        table[:SLOTS] = torch.randint(1, PAGES, (SLOTS, columns * 4), device="cuda")
        return cls(cache, table)


def shape_of(heads: int, kv_heads: int, head_dim: int, window: int, world: World) -> AttentionShape:
    columns = world.table.shape[1]
    return AttentionShape(heads, kv_heads, head_dim, PAGE, columns, torch.bfloat16, (window,))


def attend(q: Tensor, world: World, inputs: StepInputs, window: int, kind: str) -> Tensor:
    out: Tensor = paged_attention(
        q,
        world.cache,
        world.table,
        inputs.row_slots_R,
        inputs.row_starts_R,
        inputs.row_lens_R,
        inputs.row_offsets_R,
        q.shape[2] ** -0.5,
        window,
        kind,
    )
    return out


def expected_attention(q: Tensor, world: World, inputs: StepInputs, window: int) -> Tensor:
    return reference_attention(
        q.float().cpu(),
        world.cache.float().cpu(),
        world.table.cpu(),
        inputs.row_slots_R.cpu(),
        inputs.row_starts_R.cpu(),
        inputs.row_lens_R.cpu(),
        inputs.row_offsets_R.cpu(),
        q.shape[2] ** -0.5,
        window,
    )


def load(batch: ScheduledBatch, bucket: Bucket, buffer: Tensor) -> StepInputs:
    host = np.zeros(bucket.buffer_length, np.int32)
    pack(batch, bucket, host)
    buffer[: bucket.buffer_length].copy_(torch.from_numpy(host))
    return views(buffer, bucket)


@pytest.fixture
def buffer() -> Tensor:
    return torch.zeros(1 << 16, dtype=torch.int32, device="cuda")


def steps(kind: Kind) -> Iterator[tuple[Bucket, tuple[Row, ...]]]:
    """Buckets exactly full, padded by one, padded by much, empty."""
    rows = DECODE_ROWS if kind == "decode" else MIXED_ROWS
    count = len(rows) if kind == "decode" else sum(length for _, length in rows)
    for size in (count, count + 1, 2 * count):
        yield (decode_bucket(size) if kind == "decode" else extend_bucket(size)), rows
    if kind == "extend":
        yield extend_bucket(64), ((0, 64),)
        yield extend_bucket(64), DECODE_ROWS
        yield extend_bucket(32), ((9, 1), (500, 31))


HEADS = [(16, 8, 128), (8, 8, 128), (14, 2, 64), (32, 4, 64), (16, 2, 128)]
WIDE = [(16, 1, 128), (8, 4, 256), (16, 1, 256)]


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS + WIDE)
def test_triton_decode(
    heads: int, kv_heads: int, head_dim: int, window: int, buffer: Tensor
) -> None:
    check_attention("triton", "fa3", "decode", heads, kv_heads, head_dim, window, buffer)


@pytest.mark.parametrize("decode", ["fa2", "fa3"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_flashinfer_decode(
    decode: str, heads: int, kv_heads: int, head_dim: int, buffer: Tensor
) -> None:
    check_attention(decode, "fa3", "decode", heads, kv_heads, head_dim, 0, buffer)


def test_xqa_decode(buffer: Tensor) -> None:
    check_attention("xqa", "fa3", "decode", 16, 8, 128, 0, buffer)


@pytest.mark.parametrize("extend", ["fa2", "fa3"])
@pytest.mark.parametrize("decode", ["fa2", "triton"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [*HEADS[:4], WIDE[1]])
def test_extend(
    decode: str, extend: str, heads: int, kv_heads: int, head_dim: int, buffer: Tensor
) -> None:
    check_attention(decode, extend, "extend", heads, kv_heads, head_dim, 0, buffer)


@pytest.mark.parametrize("extend", ["fa2", "fa3"])
def test_extend_with_window(extend: str, buffer: Tensor) -> None:
    check_attention("triton", extend, "extend", 16, 8, 128, 40, buffer)


def test_extend_with_xqa(buffer: Tensor) -> None:
    check_attention("xqa", "fa3", "extend", 16, 8, 128, 0, buffer)


def check_attention(
    decode: str,
    extend: str,
    kind: Kind,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    buffer: Tensor,
) -> None:
    world = World.make(kv_heads, head_dim)
    cases = list(steps(kind))
    buckets = list(dict.fromkeys(bucket for bucket, _ in cases))
    shape = shape_of(heads, kv_heads, head_dim, window, world)
    planner = AttentionPlanner(shape, decode, extend, buckets, world.cache, 1 << 20)
    try:
        for bucket, rows in cases:
            batch = batch_of(kind, rows, bucket)
            inputs = load(batch, bucket, buffer)
            planner.plan(bucket, batch)
            q = torch.randn(bucket.num_tokens, heads, head_dim, device="cuda").bfloat16()
            torch.empty_like(q).fill_(float("nan"))  # what the allocator hands out next is NaN
            out = attend(q, world, inputs, window, kind)
            expected = expected_attention(q, world, inputs, window)
            assert torch.isfinite(out).all(), (bucket, rows)
            used = sum(length for _, length in rows)
            assert error(out[:used], expected[:used]) < TOLERANCE, (bucket, rows)
    finally:
        planner.close()


@pytest.mark.parametrize("kernel", ["fa2", "xqa", "triton"])
def test_replay_follows_lengths(kernel: str, buffer: Tensor) -> None:
    """One captured graph serves every length: recorded empty, replayed while rows grow, leave and
    come.
    """
    world = World.make(8, 128)
    bucket = decode_bucket(8)
    planner = AttentionPlanner(
        shape_of(16, 8, 128, 0, world), kernel, "fa3", [bucket], world.cache, 1 << 20
    )
    q = torch.randn(8, 16, 128, device="cuda").bfloat16()
    nothing = empty_batch(bucket)
    inputs = load(nothing, bucket, buffer)
    planner.plan(bucket, nothing)
    attend(q, world, inputs, 0, "decode")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, world, inputs, 0, "decode")
    for step in range(40):
        rows = tuple((start + 7 * step, 1) for start in (0, 14, 600, 1000)[: 1 + step % 4])
        batch = batch_of("decode", rows, bucket)
        planner.plan(bucket, batch)
        load(batch, bucket, buffer)
        graph.replay()
        expected = expected_attention(q, world, inputs, 0)
        assert error(out[: len(rows)], expected[: len(rows)]) < TOLERANCE, (step, rows)
    del graph
    planner.close()


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS + WIDE)
def test_decode_attention(
    heads: int, kv_heads: int, head_dim: int, normed: bool, window: int, buffer: Tensor
) -> None:
    check_decode_attention("triton", heads, kv_heads, head_dim, normed, window, buffer)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 4, 128), (16, 2, 256)])
def test_decode_attention_of_few_rows(
    heads: int, kv_heads: int, head_dim: int, rows: int, buffer: Tensor
) -> None:
    check_decode_attention("triton", heads, kv_heads, head_dim, True, 0, buffer, rows)


@pytest.mark.parametrize("kernel", ["fa2", "xqa"])
def test_decode_attention_in_two_kernels(kernel: str, buffer: Tensor) -> None:
    check_decode_attention(kernel, 16, 8, 128, True, 0, buffer)


def check_decode_attention(
    kernel: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    normed: bool,
    window: int,
    buffer: Tensor,
    size: int = 8,
) -> None:
    """The new token's key and value reach the cache, and its attention, in one operator."""
    world = World.make(kv_heads, head_dim)
    columns = world.table.shape[1]
    own = torch.randperm(PAGES - 1, device="cuda")[: 5 * (PAGES // 5 - 1)].view(5, -1) + 1
    world.table[:5, : own.shape[1]] = own.to(torch.int32)  # no page is shared: pages are written
    bucket = decode_bucket(size)
    shape = shape_of(heads, kv_heads, head_dim, window, world)
    planner = AttentionPlanner(shape, kernel, "fa3", [bucket], world.cache, 1 << 20)
    for all_starts in ((0, 1, 15, 16, 17), (63, 64, 65, 127, 128), (1200, 3, 500, 0, 1000)):
        starts = all_starts[:size]
        batch = batch_of("decode", tuple((start, 1) for start in starts), bucket)
        table = world.table.cpu().numpy()
        kv_slots = [
            table[slot, start // PAGE] * PAGE + start % PAGE
            for slot, start in zip(batch.row_slots, starts, strict=True)
        ]
        batch = replace(batch, kv_slots=np.array(kv_slots, np.int32))
        assert max(starts) < columns * PAGE
        inputs = load(batch, bucket, buffer)
        planner.plan(bucket, batch)
        qkv = torch.randn(size, (heads + 2 * kv_heads) * head_dim, device="cuda").bfloat16()
        rope = torch.randn(size, head_dim, device="cuda")
        norms = [torch.rand(head_dim, device="cuda").bfloat16() + 0.5 for _ in range(2)]
        args = [qkv, rope, *(norms if normed else (None, None)), 1e-6]
        rows = [inputs.kv_slots_T, world.table]
        rows += [getattr(inputs, f"row_{n}_R") for n in ("slots", "starts", "lens", "offsets")]
        scale = head_dim**-0.5
        cache = world.cache.float().cpu()
        out = decode_attention(*args, world.cache, *rows, scale, window, True)
        floats = [a.float().cpu() if isinstance(a, Tensor) else a for a in args]
        cpu_rows = [row.cpu() for row in rows]
        expected = decode_attention(*floats, cache, *cpu_rows, scale, window, True)
        assert torch.isfinite(out).all()
        count = len(starts)
        assert error(out[:count], expected[:count]) < TOLERANCE, starts
        assert error(world.cache, cache) < TOLERANCE, starts
        assert not world.cache[0].any(), "padding wrote to the dummy page"
    planner.close()


@pytest.mark.parametrize("rows", [1, 33])
def test_lm_head(rows: int) -> None:
    x = torch.randn(rows, 576, device="cuda").bfloat16()
    weight = torch.randn(49153, 576, device="cuda").bfloat16()
    logits = lm_head(x, weight)
    assert logits.dtype == torch.float32
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-3)


def test_kv_write() -> None:
    cache = torch.zeros(5, 2, PAGE, 4, 64, device="cuda").bfloat16()
    qkv = torch.randn(6, 16, 64, device="cuda").bfloat16()
    k, v = qkv[:, 8:12], qkv[:, 12:]
    slots = torch.tensor([16, -1, 79, 40, -1, 33], dtype=torch.int32, device="cuda")
    kv_write(k, v, cache, slots)
    expected = torch.zeros_like(cache, device="cpu")
    kv_write(k.cpu(), v.cpu(), expected, slots.cpu())
    assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("tokens", [1, 7])
def test_heads(tokens: int, heads: int, kv_heads: int, head_dim: int, normed: bool) -> None:
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device="cuda").bfloat16()
    rope = torch.randn(tokens, head_dim, device="cuda")
    norms = [torch.rand(head_dim, device="cuda").bfloat16() + 0.5 for _ in range(2)]
    q_norm, k_norm = norms if normed else (None, None)
    slots = torch.randperm(16 * 7, device="cuda")[:tokens].to(torch.int32) + 16
    slots[tokens // 2] = -1
    sizes = (heads, kv_heads, head_dim)
    cache = torch.zeros(8, 2, PAGE, kv_heads, head_dim, device="cuda").bfloat16()
    q = qk_norm_rope_kv_write(qkv, rope, q_norm, k_norm, 1e-6, *sizes, cache, slots, True)
    expected_cache = torch.zeros_like(cache, device="cpu", dtype=torch.float32)
    expected = qk_norm_rope_kv_write(
        qkv.float().cpu(),
        rope.cpu(),
        *(None if norm is None else norm.float().cpu() for norm in (q_norm, k_norm)),
        1e-6,
        *sizes,
        expected_cache,
        slots.cpu(),
        True,
    )
    assert error(q, expected) < TOLERANCE
    if tokens > 1:
        assert error(cache, expected_cache) < TOLERANCE
    assert not cache[0].any(), "padding wrote to the dummy page"


LINEAR = [(1024, 2048), (576, 1536), (72, 192), (40, 100)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("act", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_fused_linear(bias: bool, norm: bool, act: bool, residual: bool) -> None:
    for columns, inner in LINEAR:
        for rows in (1, 2, 33, 65, 168):
            x = torch.randn(rows, inner, device="cuda").bfloat16()
            w = torch.randn(columns * (1 + act), inner, device="cuda").bfloat16() / inner**0.5
            optional = (
                torch.randn(len(w), device="cuda").bfloat16() if bias else None,
                torch.rand(inner, device="cuda").bfloat16() + 0.5 if norm else None,
                torch.randn(rows, columns, device="cuda").bfloat16() if residual else None,
            )
            args = (x, w, optional[0], optional[1], 1e-6, act, optional[2])
            floats = [a.float().cpu() if isinstance(a, Tensor) else a for a in args]
            expected = fused_linear(*floats, True)
            for _ in range(2):  # the second run finds the counters as the first left them
                got = fused_linear(*args, True)
                assert error(got, expected) < TOLERANCE, (rows, columns, inner)


def normal(*shape: int) -> Tensor:
    scaled: Tensor = torch.randn(*shape, device="cuda") / shape[-1] ** 0.5
    return scaled.bfloat16()


BETWEEN = (1024, 2048, 3072, 4096)  # Qwen3-0.6B's hidden, attended, ffn, columns of qkv


@pytest.mark.parametrize("rows", [2, 33, 48, 64, 65, 104, 128, 129, 168, 192, 193, 255, 256])
def test_between_attentions(rows: int) -> None:
    """A layer in the middle and the last one; every run has the same bits, and neither what another
    launch left in memory nor what lies behind attention's result, up to whole tiles, makes a
    difference.
    """
    hidden, attended, ffn, columns = BETWEEN
    o, x = (32 * normal(rows, n) for n in (attended, hidden))
    others = [32 * normal(rows, n) for n in (attended, hidden)]
    if torch.cuda.get_device_capability() == (9, 0):
        assert not between.prepare(o.device) and between._one_kernel(o.device)
        # A multiple of every group's programs, so that the launches below pass the sign.
        between._counters(o.device).fill_(2**31 - 128 * 50)
    norms = [torch.rand(hidden, device="cuda").bfloat16() + 0.5 for _ in range(2)]
    before = [normal(hidden, attended), None, norms[0], normal(2 * ffn, hidden), None]
    before += [normal(hidden, ffn), None]
    for after in ([norms[1], normal(columns, hidden), None], [None, None, None]):
        args = [o, x, *before, *after, 1e-6]
        floats = [a.double().cpu() if isinstance(a, Tensor) else a for a in args]
        expected = between_attentions(*floats, True)
        first: list[Tensor] = []
        roomy = torch.full((256, attended), torch.nan, device="cuda").bfloat16()[:rows]
        roomy.copy_(o)
        for repeat in range(200):
            between_attentions(*others, *args[2:], True)
            got = between_attentions(roomy if repeat % 2 else o, *args[1:], True)
            if not repeat:
                first = list(got)
                assert error(got[0], expected[0]) < TOLERANCE, rows
                assert got[1].shape == expected[1].shape
                assert not got[1].numel() or error(got[1], expected[1]) < TOLERANCE, rows
            assert all(map(torch.equal, got, first)), (rows, repeat)


@pytest.mark.parametrize("rows", [64, 104, 192, 256])
def test_layers_in_a_graph(rows: int) -> None:
    """Each begins while the one before ends: the same bits as one by one."""
    hidden, attended, ffn, columns = BETWEEN
    between.prepare(torch.device("cuda"))
    norm = torch.ones(hidden, device="cuda").bfloat16()
    o_and_norm = [(normal(hidden, attended), None, norm) for _ in range(4)]
    layers = [
        (*first, normal(2 * ffn, hidden), None, normal(hidden, ffn), None)
        + (norm, normal(columns, hidden), None)
        for first in o_and_norm
    ]
    o, x = normal(rows, attended), normal(rows, hidden)

    def run(wait: bool) -> Tensor:
        y, attend = x, o
        for p in layers:
            y, qkv = between_attentions(attend, y, *p, 1e-6, True)
            attend = qkv[:, :attended].contiguous()
            if wait:
                torch.cuda.synchronize()
        return torch.cat([y, attend], 1)

    run(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(False)
    for _ in range(50):
        o.copy_(normal(rows, attended))
        x.copy_(normal(rows, hidden))
        graph.replay()
        assert torch.equal(got, run(True))
