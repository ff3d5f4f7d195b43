"""A store in a temporary folder, and what it warned of."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from compile_cache.store import Store
from tests.compile_cache.entries import Warnings


@pytest.fixture
def warned() -> Warnings:
    return Warnings()


@pytest.fixture
def store(tmp_path: Path, warned: Warnings, monkeypatch: pytest.MonkeyPatch) -> Store:
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(elsewhere))
    return Store(tmp_path / "cache", warned)
