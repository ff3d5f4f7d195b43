"""The report on several ranks survives parts that failed or never ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.tensor_parallel import Part, beside, finish, one_by_one, report, start, works


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "good.json").write_text(json.dumps({"environment": {}, "rows": [{"ranks": 2}]}))
    (folder / "bad.log").write_text("line\nRuntimeError: it broke\n")
    names = ("good", "bad", "never")
    report([Part(name, ["decode"], 1) for name in names], folder, ["an end"], tmp_path)
    out = capsys.readouterr().out
    assert "| ranks |" in out and "RuntimeError: it broke" in out and "not run" in out
    assert json.loads((tmp_path / "tensor_parallel.json").read_text())["good"] == {
        "rows": [{"ranks": 2}]
    }


def test_a_part_that_hangs_is_killed(tmp_path: Path) -> None:
    part = start(Part("sleepy", ["1000"], 1, "tests.bench.sleepy"), tmp_path)
    assert finish(part, 0.1) == "sleepy: killed after 0 s"


def test_one_gpu_checks_one_rank() -> None:
    assert all(part.words[part.words.index("parity") + 2] == "1" for part in beside(1, "cache"))


def test_timed_parts_take_the_way_that_gives_tokens(tmp_path: Path) -> None:
    assert not works(tmp_path, "nccl")
    rows = [{"way": "nccl", "tokens": 5}, {"way": "symmetric", "tokens": "-"}, {"way": "trees"}]
    (tmp_path / "parity_qwen3.json").write_text(json.dumps({"rows": rows}))
    assert [works(tmp_path, way) for way in ("nccl", "symmetric", "trees")] == [True, False, False]
    for way, other in (("nccl", "symmetric"), ("symmetric", "nccl")):
        names = [part.name for part in one_by_one(2, way, "cache")]
        assert names[0] == f"decode_2_{way}" and f"decode_2_{other}" in names[2:]
        assert len(set(names)) == len(names)
