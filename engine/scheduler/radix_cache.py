"""RadixCache: the prefix tree over pages of the KV cache. Match, lock, extend, unlock, evict.

A node holds a run of whole pages and their token ids; its children differ in their first page. A
page in the tree is immutable: full, and written (or being written by a step that runs before any
step that reads it). A holder (a live request) locks the path from the root to its node; what nobody
locks can be evicted, leaves first, least recently used first. The heap of leaves is kept: a node
has at most one entry, and an entry that is out of date is put right when it surfaces, so that an
eviction costs O(log nodes) and nothing is ever rebuilt.

Knows nothing of requests, slots or steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.scheduler.batch import I32
from engine.scheduler.page_pool import PagePool

_NO_IDS = np.zeros(0, np.int32)


class Node:
    """A run of pages in the tree.

    Attributes:
        tokens: int32 [pages * page_size]. pages: int32 [pages], canonical for these tokens after
            this path.
        locks: holders whose path goes through here; a locked node's ancestors are locked too.
        stamp: time of the last unlock (of a node or one below it). queued: has an entry in the
            heap.
        serial: breaks ties in the heap by age, never by address.
    """

    __slots__ = ("children", "locks", "pages", "parent", "queued", "serial", "stamp", "tokens")

    def __init__(self, parent: Node | None, tokens: I32, pages: I32, serial: int) -> None:
        self.parent = parent
        self.children: dict[Hashable, Node] = {}
        self.tokens = tokens
        self.pages = pages
        self.locks = 0
        self.stamp = 0
        self.queued = False
        self.serial = serial


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of some tokens: `num_pages` pages, the last `offset` of them the
    first of `node`'s.
    """

    node: Node
    offset: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Extension:
    """What extend() did with a holder's pages.

    Attributes:
        node: the holder's node now, locked in place of the one before.
        num_pages: how many of the holder's pages lie below the old node in the tree now.
        canonical: int32 [duplicates]: the tree's pages for the first of them; the holder's own are
            still the holder's and are to be replaced by these. The others (num_pages - duplicates)
            now belong to the tree.
    """

    node: Node
    num_pages: int
    canonical: I32


class RadixCache:
    """The tree.

    Args:
        pool: where evicted pages go.
        page_size: tokens per page, >= 1.
        enabled: False: nothing ever matches or is kept.
    """

    def __init__(self, pool: PagePool, page_size: int, *, enabled: bool = True) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.root = Node(None, _NO_IDS, _NO_IDS, 0)
        self.num_evictable = 0  # pages in nodes that nobody locks
        self.num_locked = 0  # pages in locked nodes
        self.num_evicted = 0
        self.version = 0  # changes whenever a match could change
        self._pool = pool
        self._heap: list[tuple[int, int, Node]] = []
        self._clock = 0
        self._serial = 0

    def match(self, tokens: I32, max_pages: int) -> Match:
        """The longest cached prefix of `tokens` (int32 [n]), at most `max_pages` pages. Changes
        nothing.
        """
        assert max_pages * self.page_size <= len(tokens)
        return self._descend(self.root, tokens, max_pages if self.enabled else 0)

    def num_evictable_in(self, match: Match) -> int:
        """Pages of the match that lock() would take away from the evictable ones."""
        node: Node | None = match.node
        if node is None or node.parent is None or match.num_pages == 0:
            return 0
        count = match.offset if node.locks == 0 else 0
        node = node.parent
        while node is not None and node.locks == 0:
            count += len(node.pages)
            node = node.parent
        return count

    def lock(self, match: Match) -> tuple[Node, I32]:
        """Lock the matched prefix for a new holder: its node and its pages (int32
        [match.num_pages]).
        """
        node = self._cut(match)
        self._lock_path(node, self.root)
        runs = []
        above: Node | None = node
        while above is not None:
            runs.append(above.pages)
            above = above.parent
        return node, np.concatenate(runs[::-1])

    def extend(self, node: Node, tokens: I32, pages: I32, max_duplicates: int) -> Extension:
        """Put a holder's full pages below its locked `node`, and move its lock to their end.

        Args:
            tokens: int32 [pages * page_size]; pages: int32 [pages], the holder's own.
            max_duplicates: pages that the tree already has and the holder can replace by the
                tree's; where there are more, only these are taken now.
        """
        if not self.enabled or len(pages) == 0:
            return Extension(node, 0, _NO_IDS)
        match = self._descend(node, tokens, min(len(pages), max_duplicates))
        end = self._cut(match)
        runs = []
        above = end
        while above is not node:
            runs.append(above.pages)
            assert above.parent is not None
            above = above.parent
        canonical = np.concatenate(runs[::-1]) if runs else _NO_IDS
        self._lock_path(end, node)
        start = match.num_pages
        if start == max_duplicates and self._child(end, tokens[start * self.page_size :]):
            return Extension(end, start, canonical)  # more duplicates than can be replaced now
        if start < len(pages):
            end = self._append(end, tokens[start * self.page_size :], pages[start:])
        return Extension(end, len(pages), canonical)

    def unlock(self, node: Node) -> None:
        """Take a holder's lock off the path to `node`."""
        self._clock += 1
        while node.parent is not None:
            assert node.locks > 0, "a node was unlocked more often than locked"
            node.locks -= 1
            node.stamp = self._clock
            if node.locks == 0:
                self.num_locked -= len(node.pages)
                self.num_evictable += len(node.pages)
                self._queue(node)
            node = node.parent

    def discard(self, node: Node) -> None:
        """Unlock `node` and drop what nobody else uses of its path: its contents are not to be
        trusted.
        """
        self.unlock(node)
        while node.parent is not None and node.locks == 0 and not node.children:
            parent = node.parent
            self._drop_tail(node, len(node.pages))
            node = parent

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used leaves first, each from its end; how many
        were freed.
        """
        freed = 0
        while freed < count and self._heap:
            stamp, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.parent is None or node.locks > 0 or node.children:
                continue
            if stamp != node.stamp:
                self._queue(node)
                continue
            dropped = min(len(node.pages), count - freed)
            self._drop_tail(node, dropped)
            freed += dropped
        self.num_evicted += freed
        return freed

    def num_exclusive(self, node: Node) -> int:
        """Pages that unlocking `node` would make evictable."""
        count = 0
        while node.parent is not None and node.locks == 1:
            count += len(node.pages)
            node = node.parent
        return count

    def path_pages(self, node: Node) -> I32:
        """Pages from the root to the end of `node` (int32 [n])."""
        runs = [node.pages]
        while node.parent is not None:
            node = node.parent
            runs.append(node.pages)
        return np.concatenate(runs[::-1])

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self, holders: list[Node]) -> I32:
        """Raise AssertionError where the tree is broken; returns its pages (int32 [n]).

        Args:
            holders: the node of every holder (with repeats).
        """
        locks: dict[int, int] = {}
        for held in holders:
            step: Node | None = held
            while step is not None:
                locks[step.serial] = locks.get(step.serial, 0) + 1
                assert step.parent is not None or step is self.root, (
                    "a holder's node is not in the tree"
                )
                step = step.parent
        queued = {id(node) for _, _, node in self._heap}
        assert len(queued) == len(self._heap), "a node is in the heap twice"
        runs, evictable, locked = [_NO_IDS], 0, 0
        for node in self.nodes():
            assert len(node.pages) > 0, "an empty node"
            assert len(node.tokens) == len(node.pages) * self.page_size, "tokens do not fill pages"
            assert node.parent is not None
            assert node.parent.children.get(self._key(node.tokens)) is node, (
                "a child under a wrong key"
            )
            assert node.locks == locks.get(node.serial, 0), "lock count and holders disagree"
            assert node.queued == (id(node) in queued), "the heap flag is wrong"
            assert node.queued or node.locks or node.children, (
                "an evictable leaf is not in the heap"
            )
            runs.append(node.pages)
            if node.locks:
                locked += len(node.pages)
            else:
                evictable += len(node.pages)
        assert (evictable, locked) == (self.num_evictable, self.num_locked), "page counts are wrong"
        return np.concatenate(runs)

    def _key(self, tokens: I32) -> Hashable:
        return tokens[: self.page_size].tobytes()

    def _child(self, node: Node, tokens: I32) -> Node | None:
        return node.children.get(self._key(tokens)) if len(tokens) >= self.page_size else None

    def _descend(self, node: Node, tokens: I32, max_pages: int) -> Match:
        """Match `tokens` from the end of `node` on; num_pages counts from there."""
        size = self.page_size
        done, offset = 0, len(node.pages)
        while done < max_pages and (child := self._child(node, tokens[done * size :])) is not None:
            limit = min(len(child.pages), max_pages - done)
            differs = child.tokens[: limit * size] != tokens[done * size : (done + limit) * size]
            first = int(differs.argmax())
            offset = first // size if differs[first] else limit
            done += offset
            node = child
            if offset < len(child.pages):
                break
        return Match(node, offset, done)

    def _cut(self, match: Match) -> Node:
        """The node that ends where the match ends, splitting match.node when it goes on."""
        node, offset = match.node, match.offset
        if offset == len(node.pages):
            return node
        assert 0 < offset < len(node.pages)
        assert node.parent is not None
        cut = offset * self.page_size
        upper = self._new_node(node.parent, node.tokens[:cut], node.pages[:offset])
        upper.locks, upper.stamp = node.locks, node.stamp
        # The lower part keeps its identity: every holder of `node` holds all of it.
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[offset:], upper
        upper.children[self._key(node.tokens)] = node
        return upper

    def _append(self, node: Node, tokens: I32, pages: I32) -> Node:
        """New pages at the end of the locked `node`, or of the root; returns the node that holds
        them.
        """
        self.version += 1
        self.num_locked += len(pages)
        if node.parent is not None and node.locks == 1 and not node.children:
            # Only this holder is here: a prompt computed in many chunks stays one node.
            node.tokens = np.concatenate((node.tokens, tokens))
            node.pages = np.concatenate((node.pages, pages))
            return node
        child = self._new_node(node, tokens.copy(), pages.copy())
        child.locks, child.stamp = 1, self._clock
        return child

    def _new_node(self, parent: Node, tokens: I32, pages: I32) -> Node:
        self._serial += 1
        node = Node(parent, tokens, pages, self._serial)
        parent.children[self._key(tokens)] = node
        return node

    def _lock_path(self, node: Node, stop: Node) -> None:
        """One lock more on every node from `node` up to, and without, `stop`."""
        while node is not stop:
            assert node.parent is not None
            if node.locks == 0:
                self.num_evictable -= len(node.pages)
                self.num_locked += len(node.pages)
            node.locks += 1
            node = node.parent

    def _queue(self, node: Node) -> None:
        if not node.queued and node.locks == 0 and not node.children and node.parent is not None:
            node.queued = True
            heapq.heappush(self._heap, (node.stamp, node.serial, node))

    def _drop_tail(self, node: Node, count: int) -> None:
        """Free the last `count` pages of an unlocked leaf; without any page left it goes too."""
        self.version += 1
        self.num_evictable -= count
        kept = len(node.pages) - count
        self._pool.give_back(node.pages[kept:])
        if kept:
            node.pages = node.pages[:kept]
            node.tokens = node.tokens[: kept * self.page_size]
            self._queue(node)
            return
        parent = node.parent
        assert parent is not None
        del parent.children[self._key(node.tokens)]
        node.parent = None
        self._queue(parent)
