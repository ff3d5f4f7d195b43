"""Looking at processes from outside, through /proc."""

from __future__ import annotations

import time
from pathlib import Path


def gone(pid: int, timeout_s: float = 5) -> bool:
    """Whether the process ends within the time; a zombie that nobody has reaped has ended."""
    deadline = time.monotonic() + timeout_s
    while not _ended(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def children_of(pid: int) -> list[int]:
    """Direct children, whichever thread started them; in the order of their pids."""
    lists = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return sorted(int(word) for text in lists for word in text.split())
