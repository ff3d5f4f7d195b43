"""Token ids to text, as they come: no half characters, no part of a stop string.

One Detokenizer per choice. `add` returns the text that can be shown now; joined with what `finish`
returns it equals the decoding of all ids at once, cut before the stop string if one was met. The
cost of a token does not grow with the text. Knows nothing of requests, logprobs or HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from engine.tokenizer import Tokenizer

# A character has at most four bytes. If after four tokens the text still ends in U+FFFD, the bytes
# were not the beginning of a character.
_MAX_PENDING_TOKENS = 4
_REPLACEMENT = "\ufffd"
# Tokens of the prompt that a continuation is decoded behind.
_PROMPT_TAIL = 6


class _ByteDecoder:
    """For byte-level BPE, where each token is a fixed string of bytes."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._bytes, self._skipped = tokenizer.token_bytes, skipped
        self._decode: Callable[[bytes, bool], str] = codecs.getincrementaldecoder("utf-8")(
            "replace"
        ).decode

    def add(self, token_ids: Sequence[int]) -> str:
        """The characters that these ids complete."""
        data, skipped = self._bytes, self._skipped
        if len(token_ids) == 1 and token_ids[0] not in skipped:
            return self._decode(data(token_ids[0]), False)
        return self._decode(b"".join([data(i) for i in token_ids if i not in skipped]), False)

    def flush(self) -> str:
        """What an unfinished character decodes to."""
        return self._decode(b"", True)


class _WindowDecoder:
    """For any decoder: the ids since the last whole character, seen behind those of the one before.

    A token's text depends on what stands before it (sentencepiece drops the space of the first
    word), so two windows that begin at the same id are decoded and what the longer one adds is new:

        ... prefix ........ read ......... end
            |<-- shown --->|<- pending ->|
    """

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped
        tail = prompt_ids[-_PROMPT_TAIL:]
        self._ids = [i for i in tail if i not in self._skipped and tokenizer.token_bytes(i)]
        self._read = len(self._ids)
        self._shown = self._decode() if self._ids else ""
        self._unfinished = 0  # last tokens in a row after which the text ended in U+FFFD

    def add(self, token_ids: Sequence[int]) -> str:
        known = self._tokenizer.token_bytes  # an id without text would stay pending for ever
        pieces = [self._step(i) for i in token_ids if i not in self._skipped and known(i)]
        return "".join(pieces)

    def _step(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode()
        if text.endswith(_REPLACEMENT) and self._unfinished < _MAX_PENDING_TOKENS - 1:
            self._unfinished += 1
            return ""
        return self._advance(text) if len(text) > len(self._shown) else ""

    def _advance(self, text: str) -> str:
        piece = text[len(self._shown) :]
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._shown = self._decode()
        self._unfinished = 0
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)

    def flush(self) -> str:
        text = self._decode()
        return self._advance(text) if len(text) > len(self._shown) else ""


class StopMatcher:
    """Looks for stop strings in a text that comes in pieces.

    The match that ends first wins, and of those that end together the longest, so that the outcome
    does not depend on how the text is cut into pieces. One Knuth-Morris-Pratt automaton per string:
    the cost of a character does not grow with the strings' lengths.

    Args:
        stop: non-empty strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        # Longest first: of several that end at one character the longest begins earliest.
        self._strings = sorted(stop, key=len, reverse=True)
        self._failures = [_failure_function(string) for string in self._strings]
        self._states = [0] * len(self._strings)
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """The text that can no longer be part of a stop string; on a match, all before it."""
        for position, character in enumerate(text):
            for index, string in enumerate(self._strings):
                state = self._advance(index, string, character)
                if state == len(string):
                    self.matched = string
                    seen = self._held + text[: position + 1]
                    self._held = ""
                    return seen[: len(seen) - len(string)]
        seen = self._held + text
        shown = len(seen) - max(self._states)
        self._held = seen[shown:]
        return seen[:shown]

    def _advance(self, index: int, string: str, character: str) -> int:
        state = self._states[index]
        while state and string[state] != character:
            state = self._failures[index][state - 1]
        if string[state] == character:
            state += 1
        self._states[index] = state
        return state

    def flush(self) -> str:
        """What was held back; the text has ended without a match."""
        held, self._held = self._held, ""
        return held


def _failure_function(string: str) -> list[int]:
    """By position: length of the longest proper prefix that is also a suffix up to there."""
    table = [0] * len(string)
    length = 0
    for position in range(1, len(string)):
        while length and string[position] != string[length]:
            length = table[length - 1]
        if string[position] == string[length]:
            length += 1
        table[position] = length
    return table


class Detokenizer:
    """The text of one choice.

    Args:
        tokenizer: whose ids they are.
        stop: strings that end the text; never part of it.
        skip_special_tokens: leave special tokens out.
        prompt_ids: what the text continues, where that decides whether it begins with a space
            (sentencepiece); () for a text of its own.
        min_tokens: stop strings are not looked for in the text of this many tokens.

    Attributes:
        num_tokens: ids taken, up to and including the one that completed a stop string.
        num_characters: characters decoded, shown or held back.
        stopped: the stop string that was met, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder: _ByteDecoder | _WindowDecoder = (
            _ByteDecoder(tokenizer, skipped)
            if tokenizer.byte_level
            else _WindowDecoder(tokenizer, skipped, prompt_ids)
        )
        self._matcher = StopMatcher(stop) if stop else None
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.num_characters = 0

    @property
    def stopped(self) -> str | None:
        return self._matcher.matched if self._matcher is not None else None

    def add(self, token_ids: Sequence[int]) -> str:
        """Take ids; the text that can be shown now. Ids after a stop string are not taken."""
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            text = self._decoder.add(token_ids)
            self.num_characters += len(text)
            return text
        pieces = []
        for token_id in token_ids:
            if self._matcher.matched is not None:
                break
            self.num_tokens += 1
            text = self._decoder.add((token_id,))
            self.num_characters += len(text)
            if text:
                early = self.num_tokens <= self._min_tokens
                pieces.append(text if early else self._matcher.add(text))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, when no more ids come: what was held back."""
        if self.stopped is not None:
            return ""
        text = self._decoder.flush()
        self.num_characters += len(text)
        if self._matcher is None:
            return text
        shown = self._matcher.add(text)
        return shown if self._matcher.matched is not None else shown + self._matcher.flush()
