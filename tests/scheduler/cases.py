"""Small requests and steps for tests that look at one thing."""

from __future__ import annotations

from engine.request import EngineRequest
from engine.scheduler.batch import ScheduledBatch

from .reference import VOCAB
from .simulation import Simulation


def prompt(length: int, first: int = 1) -> list[int]:
    """Ids that differ from those of another `first` from the start."""
    return [(first + 5 * index) % VOCAB for index in range(length)]


def ask(request_id: int, length: int, max_tokens: int, first: int = 1) -> EngineRequest:
    return EngineRequest(request_id, prompt(length, first), max_tokens)


def next_batch(simulation: Simulation) -> ScheduledBatch:
    """One turn that must launch a step."""
    batch = simulation.step()
    assert batch is not None
    return batch
