"""A mixture of experts on a GPU, in the shape of Qwen3-30B-A3B's layers: the kernels one by one,
and all of it against torch's grouped products and, if its module was built ahead, FlashInfer's
fused MoE, which is given the choice: no router, norm or residual sum is in its time.

    python -m bench.moe [--tokens 1 8 64 256 4096] [--results FOLDER]

Microseconds under graph replay, layers in rotation so that no weight is in the L2 cache. What was
best goes into models/ops/experts_table.py by hand. moe_engine.py times the whole engine.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu_timing import BANDWIDTH, FLOPS, replay_us
from bench.report import RESULTS, save
from models.ops import experts_triton, route_triton
from models.ops.experts import grouped_experts, mixture, top_experts
from models.ops.experts_table import Choice, Tiles, choose_experts, choose_one, num_tiles

LAYERS = 4


class Shape(NamedTuple):
    """Of Qwen3-30B-A3B's mixtures."""

    hidden: int = 2048
    ffn: int = 768
    experts: int = 128
    top_k: int = 8


SHAPE = Shape()


class Layer(NamedTuple):
    """Random bfloat16 weights of a mixture."""

    norm: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def draw(cls, s: Shape) -> Layer:
        normal = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        return cls(
            normal(s.hidden) * 0.1 + 1,
            normal(s.experts, s.hidden) * 0.02,
            normal(s.experts, 2 * s.ffn, s.hidden).mul_(0.02),
            normal(s.experts, s.hidden, s.ffn).mul_(0.02),
        )


def floor_us(s: Shape, num_tokens: int, touched: int) -> dict[str, float]:
    """Microseconds of the touched experts' bytes, and of the FLOPs, up and down apart."""
    up, down = 4 * s.ffn * s.hidden, 2 * s.ffn * s.hidden
    pairs = num_tokens * s.top_k
    return {
        name: max(touched * size / BANDWIDTH, pairs * size / FLOPS) * 1e6
        for name, size in (("up", up), ("down", down), ("all", up + down))
    }


_TALL = ((64, 128, 4, 4), (64, 128, 3, 4), (64, 64, 6, 4), (128, 128, 3, 8))
_WIDE = ((128, 64, 4, 8), (128, 64, 3, 8), (128, 64, 3, 4), (64, 64, 4, 4), (64, 64, 5, 8))
_WIDE_DOWN = ((256, 64, 4, 8), (256, 64, 3, 8))


def candidates(num_tokens: int, up: bool) -> Iterator[tuple[int, bool, Tiles]]:
    """(block_m, tall, launch) of one product worth timing."""
    average = num_tokens * SHAPE.top_k / SHAPE.experts
    for block_m in (16, 32, 64):
        if block_m / 4 <= average <= 2 * block_m or block_m == 16 and average < 4:
            for tile in _TALL:
                yield block_m, True, Tiles(*tile)
    for block_m in (64, 128):
        if average >= block_m / 4:
            for tile in _WIDE if up else (*_WIDE, *_WIDE_DOWN):
                yield block_m, False, Tiles(*tile)


def one_candidates() -> Iterator[tuple[Tiles, Tiles]]:
    """Launches of the kernels of one token."""
    ups = ((1, 2048, 1), (1, 2048, 2), (1, 2048, 4), (2, 2048, 4), (4, 1024, 4), (4, 512, 4))
    downs = ((4, 256, 4, 18), (4, 256, 4, 12), (4, 256, 4, 0), (2, 256, 2, 18), (8, 256, 8, 12),
             (1, 256, 1, 12))  # fmt: skip
    best_up, best_down = choose_one(SHAPE.top_k, SHAPE.ffn)
    for n, k, warps in ups:
        yield Tiles(n, k, 1, warps), best_down
    for n, k, warps, held in downs:
        yield best_up, Tiles(n, k, held, warps)


class Run(NamedTuple):
    """Tokens in front of every layer, already routed for tiles of `block_m`."""

    x: Tensor
    slots: Tensor
    layers: list[Layer]
    mid: Tensor
    out: Tensor

    @classmethod
    def make(cls, num_tokens: int, layers: list[Layer]) -> Run:
        normal = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        pairs = num_tokens * SHAPE.top_k
        slots = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
        x = normal(num_tokens, SHAPE.hidden)
        return cls(x, slots, layers, normal(pairs, SHAPE.ffn), normal(pairs, SHAPE.hidden))

    def route(self, block_m: int, layer: Layer) -> route_triton.Routing:
        count = len(self.x)
        tiles = num_tiles(count, SHAPE.top_k, SHAPE.experts, block_m)
        return route_triton.route(
            self.x, layer.router, self.slots, SHAPE.top_k, True, block_m, tiles, True
        )

    def choice(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Weights and experts as the operator chooses them. With logits rounded to bfloat16, as in
        `in_torch`, 3 % of the tokens get another eighth expert: an error of 6e-2.
        """
        return top_experts(self.x.float() @ layer.router.float().t(), SHAPE.top_k, True)

    def touched(self) -> float:
        """Experts that a layer's tokens go to, on average."""
        sizes = [len(self.choice(layer)[1].unique()) for layer in self.layers]
        return sum(sizes) / len(sizes)


def in_torch(run: Run, layer: Layer) -> Tensor:
    """Router in torch's kernels, experts in its grouped products."""
    logits = torch.nn.functional.linear(run.x, layer.router)
    weights, experts = top_experts(logits, SHAPE.top_k, True)
    y: Tensor = grouped_experts(run.x, weights, experts, run.slots, layer.gate_up, layer.down)
    return y


def in_ours(residual: bool, run: Run, layer: Layer) -> Tensor:
    """The whole operator, as an extend step (without) and a decode step (with residual) call it."""
    norm, added = (layer.norm, run.x) if residual else (None, None)
    experts = (layer.gate_up, layer.down, SHAPE.top_k, True)
    y: Tensor = mixture(run.x, norm, 1e-6, layer.router, run.slots, *experts, added, True)
    return y


def flashinfer_runner() -> Any:
    """FlashInfer's fused MoE in bfloat16, or None: to build its module is hours of one core."""
    try:
        spec = importlib.import_module(
            "flashinfer.jit.fused_moe"
        ).gen_cutlass_fused_moe_sm90_module()
    except ImportError:
        return None
    if not spec.is_compiled:
        return None
    module = importlib.import_module("tvm_ffi").load_module(str(spec.get_library_path()))
    return module.init(*[torch.bfloat16] * 3, False, False, False, False)


def time_flashinfer(run: Run) -> tuple[float, Tensor] | None:
    """Microseconds of its best pair of launches, found one product after the other, and layer 0's
    output. Not by its autotuner: the module misreads its numbers of the second product's launches.
    """
    runner = flashinfer_runner()
    if runner is None:
        return None
    y = torch.empty_like(run.x)
    up_gates = [torch.cat(layer.gate_up.chunk(2, 1)[::-1], 1) for layer in run.layers]
    choices = [run.choice(layer) for layer in run.layers]
    trios = list(zip(run.layers, up_gates, choices, strict=True))

    def calls(first: int, second: int) -> list[Callable[[], object]]:
        tail = (None, [], *[None] * 4, True, *[1, 0] * 3, False, False, [first, second], True, 3)
        return [
            functools.partial(runner.run_moe, y, run.x, e.int(), w, up, None, layer.down, *tail)
            for layer, up, (w, e) in trios
        ]

    def us(first: int, second: int) -> float:
        try:
            return replay_us(calls(first, second), 3)
        except Exception:  # a launch that does not fit
            return float("inf")

    first = min(range(runner.get_gemm1_tactic_count()), key=lambda number: us(number, 0))
    second = min(range(runner.get_gemm2_tactic_count()), key=lambda number: us(first, number))
    best = calls(first, second)
    whole = replay_us(best, 10)
    best[0]()
    return whole, y


def route_one(run: Run, layer: Layer) -> tuple[Tensor, Tensor]:
    return route_triton.route_one(run.x, layer.norm, 1e-6, layer.router, SHAPE.top_k, True, True)


def one_call(run: Run, tiles: tuple[Tiles, Tiles], layer: Layer) -> Tensor:
    x, chosen = route_one(run, layer)
    y = torch.empty_like(x)
    experts = (layer.gate_up, layer.down)
    experts_triton.one_token(x, chosen, run.slots, *experts, x, y, True, tiles)
    return y


def time_products(run: Run) -> dict[str, Any]:
    """Every candidate of both products; the best pair of launches by block_m."""
    times: dict[str, list[tuple[float, tuple[Any, ...]]]] = {"up": [], "down": []}
    for up in (True, False):
        expected: Tensor | None = None
        routings: dict[int, list[route_triton.Routing]] = {}
        for block_m, tall, tiles in candidates(len(run.x), up):
            if block_m not in routings:
                routings[block_m] = [run.route(block_m, layer) for layer in run.layers]
            choice = Choice(block_m, tall, tiles, tiles)
            calls = [
                functools.partial(
                    experts_triton.product,
                    run.x if up else run.mid,
                    layer.gate_up if up else layer.down,
                    routing,
                    run.mid if up else run.out,
                    up,
                    choice,
                    tiles,
                    True,
                )
                for layer, routing in zip(run.layers, routings[block_m], strict=True)
            ]
            try:
                calls[0]()
                got = (run.mid if up else run.out).float()
                expected = got if expected is None else expected
                assert float((got - expected).norm()) < 1e-2 * float(expected.norm()), "wrong"
                us = replay_us(calls, 5 if len(run.x) > 1000 else 10)
            except Exception as failure:
                print("failed:", block_m, tall, tiles, str(failure)[:150], flush=True)
                continue
            times["up" if up else "down"].append((us, (block_m, tall, *tiles)))
    for rows in times.values():
        rows.sort()
    return times


def time_tokens(num_tokens: int, layers: list[Layer], top: int) -> dict[str, Any]:
    """All ways to compute the mixture of so many tokens; without `top` only torch and the operator
    as it is.
    """
    run = Run.make(num_tokens, layers)
    touched = run.touched()
    floor = floor_us(SHAPE, num_tokens, round(touched))
    experts = (run.slots, layers[0].gate_up, layers[0].down)
    expected = grouped_experts(run.x, *run.choice(layers[0]), *experts)
    error = _error(in_ours(False, run, layers[0]), expected)
    whole: dict[str, float] = {}
    ways: tuple[tuple[str, Callable[..., Tensor]], ...] = (
        ("torch", in_torch),
        ("ours", functools.partial(in_ours, num_tokens <= 256)),
    )
    for name, way in ways:
        whole[name] = replay_us([functools.partial(way, run, layer) for layer in layers], 10)
    theirs = time_flashinfer(run)
    if theirs is not None:
        whole["flashinfer"] = theirs[0]
        print(f"FlashInfer {theirs[0]:.1f}, error {_error(theirs[1], expected):.1e}")
    print(
        f"T={num_tokens:<5} touched {touched:5.1f}  floor {floor['all']:7.1f} (up {floor['up']:.1f}"
        f" down {floor['down']:.1f})  torch {whole['torch']:8.1f}  ours {whole['ours']:8.1f}"
        f"  error {error:.1e}",
        flush=True,
    )
    result = {"tokens": num_tokens, "touched": touched, "floor_us": floor, "whole_us": whole}
    if not top:
        return result
    if num_tokens == 1:
        times: Any = []
        for tiles in one_candidates():
            calls = [functools.partial(one_call, run, tiles, layer) for layer in layers]
            times.append((replay_us(calls * 4, 10), tuple(map(tuple, tiles))))
        times.sort()
        routes = [functools.partial(route_one, run, layer) for layer in layers]
        print("   route alone", round(replay_us(routes * 4, 10), 2))
        _print_best("one", times, top)
        return {**result, "one_us": times}
    block_m = choose_experts(num_tokens, SHAPE.top_k, SHAPE.experts).block_m
    route = replay_us([functools.partial(run.route, block_m, layer) for layer in layers], 10)
    print(f"   route {route:.1f}")
    products = time_products(run)
    for name, rows in products.items():
        for block in sorted({row[1][0] for row in rows}):
            _print_best(f"{name} BM={block}", [row for row in rows if row[1][0] == block], top)
    return {**result, "route_us": route, "products_us": products}


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def _print_best(name: str, rows: Sequence[tuple[float, Any]], top: int) -> None:
    print(f"   {name:11}", "  ".join(f"{us:.1f} {what[1:]}" for us, what in rows[:top]), flush=True)


def _compile_one(tiles: tuple[Tiles, Tiles]) -> str | None:
    """In a worker process: compile the launches for one token, which is padding."""
    wide = functools.partial(torch.zeros, dtype=torch.bfloat16, device="cuda")
    x, chosen = wide(1, SHAPE.hidden), torch.zeros(2, SHAPE.top_k, device="cuda")
    slots = torch.full((1,), -1, dtype=torch.int32, device="cuda")
    experts = wide(1, 2 * SHAPE.ffn, SHAPE.hidden), wide(1, SHAPE.hidden, SHAPE.ffn)
    experts_triton.one_token(x, chosen, slots, *experts, x, torch.empty_like(x), True, tiles)
    torch.cuda.synchronize()
    return None


def _compile(job: tuple[int, bool, bool, int, Tiles]) -> str | None:
    """In a worker process: compile one launch, for the cache on disk. No tile has an expert."""
    block_m, tall, up, num_tokens, tiles = job
    pairs = num_tokens * SHAPE.top_k
    try:
        wide = functools.partial(torch.zeros, dtype=torch.bfloat16, device="cuda")
        ints = functools.partial(torch.zeros, dtype=torch.int32, device="cuda")
        routing = route_triton.Routing(
            torch.zeros(num_tokens, SHAPE.top_k), ints(pairs), ints(4, 4) - 1
        )
        x, y = wide(pairs, SHAPE.hidden), wide(pairs, SHAPE.ffn)
        w = wide(2, 2 * SHAPE.ffn, SHAPE.hidden) if up else wide(2, SHAPE.hidden, SHAPE.ffn)
        choice = Choice(block_m, tall, tiles, tiles)
        x, y = (x[:num_tokens], y) if up else (y, x)
        experts_triton.product(x, w, routing, y, up, choice, tiles, True)
        torch.cuda.synchronize()
    except Exception as error:  # a candidate that does not fit is reported, not fatal
        return f"{job}: {error}"[:200]
    return None


def compile_all(token_counts: Sequence[int], workers: int) -> None:
    """Compile the candidates on all cores."""
    jobs = {
        (block_m, tall, up, 16, tiles)
        for count in token_counts
        if count > 1
        for up in (True, False)
        for block_m, tall, tiles in candidates(count, up)
    }
    workers = max(1, min(workers, (os.cpu_count() or 2) - 1))
    print(f"{len(jobs)} candidates, {workers} workers", flush=True)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        one = pool.map_async(_compile_one, one_candidates() if 1 in token_counts else (), 1)
        for failure in pool.imap_unordered(_compile, sorted(jobs), chunksize=2):
            if failure:
                print("failed:", failure, flush=True)
        one.get()


def kernels(args: argparse.Namespace) -> None:
    """Time each number of tokens; the file is whole after each."""
    if args.top and not args.skip_compile:
        compile_all(args.tokens, args.workers)
    if args.compile_only:
        return
    torch.manual_seed(0)
    layers = [Layer.draw(SHAPE) for _ in range(LAYERS)]
    rows: list[dict[str, Any]] = []
    for count in args.tokens:
        rows.append(time_tokens(count, layers, args.top))
        save(args.name, {"shape": SHAPE._asdict(), "kernels": rows}, args.results)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(prog="bench.moe", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 256, 4096])
    parser.add_argument("--top", type=int, default=5, help="candidates printed; 0: none is timed")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--compile-only", action="store_true", help="fill the cache on disk")
    parser.add_argument("--skip-compile", action="store_true", help="it is filled")
    parser.add_argument("--name", default="moe_kernels", help="of the JSON file")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("bench.moe needs a GPU")
    kernels(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
