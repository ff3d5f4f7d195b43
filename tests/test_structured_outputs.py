"""What an answer must look like -> grammars: what is taken, what is refused, by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.admission import RequestLimits, build_requests, check_params
from engine.errors import InvalidRequest
from engine.request import EngineRequest, SamplingParams, StructuredOutputs
from engine.structured_outputs import (
    MAX_CHARACTERS,
    MAX_PATTERNS,
    MAX_REGEX_CHARACTERS,
    grammar_of,
)

LIMITS = RequestLimits(
    max_model_len=64, vocab_size=300, kv_tokens=640, max_n=4, max_logprobs=5, max_logit_bias=3,
    max_stop_ids=4,
)  # fmt: skip
EOS = 1


def outputs(**fields: Any) -> StructuredOutputs:
    return StructuredOutputs(**fields)


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(outputs(**fields))
    error = caught.value
    assert str(error).startswith(f"{error.param}: ") and len(str(error)) < 2500
    return error


def requests(wanted: Any, eos_ids: tuple[int, ...] = (EOS,), n: int = 1) -> list[EngineRequest]:
    params = SamplingParams(structured_outputs=wanted, n=n)
    return build_requests([5, 6], params, LIMITS, eos_ids, lambda: 0)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "object"}},
        {"json": {}},
        {"json": '{"type": "integer"}'},
        {"json": {"$ref": "#/$defs/tree", "$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}}}}},
        {"json_object": True},
        {"json_object": True, "regex": None},
        {"regex": r"\d{3}-[a-z]+"},
        {"regex": 'a/b\n"'},
        {"regex": ""},
        {"choice": ("yes", "no")},
        {"choice": ["yes"]},
        {"grammar": 'start: "a" b*\nb: "b"'},
        {"grammar": "start: <any_token>"},  # which ones there are, only the engine knows
    ],
    ids=str,
)
def test_each_field_gives_a_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(outputs(**fields))
    assert grammar_of(outputs(**fields)) == grammar_of(outputs(**fields))


def test_a_schema_is_the_same_as_an_object_and_as_text() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    assert grammar_of(outputs(json=schema)) == grammar_of(outputs(json=json.dumps(schema)))
    assert grammar_of(outputs(json_object=True)) == grammar_of(outputs(json={"type": "object"}))


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({}, "none"),
        ({"json_object": False}, "none"),
        ({"regex": None}, "none"),
        ({"regex": "a", "choice": ("a",)}, "regex, choice"),
        ({"json": {}, "json_object": True}, "json, json_object"),
    ],
)
def test_exactly_one_field_is_set(fields: dict[str, Any], got: str) -> None:
    error = refused(**fields)
    assert error.param == "structured_outputs"
    assert f"got {got}, allowed: one of json, json_object, regex, choice, grammar" in str(error)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("regex", 5, "got 5, allowed: str | None"),
        ("regex", ["a"], "got ['a'], allowed: str | None"),
        ("grammar", b"start", "got b'start', allowed: str | None"),
        ("choice", "abc", "got 'abc', allowed: tuple[str, ...] | None"),
        ("choice", [1], "got [1], allowed: tuple[str, ...] | None"),
        ("choice", 5, "got 5"),
        ("choice", [], "at least one text"),
        ("choice", [""], "none that is empty"),
        ("choice", ["a", ""], "none that is empty"),
        ("json_object", "yes", "got 'yes', allowed: bool"),
        ("json_object", 1, "got 1, allowed: bool"),
        ("json", [{}], "got [{}], allowed: dict[str, Any] | str | None"),
        ("json", 5, "got 5"),
        ("json", {1: 2}, "got {1: 2}"),
        ("json", {"type": object()}, "unsupported"),
        ("json", "not json", "Expecting value"),
        ("json", "", "Expecting value"),
        ("json", "[]", "a JSON schema, which is an object, is expected"),
        ("json", "true", "a JSON schema, which is an object, is expected"),
        ("json", {"type": "foo"}, "Invalid type: foo"),
        ("json", {"not": {}}, 'Unimplemented keys: ["not"]'),
        ("json", {"enum": []}, "Unsatisfiable schema"),
        ("json", {"$ref": "#/nowhere"}, "nowhere"),
        ("json", {"$ref": "https://example.com/x"}, "example.com"),
        ("json", {"type": "string", "pattern": "("}, "regex"),
        ("json", {"const": float("nan")}, "expected value"),
        ("json", '{"minimum": 1e999}', "expected value"),
        ("json", {"const": "\ud800"}, "hex escape"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)", "look-around"),
        ("regex", "\ud800", "surrogates not allowed"),
        ("choice", ["\ud800"], "surrogates not allowed"),
        ("grammar", "", "Empty grammar"),
        ("grammar", "no grammar", "Expected token"),
        ("grammar", "start: unknown", 'unknown name: "unknown"'),
        ("grammar", "rule: /a/", "start"),
    ],
    ids=str,
)
def test_what_a_field_cannot_be_is_named(name: str, value: Any, words: str) -> None:
    error = refused(**{name: value})
    assert error.param == f"structured_outputs.{name}"
    assert words.lower() in str(error).lower()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regex", "a" * MAX_CHARACTERS),
        ("choice", ["a" * MAX_CHARACTERS]),
        ("choice", ["a" * 10] * (MAX_CHARACTERS // 12)),
        ("grammar", 'start: "' + "a" * MAX_CHARACTERS + '"'),
        ("json", {"const": "a" * MAX_CHARACTERS}),
        ("json", json.dumps({"const": "a" * MAX_CHARACTERS})),
    ],
    ids=lambda value: str(value)[:8],
)
def test_what_is_too_large_is_refused(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.param == f"structured_outputs.{name}"
    most = MAX_REGEX_CHARACTERS if name in ("regex", "grammar") else MAX_CHARACTERS
    assert f"characters, allowed: at most {most}" in str(error)


def test_an_error_does_not_repeat_what_was_sent() -> None:
    long = "a" * 30_000
    assert "unclosed group" in str(refused(regex=f"{long}("))
    for name, value in (
        ("regex", [long]),
        ("json", [long]),
        ("json", {"type": long}),
        ("grammar", f"start: {long}"),
        ("grammar", f'start: "{long}"\nstart'),
    ):
        assert refused(**{name: value}).param == f"structured_outputs.{name}"


@pytest.mark.parametrize("levels", [125, 200, 900, 1000, 2000, 20_000])
def test_what_is_nested_deeply_is_refused(levels: int) -> None:
    """Not a crash, nor an error of Python's."""
    text = '{"items": ' * levels + "{}" + "}" * levels
    for schema in (text, deep(levels)):
        assert refused(json=schema).param == "structured_outputs.json"
    for wanted in ({"json": deep(levels)}, outputs(json=deep(levels))):
        with pytest.raises(InvalidRequest, match=r"structured_outputs\.json: "):
            requests(wanted)
    assert refused(regex="(" * levels * 10 + "a" + ")" * levels * 10).param
    assert refused(grammar="start: " + "(" * levels + '"a"' + ")" * levels).param


def test_choices_are_texts_whatever_their_characters() -> None:
    odd = [
        '"', "\\", "/", "a/b", "\\n", "\n", "\t", "\0", "\x1b", "\x7f", "é", "\u2028", "日本",
        "\U0001f600", 'a" | "b', "//", "/* */", "%ignore", "$", "<eos>", "a\r\nb", '"a"i', " ",
    ]  # fmt: skip
    for choice in odd:
        assert grammar_of(outputs(choice=(choice,)))
    assert grammar_of(outputs(choice=odd + odd))


def test_sampling_params_take_the_fields_as_a_dictionary() -> None:
    wanted: Any = {"choice": ["yes", "no"]}
    params = check_params(SamplingParams(structured_outputs=wanted), LIMITS)
    assert params.structured_outputs == outputs(choice=("yes", "no"))
    first, second = requests(wanted, n=2)
    assert first.grammar == second.grammar == grammar_of(outputs(choice=("yes", "no")))
    assert requests(outputs(regex="a"))[0].grammar == grammar_of(outputs(regex="a"))
    assert requests(None)[0].grammar == ""


@pytest.mark.parametrize(
    ("wanted", "param", "words"),
    [
        ({"regexp": "a"}, "structured_outputs", "{'regexp': 'a'}"),
        ({"regex": "a", "strict": True}, "structured_outputs", "'strict': True"),
        ({"regex": 5}, "structured_outputs", "{'regex': 5}"),
        ("a", "structured_outputs", "got 'a'"),
        ({}, "structured_outputs", "got none"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs", "got regex, choice"),
        ({"regex": "("}, "structured_outputs.regex", "unclosed group"),
        ({"json": {"type": "foo"}}, "structured_outputs.json", "Invalid type: foo"),
    ],
    ids=str,
)
def test_sampling_params_that_are_wrong_are_refused(wanted: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        requests(wanted)
    assert caught.value.param == param
    assert words in str(caught.value)


@pytest.mark.parametrize("eos_ids", [(), (300,), (10**6, 10**7)])
def test_a_model_without_an_end_is_refused(eos_ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs: .* end-of-sequence token"):
        requests(outputs(regex="a"), eos_ids)
    assert requests(None, eos_ids)
    assert requests(outputs(regex="a"), (*eos_ids, EOS))


@pytest.mark.parametrize("count", [1_000, 2_500])
def test_long_chains_of_rules_end_no_process(count: int) -> None:
    """llguidance follows them by recursion, beyond a thread's usual stack."""
    rules = "".join(f"r{i}:r{i + 1}\n" for i in range(count))
    assert grammar_of(outputs(grammar=f'start: r0\n{rules}r{count}: "a"'))
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "integer"}}}
    assert grammar_of(outputs(json=schema))


def test_the_number_of_patterns_is_limited() -> None:
    """Wherever they are in the schema."""

    def schema(count: int) -> dict[str, object]:
        half = count // 2
        halves = [
            {"type": "object", "patternProperties": {f"^{name}{i}$": {} for i in range(number)}}
            for name, number in (("a", half), ("b", count - half))
        ]
        return {"anyOf": [halves[0], {"type": "array", "items": halves[1]}]}

    assert grammar_of(StructuredOutputs(json=schema(MAX_PATTERNS)))
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(StructuredOutputs(json=schema(MAX_PATTERNS + 1)))
    assert str(caught.value) == (
        "structured_outputs.json: got 101 patternProperties, allowed: at most 100"
    )


@pytest.mark.parametrize("key", ["const", "minimum", "maximum"])
def test_integers_that_would_come_out_as_others_are_refused(key: str) -> None:
    assert grammar_of(outputs(json={"type": "integer", key: 2**53}))
    for number in (2**53 + 1, -(2**53) - 1, 10**30):
        error = refused(json={"type": "array", "items": {"enum": [1, {key: number}]}})
        assert f"got {number}, allowed: integers from -(2**53) to 2**53" in str(error)


def test_what_is_not_larks_notation_is_told() -> None:
    assert "this looks like EBNF" in str(refused(grammar='root ::= "a"'))


@pytest.mark.parametrize("regex", ["a\\", "\\", "\\\\\\"])
def test_a_regex_that_ends_in_a_backslash_is_refused(regex: str) -> None:
    assert "ends in a backslash" in str(refused(regex=regex))
    assert grammar_of(outputs(regex=regex + "\\"))


def test_an_option_alone_asks_for_nothing() -> None:
    assert "got none" in str(refused(whitespace_pattern=" "))
    assert "whitespace_pattern" not in str(refused(whitespace_pattern=" ")).split("one of")[1]
