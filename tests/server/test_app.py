"""The routes beside generation, the server's states, keys and metrics; without sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import engine
from engine.engine_client import EngineClient
from engine.errors import ModelError
from engine.request import Progress, Ready
from engine.server.app import create_app
from engine.tokenizer import Tokenizer
from tests.server.fake_engine import FakeTransport, Limits
from tests.server.servers import config_of
from tests.tiny_tokenizer import BOS, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


@contextlib.asynccontextmanager
async def running(
    transport: FakeTransport | None = None,
    *,
    load: Any = lambda: TOKENIZER,
    on_ready: Any = None,
    ready: bool = True,
    changes: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[httpx.AsyncClient, FastAPI]]:
    """An app with its lifespan, and a client; `ready` waits for it."""
    config = config_of(**(changes or {}))
    wire = transport or FakeTransport()
    client = EngineClient(wire, max_waiting=config.scheduler.max_waiting)
    app = create_app(config, client, load, on_ready)
    transport_ = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport_, base_url="http://test") as http,
    ):
        while ready and (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.001)
        yield http, app


def test_models() -> None:
    async def run() -> None:
        async with running(changes={"model.served_name": "org/mine"}) as (http, _):
            body = (await http.get("/v1/models")).json()
            assert body["object"] == "list"
            (card,) = body["data"]
            assert (card["id"], card["object"], card["max_model_len"]) == ("org/mine", "model", 256)
            assert (await http.get("/v1/models/org/mine")).json() == card

    asyncio.run(run())


def test_tokenize_and_detokenize() -> None:
    async def run() -> None:
        async with running() as (http, _):
            body = (await http.post("/tokenize", json={"prompt": "hé"})).json()
            ids = TOKENIZER.encode("hé")
            assert body == {"count": 3, "max_model_len": 256, "tokens": ids, "token_strs": None}
            options = {"prompt": "hé", "return_token_strs": True, "model": "tiny"}
            body = (await http.post("/tokenize", json=options)).json()
            assert body["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
            chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
            body = (await http.post("/tokenize", json=chat)).json()
            assert body["tokens"] == [BOS, *TOKENIZER.encode("user:x\nassistant:")]
            chat["add_generation_prompt"] = False
            body = (await http.post("/tokenize", json=chat)).json()
            assert body["tokens"] == [BOS, *TOKENIZER.encode("user:x\n")]
            body = (await http.post("/detokenize", json={"tokens": [BOS, *ids]})).json()
            assert body == {"prompt": "<bos>hé"}
            for path, wrong in (
                ("/tokenize", {}),
                ("/tokenize", {"prompt": "x", "messages": []}),
                ("/tokenize", {"prompt": 5}),
                ("/tokenize", {"messages": []}),
                ("/detokenize", {"tokens": [-1]}),
                ("/detokenize", {"tokens": [10**6]}),
                ("/detokenize", {"tokens": "x"}),
                ("/detokenize", {}),
            ):
                response = await http.post(path, json=wrong)
                assert response.status_code == 400 and response.json()["error"]["param"]

    asyncio.run(run())


def test_long_prompts_leave_the_event_loop_free() -> None:
    """Parsing and tokenising a megabyte happens in a thread."""

    async def run() -> None:
        async with running() as (http, _):
            text = "lorem ipsum " * 50_000
            asked = asyncio.create_task(http.post("/tokenize", json={"prompt": text}))
            longest = 0.0
            loop = asyncio.get_running_loop()
            while not asked.done():
                begin = loop.time()
                await asyncio.sleep(0.001)
                longest = max(longest, loop.time() - begin)
            assert (await asked).json()["count"] == len(text)
            assert longest < 0.3, "tokenising takes a second or so"

    asyncio.run(run())


def test_starting_is_503_with_progress() -> None:
    async def run() -> None:
        transport = FakeTransport(never_ready=True, start=[Progress("weights", 3, 9, "layer 3")])
        async with running(transport, ready=False) as (http, _):
            while True:
                health = await http.get("/health")
                assert health.status_code == 503 and health.headers["retry-after"]
                if "progress" in health.json():
                    break
                await asyncio.sleep(0.001)
            progress = {"phase": "weights", "done": 3, "total": 9, "text": "layer 3"}
            assert health.json()["status"] == "starting"
            assert (await http.head("/health")).status_code == 503
            assert health.json()["progress"] == progress
            response = await http.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == 503 and response.headers["retry-after"]
            assert response.json()["error"]["code"] == "unavailable"
            assert (await http.get("/v1/models")).status_code == 200
            assert (await http.get("/metrics")).status_code == 200
            assert (await http.get("/version")).json() == {"version": engine.__version__}

    asyncio.run(run())


def test_on_ready_is_told() -> None:
    async def run() -> None:
        told: list[tuple[Ready, Tokenizer]] = []
        async with running(on_ready=lambda *args: told.append(args)):
            ((ready, tokenizer),) = told
            assert ready.vocab_size == 259 and tokenizer is TOKENIZER

    asyncio.run(run())


def broken_tokenizer() -> Tokenizer:
    raise ModelError("no tokenizer.json")


@pytest.mark.parametrize("broken", ["tokenizer", "engine"])
def test_a_start_that_fails_ends_the_server(
    broken: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.server.service._DEAD_S", 0.05)

    async def run() -> None:
        transport = FakeTransport(fatal="no room") if broken == "engine" else FakeTransport()
        load = broken_tokenizer if broken == "tokenizer" else lambda: TOKENIZER
        async with running(transport, load=load, ready=False) as (http, app):
            service = app.state.service
            await asyncio.wait_for(service.wait_over(), 5)
            assert service.failure is not None
            assert (await http.get("/health")).json()["status"] == "dead"

    asyncio.run(run())
    assert ("no room" if broken == "engine" else "no tokenizer.json") in caplog.text


def test_api_key() -> None:
    async def run() -> None:
        async with running(changes={"server.api_key": "sésame"}) as (http, _):
            wrong = [{}, {"Authorization": "Bearer x"}, {"Authorization": "sesame"}]
            for headers in wrong:
                for path in ("/v1/models", "/v1/completions", "/nothing"):
                    response = await http.post(path, headers=headers)
                    assert response.status_code == 401
                    assert response.json()["error"]["code"] == "invalid_api_key"
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/metrics")).status_code == 200
            for scheme in ("Bearer", "bearer"):
                given = {b"Authorization": f"{scheme} sésame".encode()}
                assert (await http.get("/v1/models", headers=given)).status_code == 200

    asyncio.run(run())


def test_body_limit() -> None:
    async def run() -> None:
        async with running(changes={"server.max_body_bytes": 100}) as (http, _):

            async def chunks() -> AsyncIterator[bytes]:
                for _ in range(100):
                    yield b" " * 10

            for content in (b" " * 101, chunks()):
                response = await http.post("/v1/completions", content=content)
                assert response.status_code == 413
                assert "100" in response.json()["error"]["message"]
            response = await http.post("/v1/completions", content=b'{"prompt": "x"}')
            assert response.status_code == 200

    asyncio.run(run())


def test_a_bug_of_ours_is_a_500_in_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("engine.server.routes.completion_job", bug)

    async def run() -> None:
        async with running() as (http, _):
            response = await http.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == 500
            error = response.json()["error"]
            assert error["type"] == "server_error" and "secret" not in error["message"]

    asyncio.run(run())


def test_drain_refuses_new_and_finishes_old() -> None:
    async def run() -> None:
        transport = FakeTransport(Limits(step_s=0.002))
        async with running(transport) as (http, app):
            body = {"prompt": "x", "max_tokens": 50}
            old = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(8)]
            while not transport.engine.running:
                await asyncio.sleep(0.001)
            drain = asyncio.create_task(app.state.service.drain())
            await asyncio.sleep(0)
            health = await http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            refused = await http.post("/v1/completions", json=body)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert not drain.done()
            for task in old:
                assert (await task).json()["usage"]["completion_tokens"] == 50
            await drain
            await app.state.service.wait_over()

    asyncio.run(run())


def test_drain_cuts_off_what_takes_too_long() -> None:
    async def run() -> None:
        transport = FakeTransport(Limits(step_s=0.01))
        async with running(transport, changes={"server.drain_timeout_s": 0.1}) as (http, app):
            body = {"prompt": "x", "max_tokens": 200, "stream": True}
            cut = asyncio.create_task(http.post("/v1/completions", json=body))
            while not transport.engine.running:
                await asyncio.sleep(0.001)
            transport.pause()
            await asyncio.wait_for(app.state.service.drain(), 2)
            assert '"code":"unavailable"' in (await cut).text
            assert "[DONE]" not in (await cut).text
            assert transport.engine.aborted == [1]

    asyncio.run(run())


def test_metrics() -> None:
    async def run() -> None:
        async with running() as (http, _):
            body = {"prompt": "abc", "max_tokens": 4, "n": 2}
            await http.post("/v1/completions", json=body)
            await http.post("/v1/completions", json={"prompt": "say:a", "stream": True})
            await http.post("/v1/completions", json={"n": 0})
            response = await http.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            lines = response.text.splitlines()
            for line in (
                'fullgraph_http_requests_total{endpoint="/v1/completions",status="200"} 2.0',
                'fullgraph_http_requests_total{endpoint="/v1/completions",status="400"} 1.0',
                'fullgraph_choices_total{reason="length"} 2.0',
                'fullgraph_choices_total{reason="stop"} 1.0',
                "fullgraph_prompt_tokens_total 8.0",
                "fullgraph_generated_tokens_total 10.0",
                "fullgraph_time_to_first_token_seconds_count 3.0",
                "fullgraph_time_per_output_token_seconds_count 3.0",
                "fullgraph_open_requests 0.0",
                "fullgraph_engine_running 0.0",
                "fullgraph_engine_pages_total 1000.0",
                "fullgraph_engine_preemptions_total 0.0",
            ):
                assert line in lines
            texts = {
                name.removesuffix("_total").removesuffix("_created"): text
                for _, kind, name, text in (line.split(" ", 3) for line in lines if line[0] == "#")
                if kind == "HELP"
            }
            assert len(set(texts.values())) == len(texts) > 20, "each has one of its own"
            for name, text in texts.items():
                assert text[0].isupper() and text.endswith(".")
                assert text[:-1].lower() not in name.replace("_", " ")

    asyncio.run(run())


def test_openapi_describes_the_bodies() -> None:
    async def run() -> None:
        async with running() as (http, _):
            paths = (await http.get("/openapi.json")).json()["paths"]
            body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
            assert {"prompt", "max_tokens", "top_k"} <= set(body["schema"]["properties"])

    asyncio.run(run())
