"""Runs the jobs that fill an entry, one by one, and keeps each as soon as it is done: a killed
warm-up goes on later.

A job is a name and a callable of the engine's. Knows nothing of what they compile, of terminals or
of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from compile_cache.store import format_size

Progress = Callable[[str, int, int, float], None]
Outcome = Literal["built", "loaded", "skipped", "left"]


class Recorder(Protocol):
    """Where finished jobs are kept; a Session is one."""

    @property
    def jobs(self) -> dict[str, float]:
        """Finished jobs to the seconds they took to build."""

    def finish_job(self, name: str, seconds: float) -> None:
        """Remember a job."""

    def seal(self) -> bool:
        """Keep everything so far; False where that was not possible."""


@dataclass(frozen=True)
class Job:
    """One thing to build or load.

    Attributes:
        name: unique in an entry, shown to the user.
        run: builds it, or loads it where the cache has it. Must be done when it returns: nothing
            may go on compiling.
        always: this process needs the job's result, so that it also runs when the entry has it.
    """

    name: str
    run: Callable[[], None]
    always: bool = True


@dataclass(frozen=True)
class Row:
    """How one job went. seconds: now; built_seconds: when it was built, in this process or an
    earlier one.
    """

    name: str
    outcome: Outcome
    seconds: float
    built_seconds: float


@dataclass(frozen=True)
class Report:
    """All jobs in their order. kept: whether everything built is in the cache now."""

    rows: tuple[Row, ...]
    kept: bool

    @property
    def complete(self) -> bool:
        """Whether nothing was left for another time."""
        return all(row.outcome != "left" for row in self.rows)

    def table(self, size: int | None = None) -> str:
        """Lines for a person: a row per job, then the totals.

        Args:
            size: bytes of the entry on disk, shown in the last line.
        """
        width = max([len(row.name) for row in self.rows] + [5])
        columns = f"{{:<{width}}}  {{:<8}}  {{:>8}}  {{:>8}}"
        lines = [columns.format("job", "outcome", "now s", "built s")]
        for row in self.rows:
            seconds = (f"{row.seconds:.2f}", f"{row.built_seconds:.2f}")
            lines.append(columns.format(row.name, row.outcome, *seconds))
        now = sum(row.seconds for row in self.rows)
        built = sum(row.built_seconds for row in self.rows)
        lines.append(columns.format("total", "", f"{now:.2f}", f"{built:.2f}"))
        left = sum(row.outcome == "left" for row in self.rows)
        if left:
            lines.append(f"{left} of {len(self.rows)} jobs are left; run the same command again")
        if not self.kept:
            lines.append("not everything could be kept: see the warnings")
        if size is not None:
            lines.append(f"on disk: {format_size(size)}")
        return "\n".join(lines)


def run_jobs(
    jobs: Sequence[Job],
    recorder: Recorder,
    progress: Progress,
    *,
    skip_done: bool = False,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Report:
    """Run every job that is needed.

    Args:
        jobs: in the order to run them; names are unique.
        recorder: the opened entry.
        progress: called as (name, done, total, 0) before a job and (name, done, total, seconds)
            after it.
        skip_done: leave out finished jobs even if they say `always` (a warm-up command, which
            serves nothing).
        budget_s: start no further job after this many seconds; what is left is built by the next
            call.
        clock: seconds.

    Raises:
        Whatever a job raises; the jobs before it are kept.
    """
    assert len({job.name for job in jobs}) == len(jobs), "two jobs have one name"
    rows: list[Row] = []
    begin, kept = clock(), True
    for done, job in enumerate(jobs):
        before = recorder.jobs.get(job.name)
        if before is not None and (skip_done or not job.always):
            rows.append(Row(job.name, "skipped", 0.0, before))
            progress(job.name, done + 1, len(jobs), 0.0)
            continue
        if budget_s is not None and clock() - begin >= budget_s:
            rows.append(Row(job.name, "left", 0.0, 0.0))
            continue
        progress(job.name, done, len(jobs), 0.0)
        start = clock()
        job.run()
        seconds = clock() - start
        progress(job.name, done + 1, len(jobs), seconds)
        if before is None:
            recorder.finish_job(job.name, seconds)
            kept = recorder.seal() and kept
        rows.append(
            Row(job.name, "built" if before is None else "loaded", seconds, before or seconds)
        )
    return Report(tuple(rows), kept)
