"""A cache entry as one file, to carry it to another machine of the same fingerprint.

The file is an uncompressed tar: manifest.json first, then objects/<sha256>. Artefacts are code that
the engine runs: take in only files that you trust. What is checked here is that a file cannot write
outside the cache and that its contents are what its manifest says.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import tarfile
from dataclasses import replace
from pathlib import Path

from compile_cache.files import locked, make_folder
from compile_cache.fingerprint import Fingerprint, explain
from compile_cache.manifest import (
    MANIFEST,
    OBJECTS,
    Damaged,
    Manifest,
    read_manifest,
    read_object,
    usable_manifest,
    write_manifest,
    write_object,
)
from compile_cache.session import LOCK
from compile_cache.store import CacheError, Store

_MOST_MANIFEST_BYTES = 64 << 20
_LOCK_TIMEOUT_S = 30.0


def export(store: Store, fingerprint: Fingerprint, file: Path) -> int:
    """Write the entry of a fingerprint to `file`, which appears complete or not at all.

    Returns:
        The size of the file in bytes.

    Raises:
        CacheError: there is no entry, it is damaged, or the file cannot be written.
    """
    entry = store.path(fingerprint)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        manifest = read_manifest(entry)
    except FileNotFoundError as error:
        raise CacheError(f"nothing is cached for this configuration in {store.root}") from error
    except Damaged as error:
        raise CacheError(f"{entry} cannot be used: {error}") from error
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
            _add(tar, MANIFEST, manifest.to_bytes())
            for record in {r.sha256: r for r in manifest.files.values()}.values():
                _add(tar, f"{OBJECTS}/{record.sha256}", read_object(entry, record))
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, file)
    except Damaged as error:
        raise CacheError(f"{entry} is damaged: {error}; warm it up again") from error
    except OSError as error:
        raise CacheError(f"{file} cannot be written ({error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return file.stat().st_size


def import_(store: Store, fingerprint: Fingerprint, file: Path) -> Manifest:
    """Take in a file that `export` made, if it is for this fingerprint; an entry that exists is
    added to.

    Returns:
        What the entry holds now.

    Raises:
        CacheError: not such a file, for another fingerprint (the message has both values of each
            part), or no room.
    """
    try:
        with tarfile.open(file, "r:") as tar:
            members = _members(tar, file)
            manifest = _manifest_of(tar, members, file)
            differences = fingerprint.diff(manifest.fingerprint)
            if differences:
                raise CacheError(
                    f"{file} is for another machine or configuration:\n{explain(differences)}"
                )
            return _take(store, manifest, tar, members, file)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise CacheError(f"{file} is not an exported compile cache ({error})") from error
    except OSError as error:
        raise CacheError(f"{file} cannot be taken in ({error})") from error


def _take(
    store: Store,
    manifest: Manifest,
    tar: tarfile.TarFile,
    members: dict[str, tarfile.TarInfo],
    file: Path,
) -> Manifest:
    entry = store.path(manifest.fingerprint)
    make_folder(entry)
    with locked(entry / LOCK, _LOCK_TIMEOUT_S):
        for record in {r.sha256: r for r in manifest.files.values()}.values():
            data = _read(tar, members.get(f"{OBJECTS}/{record.sha256}"), record.size)
            if data is None or write_object(entry, data) != record:
                raise CacheError(
                    f"{file} is damaged: {record.sha256} is missing or not what it was"
                )
        stored = usable_manifest(entry) or manifest
        jobs = {**stored.jobs, **manifest.jobs}
        merged = replace(
            stored,
            files={**stored.files, **manifest.files},
            notes={**stored.notes, **manifest.notes, "jobs": jobs},
        )
        write_manifest(entry, merged)
    return merged


def _members(tar: tarfile.TarFile, file: Path) -> dict[str, tarfile.TarInfo]:
    members = {}
    for member in tar:
        head, _, name = member.name.rpartition("/")
        named = head == OBJECTS and len(name) == 64 and set(name) <= set("0123456789abcdef")
        if not member.isreg() or not (named or member.name == MANIFEST):
            raise CacheError(f"{file} is refused: it holds {member.name!r}, which no export writes")
        members[member.name] = member
    return members


def _manifest_of(tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo], file: Path) -> Manifest:
    data = _read(tar, members.get(MANIFEST), _MOST_MANIFEST_BYTES)
    try:
        if data is None:
            raise Damaged(f"it holds no {MANIFEST}")
        return Manifest.from_bytes(data)
    except Damaged as error:
        raise CacheError(f"{file} is not an exported compile cache ({error})") from error


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo | None, most: int) -> bytes | None:
    # Nothing is ever extracted by its name: contents are read here and stored under their own hash.
    if member is None or member.size > most:
        return None
    stream = tar.extractfile(member)
    return None if stream is None else stream.read(most + 1)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o644
    tar.addfile(info, io.BytesIO(data))
