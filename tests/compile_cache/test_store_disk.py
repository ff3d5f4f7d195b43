"""Entries on a disk that is full, read-only, shared or killed in the middle: a warning at most."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from compile_cache import manifest as manifest_module
from compile_cache import session as session_module
from compile_cache.files import locked, try_lock, write_atomic
from compile_cache.fingerprint import Fingerprint
from compile_cache.manifest import MANIFEST
from compile_cache.session import LOCK, WORK, Session, is_live
from compile_cache.store import Hit, Miss, Store, default_root, format_size
from tests.compile_cache.entries import HERE, OTHER, ROOT, Warnings, fill, objects


def fail_with(code: int) -> Any:
    def write(path: Path, data: bytes) -> None:
        raise OSError(code, os.strerror(code), str(path))

    return write


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EIO])
def test_a_disk_that_refuses_to_store(
    store: Store, warned: Warnings, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fill(store)
    monkeypatch.setattr(manifest_module, "write_atomic", fail_with(code))
    with store.open(HERE) as session:
        session.put("more", b"x")
        assert not session.seal()
        assert session.get("more") == b"x"  # this process goes on with what it built
    monkeypatch.undo()
    assert len(warned) == 1 and os.strerror(code) in warned[0]
    hit = store.lookup(HERE)
    assert isinstance(hit, Hit) and not hit.damaged and "blobs/more" not in hit.manifest.files


def test_a_disk_that_refuses_is_not_asked_without_need(
    store: Store, warned: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    monkeypatch.setattr(manifest_module, "write_atomic", fail_with(errno.EROFS))
    with store.open(HERE) as session:
        assert session.seal() and not warned, "there was nothing new to keep"
        session.finish_job("a job", 1.0)
        assert not session.seal() and len(warned) == 1


def test_what_cannot_be_kept_is_known_before_it_is_built(
    store: Store, warned: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.open(HERE) as session:
        assert session.can_keep() and not warned
        usage = shutil.disk_usage(store.root)._replace(free=1 << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        assert not session.can_keep() and "less than 256 MiB are free" in warned[-1]
        monkeypatch.setattr(session_module, "locked", fail_with(errno.EROFS))
        assert not session.can_keep() and os.strerror(errno.EROFS) in warned[-1]


def test_a_disk_that_fills_up_between_object_and_manifest(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    real = write_atomic

    def write(path: Path, data: bytes) -> None:
        if path.name == MANIFEST:
            raise OSError(errno.ENOSPC, "full")
        real(path, data)

    monkeypatch.setattr(manifest_module, "write_atomic", write)
    with store.open(HERE) as session:
        session.put("more", b"new")
        assert not session.seal()
        monkeypatch.setattr(manifest_module, "write_atomic", real)
        assert session.seal()  # room again: what was not kept before is kept now
    hit = store.lookup(HERE)
    assert isinstance(hit, Hit) and "blobs/more" in hit.manifest.files


def test_a_full_disk_while_files_are_restored_or_put(
    store: Store, warned: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)

    def refuse(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with store.open(HERE) as session:
        assert session.get("decode/plain") is None
        assert not session.put("x", b"1")
        assert session.get("x") is None
    assert len(warned) == 2 and all("No space" in message for message in warned)


def test_too_little_room_moves_the_work_elsewhere(
    store: Store, warned: Warnings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage

    def usage(path: Path) -> Any:
        whole = real(path)
        return whole._replace(free=1000) if "cache" in path.parts else whole

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with store.open(HERE) as session:
        assert session.work is not None and tmp_path / "tmp" in session.work.parents
        work = session.work
    assert not work.exists()
    monkeypatch.setattr(session_module, "_LEAST_FREE_BYTES", 1 << 60)
    with store.open(HERE) as session:
        assert session.work is None
    assert len(warned) == 1 and "nothing is cached" in warned[0]


def test_a_cache_that_cannot_be_written_is_still_read(store: Store, warned: Warnings) -> None:
    fill(store)
    code = (
        "import sys, os; from pathlib import Path\n"
        "from compile_cache.store import Store; from tests.compile_cache.test_store import HERE\n"
        "os.seteuid(65534)\n"
        "with Store(Path(sys.argv[1]), print).open(HERE) as s:\n"
        "    print(s.get('decode/plain')[:8], s.put('more', b'x'), s.seal(), s.work)\n"
    )
    if os.geteuid() != 0:
        pytest.skip("needs root, to have another user read root's files")
    for folder in (store.root, *store.root.parents):
        if not folder.stat().st_mode & stat.S_IXOTH and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    result = subprocess.run(
        [sys.executable, "-c", code, str(store.root)], cwd=ROOT, capture_output=True, text=True
    )
    assert "b'artefact' True False" in result.stdout, result.stdout + result.stderr
    assert "Permission denied" in result.stdout
    hit = store.lookup(HERE)
    assert isinstance(hit, Hit) and "blobs/more" not in hit.manifest.files


def test_a_root_that_is_a_file_is_a_warning(tmp_path: Path, warned: Warnings) -> None:
    (tmp_path / "cache").write_text("in the way")
    store = Store(tmp_path / "cache", warned)
    assert isinstance(store.lookup(HERE), Miss)
    with store.open(HERE) as session:
        session.put("x", b"1")
        assert not session.seal()
        assert session.get("x") == b"1"
    assert warned


def warm_many(root: str, worker: int, count: int) -> None:
    store = Store(Path(root))
    for i in range(count):
        with store.open(HERE) as session:
            session.put(f"shared{i}", f"{worker}".encode() * 1000)
            session.put(f"own{worker}-{i}", f"{worker}-{i}".encode())
            session.finish_job(f"job{worker}-{i}", 1.0)
            assert session.seal()


def test_processes_that_warm_at_once_lose_nothing(store: Store) -> None:
    context = multiprocessing.get_context("spawn")
    workers, count = 3, 4
    processes = [
        context.Process(target=warm_many, args=(str(store.root), w, count)) for w in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    hit = store.lookup(HERE)
    assert isinstance(hit, Hit) and not hit.damaged
    assert len(hit.manifest.notes["jobs"]) == workers * count
    with store.open(HERE) as session:
        for i in range(count):
            shared = session.get(f"shared{i}")
            assert shared in [f"{w}".encode() * 1000 for w in range(workers)]
            for w in range(workers):
                assert session.get(f"own{w}-{i}") == f"{w}-{i}".encode()


def test_what_is_stored_anew_while_an_entry_is_opened_is_not_damage(store: Store) -> None:
    with store.open(HERE) as session:
        session.put("shared", b"1" * 1000)
        session.finish_job("first", 1.0)
        assert session.seal()
    found = store.lookup(HERE)
    assert isinstance(found, Hit)
    with store.open(HERE) as session:
        session.put("shared", b"2" * 1000)
        session.finish_job("second", 1.0)
        assert session.seal()
    # The object that `found` names has been swept.
    with Session(store.path(HERE), HERE, found.manifest, store.warn) as late:
        assert not late.damaged and late.get("shared") == b"2" * 1000
        assert late.jobs.keys() == {"first", "second"}


def test_killed_at_any_moment_the_entry_stays_sound(store: Store) -> None:
    fill(store)
    code = (
        "import sys, itertools; from pathlib import Path\n"
        "from compile_cache.store import Store; from tests.compile_cache.test_store import HERE\n"
        "with Store(Path(sys.argv[1])).open(HERE) as s:\n"
        "    print('go', flush=True)\n"
        "    for i in itertools.count():\n"
        "        s.put(f'b{i % 5}', bytes([i % 256]) * 300_000); s.seal()\n"
    )
    for delay in (0.0, 0.01, 0.03, 0.07, 0.11):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(store.root)], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        assert is_live(store.path(HERE))
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
        hit = store.lookup(HERE)
        assert isinstance(hit, Hit) and not hit.damaged
        assert not is_live(store.path(HERE))
        if delay == 0.03:  # whatever entry is opened next
            store.open(OTHER).close()
            assert {p.name for p in (store.path(HERE) / WORK).iterdir()} == {"guard"}
        with store.open(HERE) as session:
            assert session.get("decode/plain") == b"artefact" * 100
            for i in range(5):
                blob = session.get(f"b{i}")
                assert blob is None or (len(blob) == 300_000 and len(set(blob)) == 1)
            # Opening swept what the killed process left.
            assert session.work is not None
            names = {p.name for p in (store.path(HERE) / WORK).iterdir()}
            assert names == {"guard", session.work.name, f"{session.work.name}.lock"}
            session.note("delay", delay)  # objects are swept when there is something to store
            assert session.seal()
    wanted = {r.sha256 for r in session.manifest.files.values()}
    assert {p.name for p in objects(store)} == wanted


BUILDER = """
import sys, time; from pathlib import Path
from compile_cache.store import Store; from tests.compile_cache.test_store import HERE
with Store(Path(sys.argv[1])).open(HERE) as s:
    with s.building(lambda: print("waits", flush=True)):
        print(*s.jobs, flush=True)
        sys.stdin.readline()
        s.put("b", b"x"); s.finish_job("job", 1.0); s.seal()
"""


def start_builder(store: Store) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(store.root)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)


@pytest.mark.parametrize("killed", [False, True])
def test_one_process_builds_and_another_waits_and_finds(store: Store, killed: bool) -> None:
    with start_builder(store) as first:
        assert first.stdin and first.stdout and first.stdout.readline() == "\n"
        with start_builder(store) as second:
            assert second.stdin and second.stdout and second.stdout.readline() == "waits\n"
            if killed:
                first.kill()
            else:
                first.stdin.close()
            assert second.stdout.readline() == ("\n" if killed else "job\n")
            second.kill()


def test_a_lock_that_is_never_released_is_a_warning(
    store: Store, warned: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    monkeypatch.setattr(session_module, "_LOCK_TIMEOUT_S", 0.05)
    with store.open(HERE) as session, locked(store.path(HERE) / LOCK, 1):
        session.put("x", b"1")
        assert not session.seal()
    assert "another process holds the lock" in warned[0]


def test_locks_exclude_and_end_with_their_holder(tmp_path: Path) -> None:
    held = try_lock(tmp_path / "x")
    assert held is not None and try_lock(tmp_path / "x") is None
    with pytest.raises(TimeoutError), locked(tmp_path / "x", 0.05):
        pass
    os.close(held)
    with locked(tmp_path / "x", 0.05) as exclusive:
        assert exclusive


def test_write_atomic_leaves_the_old_content_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_prune_keeps_what_was_used_last_and_what_is_open(store: Store) -> None:
    fingerprints = [Fingerprint({"n": n}) for n in range(5)]
    for i, fingerprint in enumerate(fingerprints):
        fill(store, fingerprint)
        os.utime(store.path(fingerprint) / MANIFEST, (1000 + i, 1000 + i))
        (store.path(fingerprint) / "used").touch()
        os.utime(store.path(fingerprint) / "used", (2000 + i, 2000 + i))
    os.utime(store.path(fingerprints[0]) / "used", (9000, 9000))
    assert [e.manifest.fingerprint.parts["n"] for e in store.entries() if e.manifest] == [
        0, 4, 3, 2, 1,
    ]  # fmt: skip
    with store.open(fingerprints[1]) as session:
        os.utime(store.path(fingerprints[1]) / "used", (2001, 2001))
        removed = store.prune(keep=2)
        assert [e.path.name for e in removed] == [fingerprints[i].digest for i in (3, 2)]
        assert session.get("decode/plain") is not None
    left = {e.path.name for e in store.entries()}
    assert left == {fingerprints[i].digest for i in (0, 4, 1)}
    assert len(store.prune(keep=0)) == 3 and store.entries() == []


def test_opening_counts_as_use_and_sizes_add_up(store: Store) -> None:
    fill(store)
    os.utime(store.path(HERE) / MANIFEST, (1000, 1000))
    (entry,) = store.entries()
    store.open(HERE).close()
    (later,) = store.entries()
    assert later.used > time.time() - 60
    assert entry.size == sum(
        p.stat().st_size for p in [store.path(HERE) / MANIFEST, *objects(store)]
    )
    assert format_size(999) == "999 B" and format_size(3 << 19) == "1.5 MiB"


def test_default_root_follows_xdg() -> None:
    assert default_root({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/fullgraph")
    assert default_root({"XDG_CACHE_HOME": "x", "HOME": "/h"}) == Path("/h/.cache/fullgraph")
    assert default_root({"HOME": "/h"}) == Path("/h/.cache/fullgraph")
