"""One part of bench.tensor_parallel, as a process of its own; see there."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.decode_step import time_bucket
from bench.offline import counted, fit, timed
from bench.report import save
from bench.server_process import ask, first_text, free_port, wait_until_healthy
from bench.startup import watched_counters
from bench.workloads import mini_sglang, uniform
from engine.config import load_config
from engine.llm import LLM
from engine.startup import STARTUP_JSON, start_engine
from tests.e2e.harness import greedy_requests, run
from tests.e2e.tiny_models import VOCAB, hf_config, save_model

KV_LENGTH = 1024
BATCHES = (1, 64)
STREAMS = 32
SHAPE = [
    "model.path=configs/hf/qwen3-14b",
    "model.tokenizer=configs/hf/tiny-llama",
    "model.max_model_len=4096",
    "compile.decode_buckets=[1,64,128,256]",
    "compile.extend_buckets=[2048]",
    "scheduler.max_step_tokens=2048",
    "scheduler.max_running=256",
    "kv.num_pages=20000",
]
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
        "moe_intermediate_size": 256,
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


def parity(model: str, tp: int, way: str) -> Iterator[dict[str, Any]]:
    """Greedy tokens of a small random model, and each token's distance from the best one.

    The distance is in logits, of the same weights in float32 by HF transformers given the tokens
    before; it is 0 where both choose the same. Weights are bfloat16, so that a rank's rounding may
    turn a near tie: beside it are the logits' standard deviation and what HF does in bfloat16.

    Args:
        way: alone (one rank, whatever `tp`), nccl, symmetric, trees, trees-nccl or torchrun.
    """
    sizes = {"head_dim": 128, "layers": 3, "hidden_size": 256, "intermediate_size": 512}
    config = moe_config() if model == "moe" else hf_config("qwen3", **sizes)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 5, 16, 33, 70, 100, 40, 9)]
    size = 1 if way == "alone" else tp
    with tempfile.TemporaryDirectory() as folder:
        rounded = save_model(Path(folder), config, dtype=torch.bfloat16).cuda()
        begin = time.perf_counter()
        with launched(size == 1 and way != "alone", way == "torchrun"):
            ids, faults = _greedy(folder, size, way, prompts)
        seconds = time.perf_counter() - begin
        judged = judge(copy.deepcopy(rounded).float(), rounded, prompts, ids)
        row = {"model": model, "ranks": size, "way": way, **judged, **faults, "seconds": seconds}
        yield {"rows": [row], "ids": ids}


def _greedy(
    folder: str, size: int, way: str, prompts: Sequence[list[int]]
) -> tuple[list[list[int]], dict[str, int]]:
    """Tokens by prompt, and what must be 0."""
    how = "symmetric" if way in ("symmetric", "trees") else "nccl"
    changes = [f"model.path={folder}", "model.load=auto", "kv.num_pages=600"]
    # A bucket of one row is compiled apart, which a group of one need not show.
    buckets = "[8]" if size == 1 and way != "alone" else "[1,8]"
    changes += [f"compile.decode_buckets={buckets}", "compile.extend_buckets=[256]"]
    changes += ["compile.workers=0", "scheduler.max_running=8", "scheduler.max_step_tokens=256"]
    changes += [f"compile.cudagraphs={'trees' if 'trees' in way else 'manual'}"]
    shape = settings([], size, how, str(Path(folder) / "cache"))
    engine = start_engine(load_config(Path(CONFIG), [*shape, *changes]), lambda *_: None)
    try:
        outputs = run(engine, greedy_requests(prompts, NUM_TOKENS), waves=2)
        counters = engine.worker.counters
    finally:
        engine.close()
    return [outputs[i] for i in range(len(prompts))], counted_faults(counters)


def counted_faults(counters: Any) -> dict[str, int]:
    """What must be 0."""
    names = {"eager": "eager_steps", "recompiles": "recompiles", "skips": "cudagraph_skips"}
    return {short: getattr(counters, name) for short, name in names.items()}


@contextlib.contextmanager
def launched(as_one: bool, by_torchrun: bool) -> Iterator[None]:
    """The environment of a launcher of one rank, or of none; torchrun's own is left as it is."""
    before = {
        name: os.environ.pop(name) for name in (*ONE_RANK, "MASTER_PORT") if name in os.environ
    }
    if as_one:
        os.environ.update(before if by_torchrun else {**ONE_RANK, "MASTER_PORT": str(free_port())})
    try:
        yield
    finally:
        for name in (*ONE_RANK, "MASTER_PORT"):
            os.environ.pop(name, None)
        os.environ.update(before)


@torch.no_grad()
def judge(
    model: Any, rounded: Any, prompts: Sequence[list[int]], ids: Sequence[list[int]]
) -> dict[str, Any]:
    """How far each token is from the best, in logits; the same of what HF chooses in bfloat16."""
    ours: list[float] = []
    theirs: list[float] = []
    spread = 0.0
    for prompt, answer in zip(prompts, ids, strict=True):
        tokens = torch.tensor([prompt + answer]).cuda()
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
        spread = logits.std().item()
        for gaps, chosen in (
            (ours, tokens[0, len(prompt) :]),
            (theirs, rounded(tokens).logits[0, len(prompt) - 1 : -1].argmax(1)),
        ):
            best, got = logits.max(1).values, logits.gather(1, chosen[:, None])[:, 0]
            gaps.extend((best - got).tolist())
    result: dict[str, Any] = {"tokens": len(ours), "std": spread}
    for name, gaps in (("", ours), ("HF in bf16: ", theirs)):
        result |= {f"{name}as HF": gaps.count(0.0), f"{name}worst gap": max(gaps)}
    return result


def decode(tp: int, all_reduce: str, cache: str) -> Iterator[dict[str, Any]]:
    """Milliseconds of a step at KV_LENGTH, on the device and on rank 0's host."""
    begin = time.perf_counter()
    with LLM(CONFIG, settings(SHAPE, tp, all_reduce, cache)) as llm:
        result: dict[str, Any] = {"rows": [], "start_s": time.perf_counter() - begin}
        worker = llm.engine.worker
        result |= {"pages": llm.engine.num_pages, "compiled": worker.compile_log.compiled}
        head = {"ranks": tp, "all_reduce": all_reduce}
        for batch in BATCHES:
            result["rows"].append({**head, **time_bucket(llm.engine, batch, KV_LENGTH)})
            result["counters"] = [counted_faults(worker.counters)]
            yield result


def workload(tp: int, all_reduce: str, cache: str) -> Iterator[dict[str, Any]]:
    """Mini-SGLang's offline workload."""
    with LLM(CONFIG, settings(SHAPE, tp, all_reduce, cache)) as llm:
        timed(llm, fit(uniform(8, 960, 4, 1), llm.engine.model.vocab_size), 0.0)
        jobs = fit(mini_sglang(0), llm.engine.model.vocab_size)

        def measured() -> dict[str, Any]:
            seconds = timed(llm, jobs, 0.6)
            num_output = sum(job.num_output for job in jobs)
            return {"ranks": tp, "seconds": seconds, "output_per_s": num_output / seconds}

        yield {"rows": [counted(llm, measured)]}


@contextlib.contextmanager
def server(
    overrides: Sequence[str], log: Path, phases: Path, launcher: Sequence[str] = ()
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`fullgraph serve` and its URL, once it is healthy; the start's phases go to a file."""
    port = free_port()
    words = [word for text in (*overrides, f"server.port={port}") for word in ("--set", text)]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "engine", "serve", CONFIG, *words],
            stdout=out,
            stderr=out,
            env={**os.environ, STARTUP_JSON: str(phases)},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, process, log=log)
        yield url, process
    finally:
        if launcher:
            process.terminate()  # killed, it would leave its ranks alone
        else:
            process.kill()
        process.wait()


def serve(
    tp: int, all_reduce: str, cache: str, folder: Path, starts: str = "2"
) -> Iterator[dict[str, Any]]:
    """Warm starts to the first token; with several ranks one is killed under load in the last."""
    result: dict[str, Any] = {"rows": []}
    for attempt in range(int(starts)):
        begin = time.perf_counter()
        log, phases = (folder / f"serve_{tp}_{attempt}_{n}" for n in ("server.log", "phases.json"))
        with server(settings(SHAPE, tp, all_reduce, cache), log, phases) as (url, process):
            ready = time.perf_counter() - begin
            first_text(url, "Hello")
            first = time.perf_counter() - begin
            row = {"ranks": tp, "ready_s": ready, "first_token_s": first}
            result["rows"].append({**row, **json.loads(phases.read_text())})
            result["counters"] = [watched_counters(url)]
            if attempt == 0:
                result["full"] = [{"ranks": tp, **full_variant(url)}]
            if tp > 1 and attempt == int(starts) - 1:
                result["death"] = [death(url, process)]
        yield result


def torchrun(tp: int, all_reduce: str, cache: str, folder: Path) -> Iterator[dict[str, Any]]:
    """A server that torchrun starts gives the text of one that starts its ranks itself."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(tp)]
    launcher += ["--master-port", str(free_port())]
    log, phases = folder / f"torchrun_{tp}_server.log", folder / f"torchrun_{tp}_phases.json"
    begin = time.perf_counter()
    with server(settings(SHAPE, tp, all_reduce, cache), log, phases, launcher) as (url, _):
        row: dict[str, Any] = {"ranks": tp, "ready_s": time.perf_counter() - begin}
        row |= {**full_variant(url), **watched_counters(url)}
    other = json.loads((folder / f"serve_{tp}.json").read_text())["full"][0]["text"]
    yield {"rows": [{**row, "text of serve": row["text"] == other}]}


def full_variant(url: str) -> dict[str, Any]:
    """A request that needs graphs which the start has left for later: the same text, logprobs."""
    texts, found = [], 0
    begin = time.perf_counter()
    for more in ({}, {"logprobs": 2}):
        body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, **more}
        with ask(url, "/v1/completions", body, timeout_s=60) as response:
            choice = json.loads(response.read())["choices"][0]
        texts.append(choice["text"])
        found = len((choice["logprobs"] or {}).get("token_logprobs", []))
    same = texts[0] == texts[1]
    return {
        "text": texts[0],
        "same text": same,
        "logprobs": found,
        "seconds": time.perf_counter() - begin,
    }


def death(url: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Kill -9 a rank while streams are open; seconds until all have ended, and what is left."""
    ends: list[tuple[float, str]] = []

    def stream() -> None:
        body = {"prompt": "x", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        text = ""
        try:
            with ask(url, "/v1/completions", body, timeout_s=60) as response:
                text = response.read().decode(errors="replace")
        except Exception as error:
            text = repr(error)
        ends.append((time.perf_counter(), text))

    threads = [threading.Thread(target=stream) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
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
    """Run a part and save its result under its name, again and again as it grows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("parity", "decode", "workload", "serve", "torchrun"))
    parser.add_argument("words", nargs="+")
    parser.add_argument("--results", type=Path, required=True)
    args = parser.parse_args()
    words = args.words
    name = f"{args.what}_{words[0]}"
    if args.what == "parity":
        name += f"_{words[2]}"
        results = parity(words[0], int(words[1]), words[2])
    elif args.what == "decode":
        name += f"_{words[1]}"
        results = decode(int(words[0]), *words[1:])
    elif args.what == "workload":
        results = workload(int(words[0]), *words[1:])
    elif args.what == "serve":
        results = serve(int(words[0]), words[1], words[2], args.results, *words[3:])
    else:
        results = torchrun(int(words[0]), words[1], words[2], args.results)
    for result in results:
        save(name, result, args.results)


if __name__ == "__main__":
    main()
