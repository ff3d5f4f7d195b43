"""Start a server, stream one chat answer to the terminal, stop the server. Standard library only.

    demo.py CONFIG QUESTION EXPECTED

Exits 0 only if the answer holds EXPECTED.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

START_TIMEOUT_S = 900
ANSWER_TIMEOUT_S = 120


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    """Poll /health; give up when the server ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit(f"the server was not healthy after {START_TIMEOUT_S} s")


def ask(url: str, question: str) -> Iterator[str]:
    """Pieces of the streamed answer to one chat message."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            for choice in json.loads(data)["choices"] if data else ():
                yield choice["delta"].get("content") or ""


def main(config: str, question: str, expected: str) -> int:
    """Run the demo; the exit status."""
    begin = time.monotonic()
    port = free_port()
    command = [sys.executable, "-m", "engine", "serve", config, "--set", f"server.port={port}"]
    server = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, server)
        print(f"\nready after {time.monotonic() - begin:.1f} s\n\n> {question}\n", flush=True)
        answer = ""
        for piece in ask(url, question):
            answer += piece
            print(piece, end="", flush=True)
        print(f"\n\nanswered after {time.monotonic() - begin:.1f} s")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    if expected not in answer:
        print(f"the answer does not hold {expected!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
