"""Exceptions a user of the engine can meet, drawn as a tree.

    FullgraphError
    |-- ConfigError            the YAML file or a --set is wrong: file, key path, allowed values
    |-- ModelError             a checkpoint or config.json that we cannot serve, and why
    |-- RequestError           a request that is refused; carries HTTP status and field
    |   |-- InvalidRequest     400: the user's mistake
    |   |-- NotFound           404: no such model or route
    |   |-- QueueFull          429: a full machine, with Retry-After
    |   `-- Unavailable        503: starting, draining or dead
    `-- EngineDead             the engine process is gone; every open request ends with this

Knows nothing of HTTP frameworks, torch or any other module of ours: a leaf.
"""

from __future__ import annotations

from typing import Self


class FullgraphError(Exception):
    """Base of every error that fullgraph raises on purpose."""


class ConfigError(FullgraphError):
    """The configuration is wrong; names file, key path, value and what is allowed."""


class ModelError(FullgraphError):
    """A checkpoint, config.json or tokenizer that cannot be served; says which part."""


class RequestError(FullgraphError):
    """A refused request.

    Args:
        message: what is wrong, with the limit that was passed.
        param: the request field at fault, or None when no single field is.
        code: OpenAI's machine-readable error code, or None.
    """

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(RequestError):
    """The user's mistake (HTTP 400)."""

    @classmethod
    def of(cls, param: str, text: str) -> Self:
        """A mistake in one field, which the message names first."""
        return cls(f"{param}: {text}", param=param)


class NotFound(RequestError):
    """No such model or route (HTTP 404)."""

    status = 404
    kind = "not_found_error"


class QueueFull(RequestError):
    """The waiting queue is at its limit (HTTP 429).

    Args:
        message: what is full.
        retry_after_s: whole seconds a client should wait, sent as the Retry-After header.
    """

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, code="queue_full")
        self.retry_after_s = retry_after_s


class Unavailable(RequestError):
    """The server is starting, draining or dead (HTTP 503)."""

    status = 503
    kind = "server_error"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, code="unavailable")
        self.retry_after_s = retry_after_s


class EngineDead(FullgraphError):
    """The engine process ended while requests were open. The message says how it ended."""
