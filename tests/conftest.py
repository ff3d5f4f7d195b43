"""What every test shares: where the project is, how to write a configuration, one thread.

The models here are tiny: waking a second thread takes longer than the work, and one that spins in a
barrier while others need its core takes many times as long. Child processes inherit it. A test that
is about threads sets `compile.threads`, which counts more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
ROOT = Path(__file__).resolve().parents[1]


def pytest_runtest_setup() -> None:
    """An engine in this process leaves its number of threads behind."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root."""
    return ROOT


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Write YAML text into a file of its own and return its path."""

    def write(text: str, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write
