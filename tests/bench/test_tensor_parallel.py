"""The report on several ranks survives parts that failed or never ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.tensor_parallel import Part, beside, compare, finish, one_by_one, report, start, works


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
    (tmp_path / "parity_qwen3_nccl.json").write_text("{}")
    assert works(tmp_path, "nccl") and not works(tmp_path, "symmetric")
    for way, other in (("nccl", "symmetric"), ("symmetric", "nccl")):
        names = [part.name for part in one_by_one(2, way, "cache", False)]
        assert names[0] == f"decode_2_{way}" and f"decode_2_{other}" in names[2:]
        assert len(set(names)) == len(names)


def test_tokens_are_compared_with_those_of_one_rank(tmp_path: Path) -> None:
    for way, ids in (("alone", [[1], [2]]), ("nccl", [[1], [3]])):
        file = tmp_path / f"parity_moe_{way}.json"
        file.write_text(json.dumps({"rows": [{"way": way}], "ids": ids}))
    compare(tmp_path)
    compared = json.loads((tmp_path / "compared_parity_moe_nccl.json").read_text())
    assert compared["rows"] == [{"way": "nccl", "as alone": "1 of 2"}]
