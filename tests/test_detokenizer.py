"""Streamed text against the decoding of all ids at once, for any split and any stop strings."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from engine.detokenizer import Detokenizer, StopMatcher
from engine.tokenizer import Tokenizer
from tests.tiny_tokenizer import byte_level_tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama-2 style: spaces as low lines, bytes as <0x..>, the first space dropped."""
    words = ["\u2581", "\u2581he", "llo", "\u2581world", "\u2581\u2581", "a", "b", "c", "é", "你"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Backend(BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("$^"), "isolated")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend)


BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
SPECIAL = sorted(BYTE_LEVEL.special_ids)[0]


def streamed(detokenizer: Detokenizer, ids: list[int], step: int = 1) -> list[str]:
    pieces = [detokenizer.add(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*pieces, detokenizer.finish()]


@given(
    ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 2), max_size=60),
    step=st.integers(1, 7),
    skip=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_byte_level_stream_equals_whole_decode(ids: list[int], step: int, skip: bool) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, skip_special_tokens=skip)
    text = "".join(streamed(detokenizer, ids, step))
    assert text == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert detokenizer.num_characters == len(text)
    assert detokenizer.num_tokens == len(ids)


@given(text=st.text(max_size=40), step=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_no_unfinished_character_is_shown(text: str, step: int) -> None:
    ids = [byte + 3 for byte in text.encode()]
    assert BYTE_LEVEL.decode(ids) == text
    shown = ""
    for piece in streamed(Detokenizer(BYTE_LEVEL), ids, step):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    ids = [byte + 3 for byte in "ab\U0001f469".encode()[:-1]]
    assert streamed(Detokenizer(BYTE_LEVEL), ids) == ["a", "b", "", "", "", "\ufffd"]


WORD_IDS = [SENTENCEPIECE.backend.get_vocab()[t] for t in ("\u2581", "\u2581he", "llo", "a", "é")]


@st.composite
def sentencepiece_ids(draw: st.DrawFn) -> list[int]:
    """Words, special tokens, and characters spelled in whole byte sequences."""
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 20))):
        kind = draw(st.integers(0, 3))
        if kind == 0:
            ids.append(draw(st.sampled_from([1, 2])))
        elif kind == 1:
            ids += [byte + 3 for byte in draw(st.characters(exclude_categories=["Cs"])).encode()]
        else:
            ids.append(draw(st.sampled_from(WORD_IDS)))
    return ids


@given(ids=sentencepiece_ids(), step=st.integers(1, 4), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_sentencepiece_stream_equals_whole_decode(ids: list[int], step: int, skip: bool) -> None:
    assert not SENTENCEPIECE.byte_level
    pieces = streamed(Detokenizer(SENTENCEPIECE, skip_special_tokens=skip), ids, step)
    assert "".join(pieces) == SENTENCEPIECE.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 258), max_size=60))
@settings(max_examples=200, deadline=None)
def test_broken_bytes_outside_byte_level_hold_back_little(ids: list[int]) -> None:
    """A run of bytes that never becomes a character is shown after four tokens at the latest."""
    detokenizer = Detokenizer(SENTENCEPIECE)
    for token_id in ids:
        detokenizer.add([token_id])
        decoder = detokenizer._decoder
        assert len(decoder._ids) - decoder._read < 5  # type: ignore[union-attr]


def reference(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Character by character: the first end of any stop string, the longest of those there."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


SHORT = st.text(alphabet="ab", min_size=1, max_size=5)


@given(pieces=st.lists(st.text(alphabet="abc", max_size=4)), stop=st.lists(SHORT, min_size=1))
@settings(max_examples=300, deadline=None)
def test_stop_strings_against_a_reference(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    shown = ""
    expected, hit = reference("".join(pieces), stop)
    for piece in pieces:
        shown += matcher.add(piece)
        assert expected.startswith(shown), "a part of the stop string was shown"
        if matcher.matched is not None:
            break
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == (expected, hit)


@given(text=st.text(alphabet="abé", max_size=30), stop=st.lists(SHORT, min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_tokens_are_counted_up_to_the_one_that_completes_the_stop(
    text: str, stop: list[str]
) -> None:
    ids = [byte + 3 for byte in text.encode()]
    expected, hit = reference(text, stop)
    for step in (1, 3, max(1, len(ids))):
        detokenizer = Detokenizer(BYTE_LEVEL, stop)
        assert "".join(streamed(detokenizer, ids, step)) == expected
        assert detokenizer.stopped == hit
        consumed = len((expected + hit).encode()) if hit is not None else len(ids)
        assert detokenizer.num_tokens == consumed


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(["lo, wor"], "hel"), (["ab", "abc"], "hello, world"), (["o", "hello"], "")],
)
def test_stop_strings_by_example(stop: list[str], expected: str) -> None:
    ids = BYTE_LEVEL.encode("hello, world")
    assert "".join(streamed(Detokenizer(BYTE_LEVEL, stop), ids)) == expected


def test_special_tokens_are_shown_on_demand() -> None:
    ids = [*BYTE_LEVEL.encode("a"), SPECIAL]
    shown = "".join(streamed(Detokenizer(BYTE_LEVEL, skip_special_tokens=False), ids))
    assert shown == "a" + BYTE_LEVEL.token_text(SPECIAL)
    assert "".join(streamed(Detokenizer(BYTE_LEVEL), ids)) == "a"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ["never there"])
    ids = [byte + 3 for byte in b"some words "] * 10

    def seconds() -> float:
        begin = time.perf_counter()
        for token_id in ids:
            detokenizer.add([token_id])
        return time.perf_counter() - begin

    early = min(seconds() for _ in range(5))
    for _ in range(200):
        detokenizer.add(ids)
    late = min(seconds() for _ in range(5))
    assert late < 5 * early
