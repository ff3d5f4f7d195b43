"""Temporary folders of this process: sockets lie there, and what child processes read.

A process that is killed leaves its folders behind; whoever makes the next one removes them. Which
process a folder belongs to is told by a lock, so that a reused pid or another container's means
nothing. Imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "fullgraph-run-"
# A socket's path has 107 characters at most.
_LONGEST_BASE = 80
_locks: dict[Path, int] = {}


def make_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for sockets."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) >= _LONGEST_BASE:
        base = Path("/tmp")
    for left in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or somebody else's
            descriptor = _lock(left, fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
            os.close(descriptor)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    with contextlib.suppress(OSError):
        _locks[folder] = _lock(folder)
    # Another process may have taken it for left behind before it was locked.
    return folder if folder.is_dir() else make_folder()


def remove_folder(folder: Path) -> None:
    """Remove a folder of make_folder's; nothing happens if that was done before."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _locks:
        os.close(_locks.pop(folder))


def remove_all() -> None:
    """Remove every folder that this process has left, for it is about to end."""
    for folder in list(_locks):
        remove_folder(folder)


def _lock(folder: Path, flags: int = 0) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
