"""Cases of answers that follow a grammar: for a real engine; one without a model follows none."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

from tests.server.case import CHAT, Case, Check
from tests.server.target import Answer, Target, all_of

STRUCTURED_CASES: list[Case] = []
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"enum": ["red", "grün", 'a "b"']},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "<eos>", 'a "quoted" one', "日本"]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def case(name: str, **config: Any) -> Callable[[Check], Check]:
    """Register a check here, and not where servers without a model would find it."""

    def register(check: Check) -> Check:
        settings = {key.replace("__", "."): value for key, value in config.items()}
        STRUCTURED_CASES.append(Case(f"structured-{name}", check, settings))
        return check

    return register


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "colour"]
    assert isinstance(person["name"], str) and len(person["name"]) <= 8
    assert type(person["age"]) is int and 0 <= person["age"] <= 150
    assert person["colour"] in SCHEMA["properties"]["colour"]["enum"]  # type: ignore[index]


def json_schema(schema: dict[str, Any]) -> Any:
    described = {"name": "person", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": described}


async def same_streamed(t: Target, **body: Any) -> Answer:
    """The answer, which is the same streamed and whole."""
    body = {"seed": 5, "max_tokens": 600, **body}
    whole, streamed = await t.complete(**body), await t.stream(**body)
    assert whole.texts == streamed.texts and whole.token_ids == streamed.token_ids
    assert whole.reasons == streamed.reasons
    return whole


@case("chat")
async def chat(t: Target) -> None:
    create = t.client.chat.completions.create
    form = json_schema(SCHEMA)
    for seed in range(2):
        options: dict[str, Any] = {"model": t.model, "messages": MESSAGES, "seed": seed}
        answer = await create(**options, response_format=form, n=2)
        for choice in answer.choices:
            check_person(choice.message.content or "")
            assert choice.finish_reason == "stop"
        chunks = await create(**options, response_format=form, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in chunks])
        assert text == answer.choices[0].message.content
    greedy = await create(**options, response_format=form, temperature=0)
    check_person(greedy.choices[0].message.content or "")
    # Whitespace is bounded, but an object without a schema may go on.
    anything = await create(**options, response_format={"type": "json_object"}, max_tokens=50)
    assert (anything.choices[0].message.content or "").lstrip().startswith("{")


@case("completions")
async def completions(t: Target) -> None:
    texts = set()
    for seed in range(30):
        answer = await t.complete(guided_choice=CHOICES, seed=seed, max_tokens=50, n=2)
        assert set(answer.texts) <= set(CHOICES) and answer.reasons == ["stop"] * 2
        texts |= set(answer.texts)
    assert len(texts) > 2
    regex = r"\d{3}-[a-f]{2,5}"
    answer = await same_streamed(t, guided_regex=regex, n=3, temperature=1.5)
    assert all(re.fullmatch(regex, text) for text in answer.texts)
    lark = 'start: NUMBER ("+" NUMBER)~2\nNUMBER: /[1-9][0-9]?/'
    answer = await same_streamed(t, guided_grammar=lark)
    assert re.fullmatch(r"[1-9]\d?(\+[1-9]\d?){2}", answer.texts[0])
    answer = await same_streamed(t, structured_outputs={"json": SCHEMA}, temperature=0)
    check_person(answer.texts[0])
    answer = await same_streamed(t, prompt=["a", "b"], guided_json=json.dumps(SCHEMA), n=2)
    assert len(answer.texts) == 4
    for text in answer.texts:
        check_person(text)


@case("ends")
async def ends(t: Target) -> None:
    cut = await same_streamed(t, guided_regex="[ab]{40}", max_tokens=39)
    assert cut.reasons == ["length"] and re.fullmatch("[ab]{39}", cut.texts[0])
    # The last token that is allowed is the grammar's end, too.
    whole = await same_streamed(t, guided_regex="[ab]{40}", max_tokens=40)
    assert whole.reasons == ["stop"] and re.fullmatch("[ab]{40}", whole.texts[0])
    assert whole.usage.completion_tokens == 40
    eos = t.eos_ids[0]
    ended = await same_streamed(t, guided_regex="(ab)*", logit_bias={str(eos): 100})
    assert (ended.texts, ended.token_ids, ended.reasons) == ([""], [[eos]], ["stop"])
    empty = await same_streamed(t, guided_regex="")
    assert (empty.texts, empty.reasons) == ([""], ["stop"])
    stopped = await same_streamed(t, guided_regex="abcdef", stop=["de"])
    assert (stopped.texts, stopped.reasons) == (["abc"], ["stop"])
    named = await same_streamed(t, guided_choice=["only this"], ignore_eos=True)
    assert (named.texts, named.reasons) == (["only this"], ["stop"])
    echoed = await t.complete(prompt="x", guided_choice=["only this"], echo=True, max_tokens=20)
    assert echoed.texts == ["xonly this"]
    scored = await t.complete(guided_choice=["ab"], logprobs=2, max_tokens=20)
    assert len(scored.logprobs[0].tokens) == 2
    penalised = await t.complete(guided_regex="a{20}", frequency_penalty=2, max_tokens=30)
    assert penalised.texts == ["a" * 20]
    biased = await t.complete(guided_choice=["ab"], logit_bias={"5": 100}, max_tokens=20)
    assert biased.texts == ["ab"]
    ignored = await t.complete(guided_regex="(ab)*", ignore_eos=True, max_tokens=30)
    assert re.fullmatch("(ab)*a?", ignored.texts[0])


@case("refused")
async def refused(t: Target) -> None:
    await t.fields_refused("response_format", ["json_object", {}, {"type": "structural_tag"}])
    await t.fields_refused("response_format", [json_schema({"type": "foo"}), {"type": []}])
    await t.fields_refused("structured_outputs", [{}, {"regexp": "a"}, {"regex": "("}, 5])
    await t.fields_refused("guided_json", ["x", [], {"type": "foo"}, {"not": {}}])
    await t.fields_refused("guided_choice", [[], [""], "abc", [1]])
    await t.fields_refused("guided_regex", ["(", 5, "a" * 10**6], guided_json=None)
    await t.fields_refused("guided_grammar", ["", "x", "start: y", 5], stream=True)
    await t.refused({"messages": MESSAGES, "guided_regex": "("}, path=CHAT, param="guided_regex")
    # Only the engine knows which tokens there are.
    unknown = {"prompt": "x", "guided_grammar": "start: <nope>"}
    error = await t.refused(unknown, words=["unknown special token"], param="guided_grammar")
    assert len(error["message"]) < 500
    streamed = await t.post("/v1/completions", {**unknown, "stream": True})
    assert "unknown special token" in streamed.text
    deep = {"prompt": "x", "guided_json": '{"items":' * 3000 + "{}" + "}" * 3000}
    await t.refused(deep, param="guided_json")
    chain = "".join(f"r{i}:r{i + 1}\n" for i in range(2500))
    answer = await t.complete(guided_grammar=f'start: r0\n{chain}r2500: "a"', max_tokens=3)
    assert answer.texts == ["a"]
    digits = await t.complete(guided_regex=r"\d{4}", temperature=2, max_tokens=30, n=8)
    assert all(re.fullmatch("[0-9]{4}", text) for text in digits.texts)
    blank = {"guided_json": {"enum": [{"a": [1, 2]}]}, "guided_whitespace_pattern": ""}
    assert (await t.complete(**blank, max_tokens=40)).texts == ['{"a":[1,2]}']


@case("beside-others")
async def beside_others(t: Target) -> None:
    plain = [
        {"prompt": f"plain {i}", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
        for i in range(10)
    ]
    alone = [await t.complete(**body) for body in plain]
    guided = [{"guided_json": SCHEMA, "seed": i, "max_tokens": 600} for i in range(5)]
    guided += [{"guided_choice": CHOICES, "seed": i, "max_tokens": 60} for i in range(10)]
    guided_alone = [await t.complete(**body) for body in guided]
    wrong: list[dict[str, Any]] = [
        {"guided_json": {"type": "foo"}},
        {"guided_regex": "("},
        {"guided_grammar": "start: <nope>"},
        {"guided_json": {"enum": [f"v{i}" for i in range(3000)], "type": "foo"}},
    ]

    async def refuse(body: dict[str, Any]) -> None:
        await t.refused({"prompt": "x", "max_tokens": 5, **body})

    async def leave(index: int) -> None:
        body = {"prompt": "x", "guided_regex": "[ab]{1500}", "max_tokens": 1600, "stream": True}
        await t.leave("/v1/completions", body, 0.05 * (index + 1))

    others = [refuse(body) for body in wrong * 3] + [leave(i) for i in range(6)]
    async with asyncio.TaskGroup() as group:
        for other in others:
            group.create_task(other)
        waiting = group.create_task(all_of(*(t.complete(**body) for body in plain)))
        guided_beside = await all_of(*(t.stream(**body) for body in guided))
        beside = await waiting
    assert [a.token_ids for a in beside] == [a.token_ids for a in alone]
    assert [a.texts for a in guided_beside] == [a.texts for a in guided_alone]
    for answer in guided_beside[:5]:
        check_person(answer.texts[0])
    assert all(answer.texts[0] in CHOICES for answer in guided_beside[5:])
    assert {answer.reasons[0] for answer in guided_beside} == {"stop"}
    await t.quiet()


@case("preempted", kv__num_pages=8)
async def preempted(t: Target) -> None:
    """Pages run short: a guide goes on where its request was put back."""
    body = {"guided_regex": "[a-f]{70}", "temperature": 0, "max_tokens": 80}
    prompts = [[10 + i] * 8 for i in range(6)]
    together = await all_of(*(t.complete(prompt=prompt, **body) for prompt in prompts))
    alone = [await t.complete(prompt=prompt, **body) for prompt in prompts]
    assert [a.texts for a in together] == [a.texts for a in alone]
    assert all(re.fullmatch("[a-f]{70}", answer.texts[0]) for answer in together)
    await t.quiet()
