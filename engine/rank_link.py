"""The wire from rank 0 to the ranks that follow it: a ZMQ PAIR socket each, one way, in order.

A connection that ends is how both sides see the other's death, on whatever host: the kernel closes
the socket of a process that dies, and ZMQ's heartbeats notice a host that is gone. Knows nothing of
what is sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine import scratch

_Socket = zmq.Socket[bytes]
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 15000
_LAST_WORDS_MS = 1000


def _pair(context: zmq.Context[_Socket], other_hosts: bool) -> _Socket:
    socket = context.socket(zmq.PAIR)
    # How far a rank can be behind is bounded by the collectives of every step, not here.
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.LINGER, _LAST_WORDS_MS)
    if other_hosts:
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    return socket


class LeaderLink:
    """Rank 0's end.

    Args:
        ranks: those that will connect.
        host: name of this host for other hosts; None: all ranks are here.

    Attributes:
        addresses: rank -> where it is to connect.
    """

    def __init__(self, ranks: Sequence[int], host: str | None) -> None:
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._sockets = {rank: _pair(self._context, host is not None) for rank in ranks}
        self._folder: Path | None = None
        self.addresses: dict[int, str] = {}
        if host is None:
            self._folder = scratch.make_folder()
        for rank, socket in self._sockets.items():
            if host is None:
                self.addresses[rank] = f"ipc://{self._folder}/{rank}"
                socket.bind(self.addresses[rank])
            else:
                port = socket.bind_to_random_port("tcp://*")
                self.addresses[rank] = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
        # Read by one thread, which need not be the one that sends.
        self._poller = zmq.Poller()
        self._monitors: dict[Any, int] = {}
        for rank, socket in self._sockets.items():
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._monitors[monitor] = rank
            self._poller.register(monitor, zmq.POLLIN)

    def send(self, data: bytes) -> None:
        """Queue the same message for every rank; never blocks."""
        for socket in self._sockets.values():
            socket.send(data)

    def lost(self, timeout_ms: int) -> list[int]:
        """Ranks whose connection has ended since the last call; waits so long for one."""
        if not self._monitors:  # a poller of nothing does not wait
            time.sleep(timeout_ms / 1000)
        ready = self._poller.poll(timeout_ms)
        for monitor, _ in ready:
            recv_monitor_message(monitor)
        return [self._monitors[monitor] for monitor, _ in ready]

    def unlink(self) -> None:
        """Remove the sockets' folder; whoever is connected stays so."""
        if self._folder is not None:
            scratch.remove_folder(self._folder)

    def close(self) -> None:
        """Close the sockets once nobody else uses them."""
        for socket in self._sockets.values():
            socket.disable_monitor()
            socket.close()
        for monitor in self._monitors:
            monitor.close()
        self._context.term()
        self.unlink()


class FollowerLink:
    """The other end.

    Args:
        address: from LeaderLink.addresses.
        on_lost: called in a thread of its own when rank 0 is gone, until `close`.
    """

    def __init__(self, address: str, on_lost: Callable[[], None]) -> None:
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._socket = _pair(self._context, address.startswith("tcp"))
        monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        )
        self._closing = False
        self._thread = threading.Thread(target=self._watch, args=(monitor, on_lost), daemon=True)
        self._thread.start()
        self._socket.connect(address)

    def receive(self, timeout_ms: int | None) -> bytes | None:
        """The next message; None: there is none within the time."""
        return self._socket.recv() if self._socket.poll(timeout_ms) else None

    def close(self) -> None:
        """Close the socket; rank 0's end is no longer anybody's business."""
        self._closing = True
        self._socket.disable_monitor()  # which ends the thread
        self._thread.join()
        self._socket.close()
        self._context.term()

    def _watch(self, monitor: Any, on_lost: Callable[[], None]) -> None:
        with monitor:
            event = recv_monitor_message(monitor)["event"]
        if event == zmq.EVENT_DISCONNECTED and not self._closing:
            on_lost()
