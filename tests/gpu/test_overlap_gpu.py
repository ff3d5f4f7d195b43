"""What a step may do on a GPU while serving: one copy in, one out, no other wait, no allocation.

torch's sync debug mode sees waits that go through torch; the profiler sees every call of the CUDA
runtime, those of FlashInfer's plans too. Run with -s to see the calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.request import EngineRequest
from engine.startup import Engine
from tests.e2e.guides import follows, grammar_of, with_guides
from tests.e2e.harness import run, running_engine
from tests.e2e.test_parity import prompts_for
from tests.e2e.tiny_models import hf_config, save_model
from tests.gpu.engines import capture_uncompiled, gpu_sections, warm_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # of torch's compiler and of transformers
]

# Each of them would make the host wait for the device.
FORBIDDEN = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaMemcpy",
    "cudaMemset",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaMallocHost",
    "cudaFreeHost",
    "cudaHostRegister",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuMemAlloc_v2",
}
SPAN = "steps of the engine"


def requests(first_id: int, *, scored: bool = False) -> list[EngineRequest]:
    """Eight of them, of several lengths; `scored`: in the `full` variant, four with a grammar."""
    return [
        EngineRequest(
            request_id=first_id + i,
            prompt_ids=prompt,
            max_tokens=16 + 4 * i,
            temperature=0.7 * (i % 2),
            seed=i,
            logprobs=1 if scored else -1,
            frequency_penalty=0.1 * scored,
            grammar=grammar_of(7 + i) if scored and i % 2 == 0 else "",
        )
        for i, prompt in enumerate(prompts_for(first_id))
    ]


def serve(engine: Engine, first_id: int, *, scored: bool = False) -> tuple[int, int]:
    """Run requests in three waves; the number of decode and of extend steps."""
    before = engine.core.scheduler.stats()
    answers = run(engine, requests(first_id, scored=scored), waves=3, check=False)
    for i in range(0, len(answers) if scored else 0, 2):
        assert len(answers[first_id + i]) == 7 + i and follows(answers[first_id + i])
    after = engine.core.scheduler.stats()
    return after.steps_decode - before.steps_decode, after.steps_extend - before.steps_extend


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def calls_of_steps(engine: Engine, first_id: int) -> tuple[int, int, Counter[str]]:
    """Decode and extend steps run, and what was called or copied during them, by name."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(SPAN):
            decode, extend = serve(engine, first_id)
        torch.cuda.synchronize()
    events: list[Any] = list(profiler.events() or ())
    [span] = [e for e in events if e.name == SPAN and e.device_type.name == "CPU"]
    begin, end = span.time_range.start, span.time_range.end
    calls: Counter[str] = Counter()
    for event in events:
        on_host = event.device_type.name == "CPU" and event.name.startswith("cu")
        if on_host and begin <= event.time_range.start <= end:
            calls[event.name] += 1
        if event.name.startswith("Memcpy"):
            calls[event.name.split(" (")[0]] += 1
    return decode, extend, calls


def check_steps(engine: Engine) -> None:
    """No wait but for results, no allocation, one copy in and one out; plans bring their own."""
    engine = with_guides(engine)
    with no_synchronisation():
        serve(engine, 0)
        serve(engine, 100, scored=True)
    torch.cuda.synchronize()
    memory, pinned = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    serve(engine, 200)
    after = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert after == memory["allocation.all.allocated"], "a plain step allocated"
    pinned_after = torch.cuda.host_memory_stats()["num_host_alloc"]
    assert pinned_after == pinned["num_host_alloc"], "a plain step took pinned memory"
    # Requests that need more than plain sampling bring their slot's state in a tensor each, and
    # those with a grammar what they may draw.
    serve(engine, 300, scored=True)
    assert torch.cuda.memory_stats()["num_device_alloc"] == memory["num_device_alloc"]
    num_decode, num_extend, calls = calls_of_steps(engine, 400)
    steps, kernel = num_decode + num_extend, engine.config.attention.decode
    print(f"\n{kernel}: {num_decode} + {num_extend} steps, {dict(calls)}")
    assert not FORBIDDEN & calls.keys()
    assert calls["cudaGraphLaunch"] == steps
    assert calls["Memcpy DtoH"] == steps
    # FlashInfer's plans are copies of their own: one of the chunks, and one of fa2's decode rows
    # whenever a row has come to its next page.
    plans = num_extend + (steps if kernel == "fa2" else 0)
    assert steps <= calls["Memcpy HtoD"] <= steps + plans


@pytest.mark.parametrize("decode", ["triton", "fa2", "xqa"])
def test_what_a_step_does(decode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps are looked at in test_serving_gpu.py."""
    capture_uncompiled(monkeypatch)
    save_model(tmp_path, hf_config("qwen3", head_dim=128), dtype=torch.bfloat16)
    sections = gpu_sections([1, 4, 8], [64, 128], "plain")
    sections["attention"] = {"decode": decode}
    with running_engine(tmp_path, "cuda", **sections) as engine:
        warm_all(engine)
        check_steps(engine)
