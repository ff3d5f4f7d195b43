"""The engine against HF transformers on a CPU: same model file, dtype, threads, prompts and run.

Each side lives in a process of its own, so that its peak memory is its own, and both stay loaded
while rounds of one and the other take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.report import percentile
from bench.workloads import uniform
from engine.config import EngineConfig, load_config
from engine.llm import LLM
from engine.machine import physical_cores
from engine.request import SamplingParams

NUM_INPUT = 32
CONCURRENT = 8
# Generates `num_output` tokens for each prompt, together or one after the other.
Generate = Callable[[list[list[int]], int], None]


def peak_bytes() -> int:
    """Most memory that this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Side:
    """One contestant in a process of its own.

    Args:
        start: module-level function (config file, overrides) -> (generate, facts), run there.
    """

    def __init__(self, start: Callable[..., Any], config: Path, overrides: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(start, there, config, list(overrides)))
        self._process.start()
        self.facts: dict[str, Any] = self._pipe.recv()

    def seconds(self, prompts: list[list[int]], num_output: int) -> float:
        """How long it takes to generate for all prompts."""
        self._pipe.send((prompts, num_output))
        taken: float = self._pipe.recv()
        return taken

    def close(self) -> int:
        """End the process; its peak memory in bytes."""
        self._pipe.send(None)
        peak: int = self._pipe.recv()
        self._process.join()
        return peak


def _serve(
    start: Callable[..., tuple[Generate, dict[str, Any]]],
    pipe: Connection[Any, Any],
    config: Path,
    overrides: list[str],
) -> None:
    generate, facts = start(config, overrides)
    pipe.send(facts)
    while (message := pipe.recv()) is not None:
        prompts, num_output = message
        begin = time.perf_counter()
        generate(prompts, num_output)
        pipe.send(time.perf_counter() - begin)
    pipe.send(peak_bytes())


def start_engine(config: Path, overrides: list[str]) -> tuple[Generate, dict[str, Any]]:
    """Ours: everything handed over at once."""
    llm = LLM(load_config(config, overrides))

    def generate(prompts: list[list[int]], num_output: int) -> None:
        params = SamplingParams(max_tokens=num_output, temperature=0, ignore_eos=True)
        outputs = llm.generate(prompts, params, progress=False)
        assert all(len(output.token_ids) == num_output for output in outputs)

    resolved = llm.engine.config
    return generate, {
        "dtype": resolved.model.dtype,
        "threads": resolved.compile.threads,
        "kv_bytes": resolved.kv.bytes,
        "settings": llm.engine.settings,
    }


def start_hf(config: Path, overrides: list[str]) -> tuple[Generate, dict[str, Any]]:
    """HF's `generate`, greedy, with its own KV cache; one prompt after the other."""
    from transformers import AutoModelForCausalLM

    options = load_config(config, overrides)
    threads = options.compile.threads
    torch.set_num_threads(physical_cores() if threads == "auto" else threads)
    model = AutoModelForCausalLM.from_pretrained(**_hf_source(options))
    model.eval()  # type: ignore[no-untyped-call]

    def generate(prompts: list[list[int]], num_output: int) -> None:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                output = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=num_output,
                    min_new_tokens=num_output,
                    do_sample=False,
                    pad_token_id=0,
                )
            assert output.shape[1] == len(prompt) + num_output

    weights = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    return generate, {
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights_bytes": sum(weights.values()),
    }


def _hf_source(options: EngineConfig) -> dict[str, Any]:
    path = Path(options.model.path)
    dtype = "float32" if options.model.dtype == "auto" else options.model.dtype
    if path.suffix == ".gguf":
        return {
            "pretrained_model_name_or_path": str(path.parent),
            "gguf_file": path.name,
            "dtype": getattr(torch, dtype),
        }
    return {"pretrained_model_name_or_path": options.model.path, "dtype": getattr(torch, dtype)}


def compare(config: Path, overrides: Sequence[str], num_output: int, rounds: int) -> dict[str, Any]:
    """Both sides in turns: a token at batch 1, eight requests, peak memory of ours.

    Returns:
        `rows` for a table (milliseconds a token and the ratio HF / ours) and the facts behind it.
    """
    ours, theirs = Side(start_engine, config, overrides), Side(start_hf, config, overrides)
    assert ours.facts["dtype"] == theirs.facts["dtype"], "the two sides differ in dtype"
    rows = []
    for name, batch in (("one request", 1), (f"{CONCURRENT} requests", CONCURRENT)):
        times: dict[str, list[float]] = {"ours": [], "hf": []}
        for round_ in range(rounds + 1):
            prompts = [job.prompt_ids for job in uniform(batch, NUM_INPUT, 1, round_)]
            for side, label in ((ours, "ours"), (theirs, "hf")):
                times[label].append(side.seconds(prompts, num_output))
        rows.append(_row(name, times, batch * num_output))
    theirs.close()
    peak = ours.close()
    facts = {**theirs.facts, **ours.facts, "tokens": num_output, "rounds": rounds}
    extra = peak - facts["weights_bytes"] - facts["kv_bytes"]
    return {"rows": rows, "peak_bytes": peak, "beyond_weights_and_kv_bytes": extra, **facts}


def _row(name: str, times: dict[str, list[float]], num_tokens: int) -> dict[str, Any]:
    """Milliseconds a token: the medians, and the best rounds, which a busy machine spoils less.

    The first round of each warmed it up and does not count.
    """
    median = {side: 1e3 * percentile(t[1:], 50) / num_tokens for side, t in times.items()}
    best = {side: 1e3 * min(t[1:]) / num_tokens for side, t in times.items()}
    return {
        "what": name,
        "ours ms/token": median["ours"],
        "HF ms/token": median["hf"],
        "ratio": median["hf"] / median["ours"],
        "ours best": best["ours"],
        "HF best": best["hf"],
        "ratio of best": best["hf"] / best["ours"],
    }
