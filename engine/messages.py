"""Chat messages and tools: checked, and reduced to what templates take. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest

Data = Mapping[str, Any]


def template_messages(
    messages: Sequence[Data], knows_role: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """The messages with each content as one text (parts joined by line ends).

    Args:
        knows_role: whether the model's template can show a role.

    Raises:
        InvalidRequest: names the one that is wrong.
    """
    return [
        _message(message, f"messages.{index}", knows_role) for index, message in enumerate(messages)
    ]


def _message(message: Data, where: str, knows_role: Callable[[str], bool]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not knows_role(role):
        allowed = "system, developer, user, assistant, tool, function"
        raise InvalidRequest.of(
            f"{where}.role",
            f"got {role!r}; allowed: {allowed}, and what the model's chat template names",
        )
    content = message.get("content")
    calls = message.get("tool_calls") or message.get("function_call")
    if content is None and not (role == "assistant" and calls):
        raise InvalidRequest.of(f"{where}.content", "this field is required")
    if isinstance(content, list):
        parts = (_part(part, f"{where}.content.{i}") for i, part in enumerate(content))
        content = "\n".join(parts)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest.of(f"{where}.content", "a text or a list of text parts is expected")
    return {**message, "content": content or ""}  # templates add it to other text


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if isinstance(part, dict) and kind in ("text", "refusal") else None
    if not isinstance(text, str):
        taken = '{"type": "text", "text": ...}'
        raise InvalidRequest.of(
            where, f"got a part of type {kind!r}; this model takes only {taken}"
        )
    return text


def template_tools(
    tools: Sequence[Data] | None, functions: Sequence[Data] | None, choice: object
) -> list[dict[str, Any]] | None:
    """The tools a template is to show; `functions` is OpenAI's older name, without the wrapper.

    Args:
        choice: of `tool_choice` or `function_call`; "none" shows no tools.

    Raises:
        InvalidRequest: a tool that is no function with a name.
    """
    wrapped = [{"type": "function", "function": function} for function in functions or ()]
    shown = [dict(tool) for tool in tools or ()] + wrapped
    for index, tool in enumerate(shown):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str):
            shape = '{"type": "function", "function": {"name": ...}}'
            raise InvalidRequest.of(f"tools.{index}", f"{shape} is expected")
    return shown if shown and choice != "none" else None
