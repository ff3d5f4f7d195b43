"""The cost of chunks, in closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.limits import chunk_cost, tokens_within

from .simulation import make_limits

UNITS = st.sampled_from((1.0, 7.5, 1000.0, 16384.0))


@given(start=st.integers(0, 5000), count=st.integers(0, 300), unit=UNITS)
def test_cost_is_the_sum_over_tokens(start: int, count: int, unit: float) -> None:
    total = sum(1 + position / unit for position in range(start, start + count))
    assert chunk_cost(start, count, unit) == pytest.approx(total)


@given(start=st.integers(0, 200_000), budget=st.floats(0, 20_000), unit=UNITS)
def test_tokens_within_is_the_most_that_fits(start: int, budget: float, unit: float) -> None:
    count = tokens_within(start, budget, unit)
    assert count >= 0
    assert count == 0 or chunk_cost(start, count, unit) <= budget
    assert chunk_cost(start, count + 1, unit) > budget


def test_tokens_within_without_context() -> None:
    assert tokens_within(0, 8192, 1e30) == 8192
    assert tokens_within(0, -3.0, 16384) == 0
    # At a context of one unit a token costs two.
    assert tokens_within(1000, 100, 1000) == 49


def test_pages() -> None:
    limits = make_limits(page_size=16, max_model_len=100)
    assert limits.pages_per_sequence == 7
    assert [limits.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_pages": 1},
        {"max_step_tokens": 3, "max_running": 4},
        {"max_logit_rows": 3, "max_running": 4},
        {"max_page_updates": 3, "max_running": 4},
        {"page_size": 0, "max_page_updates": 9},
        {"output_estimate": 1.5},
        {"step_budget": 0},
    ],
)
def test_limits_that_cannot_work_are_our_bug(wrong: dict[str, int]) -> None:
    if wrong.get("page_size") == 0:
        with pytest.raises((AssertionError, ZeroDivisionError)):
            make_limits(page_size=0)
        return
    with pytest.raises(AssertionError):
        make_limits(**wrong)  # type: ignore[arg-type]
