"""The four shapes of a completion's prompt: text, texts, token ids, lists of token ids.

What ids there may be, and how many, engine/admission.py says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt.

    Attributes:
        text: as given; None when ids were given.
        token_ids: its own, or as given.
    """

    text: str | None
    token_ids: list[int]


def completion_prompts(
    prompt: object, encode: Callable[[str], list[int]], max_prompts: int
) -> list[Prompt]:
    """The prompts, in order.

    Raises:
        InvalidRequest: another shape, or too many.
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
        return [Prompt(text, encode(text) if text else []) for text in items]
    if all(isinstance(item, list) for item in items):
        return [Prompt(None, item) for item in items]
    raise InvalidRequest.of(
        "prompt", "a text, a list of texts, a list of token ids or a list of such lists is expected"
    )
