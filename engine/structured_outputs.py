"""What an answer must look like -> a grammar of llguidance's, checked.

JSON schemas, regular expressions, choices and Lark grammars alike. Knows nothing of tokens, HTTP or
how a grammar is followed (engine/grammars.py).
"""

from __future__ import annotations

import functools
import json
import re
import reprlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from engine.errors import InvalidRequest
from engine.request import StructuredOutputs

# OpenAI's limit is 120,000. The time to read a grammar can grow with the square of its length, of a
# single regular expression with the cube: 32 KiB of optional letters take some five seconds, in
# threads that hold up nobody but other grammars.
MAX_CHARACTERS = 128 * 1024
MAX_REGEX_CHARACTERS = 32 * 1024
# With the fourth power of these, 0.1 s for so many.
MAX_PATTERNS = 100
# llguidance counts in float64, and would take another number for a larger one.
MAX_INTEGER = 2**53
# llguidance goes down chains of rules and $refs by recursion: up to 350 bytes of stack a character,
# and the usual 8 MiB would end the process. Only what is used is taken from the machine.
_STACK_BYTES = 128 * 2**20
_STACK_LOCK = threading.Lock()
_ANY_OBJECT = {"type": "object"}
# Without a limit, a small model at temperature 0 may add lines until max_tokens.
_WHITESPACE = r"[ \n\t]{0,20}"
# Without them, other scripts' digits are digits.
_ASCII_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "s": r"[ \t\n\r\f\v]",
    "S": r"[^ \t\n\r\f\v]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
}
T = TypeVar("T")


def grammar_of(wanted: StructuredOutputs) -> str:
    """The grammar as EngineRequest carries it.

    Raises:
        InvalidRequest: none or several of the fields are set, or the grammar is wrong; names the
            field.
    """
    values = _typed(wanted)
    whitespace = values.pop("whitespace_pattern", _WHITESPACE)
    if len(values) != 1:
        got = ", ".join(values) or "none"
        allowed = ", ".join(StructuredOutputs.__struct_fields__[:5])
        raise InvalidRequest.of("structured_outputs", f"got {got}, allowed: one of {allowed}")
    ((name, value),) = values.items()
    try:
        grammar = _grammar(name, value, whitespace)
        _check(grammar)
    except (ValueError, RecursionError) as error:
        # Without the rest of long lines, which repeat the grammar.
        reason = "\n".join(f"{line:.200}" for line in str(error).strip().splitlines()[:10])
        raise InvalidRequest.of(f"structured_outputs.{name}", reason) from None
    return grammar


def _typed(wanted: StructuredOutputs) -> Any:
    """The fields that are set."""
    try:
        typed = msgspec.convert(msgspec.structs.asdict(wanted), StructuredOutputs)
        return msgspec.to_builtins(typed)
    except (TypeError, RecursionError) as error:  # of what is in a schema
        raise InvalidRequest.of("structured_outputs.json", str(error)) from None
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].split("[")[0].strip("`")
        allowed = StructuredOutputs.__annotations__[name]
        reason = f"got {reprlib.repr(getattr(wanted, name))}, allowed: {allowed}"
        raise InvalidRequest.of(f"structured_outputs.{name}", reason) from None


def _grammar(name: str, value: Any, whitespace: str) -> str:
    from llguidance import LLMatcher  # 0.1 s, for those who ask

    if name in ("json", "json_object"):
        schema = _ANY_OBJECT if name == "json_object" else value
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(schema, dict):
            raise ValueError("a JSON schema, which is an object, is expected")
        _check_schema(schema)
        options: Any = {"whitespace_pattern": whitespace}
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
    if name == "regex":
        return LLMatcher.grammar_from_regex(_ascii_regex(value))
    if name == "choice":
        if not value or not all(value):
            raise ValueError("at least one text is expected, and none that is empty")
        texts = (json.dumps(choice, ensure_ascii=False) for choice in value)
        # A terminal: a rule may have 2,000 alternatives. Lark's strings cannot hold a DEL.
        value = "start: CHOICE\nCHOICE: " + " | ".join(texts).replace("\x7f", "\\u007f")
    elif "::=" in value:
        raise ValueError("Lark's notation is expected ('start: ...'), this looks like EBNF ('::=')")
    else:
        _check_length(value, MAX_REGEX_CHARACTERS)
    return LLMatcher.grammar_from_lark(value)


def _ascii_regex(regex: str) -> str:
    _check_length(regex, MAX_REGEX_CHARACTERS)
    if not re.fullmatch(r"([^\\]|\\.)*", regex, re.DOTALL):
        raise ValueError("the regular expression ends in a backslash")
    return re.sub(r"\\(.)", lambda m: _ASCII_CLASSES.get(m[1], m[0]), regex, flags=re.DOTALL)


def _check_length(text: str, most: int) -> None:
    if len(text) > most:
        raise ValueError(f"got {len(text)} characters, allowed: at most {most}")


def _check_schema(schema: Any) -> None:
    """Refuse what takes too long to read, or would be taken for something else."""
    num_patterns, left = 0, [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            patterns, pattern = part.get("patternProperties"), part.get("pattern")
            num_patterns += len(patterns) if isinstance(patterns, dict) else 0
            _check_length(pattern if isinstance(pattern, str) else "", MAX_REGEX_CHARACTERS)
            left += part.values()
        elif isinstance(part, list):
            left += part
        elif isinstance(part, int) and abs(part) > MAX_INTEGER:
            reason = f"got {reprlib.repr(part)}, allowed: integers from -(2**53) to 2**53"
            raise ValueError(reason)
    if num_patterns > MAX_PATTERNS:
        raise ValueError(f"got {num_patterns} patternProperties, allowed: at most {MAX_PATTERNS}")


@functools.lru_cache(maxsize=64)  # the same for each prompt of a list
def _check(grammar: str) -> None:
    """Raises ValueError with what is wrong."""
    from llguidance import LLMatcher

    _check_length(grammar, MAX_CHARACTERS)
    checked = in_deep_thread(lambda: LLMatcher.validate_grammar_with_warnings(grammar))
    wrong, messages = checked.result()
    if wrong:
        raise ValueError(messages[0])


def in_deep_thread(read: Callable[[], T]) -> Future[T]:
    """What `read` returns or raises, in a thread with a stack for grammars. No exit of the process
    waits for it.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(read())
        except BaseException as error:
            future.set_exception(error)

    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return future
