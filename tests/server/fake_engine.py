"""An engine without a model: deterministic tokens, real queueing, aborts and limits.

What is generated depends only on the prompt, the position and, where the temperature is not 0, the
seed: lower-case letters, never an end. Prompts can ask for something else (see `script`). Runs in
the test's process (FakeTransport) or in one of its own (fake_engine_process.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.engine_transport import OnExit, OnMessages
from engine.request import (
    Abort,
    EngineRequest,
    Fatal,
    Finished,
    FromEngine,
    Progress,
    Ready,
    RequestFailed,
    Shutdown,
    Stats,
    StatsQuery,
    StepOutput,
    Submit,
    ToEngine,
    TokenLogprobs,
)

VOCAB_SIZE = 259  # of tests/tiny_tokenizer.py: byte b is id b + 3
_DIRECTIVE = re.compile(rb"say:(.*)$", re.DOTALL)


@dataclass
class Limits:
    """What the engine says of itself in Ready, and how fast it is."""

    max_model_len: int = 256
    num_pages: int = 1000
    page_size: int = 16
    max_running: int = 8
    step_s: float = 0.0


@dataclass
class Running:
    """A request and how far it is."""

    request: EngineRequest
    script: list[int]
    generated: list[int] = field(default_factory=list)
    scored: bool = False


def script(request: EngineRequest) -> list[int]:
    """`say:TEXT` at a prompt's end makes the engine say TEXT and then end (id 1)."""
    prompt = bytes(token_id - 3 for token_id in request.prompt_ids if token_id >= 3)
    match = _DIRECTIVE.search(prompt.removesuffix(b"\nassistant:"))
    return [*(byte + 3 for byte in match[1]), 1] if match else []


def letter(request: EngineRequest, position: int) -> int:
    """A letter's id, out of everything that may decide it."""
    key = [request.prompt_ids, position]
    if request.temperature > 0:
        key += [request.temperature, request.top_p, request.top_k, request.seed]
    return 3 + ord("a") + hashlib.blake2b(repr(key).encode()).digest()[0] % 26


class FakeEngine:
    """One step at a time.

    Args:
        limits: what to be.
        send: takes messages to the client.

    Attributes:
        steps: done so far.
        aborted: ids in the order they were aborted; aborted_at: and at which step.
        seen: every request, by id.
    """

    def __init__(self, limits: Limits, send: Callable[[FromEngine], None]) -> None:
        self.limits = limits
        self._send = send
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.steps = 0
        self.aborted: list[int] = []
        self.aborted_at: dict[int, int] = {}
        self.seen: dict[int, EngineRequest] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def ready(self) -> Ready:
        limits = self.limits
        return Ready(
            max_model_len=limits.max_model_len,
            vocab_size=VOCAB_SIZE,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_running=limits.max_running,
            settings={"kv.num_pages": str(limits.num_pages)},
        )

    def handle(self, message: ToEngine) -> bool:
        """Take a message; False: shut down."""
        if isinstance(message, Submit):
            for request in message.requests:
                self._add(request)
        elif isinstance(message, Abort):
            gone = set(message.request_ids)
            self.aborted += message.request_ids
            self.aborted_at |= dict.fromkeys(message.request_ids, self.steps)
            self.waiting = [r for r in self.waiting if r.request.request_id not in gone]
            self.running = [r for r in self.running if r.request.request_id not in gone]
        elif isinstance(message, StatsQuery):
            self._send(self._stats())
        return not isinstance(message, Shutdown)

    def _add(self, request: EngineRequest) -> None:
        assert request.request_id not in self.seen and request.prompt_ids
        assert len(request.prompt_ids) + request.max_tokens <= self.limits.max_model_len
        assert request.max_tokens > 0 or request.prompt_logprobs >= 0
        assert all(0 <= i < VOCAB_SIZE for i in [*request.prompt_ids, *request.stop_ids])
        self.seen[request.request_id] = request
        text = bytes(token_id - 3 for token_id in request.prompt_ids if token_id >= 3)
        status = re.search(rb"fail:(\d+)", text)
        if status:
            self._send(RequestFailed(request.request_id, "as you asked", int(status[1])))
            return
        self.waiting.append(Running(request, script(request)))

    def _stats(self) -> Stats:
        used = len(self.running)
        pages = self.limits.num_pages
        return Stats(
            running=used,
            waiting=len(self.waiting),
            pages_total=pages,
            pages_free=pages - used,
            pages_cached=0,
            pages_held=used,
            steps_decode=self.steps,
        )

    def step(self) -> None:
        """One token for everything that runs."""
        while self.waiting and len(self.running) < self.limits.max_running:
            self.running.append(self.waiting.pop(0))
        output = StepOutput([], [], [], [], [])
        logprobs = any(r.request.logprobs >= 0 for r in self.running)
        for item in list(self.running):
            self._advance(item, output, logprobs)
        self.steps += 1
        self._send(output)

    def _advance(self, item: Running, output: StepOutput, logprobs: bool) -> None:
        request = item.request
        if request.prompt_logprobs >= 0 and not item.scored:
            item.scored = True
            ids = request.prompt_ids
            entries = [self._logprobs(ids[i], request.prompt_logprobs) for i in range(1, len(ids))]
            half = len(entries) // 2  # in two chunks
            output.prompt_logprobs.append((request.request_id, 1, entries[:half]))
            output.prompt_logprobs.append((request.request_id, 1 + half, entries[half:]))
        if request.max_tokens == 0:
            self._finish(item, output, "length", -1)
            return
        token_id = self._draw(item)
        item.generated.append(token_id)
        output.request_ids.append(request.request_id)
        output.token_ids.append(token_id)
        if logprobs:
            entry = self._logprobs(token_id, request.logprobs) if request.logprobs >= 0 else None
            output.logprobs.append(entry)
        if token_id in request.stop_ids and len(item.generated) > request.min_tokens:
            self._finish(item, output, "stop", token_id)
        elif len(item.generated) == request.max_tokens:
            self._finish(item, output, "length", -1)

    def _draw(self, item: Running) -> int:
        request, position = item.request, len(item.generated)
        token_id = letter(request, position)
        if item.script:
            token_id = item.script[min(position, len(item.script) - 1)]
        forced = [i for i, bias in request.logit_bias.items() if bias >= 100]
        token_id = forced[0] if forced else token_id
        if token_id in request.stop_ids and position < request.min_tokens:
            return 3 + ord("m")
        return token_id

    def _finish(self, item: Running, output: StepOutput, reason: str, stop_id: int) -> None:
        self.running.remove(item)
        output.finished.append(Finished(item.request.request_id, reason, stop_id))

    def _logprobs(self, token_id: int, count: int) -> TokenLogprobs:
        """The token itself with 1/2, its neighbours with 1/4, 1/8, ..., the last one impossible."""
        tops = [(token_id + i) % VOCAB_SIZE for i in range(count)]
        values = [-math.log(2) * (i + 1) for i in range(count)]
        if count > 2:
            values[-1] = -9999.0
        return TokenLogprobs(-math.log(2), tops, values)


class FakeTransport:
    """A FakeEngine on the test's own event loop.

    Args:
        limits: of the engine.
        start: Progress messages before Ready.
        never_ready: stay in the start.
        fatal: end with this message instead of getting ready.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        start: list[Progress] | None = None,
        never_ready: bool = False,
        fatal: str = "",
    ) -> None:
        self.limits = limits or Limits()
        self._start = start or []
        self._never_ready = never_ready
        self._fatal = fatal
        self._outbox: list[FromEngine] = []
        self.engine = FakeEngine(self.limits, self._outbox.append)
        self.closed = False
        self._wake = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._exit = ""

    async def open(self, on_messages: OnMessages, on_exit: OnExit) -> None:
        self._on_messages, self._on_exit = on_messages, on_exit
        self.engine_loop = asyncio.get_running_loop()
        self._task = self.engine_loop.create_task(self._serve())

    def send(self, message: ToEngine) -> None:
        if not self.closed and not self._exit and not self.engine.handle(message):
            self._exit = "ended with status 0"
        self._wake.set()

    async def close(self, timeout_s: float) -> None:
        self.closed = True
        self._task.cancel()

    def pause(self) -> None:
        """No steps from now on; messages are still taken."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def kill(self) -> None:
        """The end of the process, from outside."""
        self._exit = "was killed by SIGKILL"
        self._wake.set()
        self._running.set()

    def flush(self) -> None:
        """Deliver what the engine has said, in one go."""
        messages, self._outbox[:] = list(self._outbox), []
        if messages:
            self._on_messages(messages)

    async def _serve(self) -> None:
        for progress in self._start:
            self._on_messages([progress])
            await asyncio.sleep(0)
        if self._fatal:
            self._on_messages([Fatal(self._fatal)])
            self._exit = "ended with status 2"
        elif not self._never_ready:
            self._on_messages([self.engine.ready()])
        while not self._exit:
            self.flush()
            if not self.engine.has_work:
                self._wake.clear()
                self.flush()
                await self._wake.wait()
                continue
            await asyncio.sleep(self.limits.step_s)
            await self._running.wait()
            if not self._exit and self.engine.has_work:
                self.engine.step()
        self._on_exit(self._exit)
