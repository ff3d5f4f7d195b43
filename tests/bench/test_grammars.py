"""What a grammar costs: the bench on a tiny model, and its made-up vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench import grammars
from tests.conftest import ROOT


def test_every_kind_is_measured(tmp_path: Path) -> None:
    sizes = ["--streams", "3", "--input", "5", "--output", "12", "--repeats", "1"]
    config = [str(ROOT / "configs/tiny_random.yaml"), "--set", "log.progress=none"]
    assert grammars.main([*config, *sizes, "--results", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "grammars.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == list(grammars.KINDS)
    assert all(row["seconds"] > 0 and row["recompiles"] == 0 for row in rows)
    assert rows[0]["decode_steps"] == 11 and rows[2]["decode_steps"] >= 11


@pytest.mark.parametrize("size", [256, 300, 70_000])
def test_the_made_up_vocabulary_has_its_size(size: int, tmp_path: Path) -> None:
    grammars.write_vocabulary(tmp_path, size)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert backend.get_vocab_size() == size
    text = '{"a": [1, "\u00e9"]}\n'
    assert backend.decode(backend.encode(text).ids) == text
