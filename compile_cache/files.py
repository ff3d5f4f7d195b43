"""Files that other processes may read, write or damage at any moment: atomic writes, locks,
ownership.

Everything here either succeeds or raises OSError; it never leaves half a file under its final name.
Knows nothing of what the files hold.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

try:
    import fcntl
except ImportError:  # not a POSIX system: no locks, so that the last writer wins
    fcntl = None  # type: ignore[assignment]


def write_atomic(path: Path, data: bytes) -> None:
    """Write a temporary file beside `path`, sync it and rename it into place, so that no reader
    ever sees a part.

    Raises:
        OSError: the disk is full or read-only; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "wb") as file:
            # Whatever the umask: is_trusted refuses what others can write.
            os.chmod(temporary, 0o644)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, writable by this user alone; nothing happens where it
    exists.
    """
    if not path.is_dir():
        # Path.mkdir(parents=True) would leave the parents' mode to the umask.
        make_folder(path.parent)
        path.mkdir(mode=0o755, exist_ok=True)


def is_trusted(path: Path) -> bool:
    """Whether only this user and root can have written `path`: artefacts are code that the engine
    will run.
    """
    if not hasattr(os, "geteuid"):
        return True
    status = path.stat()
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_safe_name(name: str) -> bool:
    """Whether a stored relative name stays below the folder that it is joined to."""
    parts = PurePosixPath(name).parts
    plain = name == "/".join(parts) and "\\" not in name and "\0" not in name
    return plain and bool(parts) and parts[0] != "/" and ".." not in parts


def try_lock(path: Path) -> int | None:
    """A descriptor that holds an exclusive lock on `path` until it is closed or the process ends;
    None: it is taken.

    Raises:
        OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _acquire(descriptor, path, 0)
    except TimeoutError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold an exclusive lock on `path`, made where missing; yields False where the file system has
    no locks.

    The lock dies with the process, so that a killed holder blocks nobody.

    Raises:
        TimeoutError: another process held it for `timeout_s` seconds.
        OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _acquire(descriptor, path, timeout_s)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, timeout_s: float) -> bool:
    if fcntl is None:
        return False
    end = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return False
        if time.monotonic() >= end:
            raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock", str(path))
        time.sleep(0.02)


def _sync_folder(folder: Path) -> None:
    # Makes the rename itself survive a power cut; some file systems refuse to sync folders.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
