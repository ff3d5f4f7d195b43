"""PagePool: which pages of the KV cache are free. Knows nothing of who holds the others.

Page 0 is the dummy that padded rows read; it is never handed out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.batch import I32


class PagePool:
    """A stack of free pages.

    Args:
        num_pages: pages of the KV cache, the dummy included.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # the lowest page on top
        self._num_free = num_pages - 1
        self._is_free = np.ones(num_pages, np.bool_)
        self._is_free[0] = False

    @property
    def num_usable(self) -> int:
        """Pages that can ever be handed out."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    def take(self, count: int) -> I32 | None:
        """`count` pages (int32 [count]), or None when fewer are free."""
        if count > self._num_free:
            return None
        top = self._num_free - count
        pages = self._stack[top : self._num_free][::-1].copy()
        self._num_free = top
        self._is_free[pages] = False
        return pages

    def give_back(self, pages: I32) -> None:
        """Make `pages` (int32 [n], distinct, none of them free) free again."""
        count = len(pages)
        if count == 0:
            return
        assert not self._is_free[pages].any(), "a page was freed twice"
        end = self._num_free + count
        assert end <= self.num_usable, "more pages were freed than there are"
        self._stack[self._num_free : end] = pages[::-1]
        self._num_free = end
        self._is_free[pages] = True

    def free_pages(self) -> I32:
        """A copy of the free pages, for integrity checks."""
        return self._stack[: self._num_free].copy()

    def check_integrity(self) -> None:
        """Raise AssertionError when the stack and the flags disagree."""
        flags: NDArray[np.bool_] = np.zeros(self.num_pages, np.bool_)
        flags[self._stack[: self._num_free]] = True
        assert not flags[0], "the dummy page is in the pool"
        assert int(flags.sum()) == self._num_free, "a page is free twice"
        assert np.array_equal(flags, self._is_free), "free stack and free flags disagree"
