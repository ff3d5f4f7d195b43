"""Jobs: each is kept as soon as it is done, and a second run only builds what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_cache.fingerprint import Fingerprint
from compile_cache.session import Session
from compile_cache.store import Store
from compile_cache.warmup import Job, jobs_table, run_jobs

HERE = Fingerprint({"torch": "2.13.0"})


class Clock:
    """Seconds that only jobs make pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Builder:
    """Jobs that put a blob, or find it, and remember what they did."""

    def __init__(self, session: Session, clock: Clock) -> None:
        self.session, self.clock = session, clock
        self.log: list[str] = []

    def job(self, name: str, *, fails: bool = False) -> Job:
        def run() -> None:
            if self.session.get(name) is not None:
                self.log.append(f"load {name}")
                self.clock.now += 1
                return
            if fails:
                raise RuntimeError("no compiler")
            self.log.append(f"build {name}")
            self.clock.now += 10
            self.session.put(name, name.encode())

        return Job(name, run)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    def warn(message: str) -> None:
        raise AssertionError(message)

    return Store(tmp_path / "cache", warn)


def nothing(name: str, seconds: float) -> None:
    pass


def test_what_is_done_is_left_out(store: Store) -> None:
    clock = Clock()
    calls: list[tuple[str, float]] = []
    with store.open(HERE) as session:
        build = Builder(session, clock)
        jobs = [build.job("a"), build.job("b")]
        assert run_jobs(jobs, session, lambda *call: calls.append(call), clock)
    assert build.log == ["build a", "build b"]
    assert calls == [("a", 10.0), ("b", 10.0)]
    with store.open(HERE) as session:
        build = Builder(session, clock)
        jobs = [build.job("a"), build.job("c")]
        assert run_jobs(jobs, session, lambda *call: calls.append(call), clock)
        assert build.log == ["build c"] and calls[2:] == [("a", 0.0), ("c", 10.0)]
        assert session.jobs == {"a": 10.0, "b": 10.0, "c": 10.0}


def test_stopped_in_the_middle_it_resumes(store: Store) -> None:
    clock = Clock()
    with store.open(HERE) as session:
        build = Builder(session, clock)
        with pytest.raises(RuntimeError, match="no compiler"):
            jobs = [build.job("a"), build.job("b", fails=True), build.job("c")]
            run_jobs(jobs, session, nothing, clock)
    with store.open(HERE) as session:
        build = Builder(session, clock)
        run_jobs([build.job(n) for n in "abc"], session, nothing, clock)
    assert build.log == ["build b", "build c"]


def test_two_processes_share_out_the_jobs(store: Store) -> None:
    clock = Clock()
    with store.open(HERE) as one, store.open(HERE) as two, store.open(HERE) as waits:
        run_jobs([Builder(one, clock).job("a")], one, nothing, clock)
        run_jobs([Builder(two, clock).job("b")], two, nothing, clock)
        assert waits.get("a") is None and not waits.jobs
        waits.put("b", b"made here meanwhile")
        waits.refresh()
        assert waits.get("a") == b"a" and waits.get("b") == b"made here meanwhile"
        assert waits.jobs == {"a": 10.0, "b": 10.0}


def test_a_damaged_file_is_whole_again_after_another_process_built_it(tmp_path: Path) -> None:
    warned: list[str] = []
    store, clock = Store(tmp_path / "cache", warned.append), Clock()
    with store.open(HERE) as session:
        run_jobs([Builder(session, clock).job("a")], session, nothing, clock)
    for file in (store.path(HERE) / "objects").iterdir():
        file.write_bytes(b"garbage")
    with store.open(HERE) as waits:
        assert waits.damaged and not waits.jobs and warned
        with store.open(HERE) as builds:
            run_jobs([Builder(builds, clock).job("a")], builds, nothing, clock)
        waits.refresh()
        assert not waits.damaged and waits.get("a") == b"a"
        assert waits.seal()
    with store.open(HERE) as session:
        assert session.jobs == {"a": 10.0} and session.get("a") == b"a"


def test_a_disk_that_keeps_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    warned: list[str] = []
    with Store(tmp_path / "cache", warned.append).open(HERE) as session:
        build = Builder(session, Clock())
        assert not run_jobs([build.job("a")], session, nothing)
    assert build.log == ["build a"] and warned


def test_the_table() -> None:
    names = ["decode 8 plain", "x", "y"]
    assert jobs_table(names, {"x": 3.25}, {"x": 3.25, "decode 8 plain": 10.0}).splitlines() == [
        "job             outcome    seconds",
        "decode 8 plain  built         10.0",
        "x               found            -",
        "y               missing          -",
    ]
