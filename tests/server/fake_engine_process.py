"""A FakeEngine as a process: the same command line and messages as engine/engine_process.py.

What it is comes from the environment variable FAKE_ENGINE, a JSON object with fields of Limits, and
    start_s: seconds before Ready       fatal: end with this message instead
    deaf: ignore Shutdown and SIGTERM   child: start a process that would never end
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from engine.parent_guard import die_with_parent
from engine.request import Fatal, FromEngine, Progress, ToEngine
from tests.server.fake_engine import FakeEngine, Limits

ENVIRONMENT = "FAKE_ENGINE"


def main(argv: Sequence[str] | None = None) -> int:
    """Run until Shutdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--config")
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    options: dict[str, Any] = json.loads(os.environ.get(ENVIRONMENT, "{}"))
    start_s, fatal = options.pop("start_s", 0.0), options.pop("fatal", "")
    deaf, child = options.pop("deaf", False), options.pop("child", False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if child:
        subprocess.Popen(["sleep", "1000"])
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.connect(args.address)
    encoder = msgspec.msgpack.Encoder()
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def send(message: FromEngine) -> None:
        socket.send(encoder.encode(message), zmq.NOBLOCK)

    send(Progress("weights", 1, 2, "layer 1"))
    time.sleep(start_s)
    if fatal:
        send(Fatal(fatal))
        socket.close()
        zmq.Context.instance().term()
        return 2
    engine = FakeEngine(Limits(**options), send)
    send(engine.ready())
    while True:
        while socket.poll(0 if engine.has_work else None):
            if not engine.handle(decoder.decode(socket.recv())) and not deaf:
                return 0
        time.sleep(engine.limits.step_s)
        if engine.has_work:
            engine.step()


if __name__ == "__main__":
    sys.exit(main())
