"""SamplingParams as a user writes them."""

from __future__ import annotations

from typing import Any

from engine.request import SamplingParams


def test_a_single_stop_string_is_one_stop() -> None:
    one: Any = "pita"
    assert SamplingParams(stop=one).stop == ("pita",)
    assert SamplingParams(stop=("a", "b")).stop == ("a", "b")
