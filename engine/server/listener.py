"""The socket that the server listens on. Imports nothing, so that a taken port is told at once."""

from __future__ import annotations

import socket

from engine.errors import ConfigError

_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; clients can connect before there is anything to answer them.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]  # which names the address
        raise ConfigError(
            f"server.host, server.port: got {host}:{port}, which cannot be listened on: {reason}"
        ) from None
