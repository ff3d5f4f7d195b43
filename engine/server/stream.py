"""Answers as server-sent events, one frame per choice and batch of tokens.

Frames are put together from parts that were encoded once per request: at hundreds of streams the
encoding of a frame is most of what the HTTP side does. Knows the two shapes of an answer, nothing
of the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import FullgraphError
from engine.server.deltas import Delta
from engine.server.errors import error_body, error_response
from engine.server.logprobs import logprobs_of
from engine.server.protocol import Job
from engine.server.run import Run
from engine.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect the frames
]


def usage(job: Job, num_completion_tokens: int) -> dict[str, int]:
    """OpenAI's usage: prompts counted once each, whatever their number of choices."""
    return {
        "prompt_tokens": job.num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": job.num_prompt_tokens + num_completion_tokens,
    }


class Frames:
    """Bytes of the events of one answer."""

    kind = "text_completion"

    def __init__(self, job: Job, answer_id: str, tokenizer: Tokenizer) -> None:
        self._job, self._tokenizer = job, tokenizer
        self._begun: set[int] = set()
        head = {"id": answer_id, "object": self.kind, "created": int(time.time())}
        self._head = b"data: " + _encode({**head, "model": job.model})[:-1] + b',"choices":['
        self._choice = self._head + b'{"index":'
        # With include_usage every chunk has the field, null up to the last one.
        self._tail = b"]%s}\n\n" % (b',"usage":null' if job.include_usage else b"")
        self._open_end = b',"logprobs":null,"finish_reason":null}' + self._tail
        self._has_more = job.return_token_ids or job.params.logprobs is not None

    def deltas(self, batch: Sequence[tuple[int, Delta]]) -> bytes:
        """What is new, as (index, delta)."""
        if len(batch) == 1:
            return self._delta(*batch[0])
        return b"".join([self._delta(index, delta) for index, delta in batch])

    def usage(self, counts: dict[str, int]) -> bytes:
        """The last chunk: no choices, the usage."""
        return b'%s],"usage":%s}\n\n' % (self._head, _encode(counts))

    def _delta(self, index: int, delta: Delta) -> bytes:
        text, end = _encode(delta.text), self._end(index, delta)
        return b'%s%d,"text":%s%s' % (self._choice, index, text, end)

    def _begin(self, index: int) -> bytes:
        """What a choice's first frame has besides: the prompt's token ids, if they are wanted."""
        self._begun.add(index)
        if not self._job.return_token_ids:
            return b""
        ids = self._job.prompts[index // self._job.params.n].token_ids
        return b',"prompt_token_ids":' + _encode(ids)

    def _end(self, index: int, delta: Delta) -> bytes:
        """What follows the text; nearly always the same."""
        if delta.finish_reason is None and not self._has_more:
            return self._open_end
        reason = b"null" if delta.finish_reason is None else b'"%s"' % delta.finish_reason.encode()
        ids = b""
        if self._job.return_token_ids:
            first = b"" if index in self._begun else self._begin(index)
            ids = b',"token_ids":' + _encode(delta.token_ids) + first
        logprobs = _encode(logprobs_of(self._job, delta, self._tokenizer))
        return b',"logprobs":%s,"finish_reason":%s%s}%s' % (logprobs, reason, ids, self._tail)


class ChatFrames(Frames):
    """Chunks of /v1/chat/completions; a choice's first one says whose words they are."""

    kind = "chat.completion.chunk"

    def _delta(self, index: int, delta: Delta) -> bytes:
        role = b"" if index in self._begun else self._role(index)
        content = b'{"content":%s}' % _encode(delta.text) if delta.text else b"{}"
        end = self._end(index, delta)
        return b'%s%s%d,"delta":%s%s' % (role, self._choice, index, content, end)

    def _role(self, index: int) -> bytes:
        role = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        end = self._begin(index) + b"}" + self._tail
        return b'%s%d,"delta":%s%s' % (self._choice, index, role, end)


def frames(job: Job, answer_id: str, tokenizer: Tokenizer) -> Frames:
    """The frames of a job's shape."""
    return (ChatFrames if job.kind == "chat" else Frames)(job, answer_id, tokenizer)


class EventStream(Response):
    """An answer that is sent as it grows.

    The header waits for the first delta, so that a request which the engine refuses (a full queue)
    still gets its true status. A client that goes away aborts the run.
    """

    def __init__(self, run: Run, shape: Frames) -> None:
        self._run, self._shape = run, shape
        self._started = False
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(close_on_disconnect(self._run, receive))
        try:
            # In a task of its own: each token would wake every caller up to here otherwise.
            await asyncio.create_task(self._send_all(send))
        except FullgraphError as error:
            if not self._started:
                await error_response(error)(scope, receive, send)
                return
            await self._body(send, b"data: %s\n\n" % _encode(error_body(error)), more=False)
        finally:
            self._run.close()
            watcher.cancel()

    async def _send_all(self, send: Send) -> None:
        run, shape = self._run, self._shape
        while (body := await run.next(shape.deltas)) is not None:
            if not self._started:
                await self._start(send)
            await self._body(send, body)
        last = DONE
        if run.job.include_usage:
            last = shape.usage(usage(run.job, run.num_completion_tokens)) + DONE
        if self._started:  # else the client left before the first token
            await self._body(send, last, more=False)

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def _body(self, send: Send, body: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def close_on_disconnect(run: Run, receive: Receive) -> None:
    """Abort the run when its client goes away. The request's body must have been read."""
    message: Any = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
    run.close()
