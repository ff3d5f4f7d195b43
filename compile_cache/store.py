"""All entries of one user: look up a fingerprint, open an entry, list, measure and prune.

    $XDG_CACHE_HOME/fullgraph/          or compile.cache_dir, or ~/.cache/fullgraph
        <digest of the fingerprint>/    one entry, see manifest.py
            used                        its modification time is when the entry was last opened

Knows nothing of torch. Only `Store.open` writes, and a disk that refuses never stops a start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from compile_cache.files import locked
from compile_cache.fingerprint import Difference, Fingerprint, explain
from compile_cache.manifest import (
    MANIFEST,
    OBJECTS,
    Damaged,
    Manifest,
    read_manifest,
    read_object,
    usable_manifest,
)
from compile_cache.session import LOCK, WORK, Session, Warn, is_live, sweep_work

_LOCK_TIMEOUT_S = 5.0


class CacheError(Exception):
    """A cache file that a user named cannot be written or taken in; the message says why."""


@dataclass(frozen=True)
class Hit:
    """An entry of this very fingerprint.

    Attributes:
        manifest: what it holds.
        damaged: files that are missing, truncated or changed, with the reason: they will be built
            again.
    """

    manifest: Manifest
    damaged: Mapping[str, str]

    def __str__(self) -> str:
        text = f"hit: {len(self.manifest.files)} files, {format_size(self.manifest.size)}"
        return f"{text}, {len(self.damaged)} of them damaged" if self.damaged else text


@dataclass(frozen=True)
class Miss:
    """No usable entry.

    Attributes:
        reason: one sentence.
        differences: each part in which the nearest other entry differs, with both values; empty
            where there is none.
    """

    reason: str
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        return f"miss: {self.reason}" + (
            f"\n{explain(self.differences)}" if self.differences else ""
        )


@dataclass(frozen=True)
class Entry:
    """One folder of the store.

    Attributes:
        path: the folder; its name is the digest.
        manifest: None where it cannot be read.
        size: bytes on disk.
        used: when it was last opened, seconds since the epoch.
    """

    path: Path
    manifest: Manifest | None
    size: int
    used: float


def default_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Where artefacts lie unless `compile.cache_dir` says otherwise."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG rules: a relative path there is to be ignored.
    folder = Path(base) if os.path.isabs(base) else Path(environ.get("HOME", "~")) / ".cache"
    return folder.expanduser() / "fullgraph"


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


class Store:
    """The entries below one folder.

    Args:
        root: the folder; None: `default_root()`. It need not exist.
        warn: told in one line about everything that could not be read or kept.
    """

    def __init__(self, root: Path | None = None, warn: Callable[[str], None] = _warn) -> None:
        self.root = root if root is not None else default_root()
        self.warn: Warn = warn

    def lookup(self, fingerprint: Fingerprint) -> Hit | Miss:
        """What a start with this fingerprint would find. Reads and checks every file; writes
        nothing.
        """
        entry = self.path(fingerprint)
        try:
            manifest = read_manifest(entry)
        except FileNotFoundError:
            return self._nearest(fingerprint)
        except Damaged as error:
            return Miss(str(error))
        damaged = {}
        for name, record in manifest.files.items():
            try:
                read_object(entry, record)
            except Damaged as error:
                damaged[name] = str(error)
        return Hit(manifest, damaged)

    def open(self, fingerprint: Fingerprint) -> Session:
        """Open the entry, whether it exists or not; what killed processes left in any entry goes.
        Never raises because of the disk: see Session.work.
        """
        entry = self.path(fingerprint)
        found = None
        try:
            found = read_manifest(entry)
            (entry / "used").touch()
        except FileNotFoundError:
            pass
        except Damaged as error:
            self.warn(f"compile cache: starting without {entry}: {error}")
        except OSError:
            pass  # a read-only cache is used all the same; only the time of its use is not noted
        for work in self.root.glob(f"*/{WORK}"):
            sweep_work(work)
        return Session(entry, fingerprint, found, self.warn)

    def path(self, fingerprint: Fingerprint) -> Path:
        """The folder of a fingerprint's entry."""
        return self.root / fingerprint.digest

    def size(self, fingerprint: Fingerprint) -> int:
        """Bytes on disk of a fingerprint's entry; 0 where there is none."""
        return _entry(self.path(fingerprint)).size

    def entries(self) -> list[Entry]:
        """All of them, the one used last first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.root.iterdir():
                if (path / MANIFEST).is_file() or (path / OBJECTS).is_dir():
                    found.append(_entry(path))
        return sorted(found, key=lambda e: (-e.used, e.path.name))

    def prune(self, keep: int) -> list[Entry]:
        """Remove all but the `keep` entries used last; those that a process has open stay.

        Returns:
            What was removed.
        """
        removed = []
        for entry in self.entries()[keep:]:
            if is_live(entry.path):
                continue
            try:
                with locked(entry.path / LOCK, _LOCK_TIMEOUT_S):
                    # The manifest first: without it the rest is no entry, even if the removal stops
                    # half way.
                    (entry.path / MANIFEST).unlink(missing_ok=True)
                    shutil.rmtree(entry.path)
            except OSError as error:
                self.warn(f"compile cache: {entry.path} was not removed ({error})")
                continue
            removed.append(entry)
        return removed

    def _nearest(self, fingerprint: Fingerprint) -> Miss:
        others = [e.manifest for e in self.entries() if e.manifest is not None]
        if not others:
            return Miss(f"nothing is cached in {self.root}")
        diffs = [fingerprint.diff(manifest.fingerprint) for manifest in others]
        return Miss(
            "no entry has this fingerprint; the nearest one differs in", min(diffs, key=len)
        )


def format_size(size: int) -> str:
    """Bytes for a person to read."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _entry(path: Path) -> Entry:
    size, used = 0, 0.0
    for name in ("used", MANIFEST):
        with contextlib.suppress(OSError):
            used = max(used, (path / name).stat().st_mtime)
    with contextlib.suppress(OSError):
        files = [path / MANIFEST, *(path / OBJECTS).iterdir()]
        size = sum(file.stat().st_size for file in files if file.is_file())
    return Entry(path, usable_manifest(path), size, used)
