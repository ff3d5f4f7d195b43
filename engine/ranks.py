"""The ranks of tensor parallelism as a worker sees them: its place, what they agree on, what is
launched on all of them.

    Ranks      one rank alone: nothing to agree on
    RankGroup  several: a store to meet at, a process group for collectives

Rank 0 (rank_leader.py) and the others (rank_process.py) differ in who sends. Knows nothing of
batches' contents or of how processes are started.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from engine.errors import ConfigError, EngineDead
from engine.graph_runner import Pending
from engine.scheduler.batch import ScheduledBatch
from engine.world import World
from models.inputs import TensorParallel
from models.ops import symmetric

_POLL_S = 0.01


class Ranks:
    """One rank alone, and the interface of all.

    Attributes:
        tp: this rank's place, once it has joined.
        alone: nobody else is there, and no process group.
        builds: has compiled what all ranks of its host load.
    """

    alone = True
    builds = False

    def __init__(self) -> None:
        self.tp = TensorParallel()

    def device(self, kind: str) -> torch.device:
        """This rank's device of a kind, "cpu" or "cuda"."""
        return torch.device(kind)

    @contextmanager
    def first(self, step: str, waits: bool) -> Iterator[None]:
        """Around what rank 0 does before the others do it, such as a download.

        Args:
            waits: False: the others need not wait.
        """
        yield

    def join(self, device: torch.device, all_reduce: str) -> None:
        """Meet the other ranks; collectives work from here on.

        `all_reduce` is `parallel.all_reduce`.
        """

    def gather(self, key: str, value: int) -> list[int]:
        """Every rank's value, in rank order. A key is good for one use."""
        return [value]

    def broadcast(self, batch: ScheduledBatch | None) -> None:
        """Have the other ranks launch the batch, too; None: record a graph (Worker.warm_next)."""

    def watched(self, pending: Pending) -> Pending:
        """The same, but its wait ends when a rank dies."""
        return pending

    def check(self) -> None:
        """Raises EngineDead if a rank has died."""

    def started(self) -> None:
        """The start is over."""

    def give_up(self, error: Exception) -> None:
        """The start failed; raises what explains the error better, if anything does."""

    def stop(self) -> None:
        """Tell the others that no batch will follow. Before graphs are freed."""

    def close(self) -> None:
        """Leave. After graphs are freed."""


class RankGroup(Ranks):
    """One of several ranks.

    Args:
        world: its place.
        store: where all ranks meet.
        timeout_s: for ranks that do not come, and of collectives.
    """

    alone = False

    def __init__(self, world: World, store: Store, timeout_s: float) -> None:
        super().__init__()
        self.world = world
        self.builds = world.local_rank == 0
        self.store = store
        self.timeout_s = timeout_s
        self._joined = False

    def device(self, kind: str) -> torch.device:
        if kind != "cuda":
            return torch.device(kind)
        torch.cuda.set_device(self.world.local_rank)
        return torch.device(kind, self.world.local_rank)

    @contextmanager
    def first(self, step: str, waits: bool) -> Iterator[None]:
        if self.world.rank > 0 and waits:
            self.get(step)
        yield
        if self.world.rank == 0:
            self.store.set(step, "done")

    def gather(self, key: str, value: int) -> list[int]:
        self.store.set(f"{key}/{self.world.rank}", str(value))
        return [int(self.get(f"{key}/{rank}")) for rank in range(self.world.size)]

    def get(self, key: str) -> str:
        """What another rank sets under a key; waits for it, but not for a dead rank."""
        deadline = time.monotonic() + self.timeout_s
        while not self.store.check([key]):
            self.check()
            if time.monotonic() > deadline:
                raise EngineDead(
                    f"rank {self.world.rank} waited {self.timeout_s:g} s for {key!r} "
                    "(parallel.timeout_s)"
                )
            time.sleep(_POLL_S)
        value: bytes = self.store.get(key)
        return value.decode()

    def join(self, device: torch.device, all_reduce: str) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "parallel.tp: torch.distributed has a process group already: one engine of "
                "several ranks per process"
            )
        cuda = device.type == "cuda"
        if cuda:  # no NVLink multicast: small messages need none, and it can wedge a host's GPUs
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        elif not self.world.launched and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not resolve
        self.gather("joined", 1)  # a wait that sees a dead rank; what follows would not
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=PrefixStore("group", self.store),
            rank=self.world.rank,
            world_size=self.world.size,
            timeout=datetime.timedelta(seconds=self.timeout_s),
            device_id=device if cuda else None,
        )
        self._joined = True
        assert dist.group.WORLD is not None
        group = dist.group.WORLD.group_name
        shares = cuda and all_reduce == "symmetric"
        self.tp = TensorParallel(self.world.rank, self.world.size, group, shares)
        if shares:
            try:
                symmetric.share(group, self.world.rank, self.world.size, device)
            except RuntimeError as error:
                raise ConfigError(
                    f"parallel.all_reduce: got symmetric, allowed: nccl, for {error}"
                ) from error

    def close(self) -> None:
        if self._joined:
            self._joined = False
            symmetric.forget(self.tp.group)
            dist.destroy_process_group()

    def abort(self) -> None:
        """Give up collectives that wait for a dead rank, so that the device comes free."""
        if not self._joined:
            return
        self._joined = False
        with contextlib.suppress(Exception):  # whatever happens, the end is near
            if torch.cuda.is_initialized():
                symmetric.release(self.tp.group)
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()


def launched_store(world: World, timeout: datetime.timedelta) -> Store:
    """Where ranks meet that torchrun has started."""
    found: Store = next(rendezvous("env://", world.rank, world.size, timeout=timeout))[0]
    return PrefixStore("fullgraph", found)


def check_devices(world: World, kind: str) -> None:
    """Raises ConfigError if this host has fewer GPUs than ranks."""
    if kind != "cuda":
        return
    count = torch.cuda.device_count()
    needed = world.local_rank + 1 if world.launched else world.size
    if needed > count:
        raise ConfigError(
            f"parallel.tp: got {world.size}, allowed: at most {count}, the CUDA devices that torch "
            "sees here"
        )
