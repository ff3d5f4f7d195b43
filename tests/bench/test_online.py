"""The load generator against a fake server on a local socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bench import online
from bench.online import Limits, Target, drive, measures, tpot
from bench.sse_client import Answer
from bench.workloads import Job, uniform

OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Reply = Callable[[dict[str, Any], asyncio.StreamWriter], Any]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def well(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Two tokens an event, some events cut in two."""
    writer.write(OK)
    num = body["max_tokens"]
    for _ in range((num + 1) // 2):
        data = event({"choices": [{"text": "ab"}]})
        writer.write(chunk(data[:7]))
        await writer.drain()
        await asyncio.sleep(0.005)
        writer.write(chunk(data[7:]))
    details = {"cached_tokens": 2}
    usage = {"completion_tokens": num, "prompt_tokens_details": details}
    writer.write(chunk(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"))
    writer.write(b"0\r\n\r\n")


async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 No\r\nContent-Length: 4\r\n\r\nfull")


async def cut(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + event({"choices": [{"text": "a"}]}))


async def fail(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(OK + chunk(event({"error": {"message": "lost"}})))


async def hang(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(OK)
    await asyncio.sleep(30)


class FakeServer:
    """Answers every request with `reply`; keeps the bodies and the most requests open at a time."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.open = 0
        self.most_open = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models"):
            data = json.dumps({"data": [{"id": "fake"}]}).encode()
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        else:
            lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:-2])
            body = json.loads(await reader.readexactly(int(lines["Content-Length"])))
            self.bodies.append(body)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            await self._reply(body, writer)
            self.open -= 1

    async def run(self, jobs: list[Job], concurrency: int, limit_s: float) -> list[Answer]:
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        target = Target(f"http://127.0.0.1:{port}", "fake", {"X-Key": "k"}, limit_s)
        answers = await drive(target, jobs, concurrency)
        server.close()
        return answers


def run(reply: Reply, jobs: list[Job], concurrency: int = 99, limit_s: float = 30) -> list[Answer]:
    return asyncio.run(FakeServer(reply).run(jobs, concurrency, limit_s))


def test_a_stream_is_timed_and_counted() -> None:
    server = FakeServer(well)
    jobs = uniform(6, 3, 5)
    answers = asyncio.run(server.run(jobs, 2, 30))
    assert server.most_open == 2
    assert [a.error for a in answers] == [""] * 6
    assert [(a.num_output, a.num_cached, len(a.arrivals)) for a in answers] == [(5, 2, 3)] * 6
    assert all(a.sent < a.arrivals[0] <= a.arrivals[-1] for a in answers)
    prompts = sorted(job.prompt_ids for job in jobs)
    assert sorted(body["prompt"] for body in server.bodies) == prompts
    assert server.bodies[0]["ignore_eos"] and server.bodies[0]["stream"]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (refuse, "HttpError: status 429: full"),
        (cut, "EOFError: the stream ended without [DONE]"),
        (fail, "HttpError: {'message': 'lost'}"),
        (hang, "no end after 0.2 s"),
    ],
)
def test_failures_are_told_apart(reply: Reply, error: str) -> None:
    assert [a.error for a in run(reply, uniform(2, 3, 5), limit_s=0.2)] == [error] * 2


def test_no_server_is_an_error_of_each_request() -> None:
    target = Target("http://127.0.0.1:9", "m", {}, 5)
    answers = asyncio.run(drive(target, uniform(2, 1, 1), 2))
    assert all("Error" in a.error for a in answers)
    with pytest.raises(SystemExit, match="every request failed"):
        measures(uniform(2, 1, 1), answers, Limits(1, 1))


def test_jobs_wait_for_their_arrival() -> None:
    jobs = [Job([1], 2, arrival_s=0.3), Job([2], 2, arrival_s=0.0)]
    late, soon = run(well, jobs)
    assert late.sent - soon.sent > 0.25


def test_measures() -> None:
    jobs = [Job([0] * 10, 3), Job([0] * 20, 1), Job([0] * 5, 4)]
    answers = [
        Answer(sent=1.0, arrivals=[1.5, 1.6, 1.7], num_output=3),
        Answer(sent=1.0, arrivals=[3.0], num_output=1),
        Answer(sent=1.2, error="lost"),
    ]
    assert tpot(answers[0]) == pytest.approx(0.1) and tpot(answers[1]) == 0
    result = measures(jobs, answers, Limits(ttft_s=1.0, tpot_s=0.2))
    assert (result["requests"], result["failed"], result["errors"]) == (3, 1, ["lost"])
    assert (result["input_tokens"], result["output_tokens"]) == (30, 4)
    assert result["seconds"] == 2.0 and result["output_tokens_per_s"] == 2.0
    assert result["good_requests_per_s"] == 0.5 and result["good_share"] == pytest.approx(1 / 3)
    assert result["ttft_ms"]["p50"] == 1250
    assert result["gap_ms"]["max"] == pytest.approx(100)
    assert result["end_to_end_ms"]["max"] == 2000
    tight = measures(jobs, answers, Limits(ttft_s=1.0, tpot_s=0.05))
    assert tight["good_requests_per_s"] == 0


@contextmanager
def serving(reply: Reply) -> Iterator[str]:
    """A fake server in a thread of its own; gives its URL."""
    loop = asyncio.new_event_loop()
    start = asyncio.start_server(FakeServer(reply).handle, "127.0.0.1", 0)
    server = loop.run_until_complete(start)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--requests", "5", "--input", "3-4", "--output", "4", "--rate", "100", "--warmup", "1"]
    with serving(well) as url:
        status = online.main(["--url", url, *words, "--results", str(tmp_path), "--name", "x"])
    assert status == 0
    result = json.loads((tmp_path / "x.json").read_text())
    assert (result["model"], result["requests"], result["output_tokens"]) == ("fake", 5, 20)
    assert "first token" in capsys.readouterr().out


def test_several_clients_share_the_jobs() -> None:
    with serving(well) as url:
        target = Target(url, "fake", {}, 60)
        jobs = [Job([i], 2 * i + 1) for i in range(5)]
        answers = online.drive_all(target, jobs, 4, 2)
    assert [a.num_output for a in answers] == [job.num_output for job in jobs]


def test_a_server_is_needed() -> None:
    for words in ([], ["c.yaml", "--url", "http://x"]):
        with pytest.raises(SystemExit):
            online.main(words)
