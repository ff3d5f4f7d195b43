"""Answers: texts, ids, ends, usage, and what aborts and a full server leave (see case.py)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from tests.server.case import CHAT, case, greedy
from tests.server.target import Target, all_of, strict_json


@case("stop-split")
async def stop_split(t: Target) -> None:
    prompt = "Repeat exactly: hello, world. hello, world."
    text = await greedy(t, prompt=prompt, max_tokens=40)
    for stop in (text[3:9], text[5:6], text[-3:], "lo, wor"):
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "stop": [stop]}
        cut = await greedy(t, **body)
        streamed = await t.stream(**body)
        if stop in text:
            assert cut == text[: text.index(stop)]
            assert streamed.reasons == ["stop"]
        else:
            assert cut == text
        shown = ""
        for chunk in streamed.chunks:
            shown += "".join(choice.text for choice in chunk.choices)
            assert cut.startswith(shown), "a part of the stop string, or what follows, was shown"
        assert (await t.complete(**body)).usage.completion_tokens == len(streamed.token_ids[0])


@case("stop-nested")
async def stop_nested(t: Target) -> None:
    text = await greedy(t, max_tokens=40)
    short, long = text[6:8], text[6:9]
    assert await greedy(t, stop=[short, long], max_tokens=40) == text[: text.index(short)]
    assert await greedy(t, stop=[long, short], max_tokens=40) == text[: text.index(short)]
    await greedy(t, stop=["ab", "abc"], max_tokens=40)


@case("utf8-split")
async def utf8_split(t: Target) -> None:
    for max_tokens in (1, 2, 3, 5, 8, 12):
        body = {"prompt": t.emoji_prompt, "max_tokens": max_tokens, "temperature": 0}
        text = await greedy(t, **body)
        streamed = await t.stream(**body)
        ids = [i for i in streamed.token_ids[0] if i not in t.eos_ids]
        decoded = await t.post("/detokenize", {"tokens": ids})
        assert text == decoded.json()["prompt"]
        shown = ""
        for chunk in streamed.chunks[:-1]:
            shown += "".join(choice.text for choice in chunk.choices)
            assert text.startswith(shown)


@case("greedy-beside-sampled")
async def greedy_beside_sampled(t: Target) -> None:
    body = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    alone = await t.complete(**body)
    others = (t.complete(temperature=1.2, seed=i, max_tokens=16, ignore_eos=True) for i in range(7))
    beside, *_ = await all_of(t.complete(**body), *others)
    assert beside.token_ids == alone.token_ids


@case("disconnect")
async def disconnect(t: Target) -> None:
    aborted = 'choices_total{reason="abort"}'
    before = await t.quiet()
    long = [7] * (t.max_model_len // 2)
    count = int(200 * t.scale)

    async def leave(index: int) -> None:
        prompt: object = long if index % 4 == 0 else f"{t.prompt} {index}"
        body = {"prompt": prompt, "max_tokens": 10**6, "ignore_eos": True}
        await t.leave("/v1/completions", {**body, "stream": index % 8 < 6}, 0.05)

    await asyncio.gather(*map(leave, range(count)))
    left = await t.steps()
    after = await t.quiet()
    # Two steps after the server hears of it; not the thousands that they would have gone on for.
    assert await t.steps() - left < 20
    # A busy machine may not have read a request before its client was gone.
    assert after.get(aborted, 0) > before.get(aborted, 0)
    assert (await t.complete(max_tokens=3, ignore_eos=True)).reasons == ["length"]


@case("abort-in-flight")
async def abort_in_flight(t: Target) -> None:
    draw = random.Random(0)
    expected = await t.complete(temperature=0, max_tokens=12, ignore_eos=True)
    gate = asyncio.Semaphore(24)

    async def leave(chunks: int) -> None:
        prompt = [draw.randrange(5, t.vocab_size) for _ in range(draw.randrange(1, 40))]
        body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "stream": True}
        async with gate, t.http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                chunks -= 1
                if chunks <= 0:
                    return

    async with asyncio.TaskGroup() as group:
        for _ in range(int(1000 * t.scale)):
            group.create_task(leave(draw.randrange(1, 30)))
        for _ in range(5):
            beside = await t.complete(temperature=0, max_tokens=12, ignore_eos=True)
            assert beside.token_ids == expected.token_ids, "another request's tokens"
    await t.quiet()


@case("prefix-full-hit")
async def prefix_full_hit(t: Target) -> None:
    for length in (16, 32, 48):
        body = {"prompt": [5 + i % 40 for i in range(length)], "temperature": 0}
        first = await t.complete(**body, max_tokens=8, ignore_eos=True)
        second = await t.complete(**body, max_tokens=8, ignore_eos=True)
        assert first.token_ids == second.token_ids and len(first.token_ids[0]) == 8


@case("same-prefix-together")
async def same_prefix_together(t: Target) -> None:
    shared = [9 + i % 30 for i in range(48)]
    bodies: list[dict[str, Any]] = [
        {"prompt": [*shared, 6 + i], "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        for i in range(8)
    ]
    together = await all_of(*(t.complete(**body) for body in bodies))
    alone = [await t.complete(**body) for body in bodies]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    await t.quiet()


@case("preempt", kv__num_pages=6)
async def preempt(t: Target) -> None:
    length = t.pool_tokens * 2 // 3
    bodies: list[dict[str, Any]] = [
        {"prompt": [5 + i] * 8, "temperature": 0, "max_tokens": length - 8, "ignore_eos": True}
        for i in range(8)
    ]
    together = await all_of(*(t.complete(**body) for body in bodies))
    alone = [await t.complete(**body) for body in bodies]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert all(len(a.token_ids[0]) == length - 8 for a in together)
    await t.quiet()


@case("seed")
async def seed(t: Target) -> None:
    body = {"seed": 7, "temperature": 1, "max_tokens": 12, "ignore_eos": True}
    first, second = await t.complete(**body), await t.complete(**body)
    others = (t.complete(temperature=1, max_tokens=12, ignore_eos=True) for _ in range(7))
    third, *rest = await all_of(t.complete(**body), *others)
    assert first.token_ids == second.token_ids == third.token_ids
    assert len({tuple(answer.token_ids[0]) for answer in rest}) > 1
    three, again = await t.complete(**body, n=3), await t.complete(**body, n=3)
    assert three.token_ids == again.token_ids
    assert len({tuple(ids) for ids in three.token_ids}) == 3
    assert three.token_ids[0] == first.token_ids[0]
    assert (await t.complete(**{**body, "seed": -7})).reasons == ["length"]


@case("many")
async def many(t: Target) -> None:
    body = {"seed": 1, "max_tokens": 6, "ignore_eos": True, "n": 3}
    streamed, whole = (
        await t.stream(prompt=["a", "b"], **body),
        await t.complete(prompt=["a", "b"], **body),
    )
    assert len(streamed.texts) == 6 and streamed.reasons == ["length"] * 6
    assert streamed.token_ids == whole.token_ids and streamed.texts == whole.texts
    for prompt in (0, 1):
        alone = await t.complete(prompt="ab"[prompt], **{**body, "seed": 1 + 3 * prompt})
        assert alone.token_ids == whole.token_ids[3 * prompt : 3 * prompt + 3]
    assert whole.usage.completion_tokens == 36
    single = await t.complete(prompt=["a", "b"], max_tokens=1)
    assert whole.usage.prompt_tokens == single.usage.prompt_tokens


@case("eos-list")
async def eos_list(t: Target) -> None:
    assert t.eos_ids
    for eos in t.eos_ids:
        body = {"logit_bias": {str(eos): 100}, "temperature": 0, "max_tokens": 8}
        answer = await t.complete(**body)
        assert (answer.texts, answer.reasons, answer.token_ids) == ([""], ["stop"], [[eos]])
        later = await t.complete(**body, min_tokens=4)
        assert later.reasons == ["stop"] and len(later.token_ids[0]) == 5
        assert not set(later.token_ids[0][:4]) & set(t.eos_ids)
        ignored = await t.complete(**body, ignore_eos=True)
        assert ignored.token_ids == [[eos] * 8] and ignored.reasons == ["length"]


@case("double-bos")
async def double_bos(t: Target) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    answer = await t.client.chat.completions.create(model=t.model, messages=messages, max_tokens=2)
    tokens = (await t.post("/tokenize", {"messages": messages})).json()
    assert answer.usage is not None and answer.usage.prompt_tokens == tokens["count"]
    if t.count_chat_tokens is not None:
        assert tokens["count"] == t.count_chat_tokens(messages)


@case("usage")
async def usage(t: Target) -> None:
    body = {"temperature": 0, "max_tokens": 6}
    whole = await t.complete(**body)
    streamed = await t.stream(**body, stream_options={"include_usage": True})
    assert streamed.chunks[-1].choices == [] and streamed.chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in streamed.chunks[:-1])
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    request = {**body, "prompt": t.prompt, "stream": True}
    for options in ({}, {"stream_options": {"include_usage": True}}):
        lines = (await t.post("/v1/completions", {**request, **options})).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]


@case("logprobs-json")
async def logprobs_json(t: Target) -> None:
    body = {
        "prompt": t.prompt, "logprobs": 5, "logit_bias": {"5": -100}, "max_tokens": 4,
        "ignore_eos": True,
    }  # fmt: skip
    for options in ({}, {"echo": True}, {"stream": True}):
        response = await t.post("/v1/completions", {**body, **options})
        lines = response.text.split("\n\n") if "stream" in options else [response.text]
        for line in lines:
            if line and not line.endswith("[DONE]"):
                choice = strict_json(line.removeprefix("data: "))["choices"][0]
                sizes = {len(values) for values in choice["logprobs"].values()}
                assert len(sizes) == 1
    messages = [{"role": "user", "content": "x"}]
    chat = {"messages": messages, "logprobs": True, "top_logprobs": 5, "max_tokens": 4}
    content = strict_json((await t.post(CHAT, chat)).text)["choices"][0]["logprobs"]["content"]
    assert content and all(len(token["top_logprobs"]) == 5 for token in content)


@case("queue-full", scheduler__max_waiting=16)
async def queue_full(t: Target) -> None:

    async def ask(index: int) -> httpx.Response:
        body = {"prompt": f"{t.prompt} {index}", "max_tokens": 16, "ignore_eos": True}
        return await t.post("/v1/completions", body)

    responses = await asyncio.gather(*map(ask, range(int(500 * t.scale))))
    accepted = [r for r in responses if r.status_code == 200]
    refused = [r for r in responses if r.status_code != 200]
    assert accepted and refused
    assert all(r.json()["usage"]["completion_tokens"] == 16 for r in accepted)
    for response in refused:
        assert response.status_code in (429, 503) and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
    await t.quiet()
    assert (await t.complete(max_tokens=2, ignore_eos=True)).reasons == ["length"]
