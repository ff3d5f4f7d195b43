"""The exact shape and content of answers, whole and streamed, in both styles."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import openai
import pytest

from tests.server.fake_engine import FakeTransport, Limits
from tests.server.servers import serving
from tests.server.target import Target
from tests.tiny_tokenizer import EOS

HALF = -math.log(2)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with serving(Limits()) as server:
        yield server


def using(target: Target, test: Callable[[Target], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with target:
            await test(target)

    asyncio.run(asyncio.wait_for(run(), 30))


def ids_of(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


async def events(t: Target, path: str, **body: Any) -> list[Any]:
    """The JSON of each server-sent event, [DONE] checked and left out."""
    response = await t.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *frames, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame[6:]) for frame in frames]


def test_whole_completion(target: Target) -> None:
    async def test(t: Target) -> None:
        response = await t.post("/v1/completions", {"prompt": "say:hi", "model": "tiny"})
        body = response.json()
        assert body.pop("id").startswith("cmpl-") and body.pop("created") > 1.7e9
        assert body == {
            "object": "text_completion",
            "model": "tiny",
            "choices": [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9},
        }

    using(target, test)


def test_whole_chat(target: Target) -> None:
    async def test(t: Target) -> None:
        messages: list[Any] = [{"role": "user", "content": "say:hi"}]
        response = await t.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
        body = response.json()
        assert body.pop("id").startswith("chatcmpl-")
        body.pop("created")
        message = {"role": "assistant", "content": "hi", "refusal": None}
        assert body == {
            "object": "chat.completion",
            "model": "tiny",
            "choices": [
                {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
            ],
            "usage": {"prompt_tokens": 23, "completion_tokens": 2, "total_tokens": 25},
        }

    using(target, test)


def test_streamed_completion(target: Target) -> None:
    async def test(t: Target) -> None:
        chunks = await events(t, "/v1/completions", prompt="say:hi", max_tokens=9)
        assert len({chunk["id"] for chunk in chunks}) == 1
        for chunk in chunks:
            assert set(chunk) == {"id", "object", "created", "model", "choices"}
            assert (chunk["object"], chunk["model"]) == ("text_completion", "tiny")
            (choice,) = chunk["choices"]
            assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == "hi"
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]

    using(target, test)


def test_streamed_chat(target: Target) -> None:
    async def test(t: Target) -> None:
        body = {"messages": [{"role": "user", "content": "say:hi"}], "n": 2}
        chunks = await events(t, "/v1/chat/completions", **body)
        for index in (0, 1):
            deltas = [
                choice["delta"]
                for chunk in chunks
                for choice in chunk["choices"]
                if choice["index"] == index
            ]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert "".join(delta.get("content", "") for delta in deltas) == "hi"
            assert all("role" not in delta for delta in deltas[1:])
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons.count("stop") == 2 and reasons[-1] == "stop"

    using(target, test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_streams_first_chunks_have_the_prompts_ids_as_whole_answers_do(
    target: Target, path: str
) -> None:
    async def test(t: Target) -> None:
        body: dict[str, Any] = {"prompt": ["say:hi", "say:ho"], "n": 2, "return_token_ids": True}
        if "chat" in path:
            body |= {"messages": [{"role": "user", "content": "say:hi"}]}
        whole = (await t.post(path, body)).json()["choices"]
        assert len(whole) == (2 if "chat" in path else 4)
        first: dict[int, Any] = {}
        rest = []
        for chunk in await events(t, path, **body):
            (choice,) = chunk["choices"]
            rest += [choice] if choice["index"] in first else []
            first.setdefault(choice["index"], choice)
        for choice in whole:
            assert first[choice["index"]]["prompt_token_ids"] == choice["prompt_token_ids"] != []
        assert rest and all("prompt_token_ids" not in choice for choice in rest)
        plain = await events(t, path, **{**body, "return_token_ids": False})
        assert "prompt_token_ids" not in str(plain)

    using(target, test)


def test_usage_chunks(target: Target) -> None:
    async def test(t: Target) -> None:
        body = {"messages": [{"role": "user", "content": "say:hi"}], "max_tokens": 2, "n": 2}
        usage = {"include_usage": True}
        chunks = await events(t, "/v1/chat/completions", **body, stream_options=usage)
        whole = (await t.post("/v1/chat/completions", body)).json()["usage"]
        assert chunks[-1]["usage"] == whole and chunks[-1]["choices"] == []
        assert whole == {"prompt_tokens": 23, "completion_tokens": 4, "total_tokens": 27}
        assert all(chunk["usage"] is None for chunk in chunks[:-1])

    using(target, test)


def test_stop_string_aborts_and_counts(target: Target) -> None:
    async def test(t: Target) -> None:
        for prompt, stop, text, tokens in (
            ("say:one two three", " tw", "one", 6),
            ("say:one two three", ["three", "zzz"], "one two ", 13),
            ("say:one", "two", "one", 4),
        ):
            body = {"prompt": prompt, "stop": stop, "max_tokens": 50}
            whole, streamed = await t.complete(**body), await t.stream(**body)
            assert whole.texts == streamed.texts == [text]
            assert whole.reasons == streamed.reasons == ["stop"]
            assert whole.usage.completion_tokens == tokens == len(streamed.token_ids[0])
        await t.quiet()

    using(target, test)


def test_min_tokens_holds_off_stop_strings(target: Target) -> None:
    async def test(t: Target) -> None:
        body = {"prompt": "say:a.b.c.d", "stop": "."}
        assert (await t.complete(**body)).texts == ["a"]
        assert (await t.complete(**body, min_tokens=3)).texts == ["a.b"]

    using(target, test)


def test_special_tokens(target: Target) -> None:
    async def test(t: Target) -> None:
        body = {"max_tokens": 2, "logit_bias": {"2": 100}, "temperature": 0}
        assert (await t.complete(**body)).texts == [""]
        assert (await t.complete(**body, skip_special_tokens=False)).texts == ["<pad><pad>"]

    using(target, test)


def test_completion_logprobs(target: Target) -> None:
    async def test(t: Target) -> None:
        body = {"prompt": "say:hé", "logprobs": 2, "max_tokens": 9}
        expected = {
            "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9", "<eos>"],
            "token_logprobs": [HALF] * 4,
            "top_logprobs": [
                {"h": HALF, "i": 2 * HALF},
                {"bytes:\\xc3": HALF, "bytes:\\xc4": 2 * HALF},
                {"bytes:\\xa9": HALF, "bytes:\\xaa": 2 * HALF},
                {"<eos>": HALF, "<pad>": 2 * HALF},
            ],
            "text_offset": [0, 1, 1, 2],
        }
        (choice,) = (await t.post("/v1/completions", body)).json()["choices"]
        assert choice["text"] == "hé" and choice["logprobs"] == expected
        chunks = await events(t, "/v1/completions", **body)
        for key, values in expected.items():
            parts = [chunk["choices"][0]["logprobs"][key] for chunk in chunks]
            assert sum(parts, []) == values

    using(target, test)


def test_completion_logprobs_zero(target: Target) -> None:
    async def test(t: Target) -> None:
        body = {"prompt": "say:h", "logprobs": 0, "max_tokens": 1}
        (choice,) = (await t.post("/v1/completions", body)).json()["choices"]
        assert choice["logprobs"]["top_logprobs"] == [{"h": HALF}]

    using(target, test)


def test_chat_logprobs(target: Target) -> None:
    async def test(t: Target) -> None:
        body = {
            "messages": [{"role": "user", "content": "say:é"}],
            "logprobs": True,
            "top_logprobs": 2,
            "max_tokens": 2,
        }
        expected = [
            {
                "token": f"bytes:\\x{byte:x}",
                "logprob": HALF,
                "bytes": [byte],
                "top_logprobs": [
                    {
                        "token": f"bytes:\\x{byte + i:x}",
                        "logprob": HALF * (i + 1),
                        "bytes": [byte + i],
                    }
                    for i in (0, 1)
                ],
            }
            for byte in "é".encode()
        ]
        (choice,) = (await t.post("/v1/chat/completions", body)).json()["choices"]
        assert choice["logprobs"] == {"content": expected, "refusal": None}
        chunks = await events(t, "/v1/chat/completions", **body)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert parts[0] is None  # the role's chunk
        assert sum((part["content"] for part in parts[1:]), []) == expected

    using(target, test)


@pytest.mark.parametrize("prompt", ["say:hi", ids_of("say:hi")], ids=["text", "ids"])
def test_echo(target: Target, prompt: Any) -> None:
    async def test(t: Target) -> None:
        for max_tokens, text, tokens in ((9, "say:hihi", 3), (1, "say:hih", 1), (0, "say:hi", 0)):
            body = {"prompt": prompt, "echo": True, "max_tokens": max_tokens}
            whole, streamed = await t.complete(**body), await t.stream(**body)
            assert whole.texts == streamed.texts == [text]
            assert whole.usage.completion_tokens == tokens
            assert whole.usage.prompt_tokens == 6
            assert whole.reasons == streamed.reasons == ["stop" if tokens == 3 else "length"]

    using(target, test)


def test_echo_with_logprobs(target: Target) -> None:
    async def test(t: Target) -> None:
        for max_tokens in (2, 0):
            generated = ["h", "i"][:max_tokens]
            body = {"prompt": "é say:hi", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
            (choice,) = (await t.post("/v1/completions", body)).json()["choices"]
            tokens = ["bytes:\\xc3", "bytes:\\xa9", *" say:hi", *generated]
            logprobs = choice["logprobs"]
            assert choice["text"] == "é say:hi" + "".join(generated)
            assert logprobs["tokens"] == tokens
            assert logprobs["token_logprobs"] == [None] + [HALF] * (len(tokens) - 1)
            expected = [None, *({token: HALF} for token in tokens[1:])]
            assert logprobs["top_logprobs"] == expected
            assert logprobs["text_offset"] == [0, 0, *range(1, 8 + max_tokens)]
            chunks = await events(t, "/v1/completions", **body)
            parts = [chunk["choices"][0]["logprobs"]["tokens"] for chunk in chunks]
            assert sum(parts, []) == tokens

    using(target, test)


def test_echo_of_many(target: Target) -> None:
    async def test(t: Target) -> None:
        answer = await t.complete(prompt=["say:a", "say:b"], n=2, echo=True, logprobs=0)
        assert answer.texts == ["say:aa", "say:aa", "say:bb", "say:bb"]

    using(target, test)


def test_the_openai_client_streams_a_chat(target: Target) -> None:
    async def test(t: Target) -> None:
        stream = await t.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "say:hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == "hello" and usage is not None and usage.completion_tokens == 6

    using(target, test)


def test_the_openai_client_sees_our_errors(target: Target) -> None:
    async def test(t: Target) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await t.client.completions.create(model="tiny", prompt="x", n=99)
        assert caught.value.param == "n" and caught.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError) as missing:
            await t.client.completions.create(model="other", prompt="x")
        assert missing.value.code == "model_not_found"
        assert [model.id async for model in t.client.models.list()] == ["tiny"]

    using(target, test)


@pytest.mark.parametrize("status", [400, 429, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engine_has_its_own_status(
    target: Target, status: int, stream: bool
) -> None:
    async def test(t: Target) -> None:
        body = {"prompt": f"fail:{status}", "stream": stream}
        error = await t.refused(body, status=status, words=["as you asked"])
        assert error["type"]
        one_of_two = {"prompt": ["x", f"fail:{status}"], "stream": stream, "max_tokens": 200}
        await t.refused(one_of_two, status=status)
        await t.quiet()

    using(target, test)


def test_an_error_after_the_first_token_is_an_event() -> None:
    transport = FakeTransport(Limits(step_s=0.01))

    async def test(t: Target) -> None:
        stream = await t.client.completions.create(
            model="tiny", prompt="x", max_tokens=200, stream=True
        )
        with pytest.raises(openai.APIError, match="SIGKILL"):
            async for _ in stream:
                transport.engine_loop.call_soon_threadsafe(transport.kill)
        health = await t.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "dead"
        await t.refused({"prompt": "x"}, status=503, words=["SIGKILL"])
        await t.refused({"prompt": "x", "stream": True}, status=503)

    with serving(transport=transport) as target:
        asyncio.run(_ready(target))
        using(target, test)


async def _ready(t: Target) -> None:
    async with t:
        while (await t.http.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)


def test_a_finished_choice_is_not_aborted_and_a_stopped_one_is() -> None:
    transport = FakeTransport(Limits())

    async def test(t: Target) -> None:
        await t.complete(prompt="say:abc")
        assert transport.engine.aborted == []
        await t.complete(prompt="say:abc", stop="b", max_tokens=100)
        await t.complete(prompt="x", max_tokens=3)
        assert transport.engine.aborted in ([], [2])  # [] if it had ended by then
        transport.limits.step_s, begin = 0.002, transport.engine.steps
        prompts = ["say:" + "ab" * 60, "say:" + "c" * 100]
        both = await t.complete(prompt=prompts, stop="ba", max_tokens=130)
        assert both.texts == ["a", "c" * 100]
        (aborted,) = transport.engine.aborted[-1:]
        assert transport.engine.aborted_at[aborted] - begin < 50, "not before the other one ended"
        await t.quiet()

    with serving(transport=transport) as target:
        asyncio.run(_ready(target))
        using(target, test)


def test_eos_is_not_in_a_text(target: Target) -> None:
    async def test(t: Target) -> None:
        body = {"prompt": "say:x", "skip_special_tokens": False}
        assert (await t.complete(**body)).texts == ["x"]
        assert (await t.complete(**body, stop_token_ids=[ids_of("x")[0]])).texts == [""]
        ignored = await t.complete(**body, ignore_eos=True, max_tokens=3)
        assert ignored.texts == ["x<eos><eos>"] and ignored.token_ids[0][-1] == EOS

    using(target, test)
