"""Entries found, missed, damaged or tampered with: never a wrong artefact, never a crash."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from compile_cache.files import is_safe_name, make_folder
from compile_cache.fingerprint import Fingerprint
from compile_cache.manifest import MANIFEST, OBJECTS
from compile_cache.store import Hit, Miss, Store
from tests.compile_cache.entries import HERE, OTHER, Warnings, fill, inductor_file, objects


def test_first_a_miss_then_a_hit(store: Store, warned: Warnings) -> None:
    miss = store.lookup(HERE)
    assert isinstance(miss, Miss)
    assert "nothing is cached" in miss.reason
    fill(store)
    hit = store.lookup(HERE)
    assert isinstance(hit, Hit)
    assert not hit.damaged
    assert hit.manifest.notes == {"num_pages": 100, "jobs": {"decode plain": 3.5}}
    with store.open(HERE) as session:
        assert session.get("decode/plain") == b"artefact" * 100
        assert session.get("decode/full") is None
        path = session.path("decode/plain")
        assert path is not None and path.read_bytes() == b"artefact" * 100
        assert session.path("decode/full") is None
        assert inductor_file(session, "ab/kernel.so").read_bytes() == b"machine code"
        assert session.jobs == {"decode plain": 3.5}
        assert session.work is not None
        assert session.environment() == {
            "TORCHINDUCTOR_CACHE_DIR": str(session.work / "inductor"),
            "TRITON_CACHE_DIR": str(session.work / "triton"),
        }
    assert warned == []


def test_a_miss_names_the_nearest_entry_and_both_values(store: Store) -> None:
    fill(store, OTHER)
    fill(store, Fingerprint({"torch": "1.0", "config.parallel.tp": 8, "more": 1}))
    miss = store.lookup(HERE)
    assert isinstance(miss, Miss)
    assert [d.part for d in miss.differences] == ["torch"]
    assert '"2.11.0" there, "2.13.0" here' in str(miss)


def test_nothing_is_stored_before_seal_and_close_leaves_no_folder(store: Store) -> None:
    session = store.open(HERE)
    session.put("x", b"1")
    work = session.work
    assert work is not None and work.is_dir()
    session.close()
    assert not work.exists()
    assert isinstance(store.lookup(HERE), Miss)
    assert session.get("x") is None and not session.put("x", b"1") and not session.seal()
    assert session.environment() == {}


def test_seal_twice_and_replace_a_blob(store: Store) -> None:
    with store.open(HERE) as session:
        session.put("x", b"old")
        session.seal()
        session.put("x", b"newer")
        session.put("y", b"")
        session.seal()
    with store.open(HERE) as session:
        assert session.get("x") == b"newer"
        assert session.get("y") == b""
    objects = list((store.path(HERE) / OBJECTS).iterdir())
    assert len(objects) == 2  # the old content was swept


def test_an_entry_that_vanished_meanwhile_is_stored_again(store: Store) -> None:
    fill(store)
    with store.open(HERE) as session:
        (store.path(HERE) / MANIFEST).unlink()
        session.put("x", b"1")
        assert session.seal()
    hit = store.lookup(HERE)
    assert isinstance(hit, Hit) and not hit.damaged
    assert set(hit.manifest.files) == {"blobs/x", "blobs/decode/plain", "inductor/ab/kernel.so"}


def test_a_blob_that_another_process_replaced_meanwhile_stays(store: Store) -> None:
    fill(store)
    with store.open(HERE) as first, store.open(HERE) as second:
        second.put("decode/plain", b"second")
        second.seal()
        first.put("x", b"1")
        first.seal()
    with store.open(HERE) as session:
        assert session.get("decode/plain") == b"second" and session.get("x") == b"1"


def test_what_another_process_sealed_before_a_seal_of_ours_comes_in_all_the_same(
    store: Store,
) -> None:
    with store.open(HERE) as first, store.open(HERE) as second:
        second.put("x", b"second")
        second.seal()
        first.put("y", b"first")
        first.seal()  # names x among the entry's files
        first.refresh()
        assert first.get("x") == b"second" and first.get("y") == b"first"


def test_scratch_files_of_torch_and_triton_are_not_stored(store: Store) -> None:
    with store.open(HERE) as session:
        for name in ("locks/a", "x.lock", "y.tmp", "__pycache__/z.pyc", "tmp.pid_3_x/k", "k/lock"):
            inductor_file(session, name).write_bytes(b"x")
        inductor_file(session, "kept.py").write_bytes(b"x")
        inductor_file(session, "link.py").symlink_to("/etc/passwd")
        session.seal()
    hit = store.lookup(HERE)
    assert isinstance(hit, Hit) and set(hit.manifest.files) == {"inductor/kept.py"}


def test_triton_groups_point_into_the_folder_of_the_process(store: Store) -> None:
    with store.open(HERE) as session:
        assert session.work is not None
        kernel = session.work / "triton" / "HASH" / "kernel.cubin"
        make_folder(kernel.parent)
        kernel.write_bytes(b"cubin")
        group = kernel.with_name("__grp__kernel.json")
        group.write_text(json.dumps({"child_paths": {"kernel.cubin": str(kernel)}}))
        (kernel.parent / "__grp__bad.json").write_text("[")
        session.seal()
        first = session.work
    with store.open(HERE) as session:
        assert session.work is not None and session.work != first
        folder = session.work / "triton" / "HASH"
        children = json.loads((folder / "__grp__kernel.json").read_text())["child_paths"]
        assert children == {"kernel.cubin": str(folder / "kernel.cubin")}
        assert Path(children["kernel.cubin"]).read_bytes() == b"cubin"
        assert (folder / "__grp__bad.json").read_text() == "["
        before = store.lookup(HERE)
        session.seal()
        assert store.lookup(HERE) == before


@pytest.mark.parametrize("damage", ["truncate", "grow", "flip", "delete", "folder"])
def test_a_damaged_object_is_a_warning_and_a_rebuild(
    store: Store, warned: Warnings, damage: str
) -> None:
    fill(store)
    for path in objects(store):
        content = path.read_bytes()
        if damage == "truncate":
            path.write_bytes(content[:-1])
        elif damage == "grow":
            path.write_bytes(content + b"x")
        elif damage == "flip":
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        else:
            path.unlink()
        if damage == "folder":
            path.mkdir()
    hit = store.lookup(HERE)
    assert isinstance(hit, Hit)
    assert set(hit.damaged) == {"blobs/decode/plain", "inductor/ab/kernel.so"}
    with store.open(HERE) as session:
        assert "2 of 2 files" in warned[0] and len(warned) == 1
        assert session.get("decode/plain") is None
        assert session.jobs == {}  # a job whose files are damaged is not done
        assert not inductor_file(session, "ab/kernel.so").exists()
        if damage == "folder":
            return
        session.put("decode/plain", b"again")
        session.seal()
    healed = store.lookup(HERE)
    assert isinstance(healed, Hit)
    assert not healed.damaged
    assert set(healed.manifest.files) == {"blobs/decode/plain"}
    assert healed.manifest.notes["jobs"] == {}


def test_one_damaged_file_does_not_spoil_the_others(store: Store, warned: Warnings) -> None:
    fill(store)
    record = store.open(HERE).manifest.files["inductor/ab/kernel.so"]
    (store.path(HERE) / OBJECTS / record.sha256).write_bytes(b"garbage")
    with store.open(HERE) as session:
        assert session.get("decode/plain") == b"artefact" * 100
        assert "kernel.so" in warned[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff garbage",
        b"{",
        b"[]",
        b"null",
        b'{"format": 1}',
        b"[" * 100_000,
        b'{"format": 999}',
    ],
)
def test_a_garbage_manifest_is_a_miss(store: Store, warned: Warnings, content: bytes) -> None:
    fill(store)
    (store.path(HERE) / MANIFEST).write_bytes(content)
    assert isinstance(store.lookup(HERE), Miss)
    with store.open(HERE) as session:
        assert session.get("decode/plain") is None
        assert session.jobs == {}
        session.put("decode/plain", b"again")
        assert session.seal()
    assert isinstance(store.lookup(HERE), Hit)
    assert len(warned) == 1


def changed(store: Store, **fields: Any) -> None:
    path = store.path(HERE) / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_every_truncation_of_a_manifest_is_a_miss(store: Store) -> None:
    fill(store)
    path = store.path(HERE) / MANIFEST
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 37):
        path.write_bytes(whole[:length])
        assert isinstance(store.lookup(HERE), Miss)


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/../../b", "a//b", "", ".", "a\\b"])
def test_a_manifest_that_names_files_elsewhere_is_refused(store: Store, name: str) -> None:
    fill(store)
    record = json.loads((store.path(HERE) / MANIFEST).read_text())["files"]["blobs/decode/plain"]
    changed(store, files={name: record})
    assert not is_safe_name(name)
    assert isinstance(store.lookup(HERE), Miss)


def test_a_manifest_whose_parts_were_edited_is_refused(store: Store) -> None:
    fill(store)
    changed(store, fingerprint=OTHER.to_json())
    miss = store.lookup(HERE)
    assert isinstance(miss, Miss) and "digest" in miss.reason


def test_an_entry_that_others_can_write_is_not_used(store: Store, warned: Warnings) -> None:
    fill(store)
    entry = store.path(HERE)
    for path in (entry, entry / MANIFEST):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | stat.S_IWOTH)
        assert isinstance(store.lookup(HERE), Miss)
        with store.open(HERE) as session:
            assert session.get("decode/plain") is None
            assert session.work is not None
        path.chmod(mode)
    assert isinstance(store.lookup(HERE), Hit)
    assert all("written by others" in message for message in warned) and warned


def test_an_entry_of_another_user_is_not_used(
    store: Store, monkeypatch: pytest.MonkeyPatch, warned: Warnings
) -> None:
    fill(store)
    real = os.stat(store.path(HERE)).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    if real != 0:  # root's own files are trusted by everybody
        assert isinstance(store.lookup(HERE), Miss)
        return
    os.chown(store.path(HERE) / MANIFEST, real + 2, -1)
    miss = store.lookup(HERE)
    assert isinstance(miss, Miss) and "another user" in miss.reason


def test_the_umask_does_not_make_an_entry_untrusted(store: Store) -> None:
    before = os.umask(0o002)
    try:
        fill(store)
    finally:
        os.umask(before)
    assert isinstance(store.lookup(HERE), Hit)
