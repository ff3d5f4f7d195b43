"""The cost of chunks, in closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.limits import TokenBucket, context_pairs, tokens_within

from .simulation import make_limits


@given(start=st.integers(0, 5000), count=st.integers(0, 300))
def test_pairs_are_the_sum_of_positions(start: int, count: int) -> None:
    assert context_pairs(start, count) == sum(range(start, start + count))


@given(start=st.integers(0, 200_000), pairs=st.floats(0, 1e12))
def test_tokens_within_is_the_most_that_fits(start: int, pairs: float) -> None:
    count = tokens_within(start, pairs)
    assert context_pairs(start, count) <= pairs < context_pairs(start, count + 1)
    assert tokens_within(start, -pairs - 1) == 0


def test_whole_waves() -> None:
    bucket = TokenBucket(4096, 3840, 1024)
    assert [bucket.waves(n) for n in (0, 1, 1024, 1025)] == [0, 1024, 1024, 2048]
    assert TokenBucket(512, 3840).waves(77) == 77


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
