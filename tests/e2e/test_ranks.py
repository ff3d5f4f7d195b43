"""Tensor parallelism through the whole engine, ranks as processes that talk over gloo."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import spawn

from bench.server_process import free_port
from compile_cache.store import Hit
from engine import cli, rank_process
from engine.artefacts import fingerprint_of, prepare, store_of
from engine.config import EngineConfig, ModelOptions, ParallelOptions, load_config
from engine.errors import ConfigError, EngineDead
from engine.llm import LLM
from engine.memory import smallest_free
from engine.rank_leader import STOP, WARM
from engine.rank_link import LeaderLink
from engine.request import SamplingParams
from engine.startup import start_engine
from engine.world import World, rank_zero, ranks_here
from tests.e2e.harness import greedy_requests, run, running_engine, write_config
from tests.e2e.live_server import LOG, live_process, model_folder
from tests.e2e.rank_of_many import ANSWER, run_rank
from tests.e2e.tiny_models import FAMILIES, VOCAB, chosen, greedy, hf_config, save_model
from tests.models.test_moe import CONFIGS
from tests.server.processes import children_of, gone
from tests.server.test_process import open_streams

MAX_TOKENS = 12
GIB = 2**30
# Odd vocab always; with 4 ranks there are fewer kv heads than ranks.
DENSE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "intermediate_size": 101}
MODELS = {
    **{family: hf_config(family, **DENSE) for family in FAMILIES},
    **{name: CONFIGS[name] for name in ("qwen3_moe", "mixtral")},
}


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (5, 33, 70)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Any]:
    """A folder for each of MODELS, and Hugging Face's model of what lies there."""
    folder = tmp_path_factory.mktemp("models")
    return {folder / name: save_model(folder / name, config) for name, config in MODELS.items()}


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_give_the_tokens_of_one(tp: int, saved: dict[Path, Any]) -> None:
    """Those of Hugging Face's model, which one rank gives too (test_parity.py); every family."""
    folders = [str(folder) for folder in saved]
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in folders]
    ports = [store.port for store in stores]
    spawn(run_rank, (tp, ports, folders, prompts(), MAX_TOKENS), nprocs=tp)
    for folder, model in saved.items():
        answers = json.loads((folder / ANSWER).read_text())
        (folder / ANSWER).unlink()
        assert [len(answer) for answer in answers] == [MAX_TOKENS] * 3
        assert answers == chosen(model, prompts(), answers), folder.name


def test_ranks_are_started_and_ended_with_the_engine(tmp_path: Path) -> None:
    expected = greedy(save_model(tmp_path, MODELS["qwen2"]), prompts(), MAX_TOKENS)
    others = children_of(os.getpid())
    with running_engine(tmp_path, parallel={"tp": 2}) as engine:
        followers = set(children_of(os.getpid())) - set(others)
        outputs = run(engine, greedy_requests(prompts(), MAX_TOKENS), waves=2)
    assert [outputs[i] for i in range(len(expected))] == expected
    assert len(followers) == 1 and not dist.is_initialized()
    assert all(gone(pid, 0) for pid in followers)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_ranks(tmp_path: Path) -> None:
    """Collectives inside compiled graphs; after a warm-up no rank compiles, all load the same."""
    expected = greedy(save_model(tmp_path, MODELS["llama"]), prompts(), MAX_TOKENS)
    sections: dict[str, dict[str, Any]] = {
        "parallel": {"tp": 2},
        "compile": {
            "backend": "inductor",
            "threads": 1,
            "decode_buckets": [4],
            "extend_buckets": [64],
            "cache_dir": str(tmp_path / "cache"),
        },
        "scheduler": {"max_running": 4, "max_step_tokens": 64},
    }
    file = write_config(tmp_path, **sections)
    assert cli.main(["warmup", str(file)]) == 0
    before = kept_files(file)
    with running_engine(tmp_path, **sections) as engine:
        outputs = run(engine, greedy_requests(prompts(), MAX_TOKENS), waves=2)
        stats, log = engine.core.stats(), engine.worker.compile_log
    assert [outputs[i] for i in range(len(expected))] == expected
    assert (stats.eager_steps, stats.recompiles) == (0, 0)
    assert not log.compiled and log.loaded and log.frozen
    assert kept_files(file) == before, "a rank has compiled something"


def kept_files(file: Path) -> list[str]:
    """Names in the configuration's entry of the compile cache."""
    config = load_config(file)
    found = store_of(config).lookup(fingerprint_of(prepare(config)))
    assert isinstance(found, Hit)
    return sorted(found.manifest.files)


def test_a_rank_killed_mid_stream(tmp_path: Path) -> None:
    """Open streams end with an error that names it, the server ends, nothing is left."""
    with live_process(tmp_path, {"parallel.tp": 4}) as (target, process):
        (engine,) = children_of(process.pid)
        followers = children_of(engine)
        assert len(followers) == 3
        killed = 0.0

        async def kill(http: httpx.AsyncClient) -> None:
            nonlocal killed
            killed = time.monotonic()
            os.kill(followers[1], signal.SIGKILL)

        texts: list[Any] = asyncio.run(open_streams(target.url, 1500, kill))
        for text in texts:
            assert "rank 2 was killed by SIGKILL" in text and "[DONE]" not in text
        assert process.wait(timeout=30) == 1
        assert time.monotonic() - killed < 10
        assert all(gone(pid) for pid in (engine, *followers))


def test_a_rank_killed_under_an_engine_in_this_process(tmp_path: Path) -> None:
    """Jobs end with an error that names it; the engine can be closed and another started."""
    sections: dict[str, dict[str, Any]] = {"model": {"load": "random"}, "parallel": {"tp": 2}}
    others = children_of(os.getpid())
    params = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    folder = model_folder(tmp_path)
    jobs = [[3 + i, 50 + i] for i in range(3)]
    with LLM(write_config(folder, **sections)) as llm:
        (follower,) = set(children_of(os.getpid())) - set(others)
        threading.Timer(0.2, os.kill, (follower, signal.SIGKILL)).start()
        with pytest.raises(EngineDead, match="rank 1 was killed by SIGKILL"):
            for _ in range(50):
                llm.generate(jobs, params, progress=False)
    assert not dist.is_initialized()
    with running_engine(folder, **sections) as engine:
        run(engine, greedy_requests(jobs, 3))


def test_an_idle_server_notices_and_a_killed_engine_leaves_no_rank(tmp_path: Path) -> None:
    for victim in ("follower", "engine"):
        folder = tmp_path / victim
        folder.mkdir()
        with live_process(folder, {"parallel.tp": 2}) as (target, process):
            (engine,) = children_of(process.pid)
            (follower,) = children_of(engine)
            os.kill(follower if victim == "follower" else engine, signal.SIGKILL)
            assert process.wait(timeout=10) == 1
            assert gone(engine) and gone(follower)
            assert "was killed by SIGKILL" in (folder / LOG).read_text()


def test_a_follower_records_when_told() -> None:
    """Between batches, in the order that rank 0 sent."""
    told: list[str] = []
    messages = [STOP, WARM, WARM]
    link = SimpleNamespace(receive=lambda _: messages.pop())
    worker = SimpleNamespace(warm_next=lambda: told.append("recorded"))
    rank_process._run(worker, link)  # type: ignore[arg-type]
    assert told == ["recorded"] * 2


def test_a_leader_of_nobody_waits_all_the_same() -> None:
    """Else the thread that watches would take half of the time of a group of one."""
    link = LeaderLink([], None)
    begin = time.monotonic()
    assert link.lost(100) == []
    assert time.monotonic() - begin > 0.09
    link.close()


def test_torchrun(tmp_path: Path) -> None:
    """Two ranks that torchrun started; SIGTERM drains and ends them all."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with live_process(tmp_path, {"parallel.tp": 2}, launcher) as (target, process):
        zero, one = children_of(process.pid)
        (engine,) = children_of(zero) or children_of(one)

        async def terminate(http: httpx.AsyncClient) -> None:
            process.send_signal(signal.SIGTERM)

        texts: list[Any] = asyncio.run(open_streams(target.url, 100, terminate, 2))
        for text in texts:
            assert text.endswith("data: [DONE]\n\n"), text
        process.wait(timeout=30)
        assert all(gone(pid) for pid in (zero, one, engine)), (tmp_path / LOG).read_text()


def test_torchrun_with_another_number_of_ranks() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    environ |= {"MASTER_ADDR": "here", "MASTER_PORT": "1"}
    assert rank_zero(2, environ) == World(0, 2, 0, launched=True)
    with pytest.raises(ConfigError, match=r"parallel.tp: got 4, allowed: 2, the WORLD_SIZE"):
        rank_zero(4, environ)
    assert rank_zero(4, {**environ, "MASTER_PORT": ""}) == World(size=4)
    assert (ranks_here(2, {}), ranks_here(2, environ)) == (2, 1)
    assert ranks_here(2, {**environ, "LOCAL_WORLD_SIZE": "2"}) == 2


def config_of(folder: Path, tp: int) -> EngineConfig:
    """Of a model of 4 query heads with random weights."""
    model = ModelOptions(path=str(model_folder(folder)), load="random")
    return EngineConfig(model=model, device="cpu", parallel=ParallelOptions(tp=tp))


def test_heads_that_ranks_do_not_divide(tmp_path: Path) -> None:
    before = children_of(os.getpid())
    with pytest.raises(ConfigError, match="parallel.tp: got 3, but 4 query heads cannot be div"):
        start_engine(config_of(tmp_path, 3), lambda *_: None)
    assert set(children_of(os.getpid())) <= set(before)


def test_a_rank_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the rank becomes that of the start."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineDead, match="rank 1 ended with status 1"):
        start_engine(config_of(tmp_path, 2), lambda *_: None)


def test_ranks_with_unequal_memory() -> None:
    assert smallest_free([70 * GIB, 69 * GIB, 68 * GIB]) == 68 * GIB
    with pytest.raises(ConfigError, match="rank 1, 3 has 60.0 GiB free.*rank 0 has 70.0 GiB"):
        smallest_free([70 * GIB, 61 * GIB, 69 * GIB, 60 * GIB])
