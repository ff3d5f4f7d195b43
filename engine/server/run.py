"""One job in the engine: submit, turn what comes into deltas, abort what nobody wants any more.

Knows nothing of JSON or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from engine.engine_client import EngineClient
from engine.errors import InvalidRequest
from engine.metrics import Metrics
from engine.open_requests import Choice, OpenRequests
from engine.request import FINISH_ABORT
from engine.server.deltas import ChoiceText, Delta
from engine.server.protocol import Job
from engine.tokenizer import Tokenizer

Batch = list[tuple[int, Delta]]
T = TypeVar("T")


class Run:
    """A job being answered. `close` it, whatever happens.

    Args:
        job: what to do.
        client: where to do it.
        tokenizer: for the text.
        metrics: told of every choice's times and end.
        arrived: time.monotonic() of the request's arrival.

    Raises:
        QueueFull, Unavailable, InvalidRequest: the engine takes no requests, or not so many.
    """

    def __init__(
        self, job: Job, client: EngineClient, tokenizer: Tokenizer, metrics: Metrics, arrived: float
    ) -> None:
        self.job = job
        self._metrics = metrics
        self._arrived = arrived
        self._texts = [ChoiceText(tokenizer, job, index) for index in range(job.num_choices)]
        self._first_token: list[float | None] = [None] * job.num_choices
        self._open = set(range(job.num_choices))
        self._group: OpenRequests | None = client.submit(job.requests) if job.requests else None
        metrics.accepted(job.num_prompt_tokens)

    @property
    def num_completion_tokens(self) -> int:
        """Given to the client so far, over all choices."""
        return sum(text.num_tokens for text in self._texts)

    async def next(self, make: Callable[[Batch], T]) -> T | None:
        """What `make` makes of what is new; None when every choice has ended or after `close`.

        All that has come meanwhile is in one delta per choice, so that a slow reader gets fewer
        and longer ones. `make` may be called before this task runs again (OpenRequests.changed).

        Raises:
            RequestError: the engine refused or lost a choice; all others are aborted with it.
            EngineDead: it ended.
        """
        if self._group is None:
            return make([(i, self._alone(i)) for i in sorted(self._open)]) if self._open else None

        def take(changed: list[Choice]) -> tuple[bool, T | None]:
            batch = [(choice.index, self._advance(choice)) for choice in changed]
            fresh = [(index, delta) for index, delta in batch if delta is not None]
            return bool(changed), make(fresh) if fresh else None

        while self._open:
            more, made = await self._group.changed(take)
            if made is not None or not more:
                return made
        return None

    def close(self) -> None:
        """End what is still open. More than once is allowed."""
        if self._group is not None:
            self._group.close()
        for index in sorted(self._open):
            self._end(index, FINISH_ABORT)

    def _alone(self, index: int) -> Delta:
        delta = self._texts[index].prompt_alone()
        self._end(index, "length")
        return delta

    def _advance(self, choice: Choice) -> Delta | None:
        index = choice.index
        if choice.error is not None:
            self._end(index, "error")
            raise self._named(choice.error)
        if index not in self._open:
            return None
        if self._first_token[index] is None and choice.token_ids:
            self._first_token[index] = now = time.monotonic()
            self._metrics.first_token(now - self._arrived)
        delta = self._texts[index].advance(choice)
        if delta is not None and delta.finish_reason is not None:
            assert self._group is not None
            if not choice.ended:  # a stop string, of which the engine knows nothing
                self._group.abort(choice)
            self._end(index, delta.finish_reason)
        return delta

    def _named(self, error: Exception) -> Exception:
        """What the engine found wrong with a grammar, under the field that brought it."""
        field, reason = self.job.format_field, str(error).removeprefix("structured_outputs: ")
        return InvalidRequest.of(field, reason) if field and reason != str(error) else error

    def _end(self, index: int, reason: str) -> None:
        self._open.discard(index)
        now, first = time.monotonic(), self._first_token[index]
        self._metrics.finished(
            reason,
            self._texts[index].num_tokens,
            now - self._arrived,
            None if first is None else now - first,
        )
