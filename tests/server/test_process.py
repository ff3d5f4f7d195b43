"""The server as a process: signals, the engine's death, what is left behind. One engine is fake."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from engine import scratch
from engine.errors import ConfigError
from engine.server.lifecycle import DrainingServer
from engine.server.listener import listen
from tests.conftest import ROOT
from tests.server.fake_engine_process import ENVIRONMENT
from tests.server.processes import children_of, gone
from tests.server.servers import ServerProcess, wait_for_status

SLOW: dict[str, Any] = {"step_s": 0.02}


async def stream(http: httpx.AsyncClient, started: asyncio.Event, max_tokens: int) -> str:
    """A streamed completion, whole; `started` is set at its first bytes."""
    body = {"prompt": "x", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    text = ""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for piece in response.aiter_text():
            started.set()
            text += piece
    return text


async def open_streams(url: str, max_tokens: int, then: Any, count: int = 8) -> list[Any]:
    """Open streams, call `then` once all have begun, and return the texts or exceptions."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        events = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(stream(http, event, max_tokens)) for event in events]
        for event in events:
            await event.wait()
        await then(http)
        return await asyncio.gather(*tasks, return_exceptions=True)


def test_idle_connections_outlive_what_clients_keep(tmp_path: Path) -> None:
    """httpx, and so openai's client, lets go of one after 5 s: the server must not be first."""
    with ServerProcess(tmp_path, SLOW) as server:
        wait_for_status(server.url, 200)
        address = httpx.URL(server.url)
        # Does not connect anew by itself, as httpx would.
        connection = http.client.HTTPConnection(address.host, address.port, timeout=10)
        with contextlib.closing(connection):
            for pause_s in (5.5, 0.0):
                connection.request("GET", "/version")
                response = connection.getresponse()
                assert response.read() and response.status == 200
                time.sleep(pause_s)


def test_sigterm_drains(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, SLOW) as server:
        wait_for_status(server.url, 200)
        (engine,) = children_of(server.process.pid)

        async def terminate(http: httpx.AsyncClient) -> None:
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            health = await http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            refused = await http.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503

        assert len(list(server.temporary.iterdir())) == 2  # the socket's folder, the configuration
        texts = asyncio.run(open_streams(server.url, 50, terminate))
        for text in texts:
            assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text
        assert server.process.wait(timeout=10) == 0
        assert gone(engine)
        assert list(server.temporary.iterdir()) == []


def test_drain_timeout(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, SLOW, **{"server.drain_timeout_s": 0.2}) as server:
        wait_for_status(server.url, 200)

        async def terminate(http: httpx.AsyncClient) -> None:
            server.process.send_signal(signal.SIGTERM)

        begin = time.monotonic()
        texts = asyncio.run(open_streams(server.url, 240, terminate))
        assert all('"code":"unavailable"' in text for text in texts)
        assert server.process.wait(timeout=10) == 0
        assert time.monotonic() - begin < 4


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, SLOW) as server:
        wait_for_status(server.url, 200)
        (engine,) = children_of(server.process.pid)

        async def interrupt_twice(http: httpx.AsyncClient) -> None:
            server.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.2)
            server.process.send_signal(signal.SIGINT)

        begin = time.monotonic()
        texts = asyncio.run(open_streams(server.url, 240, interrupt_twice, count=2))
        for text in texts:
            assert '"code":"unavailable"' in text and text.endswith("}\n\n")
        assert server.process.wait(timeout=10) == 130
        assert time.monotonic() - begin < 3 and gone(engine)
        assert list(server.temporary.iterdir()) == []
    assert "Traceback" not in "".join(server.lines)


def test_a_third_signal_waits_for_nothing() -> None:
    ended: list[int] = []
    service: Any = SimpleNamespace(draining=False, drain=lambda: "drain")
    app: Any = None
    server = DrainingServer(uvicorn.Config(app), service, ended.append)
    begun: list[Any] = []
    loop: Any = SimpleNamespace(call_soon_threadsafe=lambda begin, work: begun.append(work))
    server._loop, server.started = loop, True
    server.handle_exit(signal.SIGTERM, None)
    assert service.draining and begun == ["drain"]
    server.handle_exit(signal.SIGTERM, None)
    begun[1].close()
    assert ended == []
    server.handle_exit(signal.SIGINT, None)
    begun[2].close()
    assert ended == [signal.SIGINT]


def test_killed_engine(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, SLOW) as server:
        wait_for_status(server.url, 200)
        (engine,) = children_of(server.process.pid)

        async def kill(http: httpx.AsyncClient) -> None:
            os.kill(engine, signal.SIGKILL)
            deadline = time.monotonic() + 5
            while (await http.get("/health")).status_code != 503:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)

        texts = asyncio.run(open_streams(server.url, 240, kill))
        for text in texts:
            assert "killed by SIGKILL" in text and '"code":"engine_dead"' in text
        assert server.process.wait(timeout=10) == 1
        assert server.wait_for_line("killed by SIGKILL")


def test_an_engine_that_cannot_start(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, {"fatal": "no such weights"}) as server:
        assert server.process.wait(timeout=20) == 1
        assert server.wait_for_line("no such weights")


def test_listens_and_answers_while_the_engine_starts(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, {"start_s": 100}, **{"log.progress": "lines"}) as server:
        health = wait_for_status(server.url, 503)
        assert health.json()["status"] == "starting"
        assert server.wait_for_line("weights 1/2 layer 1")
        (engine,) = children_of(server.process.pid)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10) == 0
        assert time.monotonic() - begin < 8 and gone(engine)


def test_settings_are_shown_when_ready(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, {"num_pages": 77}, **{"log.progress": "lines"}) as server:
        assert server.wait_for_line("ready on ").split()[-1] == server.url
        assert server.wait_for_line("kv.num_pages = 77")


def test_a_killed_server_leaves_no_engine_and_its_files_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServerProcess(tmp_path, {}) as server:
        wait_for_status(server.url, 200)
        (engine,) = children_of(server.process.pid)
        server.process.kill()
        assert gone(engine)
        server.process.wait()  # the engine dies with one of its threads, locks with the last
        assert len(list(server.temporary.iterdir())) == 2
        monkeypatch.setattr(tempfile, "tempdir", str(server.temporary))
        folder = scratch.make_folder()
        assert list(server.temporary.iterdir()) == [folder]
        scratch.remove_folder(folder)


def test_ctrl_c_before_the_server_handles_it(tmp_path: Path) -> None:
    """While FastAPI is imported, say, where an exception might be swallowed."""
    code = (
        "import time\n"
        "from engine.config import EngineConfig\n"
        "from engine.engine_launch import launched\n"
        "config = EngineConfig(model={'path': 'x'})\n"
        "with launched(config, 'tests.server.fake_engine_process') as transport:\n"
        "    try:\n"
        "        print(transport.pid, flush=True)\n"
        # Not one long sleep: a signal just before it would be handled after it.
        "        for _ in range(6000): time.sleep(0.01)\n"
        "    except BaseException:\n"
        "        time.sleep(60)\n"
    )
    environ = {**os.environ, ENVIRONMENT: "{}", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        engine = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
    assert gone(engine) and list(tmp_path.iterdir()) == []


def test_throughput(tmp_path: Path) -> None:
    """The HTTP side keeps up with an engine that is far faster than it, and loses nothing."""
    streams, tokens = 128, 200
    with ServerProcess(tmp_path, {"max_running": streams}) as server:
        wait_for_status(server.url, 200)

        async def nothing(http: httpx.AsyncClient) -> None: ...

        begin = time.monotonic()
        texts = asyncio.run(open_streams(server.url, tokens, nothing, count=streams))
        rate = streams * tokens / (time.monotonic() - begin)
        for text in texts:
            frames = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
            joined = "".join(frame["choices"][0]["text"] for frame in frames)
            # How many tokens share a frame depends on how far the server falls behind.
            assert len(joined) == tokens
        assert rate > 5_000, "70,000 on two quiet cores, client and engine included"


def test_a_taken_port_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="no.such.host"):
        listen("no.such.host.invalid", 0)
