"""The four shapes of a completion's prompt: text, texts, token ids, lists of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest
from engine.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt.

    Attributes:
        text: as given; None when ids were given.
        token_ids: at least one.
    """

    text: str | None
    token_ids: list[int]


def completion_prompts(
    prompt: object, tokenizer: Tokenizer, *, max_prompts: int, add_special_tokens: bool
) -> list[Prompt]:
    """The prompts, in order.

    Raises:
        InvalidRequest: another shape, an empty prompt, or too many.
    """
    if prompt is None:
        raise InvalidRequest.of("prompt", "this field is required")
    items: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if not items:
        raise InvalidRequest.of("prompt", "the list is empty")
    if isinstance(items[0], int | float) and isinstance(prompt, list):
        items = [items]  # one prompt of token ids
    if len(items) > max_prompts:
        raise InvalidRequest.of(
            "prompt", f"got {len(items)} prompts, allowed: at most {max_prompts}"
        )
    if all(isinstance(item, str) for item in items):
        return [_text_prompt(item, tokenizer, add_special_tokens) for item in items]
    if all(isinstance(item, list) for item in items):
        return [_ids_prompt(item) for item in items]
    raise InvalidRequest.of(
        "prompt", "a text, a list of texts, a list of token ids or a list of such lists is expected"
    )


def _text_prompt(text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> Prompt:
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []
    if not ids:
        raise InvalidRequest.of("prompt", "it is empty")
    return Prompt(text, ids)


def _ids_prompt(ids: list[Any]) -> Prompt:
    if not set(map(type, ids)) <= {int}:  # parsed JSON: a bool has a type of its own
        raise InvalidRequest.of("prompt", "token ids must be integers")
    if not ids:
        raise InvalidRequest.of("prompt", "it is empty")
    return Prompt(None, ids)
