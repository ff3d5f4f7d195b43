"""Fixtures for the scheduler's tests."""

from __future__ import annotations

import pytest

from . import reference


@pytest.fixture
def nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake model has finite logits everywhere."""
    monkeypatch.setattr(reference, "FAILURE_RATE", 1 << 70)
