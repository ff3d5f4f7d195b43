"""The offline benchmarks' arithmetic, against an engine that does nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import offline, peers
from bench.offline import COUNTERS, counted, fit, params_for, step_times, timed
from bench.workloads import Job, uniform
from engine.request import SamplingParams, Stats
from tests.conftest import ROOT


class FakeLLM:
    """Takes a second a step of simulated time, one step a token of the longest answer."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock
        self.steps = 0
        self.engine = SimpleNamespace(core=SimpleNamespace(stats=self._stats))
        self.prompts: list[Sequence[int]] = []

    def _stats(self) -> Stats:
        return Stats(0, 0, 0, 0, 0, 0, steps_decode=self.steps)

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], *, progress: bool
    ) -> list[Any]:
        assert not progress
        lengths = [p.max_tokens or 0 for p in params]
        self.steps += max(lengths)
        self.clock.now += max(lengths)
        self.prompts += prompts
        return [SimpleNamespace(token_ids=[0] * length) for length in lengths]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=0.0)
    fake_time = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(offline, "time", fake_time)
    return FakeLLM(clock)


def test_ids_fit_the_vocabulary() -> None:
    jobs = fit([Job([5, 10, 23], 3)], 10)
    assert jobs == [Job([5, 0, 3], 3)]


def test_each_job_gets_its_own_length() -> None:
    params = params_for([Job([1], 3), Job([1], 5)], 0.6)
    assert [(p.max_tokens, p.ignore_eos, p.temperature) for p in params] == [
        (3, True, 0.6),
        (5, True, 0.6),
    ]


def test_missing_tokens_are_noticed(llm: Any) -> None:
    llm.generate = lambda prompts, params, progress: []
    with pytest.raises(AssertionError, match="tokens are missing"):
        timed(llm, uniform(2, 3, 4), 0.0)


def test_a_step_takes_what_it_takes(llm: Any) -> None:
    rows = step_times(llm, 100, [1, 4])
    assert [row["batch"] for row in rows] == [1, 4]
    assert [row["step_ms"] for row in rows] == [1000, 1000]
    assert [row["tokens_per_s"] for row in rows] == [1, 4]
    assert rows[0]["first_token_ms"] == 1000
    assert rows[0]["steps_decode"] == offline.REPEATS * (1 + offline.STEP_OUTPUT)
    assert len({tuple(prompt) for prompt in llm.prompts}) == len(llm.prompts)  # no cache hits


def test_counters_are_differences(llm: Any) -> None:
    llm.steps = 7

    def run() -> dict[str, Any]:
        llm.steps += 5
        return {"x": 1}

    result = counted(llm, run)
    assert result["x"] == 1 and result["steps_decode"] == 5
    assert set(result) >= set(COUNTERS)


class FakeSide:
    """Tells fixed times; ours are half of HF's at batch 1 and an eighth above."""

    def __init__(self, start: Any, config: str, overrides: Sequence[str]) -> None:
        self.ours = start is peers.start_engine
        self.facts: dict[str, Any] = {"dtype": "float32"}
        self.facts |= {"kv_bytes": 100} if self.ours else {"weights_bytes": 1000}

    def seconds(self, prompts: list[list[int]], num_output: int) -> float:
        each = num_output * 0.1
        return (each / 2 if self.ours else each * len(prompts)) * 1.0

    def close(self) -> int:
        return 1500


def test_comparison(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "Side", FakeSide)
    words = ["c.yaml", "--cpu-hf", "--results", str(tmp_path), "--name", "x"]
    assert offline.main(words) == 0
    result = json.loads((tmp_path / "x.json").read_text())["cpu_hf"]
    assert [row["ratio"] for row in result["rows"]] == pytest.approx([2, 16])
    assert result["rows"][0]["HF ms/token"] == pytest.approx(100)
    assert result["beyond_weights_and_kv_bytes"] == 400
    assert "one request" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "model.max_model_len: room for 512 tokens, needed: 20"),
        (["--steps", "--set", "model.max_model_len=383"], "max_model_len: room for 383 tokens, ne"),
        (["--steps", "--set", "kv.num_pages=23"], "kv: room for 368 tokens, needed: 384, of"),
        (["--set", "kv.page_size=0"], "--set kv.page_size=0: kv.page_size: got 0"),
    ],
)
def test_what_is_too_small_is_told_in_a_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = [
        str(ROOT / "configs/tiny_random.yaml"),
        "--set",
        "log.progress=none",
        "--results",
        str(tmp_path),
    ]
    assert offline.main([*config, *words]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("bench.offline: ") and line in told and "\n" not in told
    assert not list(tmp_path.iterdir())


def test_the_workload_is_run_three_times_with_other_ids(llm: Any) -> None:
    result = offline.workload(llm, 151936)
    assert result["output_per_s"] == result["output"] / result["seconds"]
    firsts = {tuple(prompt[:8]) for prompt in llm.prompts}
    assert len(firsts) == len(llm.prompts) == 4 * 256
