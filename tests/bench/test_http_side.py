"""The HTTP side alone: a real server process over the hollow engine."""

from __future__ import annotations

import json
from pathlib import Path

from bench import http_side


def test_every_token_of_every_stream_arrives(tmp_path: Path) -> None:
    words = ["--streams", "4", "--tokens", "5", "--input", "3", "--step-ms", "1", "--clients", "1"]
    assert http_side.main([*words, "--vocab", "300", "--results", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "http_side.json").read_text())
    assert (result["streams"], result["tokens"]) == (4, 20)
    assert result["api_cpu_us_a_token"] > 0
