"""An engine process that computes nothing: every running request gets the next id at every step.

The same command line and messages as engine/engine_process.py, so that the HTTP side can be
measured alone. FULLGRAPH_HOLLOW (JSON) says what it is: step_s, vocab_size, max_model_len,
max_running.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

import msgspec
import zmq

from engine.parent_guard import die_with_parent
from engine.request import (
    Abort,
    EngineRequest,
    Finished,
    Ready,
    Shutdown,
    StatsQuery,
    StepOutput,
    Submit,
    ToEngine,
)

VARIABLE = "FULLGRAPH_HOLLOW"


class HollowEngine:
    """Requests that run, each with the number of tokens still to come."""

    def __init__(self, max_running: int, vocab_size: int) -> None:
        self.left: dict[int, int] = {}
        self.waiting: list[EngineRequest] = []
        self._max_running, self._vocab_size = max_running, vocab_size
        self._step = 0

    def take(self, message: ToEngine) -> bool:
        """False: shut down."""
        if isinstance(message, Submit):
            self.waiting += message.requests
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.left.pop(request_id, None)
        return not isinstance(message, Shutdown | StatsQuery)

    def step(self) -> StepOutput:
        """One token for each."""
        while self.waiting and len(self.left) < self._max_running:
            request = self.waiting.pop(0)
            self.left[request.request_id] = request.max_tokens
        ids = list(self.left)
        first = self._step * 7919
        tokens = [(first + 31 * i) % self._vocab_size for i in range(len(ids))]
        self._step += 1
        finished = []
        for request_id in ids:
            self.left[request_id] -= 1
            if not self.left[request_id]:
                del self.left[request_id]
                finished.append(Finished(request_id, "length"))
        return StepOutput(ids, tokens, finished)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until Shutdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--config")
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    options = json.loads(os.environ[VARIABLE])
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(args.address)
    encoder = msgspec.msgpack.Encoder()
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    engine = HollowEngine(options["max_running"], options["vocab_size"])
    ready = Ready(options["max_model_len"], options["vocab_size"], 1 << 20, 16, engine._max_running)
    socket.send(encoder.encode(ready))
    due = time.perf_counter()
    while True:
        busy = bool(engine.left or engine.waiting)
        while socket.poll(0 if busy else None):
            if not engine.take(decoder.decode(socket.recv())):
                return 0
            busy = True
        due = max(due, time.perf_counter() - options["step_s"]) + options["step_s"]
        time.sleep(max(0.0, due - time.perf_counter()))
        socket.send(encoder.encode(engine.step()))


if __name__ == "__main__":
    sys.exit(main())
