"""The key-value header of a GGUF file, read without touching the tensors.

A 49k-token vocabulary takes about 0.1 s this way. Knows the layout of the header (version 2 and 3,
little endian) and nothing of what the keys mean.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from engine.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_LENGTH = struct.Struct("<Q")


class _Cursor:
    """Reads values one after the other out of a buffer."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, at, unpack = self._data, self._at, _LENGTH.unpack_from
        result = []
        for _ in range(count):
            start = at + _LENGTH.size
            at = start + unpack(data, at)[0]
            if at > len(data):
                raise struct.error("a string goes past the end of the file")
            result.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        return result

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("I"), self.scalar("Q")
        if item == _STRING:
            return self.strings(count)
        if item == _ARRAY:
            return [self.value(item) for _ in range(count)]
        size = struct.calcsize(f"<{_SCALARS[item]}") * count
        if self._at + size > len(self._data):
            raise struct.error("an array goes past the end of the file")
        values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self._data, self._at)
        self._at += size
        return list(values)


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Every key of the header with its value: numbers, booleans, str, and lists of these.

    Raises:
        ModelError: the file cannot be read, or is no GGUF file of version 2 or 3.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(data), data[:4])
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (struct.error, KeyError, ValueError, MemoryError) as error:
        raise ModelError(f"{path}: not a readable GGUF file: {error}") from None


def _read(cursor: _Cursor, magic: bytes) -> dict[str, Any]:
    cursor.scalar("I")
    version = cursor.scalar("I")
    if magic != _MAGIC or version not in _VERSIONS:
        raise ValueError(f"starts with {magic!r}, version {version}")
    cursor.scalar("Q")  # number of tensors
    metadata = {}
    for _ in range(cursor.scalar("Q")):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    return metadata
