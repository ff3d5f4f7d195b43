"""Every case of cases.py against a server over a real socket, with an engine that has no model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.server.cases import CASES, Case
from tests.server.fake_engine import Limits
from tests.server.servers import serving
from tests.server.target import Target
from tests.tiny_tokenizer import byte_level_tokenizer

LIMITS = Limits(step_s=0.0005)
# Of the requests in the heavy scripts: the engine here has no pages to lose.
SCALE = 0.3


@pytest.fixture(scope="module")
def shared() -> Iterator[Target]:
    with serving(LIMITS) as target:
        yield target


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: Case, request: pytest.FixtureRequest) -> None:
    if case.id == "disconnect":
        # Answers must outlast the clients, or nobody is there to be missed.
        with serving(replace(LIMITS, step_s=0.02)) as slow:
            slow.scale = SCALE
            asyncio.run(asyncio.wait_for(run(case, slow), 60))
        return
    if not case.config:
        target: Target = request.getfixturevalue("shared")
        target.scale = SCALE
        asyncio.run(asyncio.wait_for(run(case, target), 60))
        return
    config = dict(case.config)
    template = config.pop("model.chat_template", "")
    tokenizer = byte_level_tokenizer(template=None) if template is None else None
    with serving(LIMITS, tokenizer=tokenizer, **config) as target:
        target.scale = SCALE
        asyncio.run(asyncio.wait_for(run(case, target), 60))


async def run(case: Case, target: Target) -> None:
    async with target:
        await case.check(target)
