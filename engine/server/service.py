"""The server's state: starting, ready, draining, dead; and what is in flight.

Owns the engine client and the tokenizer over the life of the process. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.engine_client import EngineClient, State
from engine.errors import EngineDead, FullgraphError, Unavailable
from engine.metrics import Metrics
from engine.request import Ready
from engine.server.protocol import Context
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_POLL_S = 0.05
# For handlers to tell their clients that the engine died or the time to drain is over.
_LAST_WORDS_S = 2.0
# How long /health says 503 before a server without an engine goes away.
_DEAD_S = 1.0
_STATS_TIMEOUT_S = 2.0


class Service:
    """What every route needs.

    Args:
        config: of the whole server.
        client: not started yet.
        load_tokenizer: called in a thread while the engine starts.
        on_ready: called when requests are taken.

    Attributes:
        draining: no new requests; those open may finish.
        failure: why the server cannot go on, or None.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        load_tokenizer: Callable[[], Tokenizer],
        on_ready: Callable[[Ready, Tokenizer], None] | None = None,
    ) -> None:
        self.config = config
        self.client = client
        self.metrics = Metrics()
        self.draining = False
        self.failure: FullgraphError | None = None
        self.created = int(time.time())
        self._load_tokenizer = load_tokenizer
        self._on_ready = on_ready
        self._tokenizer: Tokenizer | None = None
        self._num_active = 0
        self._over = asyncio.Event()

    async def start(self) -> None:
        """Start engine and tokenizer; returns when the server is ready.

        Raises:
            FullgraphError: one of them cannot be had; also kept in `failure`.
        """
        engine = asyncio.create_task(self.client.start(self.config.server.start_timeout_s))
        try:
            tokenizer = await asyncio.to_thread(self._load_tokenizer)
            ready = await engine
            self._tokenizer = tokenizer
        except FullgraphError as error:
            self.failure = error
            raise
        finally:
            engine.cancel()
        if self._on_ready is not None:
            self._on_ready(ready, tokenizer)

    async def run(self) -> None:
        """Start, and watch the engine until it dies. `wait_over` returns after that."""
        try:
            await self.start()
            self.failure = await self.client.wait_dead()
        except FullgraphError as error:
            self.failure = error
        except Exception as error:
            logger.exception("the start failed")
            self.failure = EngineDead(f"the start failed: {error!r}")
        logger.error("%s", self.failure)
        await self._wait_idle(_LAST_WORDS_S)
        await asyncio.sleep(_DEAD_S)
        self._over.set()

    async def wait_over(self) -> None:
        """Wait until there is nothing more to serve: the engine is dead, or the drain is over."""
        await self._over.wait()

    async def drain(self) -> None:
        """Refuse new requests, let open ones finish within `server.drain_timeout_s`."""
        self.draining = True
        timeout_s = self.config.server.drain_timeout_s
        if self._num_active:
            text = "shutting down: %d open requests have %g s; a second signal ends them"
            logger.warning(text, self._num_active, timeout_s)
        if self.client.state is State.READY and not await self._wait_idle(timeout_s):
            await self.cut_off()
        self._over.set()

    async def cut_off(self) -> None:
        """End open requests with an error and let them tell their clients."""
        if self._num_active:
            logger.warning("%d open requests are cut off", self._num_active)
        self.client.fail_open(Unavailable("the server is shutting down"))
        await self._wait_idle(_LAST_WORDS_S)
        await asyncio.sleep(_POLL_S)  # what was sent last is written

    async def stop(self) -> None:
        """End the engine."""
        await self.client.shutdown()

    async def _wait_idle(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._num_active and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        return not self._num_active

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Around everything that a drain waits for."""
        self._num_active += 1
        try:
            yield
        finally:
            self._num_active -= 1

    def context(self) -> Context:
        """What requests are judged by.

        Raises:
            Unavailable: starting, draining or dead.
        """
        if self.draining:
            raise Unavailable("the server is shutting down", retry_after_s=5)
        if self.failure is not None:
            raise Unavailable(str(self.failure))
        ready = self.client.check_ready()
        if self._tokenizer is None:
            raise Unavailable("the tokenizer is being loaded")
        return Context(self.config, ready, self._tokenizer)

    def health(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of /health."""
        try:
            self.context()
        except Unavailable as error:
            progress = self.client.progress
            body: dict[str, Any] = {"status": self._status(), "message": error.message}
            if progress is not None and body["status"] == "starting":
                body["progress"] = msgspec.structs.asdict(progress)
            return error.status, body
        return 200, {"status": "ready"}

    def _status(self) -> str:
        if self.failure is not None or self.client.state is State.DEAD:
            return "dead"
        return "draining" if self.draining else "starting"

    async def render_metrics(self) -> bytes:
        """The text of /metrics, with the engine's own numbers where it answers."""
        stats: dict[str, Any] = {}
        with contextlib.suppress(Unavailable, EngineDead):
            stats = msgspec.structs.asdict(await self.client.stats(timeout_s=_STATS_TIMEOUT_S))
        return self.metrics.render(self.client.num_open, stats)
