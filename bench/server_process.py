"""A server as a child process: waited for, asked, stopped; a `fullgraph serve` of one's own on a
free port, for as long as a `with` lasts.

Standard library only, so that the demo needs nothing beyond what serving needs.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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


def wait_until_healthy(
    url: str, server: subprocess.Popen[bytes], poll_s: float = 0.1, log: Path | None = None
) -> None:
    """Wait until a server answers /health with 200.

    Raises:
        ServerFailed: it has ended, or was not healthy within START_TIMEOUT_S; the message has the
            end of its log.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    reason = f"the server was not healthy after {START_TIMEOUT_S} s"
    while time.monotonic() < deadline:
        if server.poll() is not None:
            reason = f"the server ended with status {server.returncode}"
            break
        refused = contextlib.suppress(OSError, http.client.HTTPException)
        with refused, ask(url, "/health", timeout_s=5) as response:
            if response.status == 200:
                return
        time.sleep(poll_s)
    tail = [] if log is None else log.read_text(errors="replace").splitlines()[-20:]
    raise ServerFailed("\n".join([reason + (":" if tail else ""), *tail]))


@contextlib.contextmanager
def ask(
    url: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 600
) -> Iterator[http.client.HTTPResponse]:
    """The response to a GET, or to a POST of JSON, whatever its status."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        yield connection.getresponse()
    finally:
        connection.close()


def first_model(url: str, headers: dict[str, str] | None = None) -> str:
    """The first name in /v1/models."""
    request = urllib.request.Request(f"{url}/v1/models", headers=headers or {})
    with urllib.request.urlopen(request, timeout=30) as response:
        name: str = json.load(response)["data"][0]["id"]
    return name


def first_text(url: str, prompt: str) -> None:
    """Wait for the first text of a streamed completion.

    Raises:
        ServerFailed: it came to nothing.
    """
    body = {"model": first_model(url), "prompt": prompt, "max_tokens": 8, "temperature": 0}
    with ask(url, "/v1/completions", {**body, "stream": True}) as response:
        if response.status != 200:
            raise ServerFailed(f"the completion failed: {response.status} {response.read()!r}")
        for line in response:
            if line.startswith(b"data: {"):
                return
    raise ServerFailed("the completion ended without a token")


def stop(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL if that is not enough."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
