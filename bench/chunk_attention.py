"""Attention of a chunk of a long prompt, beside decode rows, with each of FlashInfer's kernels.

    python -m bench.chunk_attention [--tokens 64 512 8192] [--contexts 0 8192 32768]

A step of so many tokens, `--decode-rows` of them decode rows, the rest a chunk that starts at the
context: microseconds of the chunk's call in one layer under graph replay, and of its plan on the
host. Pages are scattered; two layers' caches alternate. Writes results/NAME.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu_timing import replay_us
from bench.report import command_line, save, table
from engine.attention_plan import AttentionPlanner
from engine.flashinfer_plan import AttentionShape
from engine.step_inputs import Bucket, empty_batch
from models.ops import attention_cuda

PAGE, ROWS = 16, 256


def step_rows(chunk: int, context: int, decode_rows: int) -> tuple[np.ndarray[Any, Any], ...]:
    """Slots, starts, lengths and offsets of the rows, int32: the decode rows, then the chunk."""
    lens = np.ones(decode_rows + 1, np.int32)
    lens[-1] = chunk
    starts = np.full(decode_rows + 1, 512, np.int32)
    starts[-1] = context
    slots = np.arange(decode_rows + 1, dtype=np.int32)
    return slots, starts, lens, np.arange(decode_rows + 1, dtype=np.int32)


class Case:
    """A step of `tokens` tokens whose chunk starts at `context`."""

    def __init__(self, tokens: int, context: int, args: argparse.Namespace) -> None:
        decode_rows = args.decode_rows if tokens > args.decode_rows else 0
        self.tokens, self.context, self.chunk = tokens, context, tokens - decode_rows
        self.bucket = bucket_of(tokens)
        self.host = step_rows(self.chunk, context, decode_rows)
        self.batch = dataclasses.replace(
            empty_batch(self.bucket), row_starts=self.host[1], row_lens=self.host[2]
        )
        normal = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        self.query = normal(tokens, args.heads[0], args.heads[2])

    def rows(self, pages: Tensor) -> attention_cuda.Rows:
        """On the device, padded."""
        padding = max(0, min(ROWS, self.tokens) - len(self.host[0]))
        padded = (np.pad(array, (0, padding)) for array in self.host)
        return attention_cuda.Rows(pages, *(torch.from_numpy(array).cuda() for array in padded))


def bucket_of(tokens: int) -> Bucket:
    return Bucket("extend", tokens, ROWS, ROWS, ROWS, ROWS)


def time_case(
    planner: AttentionPlanner, case: Case, caches: Sequence[Tensor], pages: Tensor
) -> tuple[float, float, Tensor]:
    """Microseconds of the chunk's call and of its plan, and the chunk's attention."""
    runner: Any = attention_cuda.runner("extend", case.tokens, 0)
    planner.plan(case.bucket, case.batch)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    planner.plan(case.bucket, case.batch)
    plan_us = 1e6 * (time.perf_counter() - begin)
    runner.chunks.prepare(case.rows(pages))
    out = torch.empty_like(case.query)
    scale = case.query.shape[2] ** -0.5
    calls = [functools.partial(runner.chunks.run, case.query, c, scale, out) for c in caches]
    calls[0]()
    result = out[-case.chunk :].float()
    return replay_us(calls, 5), plan_us, result


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each step and context, with columns of each kernel."""
    heads, kv_heads, dim = args.heads
    columns = -(-(max(args.contexts) + max(args.tokens)) // PAGE)
    pages = torch.zeros(ROWS + 1, columns, dtype=torch.int32, device="cuda")
    pages[:] = (torch.randperm(columns, device="cuda") + 1).to(torch.int32)
    size = (columns + 1, 2, PAGE, kv_heads, dim)
    caches = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    shape = AttentionShape(heads, kv_heads, dim, PAGE, columns, torch.bfloat16, (0,))
    cases = [Case(n, context, args) for n in args.tokens for context in args.contexts]
    rows: list[dict[str, Any]] = [
        {"tokens": c.tokens, "chunk": c.chunk, "context": c.context} for c in cases
    ]
    first: list[Tensor] = []
    buckets = [bucket_of(tokens) for tokens in args.tokens]
    for kernel in args.kernels:
        planner = AttentionPlanner(shape, "triton", kernel, buckets, caches[0], 1 << 20)
        for i, (case, row) in enumerate(zip(cases, rows, strict=True)):
            us, plan_us, result = time_case(planner, case, caches, pages)
            first += [result] if i == len(first) else []
            error = float((result - first[i]).norm() / first[i].norm())
            assert error < 2e-2, f"{kernel} differs by {error}: {row}"
            flops = 4 * heads * dim * case.chunk * (case.context + case.chunk / 2)
            row |= {f"{kernel}_us": us, f"{kernel}_plan_us": plan_us}
            row |= {f"{kernel}_tflops": flops / us / 1e6}
            print(kernel, case.tokens, case.context, round(us), round(plan_us), flush=True)
        planner.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = command_line("chunk_attention", __doc__, "chunk_attention")
    add = parser.add_argument
    sizes = [64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
    add("--tokens", type=int, nargs="+", default=sizes, help="of the step")
    contexts = [0, 1024, 4096, 8192, 16384, 24576, 32768]
    add("--contexts", type=int, nargs="+", default=contexts)
    add("--decode-rows", type=int, default=64)
    add("--kernels", nargs="+", default=["fa3", "fa2"])
    add("--heads", type=int, nargs=3, default=[16, 8, 128], help="query heads, kv heads, their dim")
    args = parser.parse_args(argv)
    rows = measure(args)
    print(table(rows))
    print(f"\n{save(args.name, {'heads': args.heads, 'rows': rows}, args.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
