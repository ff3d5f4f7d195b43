"""PagePool: what is handed out, once, and never the dummy."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scheduler.page_pool import PagePool


def test_hands_out_every_page_but_the_dummy() -> None:
    pool = PagePool(6)
    pages = pool.take(5)
    assert pages is not None
    assert sorted(pages.tolist()) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    pool.give_back(pages)
    assert pool.num_free == pool.num_usable == 5
    pool.check_integrity()


def test_no_room_is_none_and_takes_nothing() -> None:
    pool = PagePool(4)
    assert pool.take(4) is None
    assert pool.num_free == 3
    assert pool.take(0) is not None


def test_pages_come_back_in_the_order_they_were_taken() -> None:
    pool = PagePool(8)
    first = pool.take(3)
    assert first is not None
    pool.give_back(first)
    again = pool.take(3)
    assert again is not None
    assert again.tolist() == first.tolist()


def test_what_was_handed_out_is_not_changed_later() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    assert pages is not None
    kept = pages.tolist()
    pool.give_back(pages)
    pool.take(3)
    assert pages.tolist() == kept


def test_freeing_twice_is_our_bug() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    assert pages is not None
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give_back(pages[:1])


def test_freeing_the_dummy_breaks_integrity() -> None:
    pool = PagePool(4)
    pool.take(3)
    pool.give_back(np.zeros(1, np.int32))
    with pytest.raises(AssertionError, match="dummy"):
        pool.check_integrity()
