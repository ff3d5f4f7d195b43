"""How the engine process is started: its command, and the configuration file it reads.

Imports little, so that the process is on its way before FastAPI is imported. Knows nothing of what
is said to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from engine.config import EngineConfig
from engine.engine_transport import ProcessTransport
from engine.quick_import import command
from engine.world import launched_rank


@contextmanager
def launched(
    config: EngineConfig, module: str = "engine.engine_process"
) -> Iterator[ProcessTransport]:
    """An engine process that is starting; it is ended with the context, if it has not ended.

    Args:
        config: of the whole server.
        module: what to run as the engine's process.

    Raises:
        EngineDead: it cannot be started.
    """
    with _config_file(config) as file:
        words = [module, "--config", str(file)]
        ranks = config.parallel.tp - 1
        if ranks and launched_rank() is None:
            words = ["engine.early_ranks", str(ranks), *words]
        transport = ProcessTransport(command(*words))
        transport.start()
        try:
            yield transport
        finally:
            transport.kill()


@contextmanager
def _config_file(config: EngineConfig) -> Iterator[Path]:
    """The configuration as the engine process reads it, in a file that only we can read."""
    tree = config.model_dump(mode="json")
    del tree["server"]  # no business of the engine's, and holds the key
    with tempfile.NamedTemporaryFile("w", prefix="fullgraph-", suffix=".yaml") as file:
        yaml.safe_dump(tree, file)
        file.flush()
        yield Path(file.name)
