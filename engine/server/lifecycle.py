"""The server as a process: its socket, the engine's process, signals, and the exit status.

SIGTERM or Ctrl-C: /health says 503 at once, open requests finish within the drain timeout, exit 0.
A second signal ends them with an error, a third without a word: exit 143 or 130. The engine's end:
every request ends with an error, exit 1.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from engine.config import EngineConfig
from engine.engine_client import EngineClient
from engine.engine_transport import ProcessTransport
from engine.request import Progress, Ready
from engine.server.service import Service
from engine.terminal import ProgressDisplay
from engine.tokenizer import Tokenizer

# For connections whose answer is sent but not read.
_CLOSE_TIMEOUT_S = 3
# Longer than clients keep idle connections (httpx, and so openai's client: 5 s), else the clocks of
# the two sides race, and a request is sent into a connection that is being closed.
_KEEP_ALIVE_S = 75


class DrainingServer(uvicorn.Server):
    """Uvicorn that drains before it stops, and keeps answering /health meanwhile.

    Args:
        config: uvicorn's.
        service: told to drain; when it is over the server stops.
        exit_now: called with a second signal, once requests were ended, and with a third.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, exit_now: Callable[[int], None]
    ) -> None:
        super().__init__(config)
        self._service, self._exit_now = service, exit_now
        self._tasks: list[asyncio.Task[None]] = []
        self._num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and from now on stop when the service is over."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._begin(self._stop_when_over())

    async def _stop_when_over(self) -> None:
        await self._service.wait_over()
        if self._num_signals < 2:
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the interpreter, between any two instructions, on SIGTERM and SIGINT."""
        self._num_signals += 1
        if not self.started or self._num_signals > 2:
            self._exit_now(sig)
        self._service.draining = True
        work = self._service.drain() if self._num_signals == 1 else self._cut_off(sig)
        self._loop.call_soon_threadsafe(self._begin, work)

    async def _cut_off(self, sig: int) -> None:
        await self._service.cut_off()
        self._exit_now(sig)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self._loop.create_task(work))


OnReady = Callable[[Ready, Tokenizer], None]


class _StartDisplay(ProgressDisplay):
    """Shows the engine's start, then what "auto" became, then nothing more."""

    def __init__(self, config: EngineConfig, address: str) -> None:
        super().__init__(config.log.progress)
        self._address = address

    def progress(self, line: Progress) -> None:
        self.update(line.phase, line.done, line.total, line.text)

    def ready(self, ready: Ready, tokenizer: Tokenizer) -> None:
        self.close()
        defaults = {
            f"generation_config.{name}": f"{value:g}"
            for name, value in tokenizer.sampling_defaults.items()
        }
        self.table("settings", {**ready.settings, **defaults})
        # What is alive now stays alive: a vocabulary is no work for the collector between tokens.
        gc.collect()
        gc.freeze()
        print(f"ready on {self._address}", file=sys.stderr, flush=True)


def run_server(
    config: EngineConfig,
    make_app: Callable[[EngineClient, OnReady], FastAPI],
    transport: ProcessTransport,
    listener: socket.socket,
) -> int:
    """Run until there is nothing more to serve; 0 after a drain, 1 when the engine ended.

    Args:
        config: of the whole server.
        make_app: an application over the client it is given, that says when it is ready.
        transport: to the engine's process, which may be on its way already. It is ended.
        listener: a socket that listens.
    """
    # Texts are tokenised one at a time; a pool of threads would only be in the engine's way.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
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
        timeout_keep_alive=_KEEP_ALIVE_S,
        ws="none",
        lifespan="on",
    )
