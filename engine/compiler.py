"""Has compile processes fill the compile cache, and knows what is in it already.

    start(variants) -> processes share out the jobs that the entry lacks -> wait() -> the entry is
    refreshed

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
from typing import Any

from compile_cache import Session
from engine.compile_jobs import CompileJob, compile_jobs
from engine.config import EngineConfig
from engine.machine import physical_cores
from engine.quick_import import command
from engine.resolve import ResolvedConfig
from engine.scheduler.batch import Variant

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int, str], None]

_MODULE = "engine.compile_process"


class Compiler:
    """The compile processes of one start.

    Args:
        config: as loaded, handed to the processes.
        resolved: the same without "auto".
        cache: the opened entry.
    """

    def __init__(self, config: EngineConfig, resolved: ResolvedConfig, cache: Session) -> None:
        self._config, self._resolved, self._cache = config, resolved, cache
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._finished: queue.SimpleQueue[tuple[str, float] | None] = queue.SimpleQueue()
        self._total = 0
        self._closed = False

    def start(self, variants: Sequence[Variant], *, nice: int = 0, least_workers: int = 0) -> None:
        """Start processes for the jobs that the entry lacks; does not wait.

        Call it in the main thread: the kernel ends the processes with the thread that started them.

        Args:
            variants: of the step.
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
        shares = [[job for group in groups[i::count] for job in group] for i in range(count)]
        self._total = sum(map(len, shares))
        options = ["--parent", str(os.getpid()), "--nice", str(nice)]
        options += ["--threads", str(max(1, physical_cores() // max(1, count)))]
        for share in shares:
            process = _spawn([*options, *(job.name for job in share)], self._config)
            reader = threading.Thread(target=self._read, args=(process, share), daemon=True)
            self._processes.append(process)
            self._readers.append(reader)
            reader.start()

    def wait(self, progress: Progress = lambda phase, done, total, text: None) -> None:
        """Until every process has ended and what they made is in the entry.

        Args:
            progress: called in this thread with ("compile", jobs done, jobs in all, text).
        """
        running, done = len(self._processes), 0
        text = f"{running} processes"
        while running:
            progress("compile", done, self._total, text)
            finished = self._finished.get()
            if finished is None:
                running -= 1
            else:
                done, text = done + 1, f"{finished[0]}: {finished[1]:.1f} s"
        if self._processes:
            progress("compile", done, self._total, text)
            self._cache.refresh()
        self._processes.clear()
        self._readers.clear()

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
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for reader in self._readers:
            reader.join()

    def _read(self, process: subprocess.Popen[bytes], share: Sequence[CompileJob]) -> None:
        assert process.stdout is not None
        left = [job.name for job in share]
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
    process: Any = subprocess.Popen(
        command(_MODULE, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(config.model_dump_json().encode())
        process.stdin.close()
    started: subprocess.Popen[bytes] = process
    return started
