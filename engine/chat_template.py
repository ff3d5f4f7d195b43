"""Jinja chat templates, sandboxed, in the environment that model authors write them for.

The conventions are those of Hugging Face's `apply_chat_template`: blocks trimmed,
`raise_exception`, `strftime_now`, a `tojson` that escapes no HTML, loop controls, and
`{% generation %}` as a plain block. Rendered here because transformers would bring
over a second of imports (and torch, in versions below 5) into the API process; a test compares the
two. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequest, ModelError

Message = Mapping[str, Any]

OPENAI_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Where the text of the last message ends in a rendering that is to be continued.
_CONTINUE_MARK = "\ue000fullgraph-continue\ue000"


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's words; here only they count."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """The templates of one model, compiled.

    Args:
        sources: name -> Jinja source; "default" is needed, "tool_use" is taken for tools.
        special_tokens: names such as "bos_token" that the template can use.

    Raises:
        ModelError: not valid Jinja, or no default among several.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._sources = dict(sources)
        if len(sources) == 1:
            self._sources["default"] = next(iter(sources.values()))
        if "default" not in self._sources:
            raise ModelError(f"several chat templates ({', '.join(sources)}), none named default")
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in self._sources.items()
            }
        except TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from None
        self._special_tokens = dict(special_tokens)

    def knows_role(self, role: str) -> bool:
        """OpenAI's roles, and any other that the template names."""
        return role in OPENAI_ROLES or self._names(role)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text, special tokens included.

        Args:
            messages: role and content (text) each; keys with None are dropped.
            tools: JSON schemas in OpenAI's shape.
            add_generation_prompt: end with the header of an assistant's message.
            continue_final_message: end inside the last message instead.
            variables: further names for the template, such as `enable_thinking`.

        Raises:
            InvalidRequest: the template refuses the conversation.
        """
        chosen = "tool_use" if tools and "tool_use" in self._templates else "default"
        conversation = [self._message(message) for message in messages]
        if continue_final_message:
            conversation[-1]["content"] = conversation[-1].get("content", "") + _CONTINUE_MARK
        arguments = {
            **self._special_tokens,
            **(variables or {}),
            "messages": conversation,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self._templates[chosen].render(arguments)
        except Exception as error:  # templates fail in every way Python can
            reason = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template refuses this conversation: {reason}", param="messages"
            ) from None
        return _cut(text) if continue_final_message else text

    def _names(self, role: str) -> bool:
        source = self._sources["default"]
        return f"'{role}'" in source or f'"{role}"' in source

    def _message(self, message: Message) -> dict[str, Any]:
        result = {key: value for key, value in message.items() if value is not None}
        if result.get("role") == "developer" and not self._names("developer"):
            result["role"] = "system"  # what OpenAI's newer name stands for
        if isinstance(result.get("tool_calls"), list):
            result["tool_calls"] = [_tool_call(call) for call in result["tool_calls"]]
        return result


def _tool_call(call: Any) -> Any:
    """OpenAI's clients send a function's arguments as JSON text; templates want the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _cut(text: str) -> str:
    if _CONTINUE_MARK not in text:
        raise InvalidRequest(
            "the model's chat template does not show the last message as it is, so that it cannot "
            "be continued",
            param="continue_final_message",
        )
    return text[: text.rindex(_CONTINUE_MARK)]
