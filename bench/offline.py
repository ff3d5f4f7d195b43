"""Throughput and step time of the engine in this process, and on a CPU against HF transformers.

    python -m bench.offline CONFIG [--set KEY.PATH=VALUE] [--workload] [--steps] [--cpu-hf]

--workload: Mini-SGLang's own offline workload (256 prompts of 100 to 1024 tokens, as many out).
--steps: milliseconds a decode step at batch 1 and 64, 128 tokens in and 256 out.
--cpu-hf: batch 1, and 8 at once against HF one after the other, interleaved in one run (peers.py).
Without any of them: the first two. Prints tables; writes bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.peers import compare
from bench.report import add_config, command_line, percentile, save, table
from bench.workloads import Job, mini_sglang, uniform
from engine.cli import USER_MISTAKE
from engine.config import load_config
from engine.errors import ConfigError, FullgraphError
from engine.llm import LLM
from engine.request import SamplingParams

BATCHES = (1, 64)
STEP_INPUT, STEP_OUTPUT = 128, 256
REPEATS = 3
COUNTERS = ("steps_decode", "steps_extend", "eager_steps", "recompiles", "preemptions")


def fit(jobs: Sequence[Job], num_ids: int) -> list[Job]:
    """The same jobs with every id below the vocabulary's size."""
    return [Job([i % num_ids for i in job.prompt_ids], job.num_output) for job in jobs]


def params_for(jobs: Sequence[Job], temperature: float) -> list[SamplingParams]:
    """Exactly `num_output` tokens each."""
    return [
        SamplingParams(max_tokens=job.num_output, temperature=temperature, ignore_eos=True)
        for job in jobs
    ]


def timed(llm: LLM, jobs: Sequence[Job], temperature: float) -> float:
    """Seconds to run all the jobs at once."""
    begin = time.perf_counter()
    outputs = llm.generate(
        [job.prompt_ids for job in jobs], params_for(jobs, temperature), progress=False
    )
    seconds = time.perf_counter() - begin
    generated = sum(len(output.token_ids) for output in outputs)
    assert generated == sum(job.num_output for job in jobs), "tokens are missing"
    return seconds


def counters(llm: LLM) -> dict[str, int]:
    """What the engine counts, and how often the GPU's allocator was asked for memory."""
    stats = msgspec.structs.asdict(llm.engine.core.stats())
    result = {key: int(stats[key]) for key in COUNTERS}
    if torch.cuda.is_available():
        result["allocations"] = torch.cuda.memory_stats()["allocation.all.allocated"]
    return result


def counted(llm: LLM, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A run's result and how far each counter went in it."""
    before = counters(llm)
    result = run()
    after = counters(llm)
    return {**result, **{key: after[key] - before[key] for key in after}}


def workload(llm: LLM, num_ids: int) -> dict[str, Any]:
    """Mini-SGLang's offline benchmark, after a whole pass with another seed: the median of three.

    A pass has the lengths of the one before and other ids, of which the prefix cache has none.
    """
    timed(llm, fit(mini_sglang(7), num_ids), 0.6)
    jobs = mini_sglang(0)
    num_input = sum(len(job.prompt_ids) for job in jobs)
    num_output = sum(job.num_output for job in jobs)

    def run() -> dict[str, Any]:
        seconds = []
        for n in range(REPEATS):
            others = [Job([i + n for i in job.prompt_ids], job.num_output) for job in jobs]
            seconds.append(timed(llm, fit(others, num_ids), 0.6))
        middle = percentile(seconds, 50)
        return {
            "input": num_input,
            "output": num_output,
            "seconds": middle,
            "seconds_min": min(seconds),
            "seconds_max": max(seconds),
            "output_per_s": num_output / middle,
        }

    return counted(llm, run)


def step_times(llm: LLM, num_ids: int, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Milliseconds a decode step, by batch: a long run less a run of one token, over the steps."""
    rows = []
    for batch in batches:

        def run(batch: int = batch) -> dict[str, Any]:
            step_ms, first_ms = [], []
            for repeat in range(REPEATS):
                # Other prompts each time: a hit in the prefix cache would shorten the first step.
                seed = 1000 * batch + 2 * repeat
                long = fit(uniform(batch, STEP_INPUT, STEP_OUTPUT, seed), num_ids)
                short = fit(uniform(batch, STEP_INPUT, 1, seed + 1), num_ids)
                first = timed(llm, short, 0.0)
                step_ms.append(1e3 * (timed(llm, long, 0.0) - first) / (STEP_OUTPUT - 1))
                first_ms.append(1e3 * first)
            step = percentile(step_ms, 50)
            return {
                "batch": batch,
                "first_token_ms": percentile(first_ms, 50),
                "step_ms": step,
                "step_ms_min": min(step_ms),
                "tokens_per_s": 1e3 * batch / step,
            }

        timed(llm, fit(uniform(batch, STEP_INPUT, 16, 1000 * batch + 999), num_ids), 0.0)
        rows.append(counted(llm, run))
    return rows


def check_room(llm: LLM, needed: int) -> None:
    """Raises ConfigError if no request of so many tokens, in and out together, can run."""
    model, pages = llm.engine.config.model, llm.engine.num_pages
    kv_tokens = pages * llm.engine.config.kv.page_size
    for key, tokens in (("model.max_model_len", model.max_model_len), ("kv", kv_tokens)):
        if tokens < needed:
            raise ConfigError(
                f"{key}: room for {tokens} tokens, needed: {needed}, of the longest request"
            )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything but the comparison, in one engine."""
    config = load_config(args.config, args.overrides)
    begin = time.perf_counter()
    llm = LLM(config)
    result: dict[str, Any] = {"start_s": time.perf_counter() - begin}
    try:
        num_ids = llm.engine.model.vocab_size
        resolved = llm.engine.config
        longest = [STEP_INPUT + STEP_OUTPUT] if args.steps else []
        if args.workload:
            longest += [
                len(job.prompt_ids) + job.num_output for job in mini_sglang(7) + mini_sglang(0)
            ]
        check_room(llm, max(longest))
        if args.workload:
            result["workload"] = workload(llm, num_ids)
            print(f"\nMini-SGLang's offline workload\n{table([result['workload']])}", flush=True)
        if args.steps:
            batches = [b for b in BATCHES if b <= resolved.scheduler.max_running]
            result["steps"] = step_times(llm, num_ids, batches)
            print(
                f"\nDecode, {STEP_INPUT} in, {STEP_OUTPUT} out\n{table(result['steps'])}",
                flush=True,
            )
        # Where a model or a cache lies is this machine's affair.
        hidden: Any = {"server": True, "compile": {"cache_dir"}}
        settings = resolved.model_dump(mode="json", exclude=hidden)
        settings["model"]["path"] = Path(resolved.model.path).name
        result["config"] = settings
        result["kv_pages"] = llm.engine.num_pages
    finally:
        llm.close()
    return result


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_line("offline", __doc__, "offline")
    add_config(parser)
    parser.add_argument("--workload", action="store_true", help="Mini-SGLang's offline workload")
    parser.add_argument("--steps", action="store_true", help="decode step at batch 1 and 64")
    parser.add_argument("--cpu-hf", action="store_true", help="against HF transformers on a CPU")
    parser.add_argument("--tokens", type=int, default=32, help="generated by --cpu-hf")
    parser.add_argument("--rounds", type=int, default=3, help="of --cpu-hf; the median counts")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    args = build_parser().parse_args(argv)
    if not (args.workload or args.steps or args.cpu_hf):
        args.workload = args.steps = True
    try:
        return run(args)
    except FullgraphError as error:
        print(f"bench.offline: {error}", file=sys.stderr)
        return USER_MISTAKE


def run(args: argparse.Namespace) -> int:
    """Run what the command line names; the exit status."""
    result: dict[str, Any] = {}
    if args.cpu_hf:
        result["cpu_hf"] = compare(args.config, args.overrides, args.tokens, args.rounds)
        print(f"\nAgainst HF transformers\n{table(result['cpu_hf']['rows'])}", flush=True)
    if args.workload or args.steps:
        result |= measure(args)
    print(f"\n{save(args.name, result, args.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
