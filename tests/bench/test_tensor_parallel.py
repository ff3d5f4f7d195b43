"""The report on several ranks survives parts that failed or never ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.tensor_parallel import Part, finish, parts, report, start


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
    side, alone = parts(1, "cache")
    assert side and not alone and all(part.words[2] == "1" for part in side)
