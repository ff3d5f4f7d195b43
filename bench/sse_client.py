"""One streamed completion over a plain socket, timed token by token.

A client library costs more per token than a fast server does; this one reads chunked HTTP/1.1 and
server-sent events and nothing else, and parses only those events that say more than "a token".
Knows no workloads and no statistics.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_HEAD_END = b"\r\n\r\n"


@dataclass
class Answer:
    """What happened to one request; times are time.perf_counter() seconds.

    Attributes:
        sent: when the request was written.
        arrivals: when each event with a choice in it came.
        num_output: tokens generated, by the server's own count, else the number of events.
        num_cached: prompt tokens that the server's prefix cache had; 0 where it does not say.
        error: "" or what went wrong.
    """

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    num_output: int = 0
    num_cached: int = 0
    error: str = ""


class HttpError(Exception):
    """The server answered with another status than 200, or not with HTTP at all."""


async def complete(
    url: str, body: dict[str, Any], headers: dict[str, str], limit_s: float
) -> Answer:
    """Post `body` (with stream on) to `url` and read the events to their end; never raises."""
    answer = Answer()
    try:
        async with asyncio.timeout(limit_s):
            await _complete(url, body, headers, answer)
    except TimeoutError:
        answer.error = f"no end after {limit_s:g} s"
    except (OSError, EOFError, ValueError, HttpError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _complete(
    url: str, body: dict[str, Any], headers: dict[str, str], answer: Answer
) -> None:
    parts = urlsplit(url)
    assert parts.hostname is not None, f"no host in {url}"
    data = json.dumps(body).encode()
    lines = {
        "Host": parts.netloc,
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        "Connection": "close",
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    transport, reply = await asyncio.get_running_loop().create_connection(
        lambda: _Reply(answer), parts.hostname, parts.port or 80
    )
    try:
        answer.sent = time.perf_counter()
        transport.write(f"POST {parts.path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        await reply.over
    finally:
        transport.abort()


class _Reply(asyncio.Protocol):
    """What comes back on a connection, put into an answer.

    Attributes:
        over: done with the end of the events, or with what went wrong.
    """

    def __init__(self, answer: Answer) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._buffer = b""  # of HTTP
        self._line = b""  # the beginning of one
        self._error_text = b""
        self._status = 0
        self._chunked = False

    def data_received(self, data: bytes) -> None:
        try:
            self._take(self._buffer + data, time.perf_counter())
        except (ValueError, HttpError) as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self._status not in (0, 200):
            self._end(self._refusal())
        elif not self._status:
            self._end(HttpError(f"not HTTP: {self._buffer[:100]!r}"))
        else:
            self._end(EOFError("the stream ended without [DONE]"))

    def _end(self, error: Exception | None = None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)

    def _refusal(self) -> HttpError:
        return HttpError(f"status {self._status}: {self._error_text[:300].decode()}")

    def _take(self, data: bytes, now: float) -> None:
        if not self._status:
            head, found, rest = data.partition(_HEAD_END)
            if not found:
                self._buffer = data
                return
            self._read_head(head)
            data = rest
        if self._chunked:
            data = self._unchunk(data)
        if self._status != 200:
            self._error_text += data
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _read_head(self, head: bytes) -> None:
        first, *rest = head.split(b"\r\n")
        words = first.split(maxsplit=2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/"):
            raise HttpError(f"not HTTP: {first[:100]!r}")
        lines = [line.lower().partition(b":") for line in rest]
        headers = {name.strip(): value.strip() for name, _, value in lines}
        self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        self._status, self._buffer = int(words[1]), b""

    def _unchunk(self, data: bytes) -> bytes:
        """The content of the whole chunks; the rest waits in the buffer."""
        pieces: list[bytes] = []
        begin = 0
        while (line := data.find(b"\r\n", begin)) >= 0:
            size = int(data[begin:line].split(b";")[0], 16)
            end = line + 2 + size
            if not size and self._status != 200:
                self._error_text += b"".join(pieces)
                raise self._refusal()
            if len(data) < end + 2:
                break
            pieces.append(data[line + 2 : end])
            begin = end + 2
        self._buffer = data[begin:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _event(self, data: bytes, now: float) -> None:
        answer = self._answer
        if data == b"[DONE]":
            self._end()
        elif b'"choices":[{' in data and b'"usage":{' not in data and b'"error"' not in data:
            answer.arrivals.append(now)
            answer.num_output = max(answer.num_output, len(answer.arrivals))
        else:
            self._rare_event(json.loads(data), now)

    def _rare_event(self, event: dict[str, Any], now: float) -> None:
        answer = self._answer
        if "error" in event:
            raise HttpError(str(event["error"]))
        if event.get("choices"):
            answer.arrivals.append(now)
            answer.num_output = max(answer.num_output, len(answer.arrivals))
        usage = event.get("usage")
        if usage:
            answer.num_output = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            answer.num_cached = details.get("cached_tokens") or 0
