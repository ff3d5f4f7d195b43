"""Ctrl-C at a time that suits. Knows nothing of what is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block. For engine steps: one that is cut in two leaves
    the scheduler and the device apart.

    A handler that somebody else has set, and other threads, are left alone.

    Raises:
        KeyboardInterrupt: Ctrl-C came meanwhile.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
