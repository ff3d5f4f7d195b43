"""Every HTTP case against a live server with a real engine over a tiny random model.

Afterwards the server is healthy, its pages add up, and a known greedy prompt gives what it gave
before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.cases_structured import STRUCTURED_CASES
from tests.e2e.live_server import live_server, wait_until_quiet
from tests.server.case import Case
from tests.server.cases import CASES
from tests.server.target import Target

TIMEOUT_S = 240


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with live_server(tmp_path_factory.mktemp("server")) as target:
        yield target


@pytest.mark.parametrize("case", [*CASES, *STRUCTURED_CASES], ids=lambda case: case.id)
def test_case(case: Case, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if case.config:
        with live_server(tmp_path, case.config) as target:
            check(case, target)
    else:
        check(case, request.getfixturevalue("shared"))


def check(case: Case, target: Target) -> None:
    """The case between two runs of a known prompt, then health and pages."""
    before = known_answer(target)
    asyncio.run(asyncio.wait_for(run(case, target), TIMEOUT_S))
    assert httpx.get(f"{target.url}/health").status_code == 200
    wait_until_quiet(target.url)
    assert known_answer(target) == before


async def run(case: Case, target: Target) -> None:
    async with target:
        await case.check(target)


def known_answer(target: Target) -> str:
    """The greedy continuation of a fixed prompt."""
    body = {"model": target.model, "prompt": "known", "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{target.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])
