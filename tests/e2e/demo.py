"""Start a server, stream one chat answer to the terminal, stop the server.

    python -m tests.e2e.demo CONFIG QUESTION EXPECTED

Exits 0 only if the answer holds EXPECTED. Standard library only.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator

from bench.server_process import ServerFailed, running_server

ANSWER_TIMEOUT_S = 120


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
    answer = ""
    try:
        with running_server(config) as url:
            print(f"\nready after {time.monotonic() - begin:.1f} s\n\n> {question}\n", flush=True)
            for piece in ask(url, question):
                answer += piece
                print(piece, end="", flush=True)
            print(f"\n\nanswered after {time.monotonic() - begin:.1f} s", flush=True)
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    if expected not in answer:
        print(f"the answer does not hold {expected!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
