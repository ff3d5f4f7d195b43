"""Export and import: one file, for the same fingerprint only, that cannot write anywhere else."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from pathlib import Path

import pytest

from compile_cache import archive as archive_module
from compile_cache.archive import export, import_
from compile_cache.fingerprint import Fingerprint
from compile_cache.manifest import MANIFEST, OBJECTS
from compile_cache.store import CacheError, Hit, Miss, Store

HERE = Fingerprint({"torch": "2.13.0", "gpu.name": "NVIDIA H200"})
OTHER = Fingerprint({"torch": "2.13.0", "gpu.name": "NVIDIA H100"})


def fail(message: str) -> None:
    raise AssertionError(message)


@pytest.fixture
def source(tmp_path: Path) -> Store:
    store = Store(tmp_path / "source", fail)
    with store.open(HERE) as session:
        session.put("decode", b"d" * 5000)
        session.put("same", b"d" * 5000)
        session.put("empty", b"")
        session.finish_job("decode", 2.0)
        assert session.seal()
    return store


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return Store(tmp_path / "target", fail)


def test_round_trip(source: Store, target: Store, tmp_path: Path) -> None:
    file = tmp_path / "cache.tar"
    size = export(source, HERE, file)
    assert size == file.stat().st_size
    manifest = import_(target, HERE, file)
    assert manifest.notes["jobs"] == {"decode": 2.0}
    hit = target.lookup(HERE)
    assert isinstance(hit, Hit) and not hit.damaged
    with target.open(HERE) as session:
        assert [session.get(n) for n in ("decode", "same", "empty")] == [b"d" * 5000] * 2 + [b""]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache.tar", "source", "target"]


def test_import_adds_to_what_is_there(source: Store, target: Store, tmp_path: Path) -> None:
    with target.open(HERE) as session:
        session.put("own", b"own")
        session.finish_job("own", 1.0)
        session.seal()
    export(source, HERE, tmp_path / "f")
    manifest = import_(target, HERE, tmp_path / "f")
    assert set(manifest.files) == {"blobs/own", "blobs/decode", "blobs/same", "blobs/empty"}
    assert manifest.notes["jobs"] == {"own": 1.0, "decode": 2.0}


def test_another_machines_file_is_refused_with_both_values(
    source: Store, target: Store, tmp_path: Path
) -> None:
    export(source, HERE, tmp_path / "f")
    with pytest.raises(CacheError) as error:
        import_(target, OTHER, tmp_path / "f")
    assert '"NVIDIA H200" there, "NVIDIA H100" here' in str(error.value)
    assert isinstance(target.lookup(HERE), Miss) and isinstance(target.lookup(OTHER), Miss)


def test_nothing_to_export(target: Store, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="nothing is cached"):
        export(target, HERE, tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_a_damaged_entry_is_not_exported(source: Store, tmp_path: Path) -> None:
    for path in (source.path(HERE) / OBJECTS).iterdir():
        path.write_bytes(b"garbage")
    with pytest.raises(CacheError, match="damaged"):
        export(source, HERE, tmp_path / "f")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_export_to_a_full_disk_leaves_nothing(
    source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "f").write_bytes(b"the one before")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CacheError, match="No space"):
        export(source, HERE, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"the one before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "source"]
    with pytest.raises(CacheError, match="cannot be written"):
        export(source, HERE, tmp_path / "missing" / "f")


def test_import_on_a_full_disk(
    source: Store, target: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(source, HERE, tmp_path / "f")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive_module, "write_manifest", refuse)
    with pytest.raises(CacheError, match="No space"):
        import_(target, HERE, tmp_path / "f")
    assert isinstance(target.lookup(HERE), Miss)


def contents(file: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(file) as tar:
        return [(m, (tar.extractfile(m) or io.BytesIO()).read()) for m in tar]


def rewrite(file: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    with tarfile.open(file, "w") as tar:
        for member, data in members:
            tar.addfile(member, io.BytesIO(data))


def evil(kind: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(
        {
            "parent": "../../evil",
            "absolute": "/tmp/evil",
            "objects_parent": f"{OBJECTS}/../evil",
            "short": f"{OBJECTS}/abc",
        }.get(kind, f"{OBJECTS}/{'a' * 64}")
    )
    info.type = {
        "symlink": tarfile.SYMTYPE,
        "hardlink": tarfile.LNKTYPE,
        "device": tarfile.CHRTYPE,
        "fifo": tarfile.FIFOTYPE,
        "folder": tarfile.DIRTYPE,
    }.get(kind, tarfile.REGTYPE)
    info.linkname = "/etc/passwd"
    info.size = 4 if info.type == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize(
    "kind",
    ["parent", "absolute", "objects_parent", "short", "symlink", "hardlink", "device", "fifo",
     "folder"],
)  # fmt: skip
def test_members_that_no_export_writes_are_refused(
    source: Store, target: Store, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "f"
    export(source, HERE, file)
    rewrite(file, [*contents(file), (evil(kind), b"evil")])
    with pytest.raises(CacheError, match="refused"):
        import_(target, HERE, file)
    assert not (tmp_path / "evil").exists() and not Path("/tmp/evil").exists()
    assert isinstance(target.lookup(HERE), Miss)


@pytest.mark.parametrize("damage", ["flip", "missing", "no manifest", "short", "empty", "text"])
def test_a_damaged_file_is_refused(
    source: Store, target: Store, tmp_path: Path, damage: str
) -> None:
    file = tmp_path / "f"
    export(source, HERE, file)
    members = contents(file)
    if damage == "flip":
        members = [(m, d if m.name == MANIFEST else d.replace(b"d", b"e")) for m, d in members]
        rewrite(file, members)
    elif damage in ("missing", "no manifest"):
        rewrite(file, [x for x in members if (x[0].name == MANIFEST) == (damage == "missing")])
    else:
        whole = file.read_bytes()
        file.write_bytes({"short": whole[:2000], "empty": b"", "text": b"hello\n" * 999}[damage])
    with pytest.raises(CacheError):
        import_(target, HERE, file)
    assert isinstance(target.lookup(HERE), Miss)


def test_a_file_that_is_not_there(target: Store, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="No such file"):
        import_(target, HERE, tmp_path / "missing")
