"""Requests that are refused, and those at the edge that are not (see case.py)."""

from __future__ import annotations

import math

from tests.server.case import CHAT, case, greedy
from tests.server.target import Target


@case("stop-empty")
async def stop_empty(t: Target) -> None:
    await t.fields_refused("stop", [[""], "", ["a", ""], [1], {"a": 1}])


@case("prompt-empty")
async def prompt_empty(t: Target) -> None:
    await t.fields_refused("prompt", ["", [""], [], [[]], ["a", ""], [[5], []], None, 5, {}])
    await t.refused({"max_tokens": 4}, param="prompt")


@case("messages-empty")
async def messages_empty(t: Target) -> None:
    bad: tuple[object, ...] = ([], None, "x", [1], [{}], [{"role": "user"}])
    for messages in bad:
        error = await t.refused({"messages": messages}, path=CHAT)
        assert error["param"].startswith("messages")
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    await t.refused({"messages": [{"role": "user", "content": image}]}, path=CHAT)
    await t.refused({}, path=CHAT, param="messages")


@case("prompt-over-context")
async def prompt_over_context(t: Target) -> None:
    longest = t.max_model_len
    for length in (longest, longest + 1, 2 * longest):
        for stream in (False, True):
            body = {"prompt": [5] * length, "max_tokens": 1, "stream": stream}
            words = [str(length), str(longest)]
            error = await t.refused(body, param="prompt", words=words)
            assert error["code"] == "context_length_exceeded"
    answer = await t.complete(prompt=[5] * (longest - 1), max_tokens=9, ignore_eos=True)
    assert answer.usage.completion_tokens == 1 and answer.reasons == ["length"]


@case("prompt-over-kv-pool", kv__num_pages=4)
async def prompt_over_kv_pool(t: Target) -> None:
    pool = t.pool_tokens
    assert pool < t.max_model_len
    words = [str(pool + 1), str(pool)]
    await t.refused({"prompt": [5] * (pool + 1), "stream": True}, param="prompt", words=words)
    answer = await t.complete(prompt=[5] * (pool - 1), max_tokens=9, ignore_eos=True)
    assert answer.reasons == ["length"]
    answer = await t.complete(prompt=[5] * 4, max_tokens=10**6, ignore_eos=True)
    assert answer.reasons == ["length"]
    assert answer.usage.total_tokens == pool


@case("max-tokens")
async def max_tokens(t: Target) -> None:
    await t.fields_refused("max_tokens", [-1, 0, 1.5, "5", True, [1]])
    user = [{"role": "user", "content": "x"}]
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (0, -1, 1.5, "5"):
            await t.refused({"messages": user, name: value}, path=CHAT, param=name)
    echoed = await t.complete(max_tokens=0, echo=True)
    assert (echoed.texts, echoed.reasons) == ([t.prompt], ["length"])
    assert echoed.usage.completion_tokens == 0
    clamped = await t.complete(prompt=[5] * 8, max_tokens=10**9, ignore_eos=True)
    assert clamped.usage.total_tokens == t.max_model_len


@case("token-ids")
async def token_ids(t: Target) -> None:
    await t.fields_refused("prompt", [[-1], [t.vocab_size], [999999], [2**31], [2**70]])
    await t.fields_refused("prompt", [[1.5], [True], [5, True], [5, "a"], [[5], "a"], [None]])


@case("stop-token-ids")
async def stop_token_ids(t: Target) -> None:
    values: list[object] = [[999999], [-1], ["5"], [1.5], 5, list(range(100))]
    await t.fields_refused("stop_token_ids", values)
    ids = (await t.complete(temperature=0, max_tokens=12, ignore_eos=True)).token_ids[0]
    first = ids.index(ids[5])
    answer = await t.complete(temperature=0, max_tokens=12, stop_token_ids=[ids[5]])
    assert answer.reasons == ["stop"] and answer.token_ids == [ids[: first + 1]]
    assert answer.usage.completion_tokens == first + 1


@case("logit-bias")
async def logit_bias(t: Target) -> None:
    bad: list[object] = [{"999999": 1}, {"abc": 1}, {"5": 1000}, {"-1": 1}, {"1.5": 1}]
    bad += [{"5": "x"}, {"5": True}, [5], {str(i): 1 for i in range(10**5)}]
    await t.fields_refused("logit_bias", bad)
    answer = await t.complete(logit_bias={"5": 100}, max_tokens=3, temperature=0, ignore_eos=True)
    assert answer.token_ids == [[5, 5, 5]]


@case("huge")
async def huge(t: Target) -> None:
    await t.fields_refused("n", [10**6, 10**30])
    await t.fields_refused("logprobs", [10**9])
    await t.fields_refused("stop", [["x"] * 100_000, ["x" * 10**6]])
    await t.fields_refused("prompt", [["a"] * 100_000])
    user = [{"role": "user", "content": "x"}]
    body = {"messages": user, "logprobs": True, "top_logprobs": 10**9}
    await t.refused(body, path=CHAT, param="top_logprobs")
    whole = {"prompt": t.prompt, "n": 10**6, "logprobs": 10**9, "stop": ["x"] * 100_000}
    await t.refused(whole)
    response = await t.post("/v1/completions", b'{"prompt": "%s"}' % (b"a" * (17 * 2**20)))
    assert response.status_code == 413 and "message" in response.json()["error"]


@case("n-zero")
async def n_zero(t: Target) -> None:
    await t.fields_refused("n", [0, -1, 1.5, "2", True])


@case("sampling-range")
async def sampling_range(t: Target) -> None:
    await t.fields_refused("temperature", [-1, "hot", math.nan, math.inf, -math.inf, True])
    await t.fields_refused("top_p", [0, 1.5, -1, "x", math.nan])
    await t.fields_refused("top_k", [1.5, -2, "x", True])
    await t.fields_refused("min_p", [-0.1, 1.5, math.nan])
    await t.fields_refused("presence_penalty", [-2.1, 2.1, math.nan])
    await t.fields_refused("frequency_penalty", [-2.1, 2.1, math.inf])
    await t.fields_refused("repetition_penalty", [0, -1, math.nan])
    await t.fields_refused("seed", [1.5, "x", 2**64, -(2**63) - 1])
    await t.fields_refused("min_tokens", [-1, 5, 1.5])
    text = await greedy(t)
    for tiny in ({"temperature": 1e-8}, {"temperature": 0, "top_k": 5}):
        assert (await t.complete(**tiny, max_tokens=24)).texts == [text]
    same = {"temperature": 1.0, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    draws = [await t.complete(**same, top_k=top_k) for top_k in (0, -1, 10**6, 10**30)]
    assert len({tuple(draw.token_ids[0]) for draw in draws}) == 1
    for odd in ({"temperature": 1e6}, {"top_p": 1e-9}, {"temperature": 1e-300}):
        assert (await t.complete(**odd, max_tokens=4)).reasons[0] in ("stop", "length")


@case("not-json")
async def not_json(t: Target) -> None:
    for body in (b'{"prompt": ', b"", b"[]", b'"x"', b"\xff\xfe", b"[" * 10**5, b"null"):
        await t.refused(body)
        await t.refused(body, path=CHAT)
        await t.refused(body, path="/tokenize")


@case("wrong-model")
async def wrong_model(t: Target) -> None:
    error = await t.refused({"model": "no-such", "prompt": "x"}, status=404, param="model")
    assert error["code"] == "model_not_found"
    user = [{"role": "user", "content": "x"}]
    await t.refused({"model": "no-such", "messages": user}, path=CHAT, status=404)
    assert (await t.http.get("/v1/models/no-such")).status_code == 404
    assert (await t.http.get(f"/v1/models/{t.model}")).json()["id"] == t.model
    response = await t.http.get("/no-such-route")
    assert response.status_code == 404 and "message" in response.json()["error"]
    response = await t.http.get("/v1/completions")
    assert response.status_code == 405 and "message" in response.json()["error"]


@case("surrogate")
async def surrogate(t: Target) -> None:
    await t.refused(b'{"prompt": "\\ud83d"}', param="prompt", words=["surrogate"])
    await t.refused(b'{"prompt": "x", "stop": "\\udc00"}', words=["surrogate"])
    body = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    await t.refused(body, path=CHAT, words=["surrogate"])
    await t.refused(b'{"prompt": "\\ud83d"}', path="/tokenize", words=["surrogate"])
    pair = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}'
    assert (await t.post("/v1/completions", pair)).status_code == 200


@case("nul")
async def nul(t: Target) -> None:
    answer = await t.complete(prompt="a\0b", max_tokens=3, echo=True)
    assert answer.texts[0].startswith("a\0b")


@case("no-chat-template", model__chat_template=None)
async def no_chat_template(t: Target) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    await t.refused(body, path=CHAT, words=["model.chat_template"])
    assert (await t.complete(max_tokens=1)).usage.completion_tokens == 1


@case("template-raises")
async def template_raises(t: Target) -> None:
    body = {"messages": [{"role": "foo", "content": "x"}]}
    error = await t.refused(body, path=CHAT)
    assert error["param"].startswith("messages")


@case("usage-without-stream")
async def usage_without_stream(t: Target) -> None:
    await t.fields_refused("stream_options", [{"include_usage": True}, {}])
    await t.fields_refused("stream_options", [{"include_usage": "x"}, 5], stream=True)
