"""The asyncio side of the engine process: submit, stream, abort, back-pressure, and its end.

Knows nothing of text or HTTP, and never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import msgspec

from engine.engine_transport import Transport
from engine.errors import (
    EngineDead,
    FullgraphError,
    InvalidRequest,
    QueueFull,
    RequestError,
    Unavailable,
)
from engine.open_requests import Choice, OpenRequests
from engine.request import (
    Abort,
    EngineRequest,
    Fatal,
    FromEngine,
    Progress,
    Ready,
    RequestFailed,
    Shutdown,
    Stats,
    StatsQuery,
    StepOutput,
    Submit,
    TokenLogprobs,
)

# Retry-After, in seconds.
_LONGEST_RETRY_S = 60
_RETRY_UNKNOWN_S = 5
_RATE_WINDOW_S = 30.0

logger = logging.getLogger(__name__)


class EngineFault(RequestError):
    """One request was ended by a fault of the engine's (HTTP 500)."""

    status = 500
    kind = "server_error"


class State(Enum):
    """Where the engine is in its life; READY is the only state that takes requests."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    CLOSED = "closed"


class EngineClient:
    """Starts, feeds and watches one engine.

    Args:
        transport: the wire to it.
        max_waiting: requests accepted beyond those the engine runs at once.
        on_progress: called with each Progress while the engine starts.

    Attributes:
        ready: what the engine said when it was ready.
        progress: the last line of its start.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        max_waiting: int,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._transport = transport
        self._max_waiting = max_waiting
        self._on_progress = on_progress
        self.state = State.STARTING
        self.ready: Ready | None = None
        self.progress: Progress | None = None
        self._open: dict[int, Choice] = {}
        self._next_id = 1
        self._stats_waiters: deque[asyncio.Future[Stats]] = deque()
        self._fatal = ""
        self._death: EngineDead | None = None
        self._settled = asyncio.Event()  # ready or dead
        self._over = asyncio.Event()  # dead
        self._rate = _FinishRate()

    @property
    def num_open(self) -> int:
        """Requests submitted and neither finished nor aborted."""
        return len(self._open)

    @property
    def capacity(self) -> int:
        """Most requests that can be open at once: those running and those waiting."""
        assert self.ready is not None
        return self.ready.max_running + self._max_waiting

    async def start(self, timeout_s: float) -> Ready:
        """Start the engine and wait until it serves.

        Raises:
            EngineDead: it ended, or was not ready in time.
        """
        await self._transport.open(self._on_messages, self._on_exit)
        try:
            await asyncio.wait_for(self._settled.wait(), timeout_s)
        except TimeoutError:
            self._die(EngineDead(f"the engine was not ready after {timeout_s:g} s"))
        if self._death is not None:
            raise self._death
        assert self.ready is not None
        return self.ready

    async def wait_dead(self) -> EngineDead:
        """Wait for the engine's end, unless `shutdown` brings it about; how it ended."""
        await self._over.wait()
        assert self._death is not None
        return self._death

    def submit(self, requests: Sequence[EngineRequest]) -> OpenRequests:
        """Start requests, all or none; their ids are replaced by ours.

        Raises:
            Unavailable: the engine is starting, ended or closed.
            InvalidRequest: more requests than could ever be open at once.
            QueueFull: too many are open; says when to try again.
        """
        self.check_ready()
        self._check_room(len(requests))
        first = self._next_id
        self._next_id += len(requests)
        group = OpenRequests(range(first, self._next_id), self.abort)
        for choice in group.choices:
            self._open[choice.request_id] = choice
        numbered = [
            msgspec.structs.replace(request, request_id=first + index)
            for index, request in enumerate(requests)
        ]
        self._transport.send(Submit(numbered))
        return group

    def check_ready(self) -> Ready:
        """What the engine said when it was ready.

        Raises:
            Unavailable: it is not ready, or no more.
        """
        if self.state is State.STARTING:
            raise Unavailable("the engine is starting", retry_after_s=5)
        if self.state is not State.READY:
            raise Unavailable(str(self._death or "the server is shutting down"))
        assert self.ready is not None
        return self.ready

    def _check_room(self, num_requests: int) -> None:
        if num_requests > self.capacity:
            raise InvalidRequest(
                f"{num_requests} choices (prompts times n) are more than the {self.capacity} that "
                "this server can hold (scheduler.max_running + scheduler.max_waiting)",
                param="n",
            )
        excess = len(self._open) + num_requests - self.capacity
        if excess > 0:
            raise QueueFull(
                f"the server is full: {len(self._open)} of {self.capacity} requests are open",
                retry_after_s=self._rate.seconds_until(excess),
            )

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests; ids that are unknown or already ended are ignored."""
        ids = [rid for rid in request_ids if self._open.pop(rid, None) is not None]
        if ids and self.state is State.READY:
            self._transport.send(Abort(ids))

    async def stats(self, check: bool = False, timeout_s: float = 5.0) -> Stats:
        """The engine's counters, between two steps; with `check` it also walks pages and tree.

        Raises:
            Unavailable: the engine is not ready, or did not answer in time.
            EngineDead: it ended meanwhile.
        """
        self.check_ready()
        waiter: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        self._transport.send(StatsQuery(check))
        try:
            return await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError:
            raise Unavailable("the engine did not answer") from None

    async def shutdown(self, timeout_s: float = 10.0) -> None:
        """End the engine and everything open. More than once is allowed."""
        if self.state is not State.CLOSED:
            if self.state is State.STARTING:  # compiling, deaf to messages, and nothing to lose
                timeout_s = 0.0
            self._transport.send(Shutdown())
            self.state = State.CLOSED
            self._fail_all(Unavailable("the server is shutting down"))
            self._settled.set()
        await self._transport.close(timeout_s)

    def fail_open(self, error: FullgraphError) -> None:
        """End every open request with an error; the engine lives on."""
        ids = list(self._open)
        self._fail_all(error)
        if ids and self.state is State.READY:
            self._transport.send(Abort(ids))

    def _on_messages(self, messages: list[FromEngine]) -> None:
        woken: list[OpenRequests] = []
        try:
            for message in messages:
                if type(message) is StepOutput:
                    self._step(message, woken)
                else:
                    self._other(message, woken)
        except Exception as error:  # a request that waits for a lost message would hang
            logger.exception("a message of the engine could not be handled")
            self._die(EngineDead(f"its messages make no sense: {error!r}"))
        for group in woken:
            group.wake()

    def _step(self, output: StepOutput, woken: list[OpenRequests]) -> None:
        """Sort one step's tokens into the choices; add to `woken` each group that is to wake."""
        get = self._open.get
        for start, position_logprobs in self._prompt_logprobs(output):
            start.prompt_logprobs.extend(position_logprobs)
            if start.group.touch(start):
                woken.append(start.group)
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            choice = get(request_id)
            if choice is None:  # aborted while this step ran
                continue
            choice.token_ids.append(token_id)
            if not choice.touched and choice.group.touch(choice):
                woken.append(choice.group)
        for request_id, entry in zip(output.request_ids, output.logprobs, strict=False):
            choice = get(request_id)
            if choice is not None and entry is not None:
                choice.logprobs.append(entry)
        for finished in output.finished:
            choice = self._open.pop(finished.request_id, None)
            if choice is None:
                continue
            choice.finished = finished
            self._rate.finished()
            if choice.group.touch(choice):
                woken.append(choice.group)

    def _prompt_logprobs(self, output: StepOutput) -> Iterable[tuple[Choice, list[TokenLogprobs]]]:
        for request_id, first, entries in output.prompt_logprobs:
            choice = self._open.get(request_id)
            if choice is None:
                continue
            # A preempted request computes its prompt again: take only what is new.
            known = len(choice.prompt_logprobs) + 1 - first
            assert known >= 0, "a chunk of prompt logprobs is missing"
            yield choice, entries[known:]

    def _other(self, message: FromEngine, woken: list[OpenRequests]) -> None:
        if isinstance(message, RequestFailed):
            self._fail(message, woken)
        elif isinstance(message, Progress):
            self.progress = message
            if self._on_progress is not None:
                self._on_progress(message)
        elif isinstance(message, Stats):
            waiter = self._stats_waiters.popleft()
            if not waiter.done():
                waiter.set_result(message)
        elif isinstance(message, Fatal):
            self._fatal = message.message
        elif isinstance(message, Ready) and self.state is State.STARTING:
            self.ready = message
            self.state = State.READY
            self._settled.set()

    def _fail(self, message: RequestFailed, woken: list[OpenRequests]) -> None:
        choice = self._open.pop(message.request_id, None)
        if choice is None:
            return
        choice.error = self._request_error(message)
        if choice.group.touch(choice):
            woken.append(choice.group)

    def _request_error(self, message: RequestFailed) -> RequestError:
        if message.status == QueueFull.status:
            return QueueFull(message.message, retry_after_s=self._rate.seconds_until(1))
        kinds = {kind.status: kind for kind in (InvalidRequest, Unavailable)}
        return kinds.get(message.status, EngineFault)(message.message)

    def _on_exit(self, how: str) -> None:
        self._die(EngineDead(f"the engine process {how}{self._fatal and ': '}{self._fatal}"))

    def _die(self, death: EngineDead) -> None:
        if self.state in (State.DEAD, State.CLOSED):
            return
        self.state = State.DEAD
        self._death = death
        self._fail_all(death)
        self._settled.set()
        self._over.set()

    def _fail_all(self, error: FullgraphError) -> None:
        choices = list(self._open.values())
        self._open.clear()
        for choice in choices:
            choice.error = error
            choice.group.touch(choice)
            choice.group.wake()
        while self._stats_waiters:
            waiter = self._stats_waiters.popleft()
            with contextlib.suppress(asyncio.InvalidStateError):
                waiter.set_exception(error)


class _FinishRate:
    """How fast requests finished lately: what Retry-After is computed from."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=64)

    def finished(self) -> None:
        self._times.append(time.monotonic())

    def seconds_until(self, num_requests: int) -> int:
        """Whole seconds until that many requests have finished, at least 1."""
        now = time.monotonic()
        recent = [when for when in self._times if now - when < _RATE_WINDOW_S]
        if not recent:
            return _RETRY_UNKNOWN_S
        interval_s = (now - recent[0]) / len(recent)
        return max(1, min(_LONGEST_RETRY_S, math.ceil(interval_s * num_requests)))
