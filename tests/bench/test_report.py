"""Percentiles, tables and the JSON file."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from bench.report import RESULTS, GpuClock, cpu_name, environment, percentile, save, summary, table


def test_percentiles() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 0) == 1 and percentile(values, 100) == 4
    assert percentile(values, 50) == 2.5
    assert math.isclose(percentile(values, 90), 3.7)
    assert math.isnan(percentile([], 50))
    assert percentile([7.0], 99) == 7
    assert summary(values)["mean"] == 2.5 and summary(values)["max"] == 4


def test_table() -> None:
    assert table([{"name": "a", "ms": 1.23456}, {"name": "bb", "ms": 12345.6}]).splitlines() == [
        "| name | ms     |",
        "|------|--------|",
        "| a    | 1.235  |",
        "| bb   | 12,346 |",
    ]
    assert table([]) == ""


def test_save_puts_the_environment_first(tmp_path: Path) -> None:
    path = save("x", {"value": 1}, tmp_path / "new")
    result = json.loads(path.read_text())
    assert list(result) == ["environment", "value"]
    assert result["environment"]["date"].startswith("20")
    assert set(environment()) >= {"cpu", "cores", "gpus", "python", "versions", "commit"}


def test_cpu_name(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Fast One\nmodel name\t: Fast One\n")
    assert cpu_name(file) == "Fast One"
    assert cpu_name(tmp_path / "absent")


def test_a_gpus_clock_is_sampled_while_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\necho "$@" > arguments\n'
        "echo '1980, 400.50, 0x0000000000000000'\necho '1200, 690.00, 0x0000000000000004'\n"
        "echo '[N/A]'\nexec sleep 60\n"
    )
    tool.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with GpuClock() as clock:
        while not (tmp_path / "arguments").exists():
            time.sleep(0.01)
        time.sleep(0.2)
    assert "--id=3" in (tmp_path / "arguments").read_text()
    assert clock.seen == {
        "sm_mhz_least": 1200.0,
        "sm_mhz_median": 1590.0,
        "watts_most": 690.0,
        "slowed_by": ["0x0000000000000000", "0x0000000000000004"],
    }


def test_no_gpu_has_no_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with GpuClock() as clock:
        pass
    assert clock.seen == {}


def test_results_are_as_a_bench_wrote_them() -> None:
    """Older ones have no commit, those of two are lists; one put together by hand had less."""
    written = environment().keys() - {"commit"}
    results = {file: json.loads(file.read_text()) for file in RESULTS.rglob("*.json")}
    heads = {file: r["environment"] for file, r in results.items() if isinstance(r, dict)}
    assert heads and not [file.name for file, head in heads.items() if written - head.keys()]
