"""Which ranks there are and which one this process is: `parallel.tp` of the configuration, or
torchrun's environment.

Knows nothing of torch, sockets or processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import ConfigError

# All of them together mean that a launcher has started the ranks, here and maybe on other hosts.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """One rank's place among all.

    Attributes:
        rank: from 0; rank 0 schedules, the others follow it.
        size: ranks in all.
        local_rank: number of this rank's GPU on its host.
        launched: by torchrun or the like; otherwise rank 0 starts the others.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launched: bool = False


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank if torchrun (or the like) has started it."""
    return int(environ["RANK"]) if all(environ.get(name) for name in _TORCHRUN) else None


def rank_zero(tp: int, environ: Mapping[str, str] = os.environ) -> World:
    """The world as the process that serves sees it.

    Raises:
        ConfigError: torchrun has started another number of ranks than `parallel.tp`.
    """
    rank = launched_rank(environ)
    if rank is None:
        return World(size=tp)
    world = launched_world(environ)
    if world.size != tp:
        raise ConfigError(
            f"parallel.tp: got {tp}, allowed: {world.size}, the WORLD_SIZE of this environment "
            "(torchrun has started so many ranks)"
        )
    if rank != 0:
        raise ConfigError(
            f"rank {rank} cannot schedule, only rank 0 can: run `python -m engine.rank_process`"
        )
    return world


def ranks_here(tp: int, environ: Mapping[str, str] = os.environ) -> int:
    """How many of the ranks are on this host, as far as the environment tells."""
    return tp if launched_rank(environ) is None else int(environ.get("LOCAL_WORLD_SIZE", 1))


def launched_world(environ: Mapping[str, str] = os.environ) -> World:
    """The world that torchrun's environment describes."""
    rank, size, local_rank = (int(environ[name]) for name in _TORCHRUN[:3])
    return World(rank, size, local_rank, launched=True)
