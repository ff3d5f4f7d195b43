"""Answers that follow a grammar, beside others: each draws the likeliest of what it may."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from engine.engine_core import EngineCore
from engine.request import EngineRequest
from engine.scheduler.scheduler import Scheduler
from engine.startup import Engine
from tests.e2e.guides import (
    CountingGrammars,
    CountingGuide,
    allowed_at,
    follows,
    grammar_of,
    with_guides,
)
from tests.e2e.harness import run, running_engine
from tests.e2e.test_parity import prompts_for
from tests.e2e.tiny_models import hf_config, save_model

LENGTHS = (1, 2, 9, 20)


def requests(first_id: int = 0) -> list[EngineRequest]:
    """Half of them with a grammar; two of those are cut off by max_tokens."""
    return [
        EngineRequest(
            request_id=first_id + i,
            prompt_ids=prompt,
            max_tokens=6 if i in (2, 6) else 20,
            logprobs=1 if i % 3 == 0 else -1,
            grammar=grammar_of(LENGTHS[i // 2]) if i % 2 == 0 else "",
        )
        for i, prompt in enumerate(prompts_for(3))
    ]


def with_limits(engine: Engine, **changes: Any) -> Engine:
    limits = dataclasses.replace(engine.core.scheduler.limits, **changes)
    core = EngineCore(Scheduler(limits), engine.worker, overlap=limits.overlap)
    return with_guides(dataclasses.replace(engine, core=core))


@torch.no_grad()
def check(model: Any, prompt: Sequence[int], answer: Sequence[int], guided: bool) -> None:
    """Of what may stand at each place, given the answer so far, the likeliest stands there."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    for place, (row, token_id) in enumerate(zip(logits, answer, strict=True)):
        best = row[allowed_at(place)].max() if guided else row.max()
        assert row[token_id] >= best - 1e-4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("guides")
    model = save_model(folder, hf_config("qwen3"))
    with running_engine(folder, kv={"num_pages": 200}) as engine:
        yield model.eval(), engine


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_pages", [200, 12])
def test_answers_follow_their_grammar(served: Any, overlap: bool, num_pages: int) -> None:
    model, plain = served
    engine = with_limits(plain, overlap=overlap, num_pages=num_pages, output_estimate=0.0)
    finished: dict[int, str] = {}
    answers = run(
        engine,
        requests(),
        waves=2,
        watch=lambda output: finished.update((f.request_id, f.reason) for f in output.finished),
    )
    for request in requests():
        answer, guided = answers[request.request_id], bool(request.grammar)
        check(model, request.prompt_ids, answer, guided)
        length = int(request.grammar.split()[0]) if guided else request.max_tokens
        assert len(answer) == min(length, request.max_tokens)
        ends = guided and length <= request.max_tokens
        assert finished[request.request_id] == ("stop" if ends else "length")
        assert follows(answer) or not guided
    stats = engine.core.stats(check=True)
    assert stats.integrity == "" and stats.pages_held == 0
    assert (stats.preemptions > 0) == (num_pages == 12)


def test_a_row_that_sits_out_does_not_hold_up_others(served: Any) -> None:
    """With overlap a guided request draws in every second step, the others in every one."""
    engine = with_limits(served[1], overlap=True)
    guided, other = requests()[4], requests()[5]
    both = [guided, msgspec.structs.replace(other, max_tokens=18)]
    steps: dict[int, list[int]] = {guided.request_id: [], other.request_id: []}
    count = 0

    def watch(output: Any) -> None:
        nonlocal count
        count += 1
        for request_id in output.request_ids:
            steps[request_id].append(count)

    run(engine, both, watch=watch)
    gaps = [{b - a for a, b in zip(s, s[1:], strict=False)} for s in steps.values()]
    assert gaps == [{2}, {1}]


def test_a_guide_that_comes_at_any_moment_loses_no_request(served: Any) -> None:
    """It may come between two looks at who waits for one."""

    class Late(Future[CountingGuide]):
        """There at every second look."""

        looks = 0

        def done(self) -> bool:
            self.looks += 1
            return self.looks % 2 == 0

    engine = with_limits(served[1], overlap=True)
    guide = Late()
    guide.set_result(CountingGuide(3))
    with mock.patch.object(CountingGrammars, "start", lambda self, grammar: guide):
        answers = run(engine, [EngineRequest(0, [5], 9, grammar=grammar_of(3))])
    assert len(answers[0]) == 3
