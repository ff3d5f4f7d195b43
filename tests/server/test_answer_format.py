"""The HTTP fields that say what an answer must look like: one meaning, errors name the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.request import StructuredOutputs
from engine.server.protocol import Job, completion_job
from engine.structured_outputs import MAX_CHARACTERS, grammar_of
from tests.server.test_protocol import chat, completion, context

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}
LARK = 'start: "a" | "b"'
Ask = Callable[..., Job]


def openai_form(**json_schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": json_schema}


@pytest.mark.parametrize("ask", [completion, chat])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"response_format": openai_form(schema=SCHEMA)}, {"json": SCHEMA}),
        (
            {"response_format": openai_form(name="x", strict=True, description="d", schema=SCHEMA)},
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json": SCHEMA}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": {}}, {"json": {}}),
        ({"response_format": openai_form(name="x", schema={})}, {"json": {}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_regex": ""}, {"regex": ""}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"guided_choice": ["a", "é"]}, {"choice": ("a", "é")}),
        ({"structured_outputs": {"choice": ["a", "é"]}}, {"choice": ("a", "é")}),
        ({"guided_grammar": LARK}, {"grammar": LARK}),
        ({"structured_outputs": {"grammar": LARK}}, {"grammar": LARK}),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, {"regex": "a"}),
        ({"guided_regex": "a", "guided_json": None, "structured_outputs": None}, {"regex": "a"}),
    ],
    ids=str,
)
def test_every_way_of_asking_means_the_same(
    ask: Ask, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    wanted = StructuredOutputs(**expected)
    job = ask(**body, n=2)
    assert job.params.structured_outputs == wanted
    assert {request.grammar for request in job.requests} == {grammar_of(wanted)}
    assert len(job.requests) == 2


@pytest.mark.parametrize("ask", [completion, chat])
def test_a_schema_may_be_text(ask: Ask) -> None:
    text = json.dumps(SCHEMA)
    for body in ({"guided_json": text}, {"structured_outputs": {"json": text}}):
        (request,) = ask(**body).requests
        assert request.grammar == grammar_of(StructuredOutputs(json=SCHEMA))


@pytest.mark.parametrize("ask", [completion, chat])
def test_nothing_asked_is_any_text(ask: Ask) -> None:
    names = ("json", "regex", "choice", "grammar")
    nulls = dict.fromkeys(
        ["response_format", "structured_outputs", *(f"guided_{n}" for n in names)]
    )
    for body in ({}, nulls, {"response_format": {"type": "text"}}):
        job = ask(**body)
        assert job.params.structured_outputs is None
        assert [request.grammar for request in job.requests] == [""]


@pytest.mark.parametrize("ask", [completion, chat])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"structured_outputs": {"json": {}}, "response_format": openai_form(schema={})},
            "response_format",
        ),
        ({"guided_grammar": LARK, "guided_choice": ["a"], "guided_json": {}}, "guided_choice"),
    ],
    ids=str,
)
def test_two_at_once_are_refused(ask: Ask, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match="at most one of") as caught:
        ask(**body)
    assert caught.value.param == param
    assert all(name in str(caught.value) for name in body)


@pytest.mark.parametrize("ask", [completion, chat])
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": "json_object"}, "response_format", "dict"),
        ({"response_format": []}, "response_format", ""),
        ({"response_format": {}}, "response_format.type", "got None, allowed: 'text'"),
        ({"response_format": {"type": None}}, "response_format.type", "got None"),
        ({"response_format": {"type": 5}}, "response_format.type", "got 5"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "structural_tag"),
        ({"response_format": {"type": "json"}}, "response_format.type", "allowed: 'text', 'json_"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", ""),
        ({"response_format": openai_form()}, "response_format.json_schema.schema", "is expected"),
        ({"response_format": openai_form(schema=None)}, "response_format.json_schema.schema", ""),
        ({"response_format": openai_form(schema="{}")}, "response_format.json_schema.schema", ""),
        ({"response_format": openai_form(schema=[])}, "response_format.json_schema.schema", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": "x"}},
            "response_format.json_schema.schema",
            "a JSON schema is expected",
        ),
        ({"response_format": openai_form(schema={"type": "foo"})}, "response_format", "foo"),
        ({"response_format": openai_form(schema={"not": {}})}, "response_format", "not"),
        ({"guided_json": {"type": "foo"}}, "guided_json", "Invalid type: foo"),
        ({"guided_json": "not json"}, "guided_json", "Expecting value"),
        ({"guided_json": "[]"}, "guided_json", "a JSON schema"),
        ({"guided_json": [SCHEMA]}, "guided_json", ""),
        ({"guided_json": 5}, "guided_json", ""),
        ({"guided_json": True}, "guided_json", ""),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": 5}, "guided_regex", "str"),
        ({"guided_choice": []}, "guided_choice", "at least one text"),
        ({"guided_choice": [""]}, "guided_choice", "none that is empty"),
        ({"guided_choice": "abc"}, "guided_choice", "list"),
        ({"guided_choice": [1]}, "guided_choice", ""),
        ({"guided_grammar": ""}, "guided_grammar", "Empty grammar"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": {}}, "guided_grammar", "str"),
        ({"structured_outputs": {}}, "structured_outputs", "got none"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "got none"),
        ({"structured_outputs": "x"}, "structured_outputs", "dict"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "`regexp`"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "$.regex"),
        ({"structured_outputs": {"choice": "abc"}}, "structured_outputs", "$.choice"),
        ({"structured_outputs": {"json": []}}, "structured_outputs", "$.json"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "got regex, choice",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
    ],
    ids=str,
)
def test_an_error_names_the_field_that_was_sent(
    ask: Ask, body: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(**body)
    error = caught.value
    field = param.split(".")[0]
    assert (error.param or "").startswith(param), error.param
    assert field in str(error) and words in str(error)
    if field != "structured_outputs":
        assert "structured_outputs" not in str(error)


@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "a" * MAX_CHARACTERS},
        {"guided_choice": ["a" * MAX_CHARACTERS]},
        {"guided_json": {"const": "a" * MAX_CHARACTERS}},
        {"response_format": openai_form(schema={"const": "a" * MAX_CHARACTERS})},
        {"structured_outputs": {"regex": "a" * MAX_CHARACTERS}},
        {"response_format": {"type": "a" * MAX_CHARACTERS}},
        {"guided_regex": "(" * 100_000},
    ],
    ids=lambda body: next(iter(body)),
)
def test_what_is_too_large_is_refused_shortly(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**body)
    (field,) = body
    assert (caught.value.param or "").split(".")[0] == field
    assert len(str(caught.value)) < 2500


@pytest.mark.parametrize("levels", [60, 200, 900, *range(960, 1000), 5000])
def test_deep_bodies_are_refused_or_taken(levels: int) -> None:
    """Around the depth where Python's own JSON reader gives up, too."""
    schema = '{"items":' * levels + "{}" + "}" * levels
    array = "[" * levels + "]" * levels
    for body in (
        f'"guided_json":{schema}',
        f'"guided_json":{json.dumps(schema)}',
        f'"structured_outputs":{{"json":{schema}}}',
        f'"response_format":{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}',
        f'"response_format":{{"type":{array}}}',
        f'"guided_choice":{array}',
    ):
        data = f'{{"prompt":"x",{body}}}'.encode()
        try:
            completion_job(data, context())
        except InvalidRequest as error:
            assert len(str(error)) < 2500
        else:
            assert levels == 60


def test_an_echo_without_an_answer_may_ask() -> None:
    assert completion(echo=True, max_tokens=0, guided_regex="a").requests == []
