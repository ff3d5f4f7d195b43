"""What is wrong with a configuration, in words: one line per key, its value, what is allowed.

The allowed values are read off the type annotation, so that no message can drift from the check.
Knows nothing of which keys there are, or of files.
"""

from __future__ import annotations

import difflib
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel, ValidationError

_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    type(None): "null",
}


@dataclass(frozen=True)
class Says:
    """Put into an Annotated type: the words for what it allows."""

    text: str


@dataclass(frozen=True)
class Problem:
    """One wrong key."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def allowed_text(annotation: Any) -> str:
    """A type in a user's words: `int | Literal["auto"]` is "an integer or auto"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        said = [extra.text for extra in args[1:] if isinstance(extra, Says)]
        return said[0] if said else allowed_text(args[0]) + _bounds_text(args[1:])
    if origin is Literal:
        return " | ".join(str(value) for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(allowed_text(arg) for arg in args)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section with keys"
    return _NAMES[annotation]


def _bounds_text(extras: tuple[object, ...]) -> str:
    words = []
    for extra in extras:
        match extra:
            case Ge(bound):
                words.append(f">= {bound}")
            case Gt(bound):
                words.append(f"> {bound}")
            case Le(bound):
                words.append(f"<= {bound}")
            case MinLen():
                words.append("that is not empty")
    return " " + " and ".join(words) if words else ""


def value_text(value: object) -> str:
    """A value as YAML would show it, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def key_problems(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """The problems in a validation error of `root`, one per key, in the tree's order."""
    problems: dict[str, Problem] = {}
    for item in error.errors():
        if item["type"] == "conflict":
            key, value, allowed = (item["ctx"][name] for name in ("key", "value", "allowed"))
            problems.setdefault(key, Problem(key, f"got {value_text(value)}, allowed: {allowed}"))
            continue
        parts, annotation = _walk(item["loc"], root)
        key = ".".join(parts)
        if item["type"] == "extra_forbidden":
            text = f"unknown key (value {value_text(item['input'])}){_did_you_mean(parts, root)}"
        elif item["type"] == "missing":
            text = f"required, allowed: {allowed_text(annotation)}"
        else:
            text = f"got {value_text(item['input'])}, allowed: {allowed_text(annotation)}"
        problems.setdefault(key, Problem(key, text))
    return list(problems.values())


def _walk(loc: tuple[int | str, ...], root: type[BaseModel]) -> tuple[list[str], Any]:
    """The key path that `loc` starts with (unions append their arms to it), and its type."""
    parts: list[str] = []
    annotation: Any = root
    for part in loc:
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        parts.append(str(part))
        annotation = get_type_hints(annotation, include_extras=True).get(str(part))
    return parts, annotation


def _did_you_mean(parts: list[str], root: type[BaseModel]) -> str:
    """A hint: a key of that very name elsewhere, else a sibling that looks like it, else any."""
    _, parent = _walk(tuple(parts[:-1]), root)
    siblings = list(parent.model_fields)
    prefix = "".join(f"{part}." for part in parts[:-1])
    paths: dict[str, str] = {}
    for section, field in root.model_fields.items():
        options = field.annotation
        if isinstance(options, type) and issubclass(options, BaseModel):
            paths |= {name: f"{section}.{name}" for name in options.model_fields}
    close = difflib.get_close_matches(parts[-1], siblings, n=1)
    if close and parts[-1] not in paths:
        return f", did you mean {prefix}{close[0]}?"
    close = difflib.get_close_matches(parts[-1], list(paths), n=1)
    if close:
        return f", did you mean {paths[close[0]]}?"
    return f", allowed: {', '.join(siblings)}"
