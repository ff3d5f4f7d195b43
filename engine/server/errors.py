"""OpenAI's error shape, and which status each of our exceptions has. Knows nothing of routes."""

from __future__ import annotations

import reprlib
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from engine.errors import FullgraphError, InvalidRequest, QueueFull, RequestError, Unavailable


class BodyTooLarge(InvalidRequest):
    """The request's body is over `server.max_body_bytes` (HTTP 413)."""

    status = 413


class Unauthorized(RequestError):
    """No API key, or another one (HTTP 401)."""

    status = 401
    kind = "authentication_error"


class Unsupported(RequestError):
    """A known route that does not take this method, and other refusals by the framework."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: FullgraphError) -> int:
    """The HTTP status; 500 for the end of the engine."""
    return error.status if isinstance(error, RequestError) else 500


def error_body(error: FullgraphError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    if isinstance(error, RequestError):
        kind, param, code = error.kind, error.param, error.code
    else:
        kind, param, code = "server_error", None, "engine_dead"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def error_response(error: FullgraphError) -> Response:
    """The whole answer to a request that failed before anything was sent."""
    headers = {}
    if isinstance(error, QueueFull | Unavailable):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=status_of(error),
        headers=headers,
        media_type="application/json",
    )


def from_validation(error: ValidationError) -> InvalidRequest:
    """The first thing that pydantic found, with the field's name and the value."""
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return InvalidRequest(f"{param}: this field is required", param=param)
    return InvalidRequest(f"{param}: {message} (got {reprlib.repr(first['input'])})", param=param)
