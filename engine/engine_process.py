"""The engine's own process: messages in, steps, outputs out.

    python -m engine.engine_process --address ipc://... --config FILE

The API process binds the address, spawns this module by name and reads Progress*, Ready, then
outputs. The process ends on Shutdown, when its parent dies, or on a fault of its own (after a Fatal
message). Knows nothing of HTTP or text.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from engine.config import load_config
from engine.engine_core import EngineCore
from engine.errors import EngineDead, FullgraphError
from engine.parent_guard import die_with_parent
from engine.ranks import Ranks
from engine.request import (
    Abort,
    Fatal,
    FromEngine,
    Progress,
    Ready,
    Shutdown,
    StatsQuery,
    StepOutput,
    Submit,
    ToEngine,
)
from engine.startup import start_engine

# How often an idle engine looks whether its ranks are alive and whether there is more to record.
_IDLE_MS = 500


class EngineLoop:
    """Feeds an EngineCore from a socket. One thread; a step and the messages between steps take
    turns.

    Args:
        core: started and warm.
        socket: connected ZMQ PAIR socket of ToEngine / FromEngine messages in msgpack.
        ranks: one of them may die while there is nothing to do.
    """

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes], ranks: Ranks) -> None:
        self._core = core
        self._ranks = ranks
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def run(self) -> None:
        """Serve until Shutdown."""
        is_busy = False
        while self._receive(0 if is_busy or self._core.has_work else _IDLE_MS):
            if not self._core.has_work:
                is_busy = self._core.use_idle_time()
                continue
            output, failures = self._core.step()
            if output is not None and not is_empty(output):
                self.send(output)
            for failure in failures:
                self.send(failure)

    def send(self, message: FromEngine) -> None:
        """Queue one message to the API process; never blocks."""
        self._socket.send(self._encoder.encode(message), flags=zmq.NOBLOCK)

    def _receive(self, timeout_ms: int) -> bool:
        """Handle every message that is there; wait so long for the first.

        False: shut down.
        """
        while self._socket.poll(timeout_ms):
            if not self._handle(self._decoder.decode(self._socket.recv())):
                return False
            timeout_ms = 0
        self._ranks.check()
        return True

    def _handle(self, message: ToEngine) -> bool:
        if isinstance(message, Submit):
            for failure in self._core.add(message.requests):
                self.send(failure)
        elif isinstance(message, Abort):
            self._core.abort(message.request_ids)
        elif isinstance(message, StatsQuery):
            self.send(self._core.stats(message.check))
        elif isinstance(message, Shutdown):
            return False
        return True


def is_empty(output: StepOutput) -> bool:
    """Whether a step (a chunk in the middle of a prompt, say) produced nothing to tell."""
    return not (output.request_ids or output.finished or output.prompt_logprobs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine process; the exit status."""
    parser = argparse.ArgumentParser(prog="engine.engine_process")
    parser.add_argument("--address", required=True)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--parent", type=int, default=os.getppid())
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    # Ctrl-C reaches the whole process group; the API process decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.connect(args.address)
    status = _serve(socket, args.config)
    socket.close()
    zmq.Context.instance().term()
    return status


def _serve(socket: zmq.Socket[bytes], config_file: Path) -> int:
    encoder = msgspec.msgpack.Encoder()
    lock = threading.RLock()

    def send(message: FromEngine) -> None:
        with lock:
            socket.send(encoder.encode(message))

    def give_up(message: str) -> None:
        # A rank has died. What would be freed now hangs in collectives, and so may the main thread.
        print(f"fullgraph: {message}", file=sys.stderr, flush=True)
        with lock:
            send(Fatal(message))
            socket.close()
            zmq.Context.instance().term()
            os._exit(1)

    def progress(phase: str, done: int, total: int, text: str) -> None:
        send(Progress(phase, done, total, text))

    engine = None
    try:
        engine = start_engine(load_config(config_file), progress, give_up)
        # What is alive now stays alive; do not let the collector walk it between steps.
        gc.collect()
        gc.freeze()
        send(
            Ready(
                max_model_len=engine.config.model.max_model_len,
                vocab_size=engine.model.vocab_size,
                num_pages=engine.num_pages,
                page_size=engine.config.kv.page_size,
                max_running=engine.config.scheduler.max_running,
                settings=engine.settings,
            )
        )
        EngineLoop(engine.core, socket, engine.ranks).run()
    except EngineDead as error:
        give_up(str(error))
    except FullgraphError as error:
        send(Fatal(str(error)))
        return 2
    except Exception as error:
        traceback.print_exc()
        send(Fatal(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        if engine is not None:
            engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
