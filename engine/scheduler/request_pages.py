"""RequestPages: the pages that requests hold, between the page pool, the prefix tree and the page
table.

A running request's columns of the page table:

    0 ............ num_published ............ num_pages
    | in the tree, locked by it  | its own            |

Knows nothing of budgets or
policies.
"""

from __future__ import annotations

import numpy as np

from engine.scheduler.batch import I32
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.page_pool import PagePool
from engine.scheduler.radix_cache import Match, RadixCache
from engine.scheduler.slots import RequestState, SlotTables

_NO_PAGES = np.zeros(0, np.int32)


class RequestPages:
    """Hands out pages and takes them back; writes SlotTables.page_table and num_pages."""

    def __init__(self, limits: SchedulerLimits, tables: SlotTables) -> None:
        self.pool = PagePool(limits.num_pages)
        self.cache = RadixCache(self.pool, limits.page_size, enabled=limits.prefix_cache)
        self.num_remapped = 0
        self._page_size = limits.page_size
        self._tables = tables

    @property
    def available(self) -> int:
        """Pages that take() can give now."""
        return self.pool.num_free + self.cache.num_evictable

    def take(self, count: int) -> I32:
        """`count` pages (int32 [count]), at most `available`, evicting what is needed."""
        missing = count - self.pool.num_free
        if missing > 0:
            self.cache.evict(missing)
        pages = self.pool.take(count)
        assert pages is not None, "more pages were asked for than are available"
        return pages

    def attach(self, state: RequestState, match: Match) -> None:
        """The first columns of a request that just entered its slot: the matched prefix, locked."""
        slot = state.slot
        state.node, pages = self.cache.lock(match)
        self._tables.page_table[slot, : len(pages)] = pages
        self._tables.num_pages[slot] = state.num_published = len(pages)
        state.num_shipped = 0

    def grow(self, slot: int, count: int) -> None:
        """`count` pages more at the end of a slot's columns."""
        start = int(self._tables.num_pages[slot])
        self._tables.page_table[slot, start : start + count] = self.take(count)
        self._tables.num_pages[slot] = start + count

    def grow_each(self, slots: I32) -> tuple[I32, I32]:
        """One page more for each of `slots` (int32 [n], distinct): columns and pages, both int32
        [n].
        """
        columns = self._tables.num_pages[slots]
        pages = self.take(len(slots))
        self._tables.page_table[slots, columns] = pages
        self._tables.num_pages[slots] = columns + 1
        return columns, pages

    def publish(self, state: RequestState, num_tokens: int, max_duplicates: int) -> I32:
        """Share a running request's full pages among its first `num_tokens` tokens, whose ids are
        known and whose KV was scheduled.

        Where the tree already has such a page (two requests computed the same prefix at the same
        time), the request takes the tree's in its place and its own is freed. Where there are more
        than `max_duplicates`, the rest has to wait. To be called with `max_duplicates` > 0 only
        when this step has all its pages.

        Returns:
            Pages (int32 [n], n <= max_duplicates) for the page table, from the column that was
            num_published before.
        """
        start, end = state.num_published, num_tokens // self._page_size
        if end <= start or not self.cache.enabled:
            return _NO_PAGES
        canonical = self._extend(state, end, max_duplicates)
        if len(canonical):
            own = self._tables.page_table[state.slot, start : start + len(canonical)]
            duplicates = own.copy()
            own[:] = canonical
            # Free for the next step at the earliest: the step in flight, which reads them, is done
            # by then, and the one being made reads the tree's.
            self.pool.give_back(duplicates)
            self.num_remapped += len(canonical)
        return canonical

    def release(self, state: RequestState) -> None:
        """Take everything back from a request that no step in flight has a row of; full pages stay
        in the tree.
        """
        tables, slot = self._tables, state.slot
        pages = tables.page_table[slot, : tables.num_pages[slot]]
        kept = state.num_published
        assert state.node is not None
        if state.tainted:
            self.pool.give_back(pages[kept:])
            self.cache.discard(state.node)
        else:
            full = int(tables.computed[slot]) // self._page_size
            canonical = _NO_PAGES
            if full > kept:
                canonical = self._extend(state, full, full - kept)
            self.pool.give_back(pages[kept : kept + len(canonical)])
            self.pool.give_back(pages[state.num_published :])
            self.cache.unlock(state.node)
        state.node, state.num_published, state.num_shipped = None, 0, 0

    def num_recoverable(self, state: RequestState) -> int:
        """Pages that become available when the request is released."""
        assert state.node is not None
        own = int(self._tables.num_pages[state.slot]) - state.num_published
        return own + self.cache.num_exclusive(state.node)

    def check_integrity(self, holders: list[RequestState]) -> None:
        """Raise AssertionError unless every page is exactly one of free, in the tree and a
        request's own.
        """
        tables = self._tables
        self.pool.check_integrity()
        nodes = [state.node for state in holders if state.node is not None]
        assert len(nodes) == len(holders), "a request in a slot has no place in the prefix tree"
        runs = [self.pool.free_pages(), self.cache.check_integrity(nodes)]
        for state, node in zip(holders, nodes, strict=True):
            columns = tables.page_table[state.slot, : tables.num_pages[state.slot]]
            path = self.cache.path_pages(node)
            assert np.array_equal(columns[: state.num_published], path), (
                f"page table of request {state.request.request_id} and its path disagree"
            )
            runs.append(columns[state.num_published :])
        counts = np.bincount(np.concatenate(runs), minlength=self.pool.num_pages)
        assert len(counts) == self.pool.num_pages and counts[0] == 0, "a page that does not exist"
        lost = (np.flatnonzero(counts[1:] == 0) + 1).tolist()
        double = np.flatnonzero(counts > 1).tolist()
        assert not lost and not double, f"pages lost: {lost[:8]}, held twice: {double[:8]}"

    def _extend(self, state: RequestState, end: int, max_duplicates: int) -> I32:
        """Publish columns num_published .. end; returns the tree's pages for the first of them."""
        start, slot, size = state.num_published, state.slot, self._page_size
        assert state.node is not None
        done = self.cache.extend(
            state.node,
            self._tables.tokens[slot, start * size : end * size],
            self._tables.page_table[slot, start:end],
            max_duplicates,
        )
        state.node, state.num_published = done.node, start + done.num_pages
        return done.canonical
