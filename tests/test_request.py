"""SamplingParams as a user writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.admission import RequestLimits, check_params
from engine.errors import InvalidRequest
from engine.request import SamplingParams

LIMITS = RequestLimits(
    max_model_len=64, vocab_size=50, kv_tokens=640, max_n=4, max_logprobs=5, max_logit_bias=3,
    max_stop_ids=4,
)  # fmt: skip


def test_a_single_stop_string_is_one_stop() -> None:
    one: Any = "pita"
    assert SamplingParams(stop=one).stop == ("pita",)
    assert SamplingParams(stop=("a", "b")).stop == ("a", "b")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", "x", "float"),
        ("max_tokens", 1.5, "int | None"),
        ("n", True, "int"),
        ("n", 5, "from 1 to 4"),
        ("temperature", -1.0, "from 0 to 1000000"),
        ("min_p", 1.5, "from 0 to 1"),
        ("seed", 2**64, f"from {-(2**63)} to {2**64 - 1}"),
        ("stop", [1], "tuple[str, ...]"),
        ("stop", 1, "tuple[str, ...]"),
        ("stop", None, "tuple[str, ...]"),
        ("stop_token_ids", (1, "x"), "tuple[int, ...]"),
        ("logit_bias", {"x": 1}, "dict[int, float] | None"),
        ("logit_bias", {1: "x"}, "dict[int, float] | None"),
        ("ignore_eos", "no", "bool"),
        ("seed", 0.5, "int | None"),
    ],
)
def test_what_a_field_cannot_be_is_named(field: str, value: Any, allowed: str) -> None:
    wrong: Any = {field: value}
    with pytest.raises(InvalidRequest) as caught:
        check_params(SamplingParams(**wrong), LIMITS)
    assert caught.value.param == field
    assert str(caught.value) == f"{field}: got {value!r}, allowed: {allowed}"


def test_lists_and_numbers_of_numpy_are_taken() -> None:
    loose: Any = {
        "n": np.int64(2),
        "temperature": np.float32(0.5),
        "stop": ["a"],
        "stop_token_ids": np.array([3, 4]),
    }
    params = check_params(SamplingParams(**loose), LIMITS)
    assert params == SamplingParams(n=2, temperature=0.5, stop=("a",), stop_token_ids=(3, 4))
