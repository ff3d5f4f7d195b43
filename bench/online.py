"""Load on a server that speaks OpenAI's completions API: latencies, throughput, goodput.

    python -m bench.online CONFIG [--set KEY.PATH=VALUE]          starts a server of ours
    python -m bench.online --url http://127.0.0.1:8000 --model M  any server (vLLM, SGLang, ...)

Requests arrive all at once, at a Poisson rate, or as a trace says. Prints a table; writes
bench/results/NAME.json and, with matplotlib, NAME.png.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.report import add_config, command_line, save, summary, table
from bench.server_process import first_model, running_server
from bench.sse_client import Answer, complete
from bench.workloads import NUM_IDS, Job, mini_sglang, poisson, read_trace, spread


@dataclass(frozen=True)
class Limits:
    """What a good answer keeps to: seconds to the first token, seconds a token after it."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Target:
    """A server: base URL, model name, headers, how long one request may take; and at what
    temperature it is to sample.
    """

    url: str
    model: str
    headers: dict[str, str]
    limit_s: float
    temperature: float = 0.0


async def drive(
    target: Target, jobs: Sequence[Job], concurrency: int, begin: float | None = None
) -> list[Answer]:
    """Send each job when it is due, at most `concurrency` at a time; answers in order.

    Args:
        begin: time.perf_counter() at which the jobs' clock starts; default: now.
    """
    slots = asyncio.Semaphore(concurrency)
    begin = time.perf_counter() if begin is None else begin

    async def one(job: Job) -> Answer:
        await asyncio.sleep(max(0.0, begin + job.arrival_s - time.perf_counter()))
        async with slots:
            body = _body(target, job)
            return await complete(
                f"{target.url}/v1/completions", body, target.headers, target.limit_s
            )

    return list(await asyncio.gather(*(one(job) for job in jobs)))


def drive_all(target: Target, jobs: Sequence[Job], concurrency: int, clients: int) -> list[Answer]:
    """The same with several processes: one of Python's cannot read what a fast server sends."""
    if clients == 1:
        return asyncio.run(drive(target, jobs, concurrency))
    share = max(1, concurrency // clients)
    with multiprocessing.get_context("spawn").Pool(clients) as pool:
        pool.map(time.sleep, [0.2] * clients, 1)  # all of them are up
        begin = time.perf_counter()  # the same clock in all processes of a machine
        parts = pool.starmap(
            _drive, [(target, jobs[i::clients], share, begin) for i in range(clients)], 1
        )
    answers = [Answer()] * len(jobs)
    for i, part in enumerate(parts):
        answers[i::clients] = part
    return answers


def _drive(target: Target, jobs: Sequence[Job], concurrency: int, begin: float) -> list[Answer]:
    return asyncio.run(drive(target, jobs, concurrency, begin))


def _body(target: Target, job: Job) -> dict[str, Any]:
    return {
        "model": target.model,
        "prompt": job.prompt_ids,
        "max_tokens": job.num_output,
        "temperature": target.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def tpot(answer: Answer) -> float:
    """Seconds a token after the first; 0 for an answer of one token."""
    if answer.num_output < 2:
        return 0.0
    return (answer.arrivals[-1] - answer.arrivals[0]) / (answer.num_output - 1)


def measures(jobs: Sequence[Job], answers: Sequence[Answer], limits: Limits) -> dict[str, Any]:
    """Everything that is reported of one run.

    Latencies are in milliseconds and of the answers without an error; rates are per second from the
    first request sent to the last token received.
    """
    pairs = [(job, a) for job, a in zip(jobs, answers, strict=True) if not a.error and a.arrivals]
    good = [a for _, a in pairs]
    if not good:
        first_error = next((a.error for a in answers if a.error), "no tokens")
        raise SystemExit(f"every request failed: {first_error}")
    seconds = max(a.arrivals[-1] for a in good) - min(a.sent for a in good)
    kept = [a for a in good if _keeps(a, limits)]
    gaps = [1e3 * (y - x) for a in good for x, y in zip(a.arrivals, a.arrivals[1:], strict=False)]
    num_input = sum(len(job.prompt_ids) for job, _ in pairs)
    num_output = sum(a.num_output for a in good)
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "seconds": seconds,
        "input_tokens": num_input,
        "cached_tokens": sum(a.num_cached for a in good),
        "output_tokens": num_output,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_input + num_output) / seconds,
        "limits": asdict(limits),
        "good_requests_per_s": len(kept) / seconds,
        "good_share": len(kept) / len(answers),
        "ttft_ms": summary([1e3 * (a.arrivals[0] - a.sent) for a in good]),
        "gap_ms": summary(gaps),
        "tpot_ms": summary([1e3 * tpot(a) for a in good if a.num_output > 1]),
        "end_to_end_ms": summary([1e3 * (a.arrivals[-1] - a.sent) for a in good]),
        "errors": sorted({a.error for a in answers if a.error})[:5],
    }


def _keeps(answer: Answer, limits: Limits) -> bool:
    ttft = answer.arrivals[0] - answer.sent
    return ttft <= limits.ttft_s and tpot(answer) <= limits.tpot_s


def show(result: dict[str, Any]) -> str:
    """The result as two tables."""
    rates = {
        key: result[key]
        for key in ("requests", "failed", "seconds", "requests_per_s", "output_tokens_per_s")
    }
    rates |= {"good_requests_per_s": result["good_requests_per_s"]}
    names = {"ttft_ms": "first token", "gap_ms": "between events", "tpot_ms": "a token after it"}
    names |= {"end_to_end_ms": "end to end"}
    latencies = [{"ms": name, **result[key]} for key, name in names.items()]
    return f"{table([rates])}\n\n{table(latencies)}"


def plot(answers: Sequence[Answer], path: Path) -> bool:
    """Cumulative shares of TTFT and gaps as a picture; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    good = [a for a in answers if not a.error and a.arrivals]
    gaps = [1e3 * (y - x) for a in good for x, y in zip(a.arrivals, a.arrivals[1:], strict=False)]
    series = {"time to first token": [1e3 * (a.arrivals[0] - a.sent) for a in good]}
    series["between events"] = gaps
    figure = Figure(figsize=(8, 4), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(1, 2), series.items(), strict=True):
        ordered = sorted(values)
        axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
        axes.set(xlabel=f"{name} (ms)", ylabel="share of them", ylim=(0, 1))
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """The workload that the command line asks for."""
    if args.trace is not None:
        return read_trace(
            args.trace,
            limit=args.requests,
            speed=args.speed,
            block_size=args.block_size,
            num_ids=args.num_ids,
            longest=args.longest,
        )
    if args.mini_sglang:
        jobs = mini_sglang(args.seed, args.requests)
    else:
        jobs = spread(args.requests, args.input, args.output, args.seed, args.num_ids)
    return poisson(jobs, args.rate, args.seed) if args.rate else jobs


def run(url: str, args: argparse.Namespace) -> None:
    """Warm up, measure, print and save."""
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    model = args.model or first_model(url, headers)
    target = Target(url, model, headers, args.timeout, args.temperature)
    jobs = make_jobs(args)
    # Other prompts than the measured ones, lest the prefix cache answer for the engine.
    warm = spread(args.warmup, args.input, (8, 8), seed=random.Random("warm").getrandbits(32))
    warm = [Job([i % args.num_ids for i in job.prompt_ids], job.num_output) for job in warm]
    drive_all(target, warm, args.concurrency, 1)
    answers = drive_all(target, jobs, args.concurrency, args.clients)
    result = measures(jobs, answers, Limits(args.ttft, args.tpot))
    print(show(result))
    hidden = ("api_key", "results", "name")
    settings = {key: str(value) for key, value in vars(args).items() if key not in hidden}
    path = save(args.name, {"model": target.model, "settings": settings, **result}, args.results)
    plotted = plot(answers, path.with_suffix(".png"))
    print(f"\n{path}{' and .png' if plotted else ''}")


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_line("online", __doc__, "online")
    add_config(parser, nargs="?", help="start a server with this file")
    add = parser.add_argument
    add("--url", help="measure the server there instead")
    add("--model", help="default: the server's first")
    add("--api-key")
    add("--requests", type=int, default=256, help="how many (of a trace: its first lines)")
    add("--input", type=_bounds, default=(100, 1024), help="prompt tokens: N or LOW-HIGH")
    add("--output", type=_bounds, default=(100, 1024), help="generated tokens: N or LOW-HIGH")
    add("--mini-sglang", action="store_true", help="its offline benchmark's sizes instead")
    add("--temperature", type=float, default=0.0)
    add("--num-ids", type=int, default=NUM_IDS, help="draw ids below this")
    add("--rate", type=float, help="requests a second (Poisson); default: all at once")
    add("--concurrency", type=int, default=1024, help="most requests open at a time")
    add("--clients", type=int, default=1, help="client processes")
    add("--seed", type=int, default=0)
    add("--warmup", type=int, default=8, help="requests before the measured ones")
    add("--trace", type=Path, help="JSON lines: timestamp, input_length, output_length, hash_ids")
    add("--speed", type=float, default=1.0, help="replay a trace so many times as fast")
    add("--block-size", type=int, default=16, help="tokens a hash id of a trace stands for")
    add("--longest", type=int, help="leave out a trace's requests of more tokens")
    add("--ttft", type=float, default=1.0, help="goodput: seconds to the first token")
    add("--tpot", type=float, default=0.05, help="goodput: seconds a token after it")
    add("--timeout", type=float, default=600.0, help="seconds one request may take")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if (args.config is None) == (args.url is None):
        parser.error("give either a CONFIG or --url")
    if args.url is not None:
        run(args.url.rstrip("/"), args)
        return 0
    with running_server(str(args.config), args.overrides) as url:
        run(url, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
