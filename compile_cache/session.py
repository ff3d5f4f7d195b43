"""One process's view of one entry: a private work folder for torch to read and write, and `seal` to
keep what is new.

    open:  stored files, each checked against its hash, are copied into a folder of this process
        alone
    use:   torch's caches point there (`environment`); blobs are read and written there (`get`,
        `put`)
    seal:  new files are stored under their hashes, then the manifest is replaced: all or nothing
    refresh: what other processes have sealed meanwhile comes in

Whatever happens to a process while it compiles, half a file can thus never be found by another one.
No method raises because of the disk: it warns, and the process goes on without the cache. Knows
nothing of what is compiled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from compile_cache.files import is_safe_name, is_trusted, locked, make_folder, try_lock
from compile_cache.fingerprint import Fingerprint
from compile_cache.manifest import (
    Damaged,
    FileRecord,
    Manifest,
    read_object,
    sweep_objects,
    usable_manifest,
    write_manifest,
    write_object,
)

Warn = Callable[[str], None]

BLOBS, INDUCTOR, TRITON = "blobs", "inductor", "triton"
WORK, GUARD, LOCK, BUILD = "work", "guard", "lock", "build"
# A seal takes well under a second; a holder that needs longer has a sick disk.
_LOCK_TIMEOUT_S = 30.0
# Torch needs room to compile even when nothing is kept; below this a temporary folder elsewhere is
# tried.
_LEAST_FREE_BYTES = 256 << 20
_GROUP_PREFIX = "__grp__"


class Session:
    """An opened entry. Use as a context manager, or call `close`.

    Attributes:
        manifest: what was found at the start; empty on a miss.
        work: this process's own folder, or None where none could be made (nothing is cached then).
        damaged: names that the manifest has and that could not be used, and why.
    """

    def __init__(self, entry: Path, fingerprint: Fingerprint, found: Manifest | None, warn: Warn):
        self._entry = entry
        self._warn = warn
        self._lock: int | None = None
        self._mutex = threading.Lock()  # a variant may be compiled and put in the background
        self._seen: dict[str, tuple[int, int]] = {}
        self._notes: dict[str, Any] = {}
        self._jobs: dict[str, float] = {}
        self.damaged: dict[str, str] = {}
        self.manifest = found or Manifest(fingerprint)
        self.work = self._make_work()
        if self.work is not None and found is not None:
            self._restore(self.work, found.files)
            for _ in range(3):
                if self.damaged:  # or stored anew by another process, and the old object swept
                    self._take_in(self.work)
            self._tell_damage()
        # Which job made a damaged file is not known: all run again, and find what is sound.
        self._forgotten = frozenset(self.manifest.jobs if self.damaged else ())

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environment(self) -> dict[str, str]:
        """Variables to set before torch compiles anything in this process or its workers."""
        if self.work is None:
            return {}
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / INDUCTOR),
            "TRITON_CACHE_DIR": str(self.work / TRITON),
        }

    def get(self, name: str) -> bytes | None:
        """A blob, or None: never stored, or damaged."""
        if self.work is None:
            return None
        with contextlib.suppress(OSError):
            return (self.work / BLOBS / _checked(name)).read_bytes()
        return None

    def path(self, name: str) -> Path | None:
        """Where a blob lies in this process's own folder, for loaders that want a file."""
        path = None if self.work is None else self.work / BLOBS / _checked(name)
        return path if path is not None and path.is_file() else None

    def put(self, name: str, data: bytes) -> bool:
        """Keep a blob, for good after the next `seal`; False where it could not be written."""
        if self.work is None:
            return False
        path = self.work / BLOBS / _checked(name)
        try:
            with self._mutex:
                make_folder(path.parent)
                path.write_bytes(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._warn(f"compile cache: {name} is not kept ({error})")
            return False
        return True

    @property
    def jobs(self) -> dict[str, float]:
        """Finished jobs to the seconds they took: those of the entry and those of this process."""
        return self._all_jobs(self.manifest)

    def finish_job(self, name: str, seconds: float) -> None:
        """Remember that a job is done; kept by the next `seal`."""
        self._jobs[name] = seconds

    def note(self, key: str, value: Any) -> None:
        """Remember a JSON fact about this entry; kept by the next `seal`."""
        self._notes[key] = value

    def seal(self) -> bool:
        """Store what is new in the work folder. Call while nothing compiles: a file half written
        would be kept so.

        Returns:
            Whether the entry now holds it; a warning says why not.
        """
        if self.work is None:
            return False
        if not self._has_news(self.work):
            return True
        try:
            make_folder(self._entry)
            with self._mutex, locked(self._entry / LOCK, _LOCK_TIMEOUT_S) as exclusive:
                self._commit(self.work, exclusive)
        except OSError as error:
            self._warn(f"compile cache: {self._entry} was not updated ({error})")
            return False
        return True

    @contextlib.contextmanager
    def building(self, waits: Callable[[], None]) -> Iterator[None]:
        """Around building all that the entry lacks: one process at a time. Another one waits, after
        a call of `waits`, and begins with what that one has made. The lock dies with its holder.

        Raises:
            OSError: the disk refuses.
        """
        make_folder(self._entry)
        free = try_lock(self._entry / BUILD)
        if free is None:
            waits()
        else:
            os.close(free)
        with locked(self._entry / BUILD, math.inf):
            self.refresh()
            yield

    def can_keep(self) -> bool:
        """Whether `seal` would work; a warning says why not."""
        try:
            make_folder(self._entry)
            with locked(self._entry / LOCK, _LOCK_TIMEOUT_S):
                pass
            if shutil.disk_usage(self._entry).free < _LEAST_FREE_BYTES:
                raise OSError(f"less than {_LEAST_FREE_BYTES >> 20} MiB are free")
        except OSError as error:
            self._warn(f"compile cache: nothing can be kept in {self._entry} ({error})")
            return False
        return True

    def refresh(self) -> None:
        """Take in what other processes have sealed since this one opened the entry."""
        if self.work is None:
            return
        with self._mutex:
            if self._take_in(self.work) and not self.damaged:
                self._forgotten = frozenset()
        self._tell_damage()

    def _take_in(self, work: Path) -> bool:
        """Restore what the stored manifest has and this one lacks or could not use."""
        stored = usable_manifest(self._entry)
        if stored is None:
            return False
        self._restore(work, stored.files)  # a seal of ours named others' files, and read none
        self.manifest = stored
        return True

    def close(self) -> None:
        """Give the work folder back. Anything not sealed is lost."""
        work, self.work = self.work, None
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
            work.with_suffix(".lock").unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _commit(self, work: Path, exclusive: bool) -> None:
        stored = usable_manifest(self._entry) or Manifest(self.manifest.fingerprint)
        files = {n: r for n, r in stored.files.items() if self._is_sound(n, r)}
        states: dict[str, tuple[int, int]] = {}
        for name, path, states[name] in list(self._news(work, files)):
            files[name] = write_object(self._entry, path.read_bytes())
        notes = {**stored.notes, **self._notes, "jobs": self._all_jobs(stored)}
        changed = replace(stored, files=files, notes=notes)
        write_manifest(self._entry, changed)
        self._seen.update(states)
        self.manifest = changed
        self.damaged.clear()
        if exclusive:
            sweep_objects(self._entry, changed)

    def _has_news(self, work: Path) -> bool:
        """Whether anything here is not in the manifest as it was last seen."""
        stored = self.manifest
        if self.damaged or self._jobs.keys() - stored.jobs.keys():
            return True
        if any(stored.notes.get(key) != value for key, value in self._notes.items()):
            return True
        return any(True for _ in self._news(work, stored.files))

    def _all_jobs(self, stored: Manifest) -> dict[str, float]:
        jobs = {n: s for n, s in stored.jobs.items() if n not in self._forgotten}
        return {**jobs, **self._jobs}

    def _is_sound(self, name: str, record: FileRecord) -> bool:
        if name in self.damaged:  # unless another process has stored it again since
            with contextlib.suppress(Damaged):
                return bool(read_object(self._entry, record)) or record.size == 0
            return False
        return True

    def _news(
        self, work: Path, stored: Mapping[str, FileRecord]
    ) -> Iterator[tuple[str, Path, tuple[int, int]]]:
        """Name, path and state of each file that was made here and is not stored."""
        for path in sorted(work.rglob("*")):
            name = path.relative_to(work).as_posix()
            if _is_scratch(name) or path.is_symlink() or not path.is_file():
                continue
            state = _state(path)
            # Torch names files by what went into them, so that one that another process stored is
            # as good as ours; a blob may have been put anew.
            mine = name.startswith(f"{BLOBS}/") and self._seen.get(name) != state
            if mine or name not in stored:
                yield name, path, state

    def _restore(self, work: Path, files: Mapping[str, FileRecord]) -> None:
        for name, record in files.items():
            path = work / name
            if path.exists():  # this process made its own meanwhile
                continue
            self.damaged.pop(name, None)
            try:
                data = read_object(self._entry, record)
                if path.name.startswith(_GROUP_PREFIX):
                    data = _relocate_group(data, path.parent)
                make_folder(path.parent)
                path.write_bytes(data)
                self._seen[name] = _state(path)
            except Damaged as error:
                self.damaged[name] = str(error)
            except OSError as error:
                path.unlink(missing_ok=True)
                self._warn(f"compile cache: {self._entry} cannot be used ({error})")
                return

    def _tell_damage(self) -> None:
        if self.damaged:
            shown = "; ".join(f"{n} {why}" for n, why in list(self.damaged.items())[:3])
            self._warn(
                f"compile cache: {len(self.damaged)} of {len(self.manifest.files)} files in "
                f"{self._entry} are damaged and will be built again: {shown}"
            )

    def _make_work(self) -> Path | None:
        reasons = []
        user = os.geteuid() if hasattr(os, "geteuid") else 0
        elsewhere = Path(tempfile.gettempdir()) / f"fullgraph-{user}"
        for base, checked in ((self._entry / WORK, self._entry), (elsewhere, elsewhere)):
            try:
                return self._make_work_in(base, checked)
            except OSError as error:
                reasons.append(str(error))
        self._warn(f"compile cache: no folder to work in, nothing is cached ({'; '.join(reasons)})")
        return None

    def _make_work_in(self, base: Path, checked: Path) -> Path:
        make_folder(base)
        if not (is_trusted(base) and is_trusted(checked)):
            raise OSError(f"{base} belongs to another user or can be written by others")
        if shutil.disk_usage(base).free < _LEAST_FREE_BYTES:
            raise OSError(f"{base} has less than {_LEAST_FREE_BYTES >> 20} MiB free")
        work = base / f"{os.getpid()}-{secrets.token_hex(4)}"
        sweep_work(base)
        # The guard keeps another process from sweeping a lock that was made and is not held yet.
        with locked(base / GUARD, _LOCK_TIMEOUT_S):
            self._lock = try_lock(work.with_suffix(".lock"))
        work.mkdir(mode=0o700)
        for name in (BLOBS, INDUCTOR, TRITON):
            (work / name).mkdir()
        return work


def is_live(entry: Path) -> bool:
    """Whether a running process has the entry open."""
    return any(_is_held(lock) for lock in (entry / WORK).glob("*.lock"))


def sweep_work(base: Path) -> None:
    """Remove work folders of processes that died, as far as the disk allows."""
    with contextlib.suppress(OSError), locked(base / GUARD, _LOCK_TIMEOUT_S):
        for lock in base.glob("*.lock"):
            if not _is_held(lock):
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink(missing_ok=True)


def _is_held(lock: Path) -> bool:
    try:
        descriptor = try_lock(lock)
    except OSError:
        return True
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def _checked(name: str) -> str:
    assert is_safe_name(name), f"not a blob name: {name!r}"
    return name


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _is_scratch(name: str) -> bool:
    """Locks, bytecode and unfinished files of torch and Triton."""
    path = PurePosixPath(name)
    parts = path.parts
    return (
        path.suffix in (".lock", ".tmp", ".pyc")
        or path.name == "lock"
        or any(p in ("locks", "__pycache__") or p.startswith("tmp.pid_") for p in parts)
    )


def _relocate_group(data: bytes, folder: Path) -> bytes:
    """Triton's list of a kernel's files holds absolute paths: point them at this folder."""
    try:
        group = json.loads(data)
        children = {n: str(folder / PurePosixPath(p).name) for n, p in group["child_paths"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return data
    return json.dumps({**group, "child_paths": children}).encode()
