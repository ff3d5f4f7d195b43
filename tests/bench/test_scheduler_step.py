"""The host's share of a decode step: its budget, and what it must not depend on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.scheduler_step import main, measure

LIMIT_US = 500.0


def test_a_step_of_256_requests_keeps_within_its_budget_at_any_length() -> None:
    short, long = measure(256, 100), measure(256, 2000)
    assert long.total <= LIMIT_US
    # Medians; the rest is noise of a shared machine. Linear in the length would be 20 times.
    assert long.total <= 2 * short.total


def test_the_table_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    main(["--batches", "1", "3", "--lengths", "20", "--json", str(path)])
    rows = json.loads(path.read_text())
    assert [(row["batch"], row["length"]) for row in rows] == [(1, 20), (3, 20)]
    assert all(row["total"] >= row["process"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 3
