"""The whole engine on a mixture of experts, on one GPU: a decode step against its bytes, an extend
step against its FLOPs.

    python -m bench.moe_engine [CONFIG] [--set KEY.PATH=VALUE] [--batch 1 64] [--kv 1024]

Random weights in the shape of Qwen3-30B-A3B unless told otherwise. Decode: real prompts fill the
cache, then steps of a full batch are timed; the floor counts the experts that such a step was seen
to touch. Extend: a prompt of so many tokens as one chunk.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.gpu_timing import BANDWIDTH, FLOPS
from bench.report import ROOT, add_config, command_line, percentile, save, table
from engine.config import load_config
from engine.request import EngineRequest
from engine.startup import Engine, start_engine
from models import moe
from models.config import ModelConfig
from models.forward import make_backbone
from models.inputs import TensorParallel

STEPS, REPEATS = 32, 5


def attention_elements(model: ModelConfig) -> int:
    """Elements of a layer's qkv and o."""
    heads = 2 * (model.num_heads + model.num_kv_heads)
    return heads * model.head_dim * model.hidden_size


def decode_floor_ms(model: ModelConfig, batch: int, kv_len: int, touched: float) -> float:
    """Milliseconds of a decode step's bytes in bfloat16: weights of attention, router and touched
    experts (`touched` a layer), KV and LM head.
    """
    expert = 3 * model.expert_ffn_size * model.hidden_size
    layer = attention_elements(model) + model.num_experts * model.hidden_size + touched * expert
    cache = batch * kv_len * 2 * model.num_kv_heads * model.head_dim
    elements = model.num_layers * (layer + cache) + model.vocab_size * model.hidden_size
    return 2e3 * elements / BANDWIDTH


def extend_flops(model: ModelConfig, num_tokens: int) -> tuple[float, float]:
    """Active FLOPs of one chunk with nothing before it: of its matrices, and of attention."""
    expert = 3 * model.expert_ffn_size * model.hidden_size
    layer = attention_elements(model) + model.num_experts * model.hidden_size
    layer += model.num_experts_per_token * expert
    matrices = 2.0 * num_tokens * layer * model.num_layers
    attended = num_tokens * (num_tokens + 1) / 2
    attention = 4.0 * attended * model.num_heads * model.head_dim * model.num_layers
    return matrices + 2.0 * model.vocab_size * model.hidden_size, attention


def requests(
    engine: Engine, count: int, length: int, num_output: int, first: int
) -> list[EngineRequest]:
    """Greedy requests of random prompts that share no prefix and never stop early."""
    rng = random.Random(first)
    return [
        EngineRequest(
            request_id=first + i,
            prompt_ids=[rng.randrange(engine.model.vocab_size) for _ in range(length)],
            max_tokens=num_output,
        )
        for i in range(count)
    ]


def time_decode(engine: Engine, batch: int, kv_len: int) -> dict[str, Any]:
    """Milliseconds of a step of `batch` rows whose caches pass `kv_len` tokens half-way."""
    core = engine.core
    work = requests(engine, batch, kv_len - STEPS, 3 * STEPS + batch, 1000 * batch)
    assert not core.add(work)
    waiting = {request.request_id for request in work}
    while waiting:
        output, failed = core.step()
        assert not failed, failed
        waiting -= set(output.request_ids) if output is not None else set()
    times = []
    for step in range(2 * STEPS):
        begin = time.perf_counter()
        output, _ = core.step()
        assert output is not None and len(output.request_ids) == batch
        if step >= STEPS // 2 and step < 3 * STEPS // 2:
            times.append(1e3 * (time.perf_counter() - begin))
        if step == STEPS:
            mean = touched_experts(engine, batch)
    core.abort([request.request_id for request in work])
    while core.has_work:
        core.step()
    floor = decode_floor_ms(engine.model, batch, kv_len, mean)
    step_ms = percentile(times, 50)
    return {
        "batch": batch,
        "kv": kv_len,
        "touched": mean,
        "step_ms": step_ms,
        "mean_ms": sum(times) / len(times),
        "floor_ms": floor,
        "times_floor": step_ms / floor,
    }


@torch.no_grad()
def touched_experts(engine: Engine, batch: int) -> float:
    """Experts a layer that the step launched last goes to, on average: it is run again in torch."""
    runner, counts = engine.worker._runner, []
    bucket = next(b for b in runner._buckets["decode"] if b.num_tokens >= batch)
    tensors, route = runner._tensors, moe.route
    torch.cuda.synchronize()

    def watched(*args: Any) -> tuple[Tensor, Tensor]:
        weights, experts = route(*args)
        counts.append(len(experts[:batch].unique()))
        return weights, experts

    with mock.patch.object(moe, "route", watched):
        backbone = make_backbone(engine.model, TensorParallel(), "decode")
        state = tensors.state._replace(page_table_SP=tensors.state.page_table_SP.clone())
        backbone(tensors.params, tensors.kv_cache, state, runner._inputs[0][bucket])
    torch.cuda.synchronize()
    return sum(counts) / len(counts)


def time_extend(engine: Engine, num_tokens: int) -> dict[str, Any]:
    """Milliseconds of a prompt of `num_tokens` tokens in one step, and its part of FLOPS."""
    core, times = engine.core, []
    before = core.stats().steps_extend
    for repeat in range(REPEATS):
        work = requests(engine, 1, num_tokens, 1, 10**6 + repeat)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        assert not core.add(work)
        while core.has_work:
            core.step()
        times.append(1e3 * (time.perf_counter() - begin))
    assert core.stats().steps_extend == before + REPEATS, "not one chunk"
    matrices, attention = extend_flops(engine.model, num_tokens)
    milliseconds = percentile(times, 50)
    return {
        "tokens": num_tokens,
        "ms": milliseconds,
        "ms_min": min(times),
        "tflop": (matrices + attention) / 1e12,
        "percent_of_790": 1e5 * (matrices + attention) / FLOPS / milliseconds,
        "percent_without_attention": 1e5 * matrices / FLOPS / milliseconds,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the engine and time both."""
    buckets = ",".join(str(batch) for batch in args.batch)
    shape = ROOT / "configs" / "hf" / "qwen3-30b-a3b"
    sets = [
        f"model.path={shape}", "model.load=random", "model.dtype=bfloat16",
        "model.max_model_len=8192", "kv.num_pages=12000", "kv.prefix_cache=false",
        f"compile.decode_buckets=[{buckets}]", f"compile.extend_buckets=[{args.extend}]",
        f"scheduler.max_running={max(args.batch)}", f"scheduler.max_step_tokens={args.extend}",
        f"scheduler.step_budget={4 * args.extend}",
        *args.overrides,
    ]  # fmt: skip
    begin = time.perf_counter()
    engine = start_engine(load_config(args.config, sets), lambda *_: None)
    result: dict[str, Any] = {
        "start_s": time.perf_counter() - begin,
        "phases_s": engine.worker.capacity.phases,
        "settings": engine.settings,
    }
    print({**result}, flush=True)
    try:
        result["extend"] = time_extend(engine, args.extend)
        print(table([result["extend"]]), flush=True)
        save(args.name, result, args.results)
        result["decode"] = []
        for batch in args.batch:
            result["decode"].append(time_decode(engine, batch, args.kv))
            print(table(result["decode"]), flush=True)
            save(args.name, result, args.results)
        stats = engine.core.stats()
        result["eager_steps"], result["recompiles"] = stats.eager_steps, stats.recompiles
    finally:
        engine.close()
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = command_line("moe_engine", __doc__, "moe_engine")
    add_config(parser, nargs="?", default=ROOT / "configs" / "qwen3_0_6b.yaml")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--kv", type=int, default=1024, help="tokens in each row's cache")
    parser.add_argument("--extend", type=int, default=4096, help="tokens of the extend step")
    args = parser.parse_args(argv)
    print(save(args.name, measure(args), args.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
