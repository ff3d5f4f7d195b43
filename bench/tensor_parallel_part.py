"""One part of bench.tensor_parallel, as a process of its own; see there."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.decode_step import time_bucket
from bench.offline import counted, fit, timed
from bench.report import save
from bench.server_process import free_port
from bench.startup import _first_text, _request, _wait_until_healthy, watched_counters
from bench.workloads import mini_sglang, uniform
from engine.config import load_config
from engine.llm import LLM
from engine.startup import start_engine
from tests.e2e.harness import greedy_requests, run
from tests.e2e.tiny_models import VOCAB, hf_config, save_model

KV_LENGTH = 1024
BATCHES = (1, 64)
STREAMS = 32
LARGE = [
    "model.path=configs/hf/qwen3-14b",
    "model.max_model_len=4096",
    "compile.decode_buckets=[1,64,128,256]",
    "compile.extend_buckets=[2048]",
    "scheduler.max_step_tokens=2048",
    "scheduler.max_running=256",
]
SMALL = ["model.path=configs/hf/qwen3-0.6b", "model.max_model_len=4096"]
SMALL += ["model.tokenizer=configs/hf/tiny-llama", "compile.decode_buckets=[1,8,64]"]
SMALL += ["compile.extend_buckets=[64,2048]", "scheduler.max_step_tokens=2048"]
SMALL += ["scheduler.max_running=64"]
COMMON = ["model.load=random", "model.dtype=bfloat16", "device=cuda", "log.progress=none"]
COMMON += ["compile.cudagraphs=manual"]
CONFIG = "configs/qwen3_0_6b.yaml"
NUM_TOKENS = 24
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def settings(shape: Sequence[str], tp: int, all_reduce: str, cache: str) -> list[str]:
    """`key.path=value` texts of an engine."""
    parallel = [f"parallel.tp={tp}", f"parallel.all_reduce={all_reduce}", "parallel.timeout_s=100"]
    return [*shape, *COMMON, *parallel, f"compile.cache_dir={cache}"]


def moe_config() -> Any:
    """A small Qwen3-MoE with heads that kernels take."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "initializer_range": 0.1,
        "max_position_embeddings": 512,
    }
    return transformers.Qwen3MoeConfig(**sizes)


def parity(model: str, tp: int, ways: Sequence[str]) -> dict[str, Any]:
    """Greedy tokens of one rank and of several; each token's distance from the best one.

    The distance is in logits, of the same weights in float32 by HF transformers given the tokens
    before; it is 0 where both choose the same. Weights are bfloat16, so that a rank's rounding may
    turn a near tie: the largest distance is shown beside the logits' standard deviation.
    """
    config = moe_config() if model == "moe" else hf_config("qwen3", head_dim=128, layers=3)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 5, 16, 33, 70, 100, 40, 9)]
    rows, answers = [], {}
    with tempfile.TemporaryDirectory() as folder:
        reference = save_model(Path(folder), config, dtype=torch.bfloat16).float().cuda()
        for size, way in [(1, "alone"), *((tp, way) for way in ways)]:
            if size == 1 and way != "alone":  # a process group of one, as under torchrun
                os.environ.update(ONE_RANK, MASTER_PORT=str(free_port()))
            changes = [f"model.path={folder}", "model.load=auto", "kv.num_pages=600"]
            changes += ["compile.decode_buckets=[1,8]", "compile.extend_buckets=[256]"]
            changes += [
                "compile.workers=0",
                "scheduler.max_running=8",
                "scheduler.max_step_tokens=256",
            ]
            changes += [f"compile.cudagraphs={'trees' if way == 'trees' else 'manual'}"]
            how = "symmetric" if way == "symmetric" else "nccl"
            shape = settings([], size, how, str(Path(folder) / "cache"))
            begin = time.perf_counter()
            loaded = load_config(Path(CONFIG), [*shape, *changes])
            engine = start_engine(loaded, lambda *_: None)
            started = time.perf_counter() - begin
            try:
                outputs = run(engine, greedy_requests(prompts, NUM_TOKENS), waves=2)
                counters = engine.worker.counters
            finally:
                engine.close()
            ids = [outputs[i] for i in range(len(prompts))]
            answers[size, way] = ids
            first = next(iter(answers.values()))
            rows.append(
                {
                    "ranks": size,
                    "way": way,
                    **judge(reference, prompts, ids),
                    "same as one rank": sum(a == b for a, b in zip(ids, first, strict=True)),
                    "prompts": len(prompts),
                    "eager": counters.eager_steps,
                    "recompiles": counters.recompiles,
                    "skips": counters.cudagraph_skips,
                    "start_s": started,
                }
            )
    return {"rows": rows}


@torch.no_grad()
def judge(model: Any, prompts: Sequence[list[int]], ids: Sequence[list[int]]) -> dict[str, Any]:
    """How far each token is from the best, in logits."""
    tokens = equal = 0
    worst = spread = 0.0
    for prompt, answer in zip(prompts, ids, strict=True):
        logits = model(torch.tensor([prompt + answer]).cuda()).logits[0].float()
        spread = logits.std().item()
        for place, token in enumerate(answer, len(prompt) - 1):
            gap = (logits[place].max() - logits[place, token]).item()
            tokens, equal, worst = tokens + 1, equal + (gap == 0), max(worst, gap)
    return {"tokens": tokens, "as HF": equal, "worst gap": worst, "std": spread}


def fill(shape: Sequence[str], tp: int, all_reduce: str, cache: str) -> dict[str, Any]:
    """Compile what later parts load; few pages, for others run beside."""
    few = ["kv.num_pages=300", "compile.workers=4"]
    config = load_config(Path(CONFIG), [*settings(shape, tp, all_reduce, cache), *few])
    begin = time.perf_counter()
    engine = start_engine(config, lambda *_: None)
    seconds = time.perf_counter() - begin
    engine.close()
    return {"rows": [{"ranks": tp, "all_reduce": all_reduce, "start_s": seconds}]}


def decode(tp: int, all_reduce: str, cache: str, workload: bool) -> dict[str, Any]:
    """Milliseconds of a step at KV_LENGTH, on the device and on rank 0's host, and end to end."""
    begin = time.perf_counter()
    with LLM(CONFIG, settings(LARGE, tp, all_reduce, cache)) as llm:
        head = {"ranks": tp, "all_reduce": all_reduce}
        started = time.perf_counter() - begin
        rows, num_ids = [], llm.engine.model.vocab_size
        for batch in BATCHES:
            row = time_bucket(llm.engine, batch, KV_LENGTH)
            timed(llm, fit(uniform(batch, 960, 4, 10 * batch), num_ids), 0.0)
            short = timed(llm, fit(uniform(batch, 960, 1, 10 * batch + 1), num_ids), 0.0)
            long = timed(llm, fit(uniform(batch, 960, 65, 10 * batch + 2), num_ids), 0.0)
            rows.append({**head, **row, "step_ms": 1e3 * (long - short) / 64, "start_s": started})
        result: dict[str, Any] = {"rows": rows, "pages": llm.engine.num_pages}
        counters = llm.engine.worker.counters
        result["counters"] = [
            {
                "eager": counters.eager_steps,
                "recompiles": counters.recompiles,
                "skips": counters.cudagraph_skips,
            }
        ]
        if workload:
            result["workload"] = [counted(llm, functools.partial(_workload, llm, num_ids))]
    return result


def _workload(llm: LLM, num_ids: int) -> dict[str, Any]:
    jobs = fit(mini_sglang(0), num_ids)
    seconds = timed(llm, jobs, 0.6)
    return {"seconds": seconds, "output_per_s": sum(job.num_output for job in jobs) / seconds}


@contextlib.contextmanager
def server(overrides: Sequence[str], log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`fullgraph serve` and its URL, once it is healthy."""
    port = free_port()
    words = [word for text in (*overrides, f"server.port={port}") for word in ("--set", text)]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine", "serve", CONFIG, *words], stdout=out, stderr=out
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, log)
        yield url, process
    finally:
        process.kill()
        process.wait()


def serve(tp: int, all_reduce: str, cache: str, folder: Path) -> dict[str, Any]:
    """Two warm starts to the first token; with several ranks one is killed under load."""
    result: dict[str, Any] = {"rows": []}
    for attempt in range(2):
        begin = time.perf_counter()
        log = folder / f"serve_{tp}_{attempt}_server.log"
        with server(settings(SMALL, tp, all_reduce, cache), log) as (url, process):
            ready = time.perf_counter() - begin
            _first_text(url, "Hello")
            first = time.perf_counter() - begin
            result["rows"].append({"ranks": tp, "ready_s": ready, "first_token_s": first})
            result["counters"] = [watched_counters(url)]
            if tp > 1 and attempt == 1:
                result["death"] = [death(url, process)]
    return result


def death(url: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Kill -9 a rank while streams are open; seconds until all have ended, and what is left."""
    ends: list[tuple[float, str]] = []

    def stream() -> None:
        body = {"prompt": "x", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        text = ""
        try:
            with _request(url, "/v1/completions", body, timeout_s=60) as response:
                text = response.read().decode(errors="replace")
        except Exception as error:
            text = repr(error)
        ends.append((time.perf_counter(), text))

    threads = [threading.Thread(target=stream) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    ranks = [pid for pid in descendants(process.pid) if "engine.rank_process" in command_of(pid)]
    everybody = descendants(process.pid)
    killed = time.perf_counter()
    os.kill(ranks[0], signal.SIGKILL)
    for thread in threads:
        thread.join(30)
    status = process.wait(30)
    over = time.perf_counter()
    time.sleep(1)
    return {
        "streams": len(ends),
        "with an error": sum("was killed by SIGKILL" in text for _, text in ends),
        "last ended after s": max(when for when, _ in ends) - killed,
        "status": status,
        "server ended after s": over - killed,
        "left": sum(bool(command_of(pid)) for pid in everybody),
    }


def descendants(pid: int) -> list[int]:
    """Children, and theirs."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *descendants(child)]
    return found


def command_of(pid: int) -> str:
    """Its command line; empty once it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    return ""


def main() -> None:
    """Run a part and save its result under its name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("parity", "fill", "decode", "serve"))
    parser.add_argument("words", nargs="+")
    parser.add_argument("--workload", action="store_true")
    parser.add_argument("--results", type=Path, required=True)
    args = parser.parse_args()
    words = args.words
    if args.what == "parity":
        name = "parity_trees" if words[2:] == ["trees"] else f"parity_{words[0]}"
        part: Callable[[], Any] = functools.partial(parity, words[0], int(words[1]), words[2:])
    elif args.what == "fill":
        name = f"fill_{words[0]}_{words[1]}_{words[2]}"
        shape = LARGE if words[0] == "large" else SMALL
        part = functools.partial(fill, shape, int(words[1]), *words[2:])
    elif args.what == "decode":
        name = f"decode_{words[0]}" + ("_symmetric" if words[1] == "symmetric" else "")
        part = functools.partial(decode, int(words[0]), words[1], words[2], args.workload)
    else:
        name = f"serve_{words[0]}"
        part = functools.partial(serve, int(words[0]), words[1], words[2], args.results)
    save(name, part(), args.results)


if __name__ == "__main__":
    main()
