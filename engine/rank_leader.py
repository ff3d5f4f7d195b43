"""Rank 0 of several: starts the others (or finds those that torchrun started), sends them every
batch, and sees them die.

One thread starts the processes and watches them, for the kernel ends a child with the thread that
started it. When a rank dies the rest are killed at once: they would hang in a collective. The main
thread finds out by `check`; if it does not look, because it hangs itself, the thread ends the whole
process. Knows nothing of scheduling.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from engine.batch_wire import encode
from engine.config import EngineConfig
from engine.early_ranks import next_process, place
from engine.errors import EngineDead
from engine.graph_runner import Pending
from engine.rank_link import LeaderLink
from engine.ranks import RankGroup, launched_store
from engine.scheduler.batch import ScheduledBatch, StepResult
from engine.world import World

OnFatal = Callable[[str], None]

# Messages beside batches, which are never so short.
STOP, WARM = b"", b"w"
_POLL_MS = 50
# For a rank's exit status or last words to come after its connection has ended.
_LAST_WORDS_S = 0.5
# How long the main thread may take to notice a rank's death before it is taken to hang; longer
# where nobody can be told but by the end of the process.
_GRACE_S, _GRACE_UNTOLD_S = 2.0, 20.0
_STOP_S = 20.0
_ABORT_S = 1.0


@dataclass(frozen=True, eq=False)
class _Watched:
    pending: Pending
    leader: Leader

    def wait(self) -> StepResult:
        try:
            while not self.pending.poll():
                self.leader.check()
            return self.pending.wait()
        except RuntimeError as error:  # gloo sees a dead peer before we do
            self.leader.explain(error)
            raise

    def poll(self) -> bool:
        return self.pending.poll()


class Leader(RankGroup):
    """Rank 0.

    Args:
        config: what all ranks will start from.
        world: rank 0's.
        on_fatal: called in the watching thread when a rank has died and the main thread does not
            look; the process ends when it returns. None: the main thread may be out of our hands,
            and so is the process's end once it is started.
    """

    def __init__(self, config: EngineConfig, world: World, on_fatal: OnFatal | None) -> None:
        timeout_s = config.parallel.timeout_s
        self.failure: str | None = None
        self._on_fatal = on_fatal
        self._starting = True
        self._stop_s = _STOP_S
        self._closing, self._noticed, self._failed = (threading.Event() for _ in range(3))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        followers = range(1, world.size)
        host = os.environ["MASTER_ADDR"] if world.launched else None
        self._link = LeaderLink(followers, host)
        super().__init__(world, _store(world, timeout_s), timeout_s)
        for rank, address in self._link.addresses.items():
            self.store.set(f"link/{rank}", address)
        self.store.set("config", config.model_dump_json(exclude={"server"}))
        self._abort = threading.Thread(target=self.abort, daemon=True)
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def broadcast(self, batch: ScheduledBatch | None) -> None:
        self.check()
        self._link.send(WARM if batch is None else encode(batch))

    def watched(self, pending: Pending) -> Pending:
        return _Watched(pending, self)

    def check(self) -> None:
        if self.failure is not None:
            self._noticed.set()
            raise EngineDead(self.failure)

    def explain(self, error: Exception) -> None:
        """Raises EngineDead in place of an error that a rank's death explains."""
        self._failed.wait(2 * _LAST_WORDS_S)
        if self.failure is not None:
            self._noticed.set()
            raise EngineDead(self.failure) from error

    def started(self) -> None:
        self._starting = False

    def give_up(self, error: Exception) -> None:
        try:
            if isinstance(error, RuntimeError):
                self.explain(error)
        finally:
            self._stop_s = 0.0
            self._closing.set()
            self.abort()
            self._leave()

    def stop(self) -> None:
        self._closing.set()
        if self.failure is None:
            self._link.send(STOP)
        else:  # NCCL tells its kernels at once, and then waits until graphs are freed
            self._abort.start()
            self._abort.join(_ABORT_S)

    def close(self) -> None:
        if self.failure is None:
            super().close()
        elif self._abort.is_alive():
            self._abort.join(_STOP_S)
        self._leave()

    def _leave(self) -> None:
        self._thread.join()
        self._link.close()

    def _watch(self) -> None:
        try:
            if not self.world.launched:
                self._spawn()
        except OSError as error:
            self._fail(f"the ranks cannot be started: {error}")
            return
        while not self._closing.is_set():
            dead = set(self._link.lost(_POLL_MS))
            dead |= {rank for rank, p in self._processes.items() if p.poll() is not None}
            if dead and not self._closing.is_set():
                self._fail(self._how(dead))
                return
        self._reap()

    def _spawn(self) -> None:
        assert isinstance(self.store, TCPStore)
        for rank in range(1, self.world.size):
            if self._closing.is_set():
                return
            self._processes[rank] = next_process()
            place(self._processes[rank], rank, self.world.size, self.store.port)

    def _how(self, dead: set[int]) -> str:
        """How the first of the dead ended: a signal first, for others may have died of it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            for rank in dead & self._processes.keys():
                self._processes[rank].wait(_LAST_WORDS_S)
        status = {rank: p.poll() for rank, p in self._processes.items() if p.poll() is not None}
        for rank, code in status.items():
            if code is not None and code < 0:
                return f"rank {rank} was killed by {signal.Signals(-code).name}"
        rank = min(dead)
        how = f"ended with status {status[rank]}" if rank in status else "is gone"
        with contextlib.suppress(Exception):  # the store of another host may be gone with it
            store: Any = self.store
            store = store.clone()  # the main thread may be waiting in the other one
            if store.check([f"error/{rank}"]):
                how += f": {store.get(f'error/{rank}').decode()}"
        return f"rank {rank} {how}"

    def _fail(self, message: str) -> None:
        for process in self._processes.values():
            process.kill()
        self._link.unlink()  # what follows may be the end of this process, at any point
        self.failure = message
        self._failed.set()
        grace_s = _GRACE_UNTOLD_S if self._on_fatal is None else _GRACE_S
        if not self._noticed.wait(grace_s) and not self._closing.is_set():
            if self._on_fatal is not None:
                self._on_fatal(message)
                os._exit(1)
            if self._starting:
                print(f"fullgraph: {message}", file=sys.stderr, flush=True)
                os._exit(1)
        self._reap()

    def _reap(self) -> None:
        deadline = time.monotonic() + self._stop_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _store(world: World, timeout_s: float) -> Store:
    timeout = timedelta(seconds=timeout_s)
    if world.launched:
        return launched_store(world, timeout)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
