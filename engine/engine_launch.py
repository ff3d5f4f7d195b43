"""How the engine process is started: its command, and the configuration file it reads.

Imports little, so that the process is on its way before FastAPI is imported. Knows nothing of what
is said to it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from engine import scratch
from engine.config import EngineConfig
from engine.engine_transport import ProcessTransport
from engine.quick_import import command
from engine.world import launched_rank


@contextmanager
def launched(
    config: EngineConfig, module: str = "engine.engine_process"
) -> Iterator[ProcessTransport]:
    """An engine process that is starting; it is ended with the context, if it has not ended.

    Until whoever uses it handles signals, SIGINT and SIGTERM end both processes at once.

    Args:
        config: of the whole server.
        module: what to run as the engine's process.

    Raises:
        EngineDead: it cannot be started.
    """
    tree = config.model_dump(mode="json")
    del tree["server"]  # no business of the engine's, and holds the key
    folder = scratch.make_folder()
    file = folder / "engine.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    words = [module, "--config", str(file)]
    ranks = config.parallel.tp - 1
    if ranks and launched_rank() is None:
        words = ["engine.early_ranks", str(ranks), *words]
    transport = ProcessTransport(command(*words))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, transport.exit_now)
    try:
        transport.start()
        yield transport
    finally:
        transport.kill()
        scratch.remove_folder(folder)
