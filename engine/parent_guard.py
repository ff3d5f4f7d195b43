"""For child processes: end when the parent ends, however that ends. Imports nothing of ours."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def die_with_parent(parent: int) -> None:
    """Make sure that this process does not outlive its parent.

    On Linux the kernel kills it when the parent's thread that started it ends (the main thread, so
    start children there); elsewhere a thread looks every second whether the parent has changed.

    Args:
        parent: pid of the parent, taken before this process was started; a parent that is gone
            already ends the process at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before we were watching
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)
