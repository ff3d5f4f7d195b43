"""Entries of a store to test with, and a `warn` that remembers."""

from __future__ import annotations

from pathlib import Path

from compile_cache.files import make_folder
from compile_cache.fingerprint import Fingerprint
from compile_cache.manifest import OBJECTS
from compile_cache.session import Session
from compile_cache.store import Store

HERE = Fingerprint({"torch": "2.13.0", "config.parallel.tp": 1})
OTHER = Fingerprint({"torch": "2.11.0", "config.parallel.tp": 1})
ROOT = Path(__file__).resolve().parents[2]


class Warnings(list[str]):
    """A `warn` callable that remembers."""

    def __call__(self, message: str) -> None:
        self.append(message)


def inductor_file(session: Session, name: str) -> Path:
    assert session.work is not None
    path = session.work / "inductor" / name
    make_folder(path.parent)
    return path


def fill(store: Store, fingerprint: Fingerprint = HERE) -> None:
    with store.open(fingerprint) as session:
        assert session.put("decode/plain", b"artefact" * 100)
        inductor_file(session, "ab/kernel.so").write_bytes(b"machine code")
        session.finish_job("decode plain", 3.5)
        session.note("num_pages", 100)
        assert session.seal()


def objects(store: Store) -> list[Path]:
    return sorted((store.path(HERE) / OBJECTS).iterdir())
