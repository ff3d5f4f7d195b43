"""Plumbing in front of the routes: the body's size, the API key, the count of requests.

Plain ASGI, since Starlette's own middleware class hides disconnects and costs a task per request.
"""

from __future__ import annotations

import hmac

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import BodyTooLarge, Unauthorized, error_response
from engine.server.service import Service

# Probes and scrapers carry no key.
_OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})


async def read_body(request: Request, most: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLarge: it has more than `most` bytes, or says so; no more than that is kept.
        starlette.requests.ClientDisconnect: the client left before its end.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise BodyTooLarge(f"the body has {declared} bytes, allowed: at most {most}")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise BodyTooLarge(f"the body has more than the allowed {most} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


class RequireKey:
    """Asks for `Authorization: Bearer KEY` everywhere but on probes.

    Args:
        app: what is behind.
        key: the key.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            scheme, _, rest = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            given = scheme.title() + b" " + rest.strip()  # the scheme's case is free (RFC 9110)
            if not hmac.compare_digest(given, self._expected):
                error = Unauthorized(
                    "a valid API key is needed, as a bearer token", code="invalid_api_key"
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class CountRequests:
    """Counts the requests in flight, and the answers by route and status.

    Args:
        app: what is behind.
        service: whose metrics and requests in flight these are.
        paths: the routes that are counted; the others are answered at once.
    """

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.answered(scope["path"], message["status"])
            await send(message)

        with self._service.active():
            await self._app(scope, receive, counting)
