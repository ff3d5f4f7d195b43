"""The server as a process: its socket, the engine's process, signals, and the exit status.

SIGTERM or Ctrl-C: /health says 503 at once, open requests finish within the drain timeout, exit 0.
A second signal does not wait: exit 143 or 130. The engine's end: every request ends with an error,
exit 1.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

import uvicorn
from fastapi import FastAPI

from engine.config import EngineConfig
from engine.engine_client import EngineClient
from engine.engine_transport import ProcessTransport
from engine.errors import ConfigError
from engine.request import Progress, Ready
from engine.server.service import Service
from engine.terminal import ProgressDisplay
from engine.tokenizer import Tokenizer

_BACKLOG = 2048
# For connections whose answer is sent but not read.
_CLOSE_TIMEOUT_S = 3


class DrainingServer(uvicorn.Server):
    """Uvicorn that drains before it stops, and keeps answering /health meanwhile.

    Args:
        config: uvicorn's.
        service: told to drain; when it is over the server stops.
        exit_now: called with a second signal.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, exit_now: Callable[[int], None]
    ) -> None:
        super().__init__(config)
        self._service, self._exit_now = service, exit_now
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and from now on stop when the service is over."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._tasks.append(self._loop.create_task(self._stop_when_over()))

    async def _stop_when_over(self) -> None:
        await self._service.wait_over()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the interpreter, between any two instructions, on SIGTERM and SIGINT."""
        if not self.started or self._service.draining:
            self._exit_now(sig)
        self._service.draining = True
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._tasks.append(self._loop.create_task(self._service.drain()))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; clients can connect before there is anything to answer them.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"server.host, server.port: got {host}:{port}, which cannot be listened on: "
            f"{error.strerror or error}"
        ) from None


OnReady = Callable[[Ready, Tokenizer], None]


class _StartDisplay:
    """Shows the engine's start, then what "auto" became, then nothing more."""

    def __init__(self, config: EngineConfig, address: str) -> None:
        self._display = ProgressDisplay(config.log.progress)
        self._stack = ExitStack()
        self._address = address

    def __enter__(self) -> _StartDisplay:
        self._stack.enter_context(self._display)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def progress(self, line: Progress) -> None:
        self._display.update(line.phase, line.done, line.total, line.text)

    def ready(self, ready: Ready, tokenizer: Tokenizer) -> None:
        self._stack.close()
        defaults = {
            f"generation_config.{name}": f"{value:g}"
            for name, value in tokenizer.sampling_defaults.items()
        }
        self._display.table("settings", {**ready.settings, **defaults})
        # What is alive now stays alive: a vocabulary is no work for the collector between tokens.
        gc.collect()
        gc.freeze()
        print(f"ready on {self._address}", file=sys.stderr, flush=True)


def run_server(
    config: EngineConfig,
    make_app: Callable[[EngineClient, OnReady], FastAPI],
    transport: ProcessTransport,
) -> int:
    """Run until there is nothing more to serve; 0 after a drain, 1 when the engine ended.

    Args:
        config: of the whole server.
        make_app: an application over the client it is given, that says when it is ready.
        transport: to the engine's process, which may be on its way already. It is ended.
    """
    # Texts are tokenised one at a time; a pool of threads would only be in the engine's way.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with listen(config.server.host, config.server.port) as listener:
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"listening on {address}", file=sys.stderr, flush=True)
        with _StartDisplay(config, address) as display:
            client = EngineClient(
                transport, max_waiting=config.scheduler.max_waiting, on_progress=display.progress
            )
            app = make_app(client, display.ready)
            service: Service = app.state.service
            try:
                server = DrainingServer(_uvicorn_config(config, app), service, transport.exit_now)
                server.run(sockets=[listener])
            finally:
                transport.kill()
    return 0 if service.failure is None else 1


def _uvicorn_config(config: EngineConfig, app: FastAPI) -> uvicorn.Config:
    debug = config.log.level == "debug"
    return uvicorn.Config(
        app,
        log_level="debug" if debug else "warning",
        access_log=debug,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        ws="none",
        lifespan="on",
    )
