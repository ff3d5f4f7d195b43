"""Has compile processes fill the compile cache, and knows what is in it already.

    start(variants) -> processes share out the jobs that the entry lacks -> wait(variants) -> the
    entry is refreshed

What a process could not do is left to whoever needs it: nothing here is fatal. Knows nothing of
what a job compiles.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence

from compile_cache.session import Session
from engine.compile_jobs import compile_jobs
from engine.config import EngineConfig
from engine.machine import physical_cores
from engine.quick_import import command
from engine.resolve import ResolvedConfig
from engine.scheduler.batch import Variant

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int, str], None]

# Of what compiles beside steps that serve: their cores are theirs.
LOW_PRIORITY = 19
_MODULE = "engine.compile_process"


def _silent(phase: str, done: int, total: int, text: str) -> None:
    pass


class Compiler:
    """The compile processes of one start.

    Args:
        config: as loaded, handed to the processes.
        resolved: the same without "auto".
        cache: the opened entry.
    """

    def __init__(self, config: EngineConfig, resolved: ResolvedConfig, cache: Session) -> None:
        self._config, self._resolved, self._cache = config, resolved, cache
        self._waves: dict[tuple[Variant, ...], _Wave] = {}
        self._closed = False

    def start(self, variants: Sequence[Variant], *, nice: int = 0, least_workers: int = 0) -> None:
        """Start processes for the jobs that the entry lacks; does not wait.

        Call it in the main thread: the kernel ends the processes with the thread that started them.

        Args:
            variants: of the step; each is started once.
            nice: lowers the priority of the processes.
            least_workers: processes at least, whatever the configuration says.
        """
        known = self._cache.jobs
        groups = [
            [job for job in group if job.name not in known]
            for group in compile_jobs(self._resolved, variants)
        ]
        groups = [group for group in groups if group]
        workers = self._resolved.compile.workers
        assert isinstance(workers, int), workers
        count = min(max(workers, least_workers), len(groups))
        shares = [[job.name for group in groups[i::count] for job in group] for i in range(count)]
        self._waves[tuple(variants)] = _Wave(shares, nice, self._config)

    def wait(self, variants: Sequence[Variant], progress: Progress = _silent) -> bool:
        """Until the processes started for the variants have ended, and what they made is in the
        entry. At once where none were started.

        Args:
            variants: as given to `start`.
            progress: called in this thread with ("compile", jobs done, jobs in all, text).

        Returns:
            False: `close` was called meanwhile.
        """
        wave = self._waves.get(tuple(variants))
        if wave is not None and wave.wait(progress) and not self._closed:
            self._cache.refresh()
        return not self._closed

    def is_done(self, variants: Sequence[Variant]) -> bool:
        """Whether `wait` would not wait."""
        wave = self._waves.get(tuple(variants))
        return wave is None or wave.is_done

    def keep(self, variants: Sequence[Variant]) -> None:
        """Note that everything for the variants is compiled now, and keep what this process
        compiled itself.
        """
        known = self._cache.jobs
        for group in compile_jobs(self._resolved, variants):
            for job in group:
                if job.name not in known:
                    self._cache.finish_job(job.name, 0.0)
        self._cache.seal()

    def close(self) -> None:
        """End the processes now; what they have finished stays."""
        self._closed = True
        for wave in self._waves.values():
            wave.close()


class _Wave:
    """Processes that were started together, a share of job names each."""

    def __init__(self, shares: Sequence[list[str]], nice: int, config: EngineConfig) -> None:
        self._finished: queue.SimpleQueue[tuple[str, float] | None] = queue.SimpleQueue()
        self._total = sum(map(len, shares))
        self._closed = False
        # Inductor's own compilers are at work for half of a process's time.
        threads = max(2, 2 * physical_cores() // max(1, len(shares)))
        options = ["--parent", str(os.getpid()), "--nice", str(nice), "--threads", str(threads)]
        self._processes = [_spawn([*options, *share], config) for share in shares]
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in zip(self._processes, shares, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def is_done(self) -> bool:
        return not any(reader.is_alive() for reader in self._readers)

    def wait(self, progress: Progress) -> bool:
        """Whether there was anything to wait for."""
        running, done = len(self._processes), 0
        text = f"in {running} process{'es' if running > 1 else ''}"
        while running:
            progress("compile", done, self._total, text)
            finished = self._finished.get()
            if finished is None:
                running -= 1
            else:
                done, text = done + 1, f"{finished[0]}: {finished[1]:.1f} s"
        if self._processes:
            progress("compile", done, self._total, text)
        started, self._processes = bool(self._processes), []
        return started

    def close(self) -> None:
        self._closed = True
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for reader in self._readers:
            reader.join()

    def _read(self, process: subprocess.Popen[bytes], share: Sequence[str]) -> None:
        assert process.stdout is not None
        left = list(share)
        for line in process.stdout:
            with contextlib.suppress(ValueError, TypeError):  # somebody else's print
                name, seconds = json.loads(line)
                left.remove(name)
                self._finished.put((name, seconds))
        process.stdout.close()
        status = process.wait()
        if left and not self._closed:
            logger.warning(
                f"a compile process ended with status {status}; "
                f"left to be compiled where it is needed: {', '.join(left)}"
            )
        self._finished.put(None)


def _spawn(arguments: Sequence[str], config: EngineConfig) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command(_MODULE, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(config.model_dump_json().encode())
    return process
