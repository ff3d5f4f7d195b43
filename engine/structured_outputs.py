"""What an answer must look like -> a grammar of llguidance's, checked.

JSON schemas, regular expressions, choices and Lark grammars alike. Knows nothing of tokens, HTTP or
how a grammar is followed (engine/grammars.py).
"""

from __future__ import annotations

import functools
import json
import reprlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from engine.request import StructuredOutputs

# OpenAI's limit is 120,000. The time to read one can grow with its square: 128 KiB of optional
# letters are read for some seconds, in threads that hold up nobody but other grammars.
MAX_CHARACTERS = 128 * 1024
# With the fourth power of these, 0.1 s for so many.
MAX_PATTERNS = 100
# llguidance goes down chains of rules and $refs by recursion: up to 350 bytes of stack a character,
# and the usual 8 MiB would end the process. Only what is used is taken from the machine.
_STACK_BYTES = 128 * 2**20
_STACK_LOCK = threading.Lock()
_ANY_OBJECT = {"type": "object"}
# Of whitespace between two parts of JSON: without a limit, a small model at temperature 0 may add
# lines until max_tokens.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\t]{0,64}"}


def grammar_of(wanted: StructuredOutputs) -> str:
    """The grammar as EngineRequest carries it.

    Raises:
        InvalidRequest: none or several of the fields are set, or the grammar is wrong; names the
            field.
    """
    values = _typed(wanted)
    if len(values) != 1:
        got, allowed = ", ".join(values) or "none", ", ".join(StructuredOutputs.__struct_fields__)
        raise InvalidRequest.of("structured_outputs", f"got {got}, allowed: one of {allowed}")
    ((name, value),) = values.items()
    try:
        grammar = _grammar(name, value)
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


def _grammar(name: str, value: Any) -> str:
    from llguidance import LLMatcher  # 0.1 s, for those who ask

    if name in ("json", "json_object"):
        schema = _ANY_OBJECT if name == "json_object" else value
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(schema, dict):
            raise ValueError("a JSON schema, which is an object, is expected")
        if (count := _num_patterns(schema)) > MAX_PATTERNS:
            raise ValueError(f"got {count} patternProperties, allowed: at most {MAX_PATTERNS}")
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_OPTIONS)
    if name == "regex":
        return LLMatcher.grammar_from_regex(value)
    if name == "choice":
        if not value or not all(value):
            raise ValueError("at least one text is expected, and none that is empty")
        texts = (json.dumps(choice, ensure_ascii=False) for choice in value)
        # A terminal: a rule may have 2,000 alternatives. Lark's strings cannot hold a DEL.
        value = "start: CHOICE\nCHOICE: " + " | ".join(texts).replace("\x7f", "\\u007f")
    return LLMatcher.grammar_from_lark(value)


def _num_patterns(schema: Any) -> int:
    count, left = 0, [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            patterns = part.get("patternProperties")
            count += len(patterns) if isinstance(patterns, dict) else 0
        left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return count


@functools.lru_cache(maxsize=64)  # the same for each prompt of a list
def _check(grammar: str) -> None:
    """Raises ValueError with what is wrong."""
    from llguidance import LLMatcher

    if len(grammar) > MAX_CHARACTERS:
        raise ValueError(f"got {len(grammar)} characters, allowed: at most {MAX_CHARACTERS}")
    wrong, messages = with_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(grammar))
    if wrong:
        raise ValueError(messages[0])


def with_deep_stack(read: Callable[[], Any]) -> Any:
    """Read a grammar, in a thread of its own; what follows then needs little stack."""
    with ThreadPoolExecutor(1) as thread:
        with _STACK_LOCK:
            before = threading.stack_size(_STACK_BYTES)
            try:
                future = thread.submit(read)
            finally:
                threading.stack_size(before)
        return future.result()
