"""Counting cores and finding a compiler."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.machine import cpp_compiler, physical_cores


def make_cpus(folder: Path, siblings: list[str]) -> Path:
    for cpu, text in enumerate(siblings):
        topology = folder / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("usable", "quota", "cores"),
    [
        ({0, 1, 2, 3}, "max 100000", 2),
        ({0, 1}, "max 100000", 1),
        ({0, 2}, "max 100000", 2),
        ({0, 1, 2, 3}, "150000 100000", 1),
        ({0, 1, 2, 3}, "50000 100000", 1),
        ({0, 1, 2, 3}, "", 2),
        ({0, 1, 2, 3, 9}, "900000 100000", 3),  # one CPU that is not described counts as a core
    ],
)
def test_physical_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usable: set[int], quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    cpus = make_cpus(tmp_path, ["0-1", "0-1", "2-3", "2-3"])
    file = tmp_path / "cpu.max"
    if quota:
        file.write_text(quota + "\n")
    assert physical_cores(cpus, file) == cores


def test_cpp_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert cpp_compiler() is None
    for name in ("clang++", "mine"):
        (tmp_path / name).touch(mode=0o755)
    assert cpp_compiler() == "clang++"
    monkeypatch.setenv("CXX", "mine")
    assert cpp_compiler() == "mine"
