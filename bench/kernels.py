"""Times the kernels of a decode step one by one on a GPU: every candidate launch of the matrices,
every attention.

    python -m bench.kernels linear [--rows 1 8 64] [--model qwen3-0.6b] [--json table.json]
    python -m bench.kernels attention [--batch 1 8 64] [--kv 256 1024]

Each number is microseconds of one call under graph replay. Operands rotate through more memory than
the L2 cache holds, as they do in a model. What was measured best goes into
models/ops/linear_table.py by hand.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.gpu_timing import BANDWIDTH, replay_us
from engine.attention_plan import AttentionPlanner
from engine.flashinfer_plan import AttentionShape
from engine.scheduler.batch import ScheduledBatch
from engine.step_inputs import Bucket, empty_batch
from models.ops import attention_cuda, decode_triton, fused_triton, linear_triton
from models.ops.linear_table import Choice, choose_linear

_ROTATE_BYTES = 240 << 20


class Matrix(NamedTuple):
    """y[M, N] = x[M, K] @ w.T of a layer; with act w has 2 N rows."""

    name: str
    columns: int
    inner: int
    norm: bool = False
    act: bool = False
    residual: bool = False


MODELS = {
    "qwen3-0.6b": (
        Matrix("qkv", 4096, 1024, norm=True),
        Matrix("o", 1024, 2048, residual=True),
        Matrix("gate_up", 3072, 1024, norm=True, act=True),
        Matrix("down", 1024, 3072, residual=True),
    ),
    "qwen3-14b": (
        Matrix("qkv", 7168, 5120, norm=True),
        Matrix("o", 5120, 5120, residual=True),
        Matrix("gate_up", 17408, 5120, norm=True, act=True),
        Matrix("down", 5120, 17408, residual=True),
    ),
    "llama-3-8b": (
        Matrix("qkv", 6144, 4096, norm=True),
        Matrix("o", 4096, 4096, residual=True),
        Matrix("gate_up", 14336, 4096, norm=True, act=True),
        Matrix("down", 4096, 14336, residual=True),
    ),
}


def operands(m: Matrix, rows: int, copies: int) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """x, weights in rotation, norm weight, residual: random bfloat16."""
    normal = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    x = normal(rows, m.inner)
    height = m.columns * (2 if m.act else 1)
    weights = [normal(height, m.inner) * 0.03 for _ in range(copies)]
    return x, weights, normal(m.inner) * 0.1 + 1, normal(rows, m.columns)


def candidates(m: Matrix, rows: int) -> Iterator[Choice | None]:
    """Launches worth timing; None is cuBLAS."""
    yield None
    if rows == 1:
        for block_n, block_k, warps in itertools.product(
            (1, 2, 4, 8, 16), (512, 1024, 2048, 4096), (4, 8)
        ):
            elements = block_n * block_k * (2 if m.act else 1)
            large = m.inner >= 4096 and not (block_n > 1 and block_k <= 2048 and warps == 4)
            if 2048 <= elements <= 16384 and block_k <= 2 * m.inner and not large:
                yield Choice(block_n, block_k, warps=warps)
        return
    if rows > 64:
        return
    tiles = (
        (16, 256, 4, 4), (32, 128, 4, 4), (32, 256, 3, 4), (64, 64, 5, 4),
        (64, 128, 4, 4), (64, 128, 4, 8), (128, 64, 4, 4),
    )  # fmt: skip
    for (block_n, block_k, stages, warps), split in itertools.product(tiles, (1, 2, 4, 8)):
        programs = -(-m.columns // (block_n // 2 if m.act else block_n)) * split
        shared = stages * block_k * 2 * (block_n + max(16, rows))
        cut = m.inner % (split * block_k) == 0 and m.inner // split >= 2 * block_k
        if cut and 48 <= programs <= 400 and shared <= 200 << 10:
            for fuse_norm in (0, 2) if m.norm else (1,):
                yield Choice(block_n, block_k, split, stages, warps, fuse_norm)


def linear_call(
    m: Matrix, choice: Choice | None, x: Tensor, w: Tensor, norm: Tensor, residual: Tensor, ws: Any
) -> Tensor:
    """What `fused_linear` does, with a given choice."""
    y = torch.empty_like(residual)
    fused = choice is not None and choice.fuse_norm > 0
    if m.norm and not fused:
        normed = torch.empty_like(x)
        fused_triton.rms_norm(x, norm, 1e-6, normed, True)
        x = normed
    if choice is None:
        if m.residual:
            return torch.addmm(residual, x, w.t())
        out = torch.nn.functional.linear(x, w)
        if m.act:
            fused_triton.silu_mul(out, y, True)
        return y if m.act else out
    linear_triton.run(
        x,
        w,
        None,
        norm if m.norm and fused else None,
        1e-6,
        m.act,
        residual if m.residual else None,
        y,
        choice,
        ws,
        True,
    )
    return y


def _compile(job: tuple[Matrix, int, Choice]) -> str | None:
    """In a worker process: compile and run once, for the cache on disk."""
    m, rows, choice = job
    try:
        x, (w,), norm, residual = operands(m, rows, 1)
        linear_call(m, choice, x, w, norm, residual, linear_triton.Workspace.of(x.device))
        torch.cuda.synchronize()
    except Exception as error:  # a candidate that does not fit is reported, not fatal
        return f"{m.name} {rows} {choice}: {error}"[:300]
    return None


def compile_all(jobs: Sequence[tuple[Matrix, int, Choice]], workers: int) -> None:
    """Compile the candidates on all cores."""
    workers = max(1, min(workers, (os.cpu_count() or 2) - 1, len(jobs)))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for failure in pool.imap_unordered(_compile, jobs, chunksize=2):
            if failure:
                print("failed:", failure, flush=True)


def time_linear(m: Matrix, rows: int, top: int) -> dict[str, Any]:
    """Time every candidate of one matrix; print the best and cuBLAS."""
    weight_bytes = 2 * m.columns * (2 if m.act else 1) * m.inner
    copies = max(2, min(28, -(-_ROTATE_BYTES // weight_bytes)))
    x, weights, norm, residual = operands(m, rows, copies)
    ws = linear_triton.Workspace.of(x.device)
    expected = linear_call(m, None, x, weights[0], norm, residual, ws).float()
    rows_out = []
    for choice in candidates(m, rows):
        try:
            y = linear_call(m, choice, x, weights[0], norm, residual, ws).float()
            error = float((y - expected).norm() / expected.norm())
            calls = [
                lambda w=w, c=choice: linear_call(m, c, x, w, norm, residual, ws) for w in weights
            ]
            rows_out.append((replay_us(calls * max(1, 28 // copies)), error, choice))
        except Exception as failure:
            print("failed:", m.name, rows, choice, str(failure)[:200], flush=True)
    rows_out.sort(key=lambda row: row[0])
    bad = [row for row in rows_out if not row[1] < 2e-2]
    assert not bad, f"{m}: wrong results {bad}"
    cublas = next(row[0] for row in rows_out if row[2] is None)
    now = choose_linear(rows, m.columns, m.inner, m.act)
    default = next((row[0] for row in rows_out if row[2] == now), float("nan"))
    best = "  ".join(f"{us:.2f} {tuple(choice or ('cublas',))}" for us, _, choice in rows_out[:top])
    floor = weight_bytes / BANDWIDTH * 1e6
    times = f"floor {floor:6.2f}  cuBLAS {cublas:6.2f}  chosen {default:6.2f}"
    print(f"{m.name:8} M={rows:<3} {times}  best: {best}", flush=True)
    return {
        "matrix": m._asdict(),
        "rows": rows,
        "cublas_us": cublas,
        "chosen_us": default,
        "candidates": [(us, error, c and list(c)) for us, error, c in rows_out],
    }


def linear(args: argparse.Namespace) -> list[dict[str, Any]]:
    matrices = MODELS[args.model]
    jobs = [
        (m, rows, choice)
        for m in matrices
        for rows in args.rows
        for choice in candidates(m, rows)
        if choice is not None
    ]
    print(f"{len(jobs)} candidates", flush=True)
    if not args.timing_only:
        compile_all(jobs, args.workers)
    if args.compile_only:
        return []
    return [time_linear(m, rows, args.top) for m in matrices for rows in args.rows]


class Case(NamedTuple):
    """A decode batch of equal rows with caches of several layers."""

    batch: ScheduledBatch
    bucket: Bucket
    shape: AttentionShape
    rows: attention_cuda.Rows
    caches: list[Tensor]
    q_THD: Tensor


def make_case(batch: int, kv_len: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    """`batch` rows of `kv_len` tokens, pages scattered; layers enough to leave the caches."""
    page = 16
    pages = -(-kv_len // page)
    layer_bytes = batch * kv_len * kv_heads * head_dim * 4
    layers = max(4, min(64, -(-_ROTATE_BYTES // layer_bytes)))
    total = batch * pages + 1
    size = (total, 2, page, kv_heads, head_dim)
    caches = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    table = torch.zeros(batch + 1, pages + 8, dtype=torch.int32, device="cuda")
    order = torch.randperm(total - 1, device="cuda").to(torch.int32) + 1
    table[:batch, :pages] = order.view(batch, pages)
    starts = np.full(batch, kv_len - 1, np.int32)
    ones = np.ones(batch, np.int32)
    bucket = Bucket("decode", batch, batch, batch, batch, batch)
    scheduled = empty_batch(bucket)
    scheduled = ScheduledBatch(
        **{
            **{name: getattr(scheduled, name) for name in scheduled.__dataclass_fields__},
            "row_starts": starts,
            "row_lens": ones,
            "num_decode_rows": batch,
        }
    )
    arange = torch.arange(batch, dtype=torch.int32, device="cuda")
    rows = attention_cuda.Rows(
        table, arange, torch.from_numpy(starts).cuda(), torch.from_numpy(ones).cuda(), arange
    )
    shape = AttentionShape(heads, kv_heads, head_dim, page, table.shape[1], torch.bfloat16, (0,))
    q = torch.randn(batch, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    return Case(scheduled, bucket, shape, rows, caches, q)


def attention_variants(
    case: Case,
) -> Iterator[tuple[str, decode_triton.DecodeShape | None, int]]:
    """(kernel, launch of Triton's kernel, multiple of the multiprocessors that XQA plans for)."""
    yield "fa2", None, 1
    yield "fa3", None, 1
    for multiple in (1, 2, 4, 8):
        yield "xqa", None, multiple
    kv_heads, group = case.shape.num_kv_heads, case.shape.group
    most = decode_triton.decode_shape(len(case.batch.row_lens), kv_heads, group).extra
    tiles = ((16, 3, 1), (16, 4, 1), (16, 5, 1), (16, 3, 2), (32, 3, 1), (64, 2, 4))
    for extra in (most // 4, most // 2, most):
        for min_chunk, tile in itertools.product((32, 64, 128), tiles):
            yield "triton", decode_triton.DecodeShape(extra, min_chunk, *tile), 1


def time_attention(case: Case, top: int, kernels: Sequence[str], compile_only: bool) -> None:
    kv_len = int(case.batch.row_starts[0]) + 1
    floor = case.caches[0].nbytes / BANDWIDTH * 1e6
    results: list[tuple[float, str]] = []
    reference: Tensor | None = None
    for kernel, launch, multiple in attention_variants(case):
        if kernel not in kernels:
            continue
        label = (
            f"{kernel}{'' if multiple == 1 else f'x{multiple}'}{tuple(launch) if launch else ''}"
        )
        try:
            planner = AttentionPlanner(
                case.shape, kernel, "fa3", [case.bucket], case.caches[0], 128 << 20
            )
            runner: Any = attention_cuda.runner("decode", case.bucket.num_tokens, 0)
            if launch is not None:
                runner.cut(launch)
            if kernel == "xqa":
                runner.num_programs *= multiple
            planner.plan(case.bucket, case.batch)
            runner.prepare(case.rows)
            out = torch.empty_like(case.q_THD)
            scale = case.shape.head_dim**-0.5
            calls = [
                functools.partial(runner.run, case.q_THD, cache, case.rows, scale, out)
                for cache in case.caches
            ]
            calls[0]()
            reference = out.clone() if reference is None else reference
            error = float((out - reference).float().norm() / reference.float().norm())
            microseconds = 0.0 if compile_only else replay_us(calls)
            results.append((microseconds, f"{label} err {error:.0e}"))
        except Exception as failure:
            print("failed:", label, str(failure)[:300], flush=True)
    results.sort()
    named = {name: next((r for r in results if r[1].startswith(name)), None) for name in kernels}
    print(
        f"b={len(case.batch.row_lens):<3} kv={kv_len:<5} floor {floor:7.2f}  "
        + "  ".join(f"{n} {r[0]:.2f}" for n, r in named.items() if r)
        + "  | "
        + "  ".join(f"{us:.2f} {label}" for us, label in results[:top]),
        flush=True,
    )


def attention(args: argparse.Namespace) -> None:
    heads, kv_heads, head_dim = args.heads
    for batch in args.batch:
        for kv_len in args.kv:
            if batch * kv_len <= args.most_tokens:
                time_attention(
                    make_case(batch, kv_len, heads, kv_heads, head_dim),
                    args.top,
                    args.kernels,
                    args.compile_only,
                )
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("linear", "attention"))
    parser.add_argument("--model", choices=tuple(MODELS), default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--kv", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--heads", type=int, nargs=3, default=[16, 8, 128])
    parser.add_argument("--kernels", nargs="+", default=["fa2", "fa3", "xqa", "triton"])
    parser.add_argument("--most-tokens", type=int, default=64 * 4096)
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile-only", action="store_true", help="fill the caches on disk")
    parser.add_argument("--timing-only", action="store_true", help="they are filled")
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.kernels needs a GPU")
    if args.what == "attention":
        attention(args)
        return
    result = linear(args)
    if args.json:
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
