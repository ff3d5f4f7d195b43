"""The fields that say what an answer must look like -> StructuredOutputs.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`. Knows nothing of
grammars.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from engine.request import StructuredOutputs
from engine.server.schema import SamplingBody
from engine.structured_outputs import grammar_of

_GUIDED = ("json", "regex", "choice", "grammar")


def format_field(request: SamplingBody) -> str:
    """The field that says what the answer must look like, or ""."""
    return next(iter(_wanted(request)), "")


def answer_format(request: SamplingBody) -> StructuredOutputs | None:
    """What the body asks for, checked; None: any text.

    Raises:
        InvalidRequest: several fields ask, or one asks for what cannot be; names the field.
    """
    wanted = _wanted(request)
    if not wanted:
        return None
    if len(wanted) > 1:
        raise InvalidRequest.of([*wanted][1], f"at most one of {', '.join(wanted)} is allowed")
    ((field, values),) = wanted.items()
    if request.guided_whitespace_pattern is not None:
        values = {**values, "whitespace_pattern": request.guided_whitespace_pattern}
    try:
        outputs = msgspec.convert(values, StructuredOutputs)
        grammar_of(outputs)
    except msgspec.ValidationError as error:
        raise InvalidRequest.of(field, str(error)) from None
    except InvalidRequest as error:
        if field == "structured_outputs":
            raise
        raise InvalidRequest.of(field, error.message.partition(": ")[2]) from None
    return outputs


def _wanted(request: SamplingBody) -> dict[str, Any]:
    """The fields that ask, and what they would set of StructuredOutputs."""
    given = {f"guided_{name}": {name: getattr(request, f"guided_{name}")} for name in _GUIDED}
    wanted = {field: value for field, value in given.items() if value[field[7:]] is not None}
    if request.structured_outputs is not None:
        wanted["structured_outputs"] = request.structured_outputs
    form = None if request.response_format is None else _response_format(request.response_format)
    if form is not None:
        wanted["response_format"] = form
    return wanted


def _response_format(form: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        reason = f"got {reprlib.repr(kind)}, allowed: 'text', 'json_object', 'json_schema'"
        raise InvalidRequest.of("response_format.type", reason)
    described = form.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequest.of("response_format.json_schema.schema", "a JSON schema is expected")
    return {"json": schema}
