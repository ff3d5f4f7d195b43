"""Runs the jobs that fill an entry, one by one, and keeps each as soon as it is done: a killed
warm-up goes on later.

A job is a name and a callable of the engine's. Knows nothing of what they compile, of terminals or
of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compile_cache.session import Session

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Job:
    """One thing to build.

    Attributes:
        name: unique in an entry, shown to the user.
        run: builds it, or loads it where the cache has it. Must be done when it returns: nothing
            may go on compiling.
    """

    name: str
    run: Callable[[], None]


def run_jobs(
    jobs: Sequence[Job],
    recorder: Session,
    progress: Progress,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Run every job that the entry does not have.

    Args:
        jobs: in the order to run them; names are unique.
        recorder: the opened entry.
        progress: called with (name, seconds) after each job; 0 seconds: the entry had it.
        clock: seconds.

    Returns:
        Whether everything that was built is kept; warnings say why not.

    Raises:
        Whatever a job raises; the jobs before it are kept.
    """
    assert len({job.name for job in jobs}) == len(jobs), "two jobs have one name"
    kept = True
    for job in jobs:
        if job.name in recorder.jobs:
            progress(job.name, 0.0)
            continue
        start = clock()
        job.run()
        seconds = clock() - start
        recorder.finish_job(job.name, seconds)
        kept = recorder.seal() and kept
        progress(job.name, seconds)
    return kept


def jobs_table(
    names: Sequence[str], before: Mapping[str, float], after: Mapping[str, float]
) -> str:
    """Lines for a person: what became of each job, and the seconds that those built now took.

    Args:
        names: of all jobs.
        before, after: finished jobs to seconds, when the warm-up began and when it ended.
    """
    width = max([len(name) for name in names] + [5])
    columns = f"{{:<{width}}}  {{:<7}}  {{:>9}}"
    lines = [columns.format("job", "outcome", "seconds")]
    for name in names:
        outcome = "found" if name in before else "built" if name in after else "missing"
        seconds = f"{after[name]:.1f}" if outcome == "built" else "-"
        lines.append(columns.format(name, outcome, seconds))
    return "\n".join(lines)
