"""A grammar without text, for tiny models: the n-th id of an answer is n modulo MODULUS."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from engine.engine_core import EngineCore
from engine.scheduler.batch import I32
from engine.startup import Engine
from tests.e2e.tiny_models import VOCAB

MODULUS = 5


def grammar_of(num_tokens: int) -> str:
    """Of answers with so many ids."""
    return f"{num_tokens} ids"


def allowed_at(place: int) -> range:
    """Ids that may stand at a place of the answer."""
    return range(place % MODULUS, VOCAB, MODULUS)


def follows(answer: Sequence[int]) -> bool:
    return all(token_id in allowed_at(place) for place, token_id in enumerate(answer))


class CountingGuide:
    """engine.scheduler.slots.Guide."""

    def __init__(self, num_tokens: int) -> None:
        self.error = ""
        self._left, self._place = num_tokens, 0

    def wait(self, seconds: float) -> bool:
        return True

    def mask(self) -> I32:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[list(allowed_at(self._place))] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, token_id: int) -> bool:
        assert token_id in allowed_at(self._place), "drawn against the grammar"
        self._place += 1
        self._left -= 1
        return not self._left


class CountingGrammars:
    """Instead of engine.grammars.Grammars."""

    def start(self, grammar: str) -> Future[CountingGuide]:
        future: Future[CountingGuide] = Future()
        future.set_result(CountingGuide(int(grammar.split()[0])))
        return future

    def close(self) -> None:
        pass


def with_guides(engine: Engine) -> Engine:
    """The engine with such grammars, over the same scheduler."""
    grammars: Any = CountingGrammars()
    scheduler = engine.core.scheduler
    core = EngineCore(scheduler, engine.worker, overlap=scheduler.limits.overlap, grammars=grammars)
    return dataclasses.replace(engine, core=core)
