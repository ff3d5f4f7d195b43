"""The API process's end of the wire to the engine process: spawn it, talk to it, see it end.

The engine is a process of its own session, so that Ctrl-C reaches only the API process, which
drains; the engine asks the kernel to die with its parent (engine_process.py). Its standard output
and error are the API process's own. Knows the messages as bytes in msgpack, not what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from engine import scratch
from engine.errors import EngineDead
from engine.request import FromEngine, ToEngine

OnMessages = Callable[[list[FromEngine]], None]
OnExit = Callable[[str], None]

# How long after the process's end its last messages may take to come through the socket.
_LAST_MESSAGES_S = 0.2
_TERMINATE_S = 5.0
_SHOW_CURSOR = b"\x1b[?25h"


class Transport(Protocol):
    """What EngineClient needs of an engine; tests give it one without a process."""

    async def open(self, on_messages: OnMessages, on_exit: OnExit) -> None:
        """Start the engine. Both callbacks run on the event loop.

        Args:
            on_messages: gets all messages that are there, in order.
            on_exit: called once, after the last message, with how the engine ended.

        Raises:
            EngineDead: it cannot be started.
        """

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks. After the engine's end it is dropped."""

    async def close(self, timeout_s: float) -> None:
        """Wait for the engine to end, make it end after `timeout_s`, and free everything."""


class ProcessTransport:
    """An engine process and a ZMQ PAIR socket.

    Args:
        command: starts the process; `--address A --parent PID` are appended.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._folder: Path | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._descriptor: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._exited = asyncio.Event()
        self._reported = False

    @property
    def pid(self) -> int | None:
        """Of the engine process; None before it is started."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process, before there is a loop to hear it.

        Raises:
            EngineDead: it cannot be started.
        """
        self._folder = scratch.make_folder()
        address = f"ipc://{self._folder}/engine"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(address)
        command = [*self._command, "--address", address, "--parent", str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._free()
            raise EngineDead(f"the engine process cannot be started: {error}") from None

    async def open(self, on_messages: OnMessages, on_exit: OnExit) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_messages, self._on_exit = on_messages, on_exit
        if self._process is None:
            self.start()
        assert self._socket is not None
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._read)
        # What came before the loop watched announces itself no more.
        self._loop.call_soon(self._read)
        threading.Thread(target=self._wait, name="engine-exit", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(zmq.Again):  # only when the peer is gone
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        # Sending can eat the edge that announces a message to read.
        self._loop.call_soon(self._read)

    async def close(self, timeout_s: float) -> None:
        if self._process is None:
            self._free()
            return
        try:
            if not await self._wait_exited(timeout_s):
                self._process.terminate()
                if not await self._wait_exited(_TERMINATE_S):
                    self.kill()
                    await self._exited.wait()
        finally:
            self.kill()
            self._free()

    async def _wait_exited(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._exited.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _read(self) -> None:
        """Hand over every message that is there (the descriptor signals edges, not levels)."""
        messages: list[FromEngine] = []
        while self._socket is not None:
            try:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
            except msgspec.DecodeError as error:
                self._report_exit(f"sent a message that cannot be read: {error}")
        if messages:
            self._on_messages(messages)

    def _wait(self) -> None:
        assert self._process is not None
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._ended, status)

    def _ended(self, status: int) -> None:
        self._exited.set()
        self.kill()  # ranks of a dead engine hang in their collectives
        self._loop.call_later(_LAST_MESSAGES_S, self._report, status)

    def _report(self, status: int) -> None:
        self._read()
        killed = status < 0
        how = f"was killed by {signal.Signals(-status).name}" if killed else ""
        self._report_exit(how or f"ended with status {status}")

    def _report_exit(self, how: str) -> None:
        if self._socket is not None and not self._reported:
            self._reported = True
            self._on_exit(how)

    def kill(self) -> None:
        """End the process and every child it has left, now. Needs no event loop."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def exit_now(self, sig: int, frame: object = None) -> None:
        """A signal's handler: end this process and the engine's at once, whatever they are at. An
        exception could be swallowed by what is interrupted, or be shown.
        """
        self.kill()
        scratch.remove_all()
        if sys.stderr.isatty():  # progress bars hide it
            os.write(2, _SHOW_CURSOR)
        os._exit(128 + sig)

    def _free(self) -> None:
        if self._socket is not None and self._context is not None:
            if self._descriptor is not None:
                self._loop.remove_reader(self._descriptor)
            self._socket.close()
            self._context.term()
            self._socket = None
        if self._folder is not None:
            scratch.remove_folder(self._folder)
