"""The engine: step() schedules, launches, and processes the step before. All of it on the host, in
one thread.

    schedule step k+1  ->  launch it  ->  wait for step k  ->  advance its requests

With overlap off the step is processed before the next one is scheduled; the code is the same. Knows
nothing of text, sockets or processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from engine.errors import InvalidRequest
from engine.grammars import Grammars, TokenGuide
from engine.graph_runner import Pending
from engine.output_processor import OutputProcessor
from engine.request import EngineRequest, RequestFailed, Stats, StepOutput
from engine.scheduler.batch import ScheduledBatch
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.slots import may_need_full
from engine.worker import Worker

logger = logging.getLogger(__name__)

# How often to look whether the graphs are there that every open request waits for.
_HELD_POLL_S = 0.005


@dataclass(frozen=True, eq=False)
class _InFlight:
    batch: ScheduledBatch
    pending: Pending


@dataclass(frozen=True, eq=False)
class _Held:
    """A request that the scheduler has not been given yet, and the guide that it waits for."""

    request: EngineRequest
    guide: Future[TokenGuide] | None

    def is_ready(self, has_full: bool) -> bool:
        if self.guide is not None and not self.guide.done():
            return False
        return has_full or not may_need_full(self.request)


class EngineCore:
    """Scheduler, worker and output processor around one step loop.

    Args:
        scheduler: decides what runs.
        worker: runs it; anything with `launch(batch) -> Pending`.
        overlap: launch step k+1 before the tokens of step k are known.
        grammars: makes the guides of requests with a grammar.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        *,
        overlap: bool,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self._overlap = overlap
        self._outputs = OutputProcessor(scheduler)
        self._in_flight: _InFlight | None = None
        self._grammars = grammars
        self._held: list[_Held] = []
        self._told = False

    @property
    def has_work(self) -> bool:
        """A request is waiting or running, or a step's result is still to come."""
        return self._in_flight is not None or self.scheduler.has_work or bool(self._held)

    def add(self, requests: Sequence[EngineRequest]) -> list[RequestFailed]:
        """Queue requests; those that can never run come back as failures."""
        self._held.extend(_Held(request, self._start_guide(request)) for request in requests)
        refused = self._release()
        if self._held and not self._told and not self.worker.is_ready("full"):
            self._told = True
            logger.warning(
                "requests with penalties, logprobs, logit bias or a grammar wait: what they need "
                "is still being prepared (`fullgraph warmup` compiles it beforehand)"
            )
        return refused

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop requests, running or waiting; unknown ids are ignored."""
        ids = set(request_ids)
        self._held = [held for held in self._held if held.request.request_id not in ids]
        self.scheduler.abort(request_ids)

    def step(self) -> tuple[StepOutput | None, list[RequestFailed]]:
        """One turn of the loop: the output of the step before (of this one without overlap), and
        failed requests.
        """
        if self._held:
            self.worker.warm_next()
        refused = self._release() if self._held else []
        before = self._in_flight
        self._in_flight = self._launch()
        if not self._overlap:
            before, self._in_flight = self._in_flight, None
        if before is None:
            if self._held and self._in_flight is None and not self.worker.warm_next():
                time.sleep(_HELD_POLL_S)  # graphs are still being compiled, in the background
            return None, refused + self.scheduler.take_failed()
        output, failed = self._outputs.process(before.batch, before.pending.wait())
        return output, refused + failed

    def use_idle_time(self) -> bool:
        """Do a little of what the start left for later; False: there is nothing (more)."""
        return self.worker.warm_next()

    def _release(self) -> list[RequestFailed]:
        """Hand requests to the scheduler, but for those whose graphs are still being compiled, or
        whose grammar is still being read.
        """
        ready = self.worker.is_ready("full")
        waiting, self._held = self._held, []
        failures = []
        for held in waiting:
            if not held.is_ready(ready):  # asked once: a guide may come at any moment
                self._held.append(held)
            elif (failure := self._hand_over(held)) is not None:
                failures.append(failure)
        return failures

    def _hand_over(self, held: _Held) -> RequestFailed | None:
        try:
            guide = held.guide.result() if held.guide is not None else None
        except BaseException as error:  # a panic of Rust's is no Exception
            status = 400 if isinstance(error, InvalidRequest) else 500
            return RequestFailed(held.request.request_id, str(error), status)
        return self.scheduler.add(held.request, guide)

    def _start_guide(self, request: EngineRequest) -> Future[TokenGuide] | None:
        if not request.grammar:
            return None
        assert self._grammars is not None, "an engine without grammars"
        return self._grammars.start(request.grammar)

    def _launch(self) -> _InFlight | None:
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        return _InFlight(batch, self.worker.launch(batch))

    def close(self) -> None:
        """Stop what runs beside the steps."""
        if self._grammars is not None:
            self._grammars.close()

    def stats(self, check: bool = False) -> Stats:
        """Counters and gauges; with `check`, integrity of pages and tree too (only judged as a
        whole when quiet).
        """
        broken = ""
        if check:
            try:
                self.scheduler.check_integrity()
            except AssertionError as error:
                broken = str(error) or "integrity check failed"
        counters = self.worker.counters
        stats = self.scheduler.stats()
        return msgspec.structs.replace(
            stats,
            waiting=stats.waiting + len(self._held),
            eager_steps=counters.eager_steps,
            recompiles=counters.recompiles,
            integrity=broken,
        )
