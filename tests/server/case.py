"""The cases of HTTP behaviour that any server of ours must show, as functions of a Target.

They can be run against any URL: the tests here use an engine without a model, the end-to-end tests
the real one. A case's `config` says how the server must be started for it ("key.path" -> value);
cases without one share a server. The cases themselves are in cases_requests.py (what is refused)
and cases_answers.py (what is answered).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.server.target import Target

Check = Callable[[Target], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """A case: its id, how to start the server, and what to do with it."""

    id: str
    check: Check
    config: dict[str, Any] = field(default_factory=dict)


CASES: list[Case] = []
CHAT = "/v1/chat/completions"


def case(name: str, **config: Any) -> Callable[[Check], Check]:
    """Register a check; `kv__num_pages=4` stands for `kv.num_pages: 4`."""

    def register(check: Check) -> Check:
        settings = {key.replace("__", "."): value for key, value in config.items()}
        CASES.append(Case(name, check, settings))
        return check

    return register


async def greedy(t: Target, **body: Any) -> str:
    """The text of one greedy choice, the same streamed and whole."""
    body = {"temperature": 0, "max_tokens": 24, **body}
    whole, streamed = await t.complete(**body), await t.stream(**body)
    assert whole.texts == streamed.texts
    assert whole.reasons == streamed.reasons
    assert whole.token_ids == streamed.token_ids
    return whole.texts[0]
