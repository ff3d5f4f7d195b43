"""Guides over a tokenizer of bytes: whatever is drawn from their masks is an answer of the grammar.

The model's vocabulary is larger than the tokenizer's, and no multiple of 32.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from engine.errors import InvalidRequest, ModelError
from engine.grammars import Grammars, TokenGuide
from engine.request import StructuredOutputs
from engine.structured_outputs import grammar_of
from engine.tokenizer import Tokenizer
from tests.tiny_tokenizer import EOS, SPECIAL_TOKENS, byte_level_backend, byte_level_tokenizer

NUM_KNOWN = 259
VOCAB_SIZE = 277
SPECIAL = range(len(SPECIAL_TOKENS))
TIMEOUT_S = 20
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", 'q"']}, "maxItems": 3},
        "born": {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(byte_level_tokenizer, VOCAB_SIZE)
    yield made
    made.close()


def start(grammars: Grammars, **wanted: Any) -> TokenGuide:
    return grammars.start(grammar_of(StructuredOutputs(**wanted))).result(TIMEOUT_S)


def allowed(guide: TokenGuide) -> list[int]:
    words = guide.mask()
    assert words.dtype == np.int32 and words.shape == (-(-VOCAB_SIZE // 32),)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def write(
    guide: TokenGuide,
    draw: random.Random,
    is_complete: Callable[[str], bool] = lambda _: True,
    longest: int = 400,
) -> str:
    """A text drawn at random; it ends itself, or at the first chance once it is long."""
    data = b""
    for _ in range(longest * 20):
        ids = allowed(guide)
        assert ids and not guide.error
        assert not [i for i in ids if i >= NUM_KNOWN or (i in SPECIAL and i != EOS)]
        if EOS in ids:
            assert is_complete(data.decode()), data
        token_id = EOS if EOS in ids and len(data) > longest else draw.choice(ids)
        data += bytes([token_id - len(SPECIAL)]) if token_id != EOS else b""
        if guide.advance(token_id):
            assert is_complete(data.decode()), data
            return data.decode()
        assert token_id != EOS, "the end, and it goes on"
    raise AssertionError(f"no end: {data!r}")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("seed", range(20))
def test_what_is_drawn_fits_the_schema(grammars: Grammars, seed: int) -> None:
    text = write(start(grammars, json=PERSON), random.Random(seed), is_json)
    person = json.loads(text)
    assert {"name", "age"} <= set(person) <= set(PERSON["properties"])  # type: ignore[call-overload]
    assert isinstance(person["name"], str) and len(person["name"]) <= 8
    assert type(person["age"]) is int and 0 <= person["age"] <= 150
    tags = person.get("tags", [])
    assert len(tags) <= 3 and set(tags) <= {"a", "é", 'q"'}
    assert person.get("born") is None or re.fullmatch(r"\d{4}-\d\d-\d\d", person["born"])


@pytest.mark.parametrize("seed", range(5))
def test_any_object_is_an_object(grammars: Grammars, seed: int) -> None:
    guide = start(grammars, json_object=True)
    draw, text = random.Random(seed), b""
    for _ in range(300):
        ids = allowed(guide)
        # Strings and numbers may go on for ever: close them where that is allowed.
        closing = [i for i in ids if bytes([i - 3]) in (b'"', b"}", b"]")] if len(text) > 20 else []
        token_id = draw.choice(closing or [i for i in ids if 35 <= i < 130] or ids)
        text += bytes([token_id - 3])
        if guide.advance(token_id):
            break
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "regex",
    [
        r"\d{3}-[a-f]{2,5}", "(ab|a)?", "a/b\n\"'", "", r"[^a]{3}", "日本|é+", "x{2,40}", "<eos>",
        r"(a|b)*c(a|b){5}", r"[a-z]+@[a-zé]+\.(com|org)", "[\\x00-\\x1f]{2}",
    ],
)  # fmt: skip
def test_what_is_drawn_matches_the_expression(grammars: Grammars, regex: str) -> None:
    for seed in range(5):
        guide = start(grammars, regex=regex)
        write(guide, random.Random(seed), lambda text: bool(re.fullmatch(regex, text)), 40)


ODD = ('"', "\\", "/", "\\n", "\n", "\0", "\x7f", "é", "日本", "a", "ab", "abc", 'b" | "c', "<eos>")


def test_what_is_drawn_is_one_of_the_choices(grammars: Grammars) -> None:
    draw, seen = random.Random(0), set()
    for _ in range(300):
        seen.add(write(start(grammars, choice=ODD), draw, lambda text: text in ODD))
    assert seen == set(ODD)


def test_there_may_be_many_choices(grammars: Grammars) -> None:
    """llguidance allows 2,000 alternatives of a rule."""
    choices = tuple(f"{i} apples" for i in range(5000))
    assert write(start(grammars, choice=choices), random.Random(0)) in choices


def test_what_is_drawn_follows_a_lark_grammar(grammars: Grammars) -> None:
    lark = 'start: sum\nsum: NUMBER ("+" sum)?\nNUMBER: /[1-9][0-9]{0,3}/'
    for seed in range(5):
        text = write(start(grammars, grammar=lark), random.Random(seed), longest=30)
        assert re.fullmatch(r"[1-9]\d{0,3}(\+[1-9]\d{0,3})*", text)


def test_the_end_is_allowed_exactly_when_the_text_is_complete(grammars: Grammars) -> None:
    guide = start(grammars, regex="(ab)*")
    for byte in b"ababab":
        assert (EOS in allowed(guide)) == (byte == ord("a"))
        assert not guide.advance(byte + 3)
    assert allowed(guide) == [EOS, ord("a") + 3]
    assert guide.advance(EOS)
    guide = start(grammars, regex="abc?")
    assert not guide.advance(ord("a") + 3) and not guide.advance(ord("b") + 3)
    assert guide.advance(ord("c") + 3), "nothing can follow"
    assert allowed(start(grammars, regex="")) == [EOS]


def test_the_text_of_a_special_token_is_text(grammars: Grammars) -> None:
    for wanted in ({"choice": ("<eos>",)}, {"json": {"const": "<bos><eos>"}}, {"regex": "<pad>"}):
        guide = start(grammars, **wanted)
        assert EOS not in allowed(guide)
        assert "<" in write(guide, random.Random(0))


def test_special_tokens_come_where_a_grammar_names_them(grammars: Grammars) -> None:
    guide = start(grammars, grammar='start: "a" <bos> "b"')
    assert not guide.advance(ord("a") + 3)
    assert allowed(guide) == [SPECIAL_TOKENS.index("<bos>")]
    assert not guide.advance(0) and guide.advance(ord("b") + 3)


@pytest.mark.parametrize("token_id", [ord("b") + 3, EOS, 0, NUM_KNOWN, VOCAB_SIZE - 1])
def test_what_is_not_allowed_is_an_error(grammars: Grammars, token_id: int) -> None:
    guide = start(grammars, regex="ac")
    assert token_id not in allowed(guide)
    assert not guide.advance(token_id)
    assert guide.error and "\n" not in guide.error and len(guide.error) < 300
    assert guide.wait(0)
    guide.mask()
    assert not guide.advance(ord("a") + 3), "it stays wrong"
    assert guide.error


def test_an_error_names_no_other_guide(grammars: Grammars) -> None:
    bad, good = start(grammars, regex="ac"), start(grammars, regex="ac")
    bad.advance(EOS)
    assert not good.error and write(good, random.Random(0)) == "ac"


def test_a_guide_becomes_ready(grammars: Grammars) -> None:
    guide = start(grammars, regex="[ab]{1000}")
    assert guide.wait(0), "what may come first is known"
    for _ in range(100):
        guide.advance(ord("a") + 3)
        assert guide.wait(TIMEOUT_S)
        assert allowed(guide) == [ord("a") + 3, ord("b") + 3]


def test_many_guides_at_once(grammars: Grammars) -> None:
    choices = [(f"{i}x", f"{i}yy") for i in range(60)]
    texts = [grammar_of(StructuredOutputs(choice=choice)) for choice in choices]
    guides = [future.result(TIMEOUT_S) for future in list(map(grammars.start, texts))]
    draw = random.Random(1)
    open_guides = dict(enumerate(guides))
    written = dict.fromkeys(open_guides, b"")
    while open_guides:
        for index, guide in list(open_guides.items()):
            token_id = draw.choice(allowed(guide))
            written[index] += bytes([token_id - 3])
            if guide.advance(token_id):
                del open_guides[index]
    assert all(text.decode() in choices[index] for index, text in written.items())


@pytest.mark.parametrize(
    ("lark", "words"),
    [
        ("start: <nope>", 'unknown special token: "<nope>"'),
        ("start: <[100000]>", "Token range end too large"),
        ("start: rule\nrule: rule", ""),
    ],
)
def test_a_grammar_that_does_not_fit_the_tokens_is_refused(
    grammars: Grammars, lark: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"^structured_outputs: .") as caught:
        start(grammars, grammar=lark)
    assert words in str(caught.value) and len(str(caught.value)) < 500
    assert write(start(grammars, regex="a"), random.Random(0)) == "a"


def test_a_tokenizer_that_cannot_be_read_is_told_each_time() -> None:
    calls = []

    def load() -> Tokenizer:
        calls.append(1)
        raise ModelError("no tokenizer.json")

    grammars = Grammars(load, VOCAB_SIZE)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"no tokenizer\.json"):
            start(grammars, regex="a")
    assert len(calls) == 2
    grammars.close()


def test_the_tokenizer_is_read_once() -> None:
    calls = []

    def load() -> Tokenizer:
        calls.append(1)
        return byte_level_tokenizer()

    grammars = Grammars(load, VOCAB_SIZE)
    assert not calls
    futures = [grammars.start(grammar_of(StructuredOutputs(regex="a"))) for _ in range(8)]
    assert all(future.result(TIMEOUT_S).mask() is not None for future in futures)
    assert len(calls) == 1
    grammars.close()


def test_close_does_not_wait_for_what_is_pending() -> None:
    gate = threading.Event()

    def load() -> Tokenizer:
        gate.wait(TIMEOUT_S)
        return byte_level_tokenizer()

    grammars = Grammars(load, VOCAB_SIZE)
    futures = [grammars.start(grammar_of(StructuredOutputs(regex="a"))) for _ in range(20)]
    begin = time.monotonic()
    grammars.close()
    assert time.monotonic() - begin < 1
    gate.set()
    assert sum(future.cancelled() for future in futures) >= 10
    for future in futures:
        if not future.cancelled():
            future.exception(TIMEOUT_S)


def test_every_end_of_the_model_ends_an_answer() -> None:
    tokenizer = Tokenizer(byte_level_backend(), eos_ids=frozenset({EOS, 2, VOCAB_SIZE, 10**6}))
    grammars = Grammars(lambda: tokenizer, VOCAB_SIZE)
    guide = start(grammars, regex="a*")
    assert allowed(guide) == [1, 2, ord("a") + 3]
    assert guide.advance(2)
    grammars.close()


@pytest.mark.parametrize("vocab_size", [200, 256, 259, 260, 288, 289])
def test_any_size_of_the_models_vocabulary(vocab_size: int) -> None:
    grammars = Grammars(byte_level_tokenizer, vocab_size)
    words = start(grammars, regex="(?s:.*)").mask()
    assert words.shape == (-(-vocab_size // 32),)
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert ids.max() < min(vocab_size, NUM_KNOWN)
    grammars.close()


def test_longer_tokens_may_cross_parts_of_a_grammar() -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken('{"a', special=False), AddedToken('":', special=False)])
    grammars = Grammars(lambda: Tokenizer(backend, eos_ids=frozenset({EOS})), VOCAB_SIZE)
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    guide = start(grammars, json={**schema, "additionalProperties": False})
    assert NUM_KNOWN in allowed(guide) and ord("{") + 3 in allowed(guide)
    assert not guide.advance(NUM_KNOWN)
    assert NUM_KNOWN + 1 in allowed(guide)
    assert not guide.advance(NUM_KNOWN + 1)
    assert ord("1") + 3 in allowed(guide)
    grammars.close()


@pytest.mark.parametrize(
    ("regex", "first"),
    [
        (r"\d", r"\d"),
        (r"[\d]+", r"\d"),
        (r"[^\d]x", r"\D"),
        (r"[\da-c]", r"[\da-c]"),
        (r"\Dx", r"\D"),
        (r"\\d", r"\\"),
        (r"\w?", r"\w"),
        (r"\s\S", r"\s"),
        (r"\.d", r"\."),
    ],
)
def test_classes_of_regular_expressions_are_ascii(
    grammars: Grammars, regex: str, first: str
) -> None:
    ids = {i - 3 for i in allowed(start(grammars, regex=regex)) if i >= 3}
    expected = {code for code in range(128) if re.match(first, chr(code), re.ASCII)}
    assert {code for code in ids if code < 128} == expected
    assert (max(ids - {EOS - 3}) >= 128) == (first == r"\D")


def test_whitespace_in_json_is_what_was_asked_for(grammars: Grammars) -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "minItems": 1}
    none = start(grammars, json=schema, whitespace_pattern="")
    assert not none.advance(ord("[") + 3)
    assert allowed(none) == [ord("1") + 3]
    some = start(grammars, json=schema)
    assert not some.advance(ord("[") + 3)
    assert ord(" ") + 3 in allowed(some)
