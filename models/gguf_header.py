"""The header of a GGUF file: its metadata, and where each tensor lies. Neither torch nor numpy.

Parsed here because the gguf package's reader takes seconds for a vocabulary's strings; 49k of them
take 0.1 s this way. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2
and 3, little endian. Knows nothing of what the keys mean.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import CheckpointError

_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufHeader:
    """What a header says.

    Attributes:
        metadata: key -> number, bool, str or list of these.
        tensors: name -> (shape in torch's order, number of the ggml type, offset behind `data`).
        data: where in the file the tensors' bytes begin.
    """

    metadata: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, int]]
    data: int


def read_gguf_header(path: Path, longest: float = math.inf) -> GgufHeader:
    """Parse a file's header; lists of more than `longest` items are left out.

    Raises:
        CheckpointError: it is no GGUF file of version 2 or 3.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Header(data, longest).parse()
    except (OSError, struct.error, KeyError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from error


class _Header:
    """A position in the header that values are read from."""

    def __init__(self, data: mmap.mmap, longest: float) -> None:
        self._data, self._longest = data, longest
        self._at = 0

    def parse(self) -> GgufHeader:
        magic, version = self._take("4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        num_tensors, num_keys = self._take("QQ")
        pairs = ((self._string(), self._value(*self._take("I"))) for _ in range(num_keys))
        metadata = {key: value for key, value in pairs if value is not None}
        tensors = {self._string(): self._tensor() for _ in range(num_tensors)}
        alignment = metadata.get("general.alignment", 32)
        return GgufHeader(metadata, tensors, -(-self._at // alignment) * alignment)

    def _take(self, code: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return values

    def _string(self) -> str:
        return self._strings(1, True)[0]

    def _strings(self, count: int, kept: bool) -> list[str]:
        data, at, unpack = self._data, self._at, _LENGTH.unpack_from
        result = []
        for _ in range(count):
            start = at + _LENGTH.size
            at = start + unpack(data, at)[0]
            if at > len(data):
                raise struct.error("a string goes past the end of the file")
            if kept:
                result.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        return result

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(_SCALARS[kind])[0]
        item, count = self._take("IQ")
        kept = count <= self._longest
        if item == _STRING:
            values = self._strings(count, kept)
        elif item == _ARRAY:
            values = [self._value(item) for _ in range(count)]
        else:
            values = list(self._take(f"{count}{_SCALARS[item]}"))
        return values if kept else None

    def _tensor(self) -> tuple[tuple[int, ...], int, int]:
        (num_dims,) = self._take("I")
        dims = self._take(f"{num_dims}Q")
        kind, offset = self._take("IQ")
        return tuple(reversed(dims)), kind, offset
