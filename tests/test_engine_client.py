"""The client against an engine in this process, and processes that die, hang or are left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.engine_client import EngineClient, EngineFault, State
from engine.engine_transport import ProcessTransport
from engine.errors import EngineDead, InvalidRequest, QueueFull, Unavailable
from engine.open_requests import OpenRequests
from engine.request import EngineRequest, Progress, StepOutput, TokenLogprobs
from tests.server.fake_engine import FakeTransport, Limits, letter
from tests.server.fake_engine_process import ENVIRONMENT
from tests.server.processes import children_of, gone

ROOT = Path(__file__).parent.parent
FAKE_ENGINE = [sys.executable, "-m", "tests.server.fake_engine_process"]


def request(prompt: str = "p", max_tokens: int = 4, **fields: Any) -> EngineRequest:
    ids = [byte + 3 for byte in prompt.encode()]
    return EngineRequest(request_id=0, prompt_ids=ids, max_tokens=max_tokens, **fields)


@asynccontextmanager
async def started(
    transport: FakeTransport | ProcessTransport, max_waiting: int = 16
) -> AsyncIterator[EngineClient]:
    client = EngineClient(transport, max_waiting=max_waiting)
    try:
        await client.start(timeout_s=20)
        yield client
    finally:
        await client.shutdown(timeout_s=5)


def with_engine(
    test: Callable[[FakeTransport, EngineClient], Coroutine[Any, Any, None]],
    limits: Limits | None = None,
    max_waiting: int = 16,
) -> None:
    async def run() -> None:
        transport = FakeTransport(limits)
        async with started(transport, max_waiting) as client:
            await test(transport, client)

    asyncio.run(asyncio.wait_for(run(), 20))


async def collect(group: OpenRequests) -> list[list[int]]:
    """Ids of each choice, until all have ended."""
    ids: list[list[int]] = [[] for _ in group.choices]
    while not all(choice.ended and not choice.touched for choice in group.choices):
        for choice in await group.changed(list):
            if choice.error is not None:
                raise choice.error
            ids[choice.index] += choice.take()[0]
    return ids


def test_ids_come_in_order_and_to_the_right_choice() -> None:
    async def test(transport: FakeTransport, client: EngineClient) -> None:
        requests = [request(f"p{i}", 1 + i) for i in range(12)]
        groups = [client.submit(requests[:5]), client.submit(requests[5:])]
        results = await asyncio.gather(*map(collect, groups))
        expected = [[letter(r, i) for i in range(r.max_tokens)] for r in requests]
        assert [ids for result in results for ids in result] == expected
        assert client.num_open == 0
        ids = list(transport.engine.seen)
        assert ids == sorted(ids) and len(ids) == 12

    with_engine(test)


def test_a_slow_reader_gets_everything_at_once_and_is_woken_once() -> None:
    async def test(transport: FakeTransport, client: EngineClient) -> None:
        group = client.submit([request("a", 20), request("b", 10)])
        while client.num_open:
            await asyncio.sleep(0.001)
        changed = await group.changed(list)
        assert [choice.index for choice in changed] == [0, 1]
        assert [len(choice.take()[0]) for choice in changed] == [20, 10]
        assert all(choice.finished is not None for choice in changed)

    with_engine(test)


def test_many_steps_in_one_delivery_wake_a_task_once() -> None:
    async def test(transport: FakeTransport, client: EngineClient) -> None:
        group = client.submit([request("a", 100)])
        transport.pause()
        waiting = asyncio.create_task(group.changed(list))
        await asyncio.sleep(0.01)
        rid = group.choices[0].request_id
        transport._on_messages([StepOutput([rid], [token]) for token in (7, 8, 9)])
        (choice,) = await waiting
        assert choice.take()[0][-3:] == [7, 8, 9]

    with_engine(test)


def test_logprobs_and_prompt_logprobs() -> None:
    async def test(transport: FakeTransport, client: EngineClient) -> None:
        asked = request("abcdef", 3, logprobs=2, prompt_logprobs=1)
        group = client.submit([request("x", 3), asked])
        while client.num_open:
            await asyncio.sleep(0.001)
        await group.changed(list)
        silent, scored = group.choices
        assert silent.take()[1] == [] == silent.prompt_logprobs
        ids, logprobs = scored.take()
        assert [entry.top_ids[0] for entry in logprobs] == ids
        assert [entry.top_ids[0] for entry in scored.prompt_logprobs] == asked.prompt_ids[1:]

    with_engine(test)


def test_prompt_logprobs_computed_twice_count_once() -> None:
    async def test(transport: FakeTransport, client: EngineClient) -> None:
        group = client.submit([request("abcdef", 3, prompt_logprobs=0)])
        transport.pause()
        rid = group.choices[0].request_id
        entries = [TokenLogprobs(-float(i), [], []) for i in range(6)]
        for first, last in ((1, 3), (1, 5), (5, 6)):  # preempted after the first chunk
            output = StepOutput([], [], [], [], [(rid, first, entries[first:last])])
            transport._on_messages([output])
        assert group.choices[0].prompt_logprobs == entries[1:]

    with_engine(test)


def test_close_aborts_and_wakes() -> None:
    async def test(transport: FakeTransport, client: EngineClient) -> None:
        group = client.submit([request("a", 200), request("say:b", 200, stop_ids=[1])])
        waiting = asyncio.create_task(group.changed(list))
        while not group.choices[1].ended:
            await asyncio.sleep(0.001)
        await waiting
        group.close()
        group.close()
        assert await group.changed(list) == []
        before = transport.engine.steps
        stats = await client.stats()
        assert (stats.running, stats.waiting, client.num_open) == (0, 0, 0)
        assert transport.engine.aborted == [group.choices[0].request_id]
        assert transport.engine.steps <= before + 2

    with_engine(test)


def test_back_pressure() -> None:
    async def test(transport: FakeTransport, client: EngineClient) -> None:
        transport.pause()
        assert client.capacity == 6
        with pytest.raises(InvalidRequest, match="7 choices.*6"):
            client.submit([request()] * 7)
        groups = [client.submit([request("a", 2)]) for _ in range(5)]
        with pytest.raises(QueueFull, match="5 of 6") as caught:
            client.submit([request()] * 2)
        assert caught.value.retry_after_s >= 1
        groups.append(client.submit([request("a", 2)]))
        with pytest.raises(QueueFull):
            client.submit([request()])
        transport.resume()
        assert [len(ids) for group in groups for ids in await collect(group)] == [2] * 6
        assert len(await collect(client.submit([request()]))) == 1

    with_engine(test, Limits(max_running=2), max_waiting=4)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, InvalidRequest), (429, QueueFull), (503, Unavailable), (500, EngineFault)],
)
def test_one_requests_failure_leaves_the_others(status: int, kind: type[Exception]) -> None:
    async def test(transport: FakeTransport, client: EngineClient) -> None:
        good, bad = client.submit([request("a", 3)]), client.submit([request(f"fail:{status}")])
        with pytest.raises(kind, match="as you asked"):
            await collect(bad)
        assert len((await collect(good))[0]) == 3

    with_engine(test)


def test_nothing_is_taken_before_ready_or_after_shutdown() -> None:
    async def run() -> None:
        transport = FakeTransport(never_ready=True, start=[Progress("weights", 1, 2)])
        lines: list[Progress] = []
        client = EngineClient(transport, max_waiting=1, on_progress=lines.append)
        starting = asyncio.create_task(client.start(timeout_s=20))
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="starting"):
            client.submit([request()])
        assert lines == [client.progress] and client.progress == Progress("weights", 1, 2)
        starting.cancel()
        await client.shutdown()
        with pytest.raises(Unavailable, match="shutting down"):
            client.submit([request()])

    asyncio.run(run())


def test_a_start_that_fails_or_takes_too_long() -> None:
    async def run() -> None:
        client = EngineClient(FakeTransport(fatal="no room for weights"), max_waiting=1)
        with pytest.raises(EngineDead, match="status 2: no room for weights"):
            await client.start(timeout_s=20)
        slow = EngineClient(FakeTransport(never_ready=True), max_waiting=1)
        with pytest.raises(EngineDead, match="not ready after 0.05 s"):
            await slow.start(timeout_s=0.05)
        with pytest.raises(Unavailable, match="not ready"):
            slow.submit([request()])
        assert slow.state is State.DEAD
        await slow.shutdown()

    asyncio.run(run())


def test_a_dead_engine_ends_every_request() -> None:
    async def test(transport: FakeTransport, client: EngineClient) -> None:
        transport.pause()
        groups = [client.submit([request("a", 200)]) for _ in range(6)]
        waiting = [asyncio.create_task(collect(group)) for group in groups]
        stats = asyncio.create_task(client.stats())
        await asyncio.sleep(0.01)
        transport.kill()
        for task in waiting:
            with pytest.raises(EngineDead, match="SIGKILL"):
                await task
        with pytest.raises(EngineDead, match="SIGKILL"):
            await stats
        assert "SIGKILL" in str(await client.wait_dead())
        with pytest.raises(Unavailable, match="SIGKILL"):
            client.submit([request()])
        with pytest.raises(Unavailable, match="SIGKILL"):
            await client.stats()
        for group in groups:
            group.close()

    with_engine(test)


def test_messages_that_make_no_sense_end_the_engine_instead_of_hanging() -> None:
    async def test(transport: FakeTransport, client: EngineClient) -> None:
        transport.pause()
        group = client.submit([request("a", 5)])
        rid = group.choices[0].request_id
        transport._on_messages([StepOutput([rid, rid], [5])])
        with pytest.raises(EngineDead, match="no sense"):
            await collect(group)

    with_engine(test)


def test_stats_time_out() -> None:
    async def test(transport: FakeTransport, client: EngineClient) -> None:
        transport.engine.handle = lambda message: True  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="did not answer"):
            await client.stats(timeout_s=0.02)

    with_engine(test)


def process_engine(monkeypatch: pytest.MonkeyPatch, **options: Any) -> ProcessTransport:
    monkeypatch.setenv(ENVIRONMENT, json.dumps(options))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return ProcessTransport(FAKE_ENGINE)


def test_process_streams_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        transport = process_engine(monkeypatch)
        async with started(transport) as client:
            assert client.ready is not None and client.ready.max_running == 8
            assert client.progress == Progress("weights", 1, 2, "layer 1")
            requests = [request(f"p{i}", 30) for i in range(20)]
            results = await asyncio.gather(*(collect(client.submit([r])) for r in requests))
            expected = [[[letter(r, i) for i in range(30)]] for r in requests]
            assert results == expected
            assert (await client.stats()).running == 0
            pid, folder = transport.pid, transport._folder
        assert pid is not None and gone(pid) and folder is not None and not folder.exists()
        assert client.state is State.CLOSED

    asyncio.run(run())


def test_killed_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        transport = process_engine(monkeypatch, step_s=0.01, child=True)
        async with started(transport) as client:
            group = client.submit([request("a", 200), request("b", 200)])
            await group.changed(list)
            pid = transport.pid
            assert pid is not None
            children = children_of(pid)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDead, match="killed by SIGKILL"):
                await collect(group)
            assert len(children) == 1 and gone(children[0])

    asyncio.run(run())


def test_fatal_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        transport = process_engine(monkeypatch, fatal="no such weights")
        client = EngineClient(transport, max_waiting=1)
        with pytest.raises(EngineDead, match="status 2: no such weights"):
            await client.start(timeout_s=20)
        await client.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize("deaf", [False, True])
def test_shutdown_during_the_start(monkeypatch: pytest.MonkeyPatch, deaf: bool) -> None:
    monkeypatch.setattr("engine.engine_transport._TERMINATE_S", 0.2)

    async def run() -> None:
        transport = process_engine(monkeypatch, start_s=100, deaf=deaf)
        client = EngineClient(transport, max_waiting=1)
        starting = asyncio.create_task(client.start(timeout_s=100))
        while client.progress is None:
            await asyncio.sleep(0.01)
        begin = time.monotonic()
        await client.shutdown()
        assert time.monotonic() - begin < 3
        assert transport.pid is not None and gone(transport.pid)
        starting.cancel()

    asyncio.run(run())


def test_a_process_that_cannot_be_started() -> None:
    async def run() -> None:
        client = EngineClient(ProcessTransport(["/no/such/program"]), max_waiting=1)
        with pytest.raises(EngineDead, match="cannot be started"):
            await client.start(timeout_s=5)
        await client.shutdown()

    asyncio.run(run())


PARENT = """
import asyncio, sys
from engine.engine_client import EngineClient
from engine.engine_transport import ProcessTransport

async def main():
    transport = ProcessTransport([sys.executable, "-m", "tests.server.fake_engine_process"])
    client = EngineClient(transport, max_waiting=1)
    await client.start(20)
    print(transport.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it takes a second or two")
def test_no_orphan_when_the_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, ENVIRONMENT: "{}", "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not gone(pid, timeout_s=0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid)


def test_fan_out_is_cheap() -> None:
    """256 tasks woken by each step; bounded loosely, for machines that are busy."""

    async def test(transport: FakeTransport, client: EngineClient) -> None:
        transport.pause()
        groups = [client.submit([request("a", 200)]) for _ in range(256)]
        ids = [group.choices[0].request_id for group in groups]
        count = 0

        async def read(group: OpenRequests) -> None:
            nonlocal count
            while True:
                for choice in await group.changed(list):
                    count += len(choice.take()[0])

        tasks = [asyncio.create_task(read(group)) for group in groups]
        await asyncio.sleep(0.05)
        begin = time.perf_counter()
        for _ in range(50):
            transport._on_messages([StepOutput(ids, ids)])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        per_token_us = (time.perf_counter() - begin) / (50 * 256) * 1e6
        for task in tasks:
            task.cancel()
        assert count == 50 * 256
        assert per_token_us < 50, "about 4 on a quiet machine"

    with_engine(test, Limits(max_running=256))


def test_no_torch() -> None:
    code = "import sys, engine.engine_client, engine.engine_transport, engine.server.app\n"
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60)
    assert result.returncode == 0
