"""Jobs: each is kept as soon as it is done, and a second run only builds what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_cache.fingerprint import Fingerprint
from compile_cache.session import Session
from compile_cache.store import Store
from compile_cache.warmup import Job, Report, run_jobs

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

    def job(self, name: str, *, always: bool = True, fails: bool = False) -> Job:
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

        return Job(name, run, always)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    def warn(message: str) -> None:
        raise AssertionError(message)

    return Store(tmp_path / "cache", warn)


def nothing(name: str, done: int, total: int, seconds: float) -> None:
    pass


def test_builds_then_loads_then_skips(store: Store) -> None:
    clock = Clock()
    calls: list[tuple[str, int, int, float]] = []
    with store.open(HERE) as session:
        build = Builder(session, clock)
        report = run_jobs(
            [build.job("a"), build.job("b")],
            session,
            lambda *call: calls.append(call),
            clock=clock,
        )
    assert build.log == ["build a", "build b"]
    assert [(r.name, r.outcome, r.seconds) for r in report.rows] == [
        ("a", "built", 10.0),
        ("b", "built", 10.0),
    ]
    assert report.complete and report.kept
    assert calls == [("a", 0, 2, 0.0), ("a", 1, 2, 10.0), ("b", 1, 2, 0.0), ("b", 2, 2, 10.0)]
    with store.open(HERE) as session:
        build = Builder(session, clock)
        jobs = [build.job("a"), build.job("b", always=False)]
        report = run_jobs(jobs, session, nothing, clock=clock)
        assert build.log == ["load a"]
        assert [(r.outcome, r.seconds, r.built_seconds) for r in report.rows] == [
            ("loaded", 1.0, 10.0),
            ("skipped", 0.0, 10.0),
        ]
        report = run_jobs(jobs, session, nothing, skip_done=True, clock=clock)
        assert [r.outcome for r in report.rows] == ["skipped", "skipped"]


def test_stopped_in_the_middle_it_resumes(store: Store) -> None:
    clock = Clock()
    with store.open(HERE) as session:
        build = Builder(session, clock)
        with pytest.raises(RuntimeError, match="no compiler"):
            run_jobs(
                [build.job("a"), build.job("b", fails=True), build.job("c")],
                session,
                nothing,
                clock=clock,
            )
    with store.open(HERE) as session:
        build = Builder(session, clock)
        report = run_jobs([build.job(n) for n in "abc"], session, nothing, clock=clock)
    assert build.log == ["load a", "build b", "build c"]
    assert [r.outcome for r in report.rows] == ["loaded", "built", "built"]


def test_a_time_budget_leaves_the_rest_for_the_next_run(store: Store) -> None:
    clock = Clock()
    outcomes = []
    for _ in range(3):
        with store.open(HERE) as session:
            build = Builder(session, clock)
            jobs = [build.job(n) for n in "abcd"]
            report = run_jobs(jobs, session, nothing, skip_done=True, budget_s=15, clock=clock)
            outcomes.append([r.outcome for r in report.rows])
    assert outcomes == [
        ["built", "built", "left", "left"],
        ["skipped", "skipped", "built", "built"],
        ["skipped"] * 4,
    ]


def test_a_disk_that_keeps_nothing_is_said_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    warned: list[str] = []
    with Store(tmp_path / "cache", warned.append).open(HERE) as session:
        build = Builder(session, Clock())
        report = run_jobs([build.job("a")], session, nothing)
    assert build.log == ["build a"] and warned
    assert not report.kept and "could be kept" in report.table()


def test_the_table(store: Store) -> None:
    clock = Clock()
    with store.open(HERE) as session:
        build = Builder(session, clock)
        jobs = [build.job("decode 8 plain"), build.job("x")]
        report = run_jobs(jobs, session, nothing, budget_s=5, clock=clock)
    assert report.table(3 << 20).splitlines() == [
        "job             outcome      now s   built s",
        "decode 8 plain  built        10.00     10.00",
        "x               left          0.00      0.00",
        "total                        10.00     10.00",
        "1 of 2 jobs are left; run the same command again",
        "on disk: 3.0 MiB",
    ]
    assert Report((), True).table().splitlines()[0].startswith("job")
