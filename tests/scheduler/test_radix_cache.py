"""RadixCache alone: matches against a flat model, locks, splits, eviction order, integrity."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.batch import I32
from engine.scheduler.page_pool import PagePool
from engine.scheduler.radix_cache import Node, RadixCache

Ids = tuple[int, ...]


class Holder:
    """Inserts a sequence as a request does: match, lock, take pages for the rest, extend."""

    def __init__(self, cache: RadixCache, pool: PagePool, ids: list[int]) -> None:
        self.cache, self.pool = cache, pool
        size = cache.page_size
        tokens = np.array(ids, np.int32)
        num_pages = len(tokens) // size
        match = cache.match(tokens, num_pages)
        self.num_hit = match.num_pages
        self.node, self.pages = cache.lock(match)
        missing = num_pages - match.num_pages
        cache.evict(missing - pool.num_free)
        own = pool.take(missing)
        assert own is not None, "the test's pool is too small"
        rest = tokens[match.num_pages * size : num_pages * size]
        done = cache.extend(self.node, rest, own, len(own))
        assert done.num_pages == missing and len(done.canonical) == 0
        self.node, self.pages = done.node, np.concatenate((self.pages, own))

    def leave(self) -> None:
        self.cache.unlock(self.node)


def make(num_pages: int = 64, page_size: int = 2) -> tuple[RadixCache, PagePool]:
    pool = PagePool(num_pages)
    return RadixCache(pool, page_size), pool


def check(cache: RadixCache, pool: PagePool, holders: list[Holder], own: int = 0) -> None:
    pool.check_integrity()
    pages = cache.check_integrity([holder.node for holder in holders])
    everything = np.concatenate((pages, pool.free_pages()))
    assert len(set(everything.tolist())) == len(everything) == pool.num_usable - own


def hit(cache: RadixCache, ids: list[int]) -> int:
    return cache.match(np.array(ids, np.int32), len(ids) // cache.page_size).num_pages


def test_matches_whole_pages_only() -> None:
    cache, pool = make(page_size=2)
    Holder(cache, pool, [1, 2, 3, 4, 5]).leave()
    assert cache.num_evictable == 2
    assert hit(cache, [1, 2, 3, 4, 5, 6]) == 2
    assert hit(cache, [1, 2, 3, 9]) == 1
    assert hit(cache, [1, 9, 3, 4]) == 0
    assert hit(cache, [1]) == 0


def test_matching_changes_nothing_and_counts_what_lock_would_take() -> None:
    cache, pool = make(page_size=1)
    holder = Holder(cache, pool, [1, 2])
    Holder(cache, pool, [1, 2, 3, 4, 5, 6]).leave()
    match = cache.match(np.array([1, 2, 3, 4], np.int32), 4)
    nodes = len(list(cache.nodes()))
    assert (match.num_pages, cache.num_evictable_in(match)) == (4, 2)
    assert len(list(cache.nodes())) == nodes
    before = cache.num_evictable
    node, pages = cache.lock(match)
    assert before - cache.num_evictable == 2
    assert pages.tolist() == cache.path_pages(node).tolist()
    assert len(pages) == 4
    cache.unlock(node)
    check(cache, pool, [holder])


def test_split_keeps_the_locks_of_those_below() -> None:
    cache, pool = make(page_size=1)
    long = Holder(cache, pool, [1, 2, 3, 4])
    fork = Holder(cache, pool, [1, 2, 9])
    assert fork.num_hit == 2
    assert fork.pages[:2].tolist() == long.pages[:2].tolist()
    check(cache, pool, [long, fork])
    long.leave()
    assert (cache.num_locked, cache.num_evictable) == (3, 2)
    assert cache.evict(10) == 2, "what the fork locks stays"
    assert hit(cache, [1, 2, 3]) == 2
    check(cache, pool, [fork])


def test_a_chunked_prompt_stays_one_node() -> None:
    cache, pool = make(page_size=1)
    node, _ = cache.lock(cache.match(np.zeros(0, np.int32), 0))
    for token in range(8):
        pages = pool.take(1)
        assert pages is not None
        node = cache.extend(node, np.array([token], np.int32), pages, 0).node
    assert len(list(cache.nodes())) == 1
    assert hit(cache, list(range(8))) == 8


def test_least_recently_used_goes_first_and_from_its_end() -> None:
    cache, pool = make(num_pages=10, page_size=1)
    for ids in ([1, 1, 1], [2, 2, 2], [3, 3, 3]):
        Holder(cache, pool, ids).leave()
    Holder(cache, pool, [1, 1, 1]).leave()  # used again: now [2, 2, 2] is the oldest
    assert cache.evict(2) == 2
    assert [hit(cache, [token] * 3) for token in (1, 2, 3)] == [3, 1, 3]
    assert cache.evict(2) == 2
    assert [hit(cache, [token] * 3) for token in (1, 2, 3)] == [3, 0, 2]
    check(cache, pool, [])


def test_a_parent_is_evicted_after_its_children() -> None:
    cache, pool = make(page_size=1)
    Holder(cache, pool, [1, 2, 3]).leave()
    Holder(cache, pool, [1, 2, 4]).leave()
    assert cache.evict(1) == 1
    assert hit(cache, [1, 2, 3]) == 2
    assert hit(cache, [1, 2, 4]) == 3
    assert cache.evict(100) == 3
    assert cache.num_evictable == 0
    check(cache, pool, [])


def test_eviction_reports_what_it_could_not_free() -> None:
    cache, pool = make(page_size=1)
    holder = Holder(cache, pool, [1, 2])
    assert cache.evict(1) == 0
    holder.leave()
    assert cache.evict(5) == 2


def test_the_heap_holds_a_node_once() -> None:
    cache, pool = make(page_size=1)
    for _ in range(50):
        Holder(cache, pool, [1, 2, 3]).leave()
    assert len(cache._heap) == 1
    assert cache.evict(3) == 3


def extend_own(
    cache: RadixCache, pool: PagePool, node: Node, ids: list[int], limit: int
) -> tuple[I32, Node, int, list[int]]:
    own = pool.take(len(ids) // cache.page_size)
    assert own is not None
    done = cache.extend(node, np.array(ids, np.int32), own, limit)
    return own, done.node, done.num_pages, done.canonical.tolist()


def test_duplicates_are_named_and_not_adopted() -> None:
    cache, pool = make(page_size=1)
    first = Holder(cache, pool, [1, 2, 3])
    root, _ = cache.lock(cache.match(np.zeros(0, np.int32), 0))
    own, node, count, canonical = extend_own(cache, pool, root, [1, 2, 7, 8], 4)
    assert count == 4
    assert canonical == first.pages[:2].tolist()
    assert cache.path_pages(node).tolist() == [*canonical, *own[2:].tolist()]
    pool.give_back(own[:2])
    cache.unlock(node)
    check(cache, pool, [first])


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_only_as_many_duplicates_as_asked_for(limit: int) -> None:
    cache, pool = make(page_size=1)
    first = Holder(cache, pool, [1, 2, 3, 4])
    root, _ = cache.lock(cache.match(np.zeros(0, np.int32), 0))
    own, node, count, canonical = extend_own(cache, pool, root, [1, 2, 3, 7], limit)
    assert count == limit
    assert canonical == first.pages[:limit].tolist()
    assert hit(cache, [1, 2, 3, 7]) == 3, "nothing was adopted past the duplicates left out"
    pool.give_back(own[:limit])
    assert cache.path_pages(node).tolist() == canonical
    cache.unlock(node)
    check(cache, pool, [first], own=len(own) - limit)


def test_exclusive_pages_are_those_that_unlocking_frees() -> None:
    cache, pool = make(page_size=1)
    long = Holder(cache, pool, [1, 2, 3, 4])
    fork = Holder(cache, pool, [1, 2])
    assert cache.num_exclusive(long.node) == 2
    assert cache.num_exclusive(fork.node) == 0
    before = cache.num_evictable
    long.leave()
    assert cache.num_evictable - before == 2


def test_discard_drops_what_nobody_else_uses() -> None:
    cache, pool = make(page_size=1)
    other = Holder(cache, pool, [1, 2])
    bad = Holder(cache, pool, [1, 2, 3, 4])
    cache.discard(bad.node)
    assert hit(cache, [1, 2, 3, 4]) == 2
    check(cache, pool, [other])
    cache.discard(other.node)
    assert cache.num_evictable == cache.num_locked == 0
    check(cache, pool, [])
    assert cache.evict(1) == 0


def test_switched_off_it_keeps_nothing() -> None:
    pool = PagePool(8)
    cache = RadixCache(pool, 1, enabled=False)
    root, pages = cache.lock(cache.match(np.array([1], np.int32), 1))
    own = pool.take(1)
    assert own is not None
    assert len(pages) == 0
    assert cache.extend(root, np.array([1], np.int32), own, 5).num_pages == 0
    cache.unlock(root)
    assert hit(cache, [1]) == 0


def test_integrity_notices() -> None:
    cache, pool = make(page_size=1)
    holder = Holder(cache, pool, [1, 2])
    with pytest.raises(AssertionError, match="lock count"):
        cache.check_integrity([])
    holder.node.tokens = holder.node.tokens[:1]
    with pytest.raises(AssertionError, match="do not fill"):
        cache.check_integrity([holder.node])
    holder.node.tokens = np.array([5, 2], np.int32)
    with pytest.raises(AssertionError, match="wrong key"):
        cache.check_integrity([holder.node])
    holder.node.tokens = np.array([1, 2], np.int32)
    cache.num_locked -= 1
    with pytest.raises(AssertionError, match="counts"):
        cache.check_integrity([holder.node])


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), page_size=st.sampled_from((1, 2, 3)))
def test_against_a_flat_model(seed: int, page_size: int) -> None:
    """The model is a dict from each cached prefix to its page; eviction only shrinks it."""
    rng = random.Random(seed)
    cache, pool = make(num_pages=30, page_size=page_size)
    model: dict[Ids, int] = {}
    holders: list[tuple[Holder, list[int]]] = []
    for _ in range(60):
        if holders and rng.random() < 0.5:
            holder, _ = holders.pop(rng.randrange(len(holders)))
            holder.leave()
        else:
            ids = [rng.randrange(2) for _ in range(page_size * rng.randint(1, 6))]
            prefixes = [tuple(ids[:end]) for end in range(page_size, len(ids) + 1, page_size)]
            known = next((i for i, p in enumerate(prefixes) if p not in model), len(prefixes))
            assert hit(cache, ids) == known
            match = cache.match(np.array(ids, np.int32), len(prefixes))
            need = len(prefixes) - known
            if need > pool.num_free + cache.num_evictable - cache.num_evictable_in(match):
                continue
            holder = Holder(cache, pool, ids)
            held = {p for _, other in holders for p in _prefixes(other, page_size)}
            for prefix in [p for p in model if hit(cache, list(p)) < len(p) // page_size]:
                assert prefix not in held, "a locked page was evicted"
                del model[prefix]
            for prefix, page in zip(prefixes, holder.pages.tolist(), strict=True):
                assert model.setdefault(prefix, page) == page
            holders.append((holder, ids))
        check(cache, pool, [holder for holder, _ in holders])
        assert cache.num_evictable + cache.num_locked == len(model)
        assert len(cache._heap) <= len(list(cache.nodes())) + 1
    for holder, _ in holders:
        holder.leave()
    assert cache.evict(1000) == len(model)
    check(cache, pool, [])


def _prefixes(ids: list[int], page_size: int) -> list[Ids]:
    return [tuple(ids[:end]) for end in range(page_size, len(ids) + 1, page_size)]
