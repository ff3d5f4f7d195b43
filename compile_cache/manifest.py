"""An entry's table of contents: which fingerprint it belongs to, and every file with its size and
sha256.

    manifest.json     this; written last and atomically, so that what it names is complete
    objects/<sha256>  contents
    lock              held while an entry is changed
    work/<name>/      one running process's own copy of the files, where torch reads and writes

A file's name is its path below a process's work folder. Knows nothing of locks, torch or which
entry is wanted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compile_cache.files import is_safe_name, is_trusted, make_folder, write_atomic
from compile_cache.fingerprint import Fingerprint

FORMAT = 1
MANIFEST = "manifest.json"
OBJECTS = "objects"
_MOST_BYTES = 64 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Damaged(Exception):
    """A manifest or an object that cannot be used; the message says why."""


@dataclass(frozen=True)
class FileRecord:
    """Content of one stored file: size in bytes and sha256 in hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What an entry holds.

    Attributes:
        fingerprint: what the artefacts depend on.
        files: relative POSIX name to content.
        notes: JSON facts of the process that filled it: "jobs" (name to seconds), number of KV
            pages and the like.
        created: seconds since the epoch.
    """

    fingerprint: Fingerprint
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    @property
    def jobs(self) -> dict[str, float]:
        """Finished jobs to the seconds they took."""
        jobs = self.notes.get("jobs")
        return dict(jobs) if isinstance(jobs, dict) else {}

    def to_bytes(self) -> bytes:
        """The JSON text."""
        data = {
            "format": FORMAT,
            "digest": self.fingerprint.digest,
            "created": self.created,
            "fingerprint": self.fingerprint.to_json(),
            "notes": dict(self.notes),
            "files": {name: [r.size, r.sha256] for name, r in sorted(self.files.items())},
        }
        return json.dumps(data, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse and check everything that a later step relies on.

        Raises:
            Damaged: not JSON, another format, a fingerprint that does not match its digest, an
                unsafe file name.
        """
        try:
            tree = json.loads(data)
            if tree["format"] != FORMAT:
                raise Damaged(f"format {tree['format']!r}, this version reads {FORMAT}")
            fingerprint = Fingerprint.from_json(tree["fingerprint"])
            files = {name: FileRecord(int(s), str(h)) for name, (s, h) in tree["files"].items()}
            notes, created = dict(tree["notes"]), float(tree["created"])
            digest = tree["digest"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"{MANIFEST} is not readable ({error})") from error
        if fingerprint.digest != digest:
            raise Damaged(f"{MANIFEST} has digest {digest!r}, its parts {fingerprint.digest!r}")
        for name, record in files.items():
            if not is_safe_name(name) or record.size < 0 or not _SHA256.fullmatch(record.sha256):
                raise Damaged(f"{MANIFEST} names an impossible file {name!r}")
        return cls(fingerprint, files, notes, created)


def read_manifest(entry: Path) -> Manifest:
    """The manifest of an entry's folder.

    Raises:
        FileNotFoundError: there is none.
        Damaged: it cannot be used, or someone else may have written it.
    """
    path = entry / MANIFEST
    try:
        for checked in (entry, path):
            if not is_trusted(checked):
                raise Damaged(f"{checked} belongs to another user or can be written by others")
        if path.stat().st_size > _MOST_BYTES:
            raise Damaged(f"{path} is too large")
        return Manifest.from_bytes(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error})") from error


def usable_manifest(entry: Path) -> Manifest | None:
    """The manifest of an entry's folder; None where there is none or it cannot be used."""
    with contextlib.suppress(FileNotFoundError, Damaged):
        return read_manifest(entry)
    return None


def read_object(entry: Path, record: FileRecord) -> bytes:
    """The content of one file, checked.

    Raises:
        Damaged: missing, unreadable, truncated or changed.
    """
    path = entry / OBJECTS / record.sha256
    try:
        # Read no more than one byte past what is right: a file may have grown to anything.
        with open(path, "rb") as file:
            data = file.read(record.size + 1)
    except OSError as error:
        raise Damaged(f"cannot be read ({error})") from error
    if len(data) != record.size:
        raise Damaged(f"has {len(data)} bytes instead of {record.size}")
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise Damaged("has changed since it was stored")
    return data


def write_object(entry: Path, data: bytes) -> FileRecord:
    """Store a content under its hash; a sound one that is already there stays.

    Raises:
        OSError: no room, or no right to write.
    """
    record = FileRecord(len(data), hashlib.sha256(data).hexdigest())
    make_folder(entry / OBJECTS)
    try:
        read_object(entry, record)
    except Damaged:
        write_atomic(entry / OBJECTS / record.sha256, data)
    return record


def write_manifest(entry: Path, manifest: Manifest) -> None:
    """Commit: from here on the entry holds exactly what the manifest names.

    Raises:
        OSError: no room, or no right to write.
    """
    write_atomic(entry / MANIFEST, manifest.to_bytes())


def sweep_objects(entry: Path, manifest: Manifest) -> None:
    """Remove contents that the manifest does not name, and leftovers of killed writers. Hold the
    entry's lock.
    """
    wanted = {record.sha256 for record in manifest.files.values()}
    for folder in filter(Path.is_dir, (entry, entry / OBJECTS)):
        for path in folder.iterdir():
            leftover = path.name.startswith(".")
            if path.is_file() and (leftover or folder != entry and path.name not in wanted):
                path.unlink(missing_ok=True)
