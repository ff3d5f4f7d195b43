"""One streamed completion over a plain asyncio socket, timed token by token.

A client library costs more per token than a fast server does; this one reads chunked HTTP/1.1 and
server-sent events and nothing else. Knows no workloads and no statistics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_LINE_LIMIT = 1 << 20


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
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or 80, limit=_LINE_LIMIT
    )
    try:
        data = json.dumps(body).encode()
        lines = {
            "Host": parts.netloc,
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            "Connection": "close",
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        answer.sent = time.perf_counter()
        writer.write(f"POST {parts.path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        await writer.drain()
        async for event in _events(reader):
            _take(json.loads(event), answer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _take(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        raise HttpError(str(event["error"]))
    if event.get("choices"):
        answer.arrivals.append(time.perf_counter())
        answer.num_output = max(answer.num_output, len(answer.arrivals))
    usage = event.get("usage")
    if usage:
        answer.num_output = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        answer.num_cached = details.get("cached_tokens") or 0


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to [DONE]."""
    chunked = await _read_head(reader)
    rest = b""
    async for piece in _chunks(reader) if chunked else _pieces(reader):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data
    raise EOFError("the stream ended without [DONE]")


async def _read_head(reader: asyncio.StreamReader) -> bool:
    """Read status and headers; whether the body is chunked."""
    status = await reader.readline()
    words = status.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise HttpError(f"not HTTP: {status!r}")
    headers = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    chunked = headers.get(b"transfer-encoding") == b"chunked"
    if words[1] != b"200":
        pieces = [piece async for piece in (_chunks(reader) if chunked else _pieces(reader))]
        raise HttpError(f"status {words[1].decode()}: {b''.join(pieces)[:300].decode()}")
    return chunked


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece
