"""A server as a child process: waited for, asked, stopped; a `fullgraph serve` of one's own on a
free port, for as long as a `with` lasts.

Standard library only, so that the demo needs nothing beyond what serving needs.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

START_TIMEOUT_S = 1800
STOP_TIMEOUT_S = 60


class ServerFailed(Exception):
    """The server ended or never became healthy; the message says which."""


def free_port() -> int:
    """A TCP port of this machine that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def running_server(config: str, overrides: Sequence[str] = ()) -> Iterator[str]:
    """Start a server, wait until it is healthy, give its URL, stop it. Main thread only.

    Args:
        config: a YAML file.
        overrides: `key.path=value` texts.

    Raises:
        ServerFailed: see there.
    """
    port = free_port()
    words = [word for text in (*overrides, f"server.port={port}") for word in ("--set", text)]
    server = subprocess.Popen([sys.executable, "-m", "engine", "serve", config, *words])
    # A SIGTERM must not leave the server behind: make it an exception, which the finally sees.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, server)
        yield url
    finally:
        stop(server)
        signal.signal(signal.SIGTERM, before)


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], poll_s: float = 0.1) -> None:
    """Wait until a server answers /health with 200.

    Raises:
        ServerFailed: it has ended, or was not healthy within START_TIMEOUT_S.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ServerFailed(f"the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(poll_s)
    raise ServerFailed(f"the server was not healthy after {START_TIMEOUT_S} s")


def first_model(url: str, headers: dict[str, str] | None = None) -> str:
    """The first name in /v1/models."""
    request = urllib.request.Request(f"{url}/v1/models", headers=headers or {})
    with urllib.request.urlopen(request, timeout=30) as response:
        name: str = json.load(response)["data"][0]["id"]
    return name


def stop(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL if that is not enough."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
