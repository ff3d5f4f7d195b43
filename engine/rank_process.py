"""A rank above 0, as a process: loads its share of the model and runs the batches that rank 0
sends.

    python -m engine.rank_process                 torchrun started it and gave it its place
    python -m engine.rank_process --parent PID    rank 0 did; its place comes by standard input

It never schedules. It ends when rank 0 says so, when rank 0 is gone, or on a fault of its own,
whose message it leaves in the store. Knows nothing of requests.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from engine.batch_wire import decode
from engine.config import EngineConfig, validate
from engine.errors import FullgraphError
from engine.graph_runner import Pending
from engine.parent_guard import die_with_parent
from engine.rank_leader import STOP, WARM
from engine.rank_link import FollowerLink
from engine.ranks import RankGroup, launched_store
from engine.startup import start_worker
from engine.worker import Worker
from engine.world import World, launched_world

_FIND_STORE_S = 600.0
# How often to look at the step in flight while no batch comes.
_POLL_MS = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Follow rank 0; the exit status."""
    parser = argparse.ArgumentParser(prog="engine.rank_process")
    parser.add_argument("--parent", type=int)
    args = parser.parse_args(argv)
    # Ctrl-C reaches the whole process group; rank 0 decides when its followers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    port = None
    if args.parent is not None:
        die_with_parent(args.parent)
        line = sys.stdin.readline()
        if not line:  # rank 0 has not come so far
            return 0
        rank, size, port = json.loads(line)
        world = World(rank, size, rank)
    else:
        world = launched_world()
    store = _store(world, port)
    try:
        follow(world, store)
    except Exception as error:
        expected = isinstance(error, FullgraphError)
        if not expected:
            traceback.print_exc()
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # rank 0 may be gone, which would explain the error
            store.set(f"error/{world.rank}", text)
        sys.stderr.flush()
        os._exit(2 if expected else 1)  # collectives that hang would keep a polite exit
    return 0


def _store(world: World, port: int | None) -> Store:
    timeout = timedelta(seconds=_FIND_STORE_S)
    if port is not None:
        return TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    return launched_store(world, timeout)


def follow(world: World, store: Store | None = None) -> None:
    """Join rank 0 and run what it sends, until it says that no batch will follow."""
    store = store or _store(world, None)
    ranks = RankGroup(world, store, _FIND_STORE_S)
    link = FollowerLink(ranks.get(f"link/{world.rank}"), _rank_zero_is_gone)
    if world.launched:  # torchrun ends all ranks at once, but rank 0 drains before it stops
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tree = json.loads(ranks.get("config"))
    config = validate(EngineConfig, tree, "rank 0's configuration", {})
    ranks.timeout_s = config.parallel.timeout_s
    started = start_worker(config, ranks, lambda *_: None)
    gc.collect()
    gc.freeze()
    _run(started.worker, link)
    link.close()
    started.worker.close()
    started.cache.close()
    ranks.close()


def _run(worker: Worker, link: FollowerLink) -> None:
    """Launch every batch that comes, before the step before is waited for, and record when told:
    all as rank 0 does and in its order, for there are collectives in both.
    """
    before: Pending | None = None
    while True:
        data = link.receive(None if before is None else _POLL_MS)
        if data == STOP:
            break
        if data == WARM:
            worker.warm_next()
            continue
        if data is None:
            if before is not None and before.poll():
                before.wait()  # raises what the step raised
                before = None
            continue
        pending = worker.launch(decode(data))
        if before is not None:
            before.wait()
        before = pending
    if before is not None:
        before.wait()


def _rank_zero_is_gone() -> None:
    """The main thread may hang in a collective that will never end."""
    print("fullgraph: rank 0 is gone", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
