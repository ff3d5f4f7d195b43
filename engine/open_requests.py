"""Requests in flight on the API side: what came for each choice and who waits for it.

One message of the engine is one step of up to hundreds of requests. The client sorts all messages
that are there into the choices' buffers first and wakes each waiting task once after that, so that
a busy server hands over several tokens at a time instead of falling behind. Knows nothing of text,
HTTP or the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.errors import FullgraphError
from engine.request import Finished, TokenLogprobs

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Choice:
    """One engine request: what came for it and was not yet taken.

    Attributes:
        index: place in the `submit` call.
        token_ids / logprobs: parallel; logprobs stays empty where none were asked for.
        prompt_logprobs: per prompt token from the second on, as far as they came.
        finished: set after the last token.
        error: set when the request ended without finishing.
        touched: the group knows that something came.
    """

    group: OpenRequests
    index: int
    request_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None
    error: FullgraphError | None = None
    touched: bool = False

    def take(self) -> tuple[list[int], list[TokenLogprobs]]:
        """The new token ids and their logprobs; they are gone from here then."""
        taken = self.token_ids, self.logprobs
        self.token_ids, self.logprobs = [], []
        return taken

    @property
    def ended(self) -> bool:
        """No more comes."""
        return self.finished is not None or self.error is not None


class OpenRequests:
    """The choices of one `submit`, for one task to wait on. Always `close` it.

    Args:
        request_ids: of the choices.
        abort: ends requests in the engine.

    Attributes:
        choices: in the order of submission.
        closed: the caller wants no more.
    """

    def __init__(self, request_ids: Sequence[int], abort: Callable[[Sequence[int]], None]) -> None:
        self._abort = abort
        self.choices = [Choice(self, index, rid) for index, rid in enumerate(request_ids)]
        self.closed = False
        self._changed: list[Choice] = []
        self._waiter: asyncio.Future[Any] | None = None
        self._take: Callable[[list[Choice]], Any]

    async def changed(self, take: Callable[[list[Choice]], T]) -> T:
        """Wait until something came for some choices; what `take` makes of those, [] once closed.

        `take` is called when it comes, before any waiting task runs. So the work that a step of the
        engine gives is done for all answers first, and then they are sent in one burst: a client
        is not woken, and put to sleep again, for each.
        """
        if self._changed or self.closed:
            return take(self._drain())
        self._take = take
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            taken: T = await self._waiter
            return taken
        finally:
            self._waiter = None

    def _drain(self) -> list[Choice]:
        changed, self._changed = self._changed, []
        for choice in changed:
            choice.touched = False
        return [] if self.closed else changed

    def abort(self, choice: Choice) -> None:
        """End one choice in the engine; nothing more comes for it."""
        self._abort([choice.request_id])

    def close(self) -> None:
        """Abort what is still open and wake the waiting task. More than once is allowed."""
        if self.closed:
            return
        self.closed = True
        self._abort([choice.request_id for choice in self.choices if not choice.ended])
        self.wake()

    def touch(self, choice: Choice) -> bool:
        """Note that something came for the choice. True: the waiting task must be woken."""
        if choice.touched:
            return False
        choice.touched = True
        self._changed.append(choice)
        return len(self._changed) == 1

    def wake(self) -> None:
        """Let the waiting task run."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            waiter.set_result(self._take(self._drain()))
        except Exception as error:  # belongs to the task that waits, not to who woke it
            waiter.set_exception(error)
