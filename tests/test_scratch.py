"""Temporary folders: those of processes that live stay, those of the dead go."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine import scratch
from tests.conftest import ROOT

HOLDER = "import time; from engine import scratch; print(scratch.make_folder(), flush=True); "
HOLDER += "time.sleep(60)"


def test_a_killed_process_s_folders_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, env=environ, text=True
    ) as process:
        assert process.stdout is not None
        other = Path(process.stdout.readline().strip())
        (other / "socket").touch()
        mine = scratch.make_folder()
        assert other.parent == mine.parent == tmp_path and other.stat().st_mode & 0o777 == 0o700
        assert (other / "socket").exists(), "its process lives"
        process.kill()
    second = scratch.make_folder()
    assert set(tmp_path.iterdir()) == {mine, second}
    scratch.remove_all()
    assert not list(tmp_path.iterdir())
    scratch.remove_folder(mine)


def test_a_long_path_is_no_place_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 80)))
    folder = scratch.make_folder()
    assert folder.parent == Path("/tmp")
    scratch.remove_folder(folder)
