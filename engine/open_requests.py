"""Requests in flight on the API side: what came for each choice and who waits for it.

One message of the engine is one step of up to hundreds of requests. The client sorts all messages
that are there into the choices' buffers first and wakes each waiting task once after that, so that
a busy server hands over several tokens at a time instead of falling behind. Knows nothing of text,
HTTP or the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from engine.errors import FullgraphError
from engine.request import Finished, TokenLogprobs


class Choice:
    """One engine request: what came for it and was not yet taken.

    Attributes:
        index: place in the `submit` call.
        token_ids / logprobs: parallel; logprobs stays empty where none were asked for.
        prompt_logprobs: per prompt token from the second on, as far as they came.
        finished: set after the last token.
        error: set when the request ended without finishing.
    """

    __slots__ = (
        "error",
        "finished",
        "group",
        "index",
        "logprobs",
        "prompt_logprobs",
        "request_id",
        "token_ids",
        "touched",
    )

    def __init__(self, group: OpenRequests, index: int, request_id: int) -> None:
        self.group = group
        self.index = index
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finished: Finished | None = None
        self.error: FullgraphError | None = None
        self.touched = False

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
        self._waiter: asyncio.Future[None] | None = None

    async def changed(self) -> list[Choice]:
        """Wait until something came for some choices and return those; [] once closed."""
        while not self._changed and not self.closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
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
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
