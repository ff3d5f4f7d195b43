"""Drives Scheduler, OutputProcessor and FakeDevice as the engine core does, and checks everything
after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.output_processor import OutputProcessor
from engine.request import EngineRequest, RequestFailed, StepOutput, TokenLogprobs
from engine.scheduler.batch import ScheduledBatch, StepResult
from engine.scheduler.limits import (
    CHUNKS_ALONE,
    MIN_CHUNK_SHARE,
    MIN_CHUNK_TOKENS,
    Policy,
    SchedulerLimits,
    TokenBucket,
    context_pairs,
)
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.slots import Phase

from .device import FakeDevice
from .reference import (
    VOCAB,
    FakeGuide,
    extend_hash,
    logprob,
    prefix_hash,
    run_alone,
    top_ids,
)

# Steps in a row in which the most senior running request may have no row: it waits for pages that a
# step in flight still uses.
MAX_IDLE_STEPS = 2
# And more, if it has a grammar: for its last token, and for its mask, which FakeGuide has late.
GUIDED_IDLE_STEPS = 2


def make_limits(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_model_len: int = 128,
    max_running: int = 4,
    max_waiting: int = 1000,
    max_step_tokens: int = 32,
    step_budget: float = 1000.0,
    decode_unit: float = 16384.0,
    context_unit: float = 16384.0,
    wave: int = 1,
    policy: Policy = "fcfs",
    output_estimate: float = 0.25,
    prefix_cache: bool = True,
    max_waiting_s: float | None = None,
    max_logit_rows: int | None = None,
    max_page_updates: int | None = None,
    overlap: bool = True,
    token_buckets: tuple[int, ...] = (),
) -> SchedulerLimits:
    """Limits for tests, small. Without `token_buckets` nothing is padded."""
    pages_per_sequence = -(-max_model_len // page_size)
    sizes = (
        [n for n in token_buckets if n < max_step_tokens]
        if token_buckets
        else range(1, max_step_tokens)
    )
    return SchedulerLimits(
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=max_model_len,
        max_running=max_running,
        max_waiting=max_waiting,
        max_step_tokens=max_step_tokens,
        step_budget=step_budget,
        decode_unit=decode_unit,
        buckets=tuple(TokenBucket(n, context_unit, wave) for n in (*sizes, max_step_tokens)),
        policy=policy,
        output_estimate=output_estimate,
        prefix_cache=prefix_cache,
        max_waiting_s=max_waiting_s,
        max_logit_rows=max_running if max_logit_rows is None else max_logit_rows,
        max_page_updates=max_running + pages_per_sequence
        if max_page_updates is None
        else max_page_updates,
        overlap=overlap,
        vocab_size=VOCAB,
    )


@dataclass
class Record:
    """What one request came to."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    reason: str = ""
    stop_id: int = -1
    num_cached: int = -1
    aborted: bool = False


@dataclass
class Abort:
    """Abort a request at a tick, in one of the moments of a tick: 0 before schedule(), 1 after it,
    2 after process().
    """

    tick: int
    moment: int
    request_id: int


class Simulation:
    """One engine core.

    Attributes:
        records: per request id. trace: per step what would show a change of order (slots, tokens,
            pages).
    """

    def __init__(self, limits: SchedulerLimits, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits, clock=clock)
        self.processor = OutputProcessor(self.scheduler)
        self.device = FakeDevice(limits)
        self.records: dict[int, Record] = {}
        self.requests: dict[int, EngineRequest] = {}
        self.trace: list[tuple[object, ...]] = []
        self.aborts: list[Abort] = []
        self.tick = 0
        self._in_flight: tuple[ScheduledBatch, StepResult] | None = None
        self._idle: dict[int, int] = {}

    def add(self, request: EngineRequest) -> RequestFailed | None:
        guide = FakeGuide(request.grammar) if request.grammar else None
        refused = self.scheduler.add(request, guide)
        if refused is None:
            self.requests[request.request_id] = request
            self.records[request.request_id] = Record()
        return refused

    def step(self) -> ScheduledBatch | None:
        """One turn of the core's loop."""
        self._abort(0)
        batch = self.scheduler.schedule()
        flying = None
        if batch is not None:
            self._check_batch(batch)
            flying = (batch, self.device.run(batch, self._in_flight is not None))
        else:
            waits = self._in_flight or self.scheduler.tables.guides  # one may not have been ready
            assert waits or not self.scheduler.has_work, "nothing runs, nothing will"
        self.scheduler.check_integrity()
        self._check_cache()
        self._abort(1)
        if not self.limits.overlap:
            self._in_flight, flying = flying, None
        if self._in_flight is not None:
            output, failed = self.processor.process(*self._in_flight)
            self._record(output, failed)
        self._in_flight = flying
        self.scheduler.check_integrity()
        self._abort(2)
        self._check_progress(batch)
        self.tick += 1
        return batch

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the requests do not end")

    def check_outputs(self) -> None:
        """Every request produced what it produces alone."""
        for request_id, record in self.records.items():
            request, expected = self.requests[request_id], run_alone(self.requests[request_id])
            if record.aborted:
                assert record.tokens == expected.tokens[: len(record.tokens)]
                continue
            assert record.tokens == expected.tokens, f"request {request_id}: wrong tokens"
            assert record.reason == expected.reason
            assert record.stop_id == expected.stop_id
            self._check_logprobs(request, record)
        stats = self.scheduler.stats()
        assert stats.running == stats.waiting == stats.pages_held == 0
        assert stats.pages_free + stats.pages_cached == stats.pages_total

    def _check_logprobs(self, request: EngineRequest, record: Record) -> None:
        prompt = list(request.prompt_ids)
        prefix = prefix_hash(prompt)
        for token, entry in zip(record.tokens, record.logprobs, strict=True):
            if request.logprobs < 0:
                assert entry is None
            else:
                assert entry == _entry(prefix, token, request.logprobs)
            prefix = extend_hash(prefix, token)
        if record.reason == "failed":
            return
        scored = range(1, len(prompt)) if request.prompt_logprobs >= 0 else range(0)
        assert sorted(record.prompt_logprobs) == list(scored)
        for index in scored:
            before = prefix_hash(prompt[:index])
            expected = _entry(before, prompt[index], request.prompt_logprobs)
            assert record.prompt_logprobs[index] == expected

    def _record(self, output: StepOutput, failed: list[RequestFailed]) -> None:
        assert len(set(output.request_ids)) == len(output.request_ids)
        logprobs = output.logprobs or [None] * len(output.token_ids)
        for request_id, token, entry in zip(
            output.request_ids, output.token_ids, logprobs, strict=True
        ):
            self._open(request_id).tokens.append(token)
            self._open(request_id).logprobs.append(entry)
        for request_id, first, entries in output.prompt_logprobs:
            scored = self._open(request_id).prompt_logprobs
            for index, scored_entry in enumerate(entries, first):
                assert index not in scored, "a prompt token was scored twice"
                scored[index] = scored_entry
        for finished in output.finished:
            record = self._open(finished.request_id)
            record.reason, record.stop_id = finished.reason, finished.stop_id
            record.num_cached = finished.num_cached_tokens
        for failure in failed:
            self._open(failure.request_id).reason = "failed"

    def _open(self, request_id: int) -> Record:
        record = self.records[request_id]
        assert not record.reason and not record.aborted, "output for a request that has ended"
        return record

    def _abort(self, moment: int) -> None:
        ids = [a.request_id for a in self.aborts if (a.tick, a.moment) == (self.tick, moment)]
        for request_id in ids:
            record = self.records.get(request_id)
            if record is not None and not record.reason:
                record.aborted = True
        self.scheduler.abort(ids)

    def _check_batch(self, batch: ScheduledBatch) -> None:
        """Shapes, budgets and order of one batch."""
        limits, decode = self.limits, batch.num_decode_rows
        self.trace.append(
            (batch.step, batch.kind, batch.variant, *(
                tuple(getattr(batch, name).tolist())
                for name in ("row_slots", "row_starts", "row_lens", "token_ids", "kv_slots")
            ))
        )  # fmt: skip
        lens = batch.row_lens
        assert int(lens.sum()) == batch.num_tokens <= limits.max_step_tokens
        assert batch.num_rows <= limits.max_running
        assert len(set(batch.row_slots.tolist())) == batch.num_rows
        assert batch.kind == ("decode" if decode == batch.num_rows else "extend")
        assert np.all(batch.token_ids[:decode] == -1) and np.all(batch.token_ids[decode:] >= 0)
        assert np.all(lens[:decode] == 1)
        if batch.kind == "decode":
            assert batch.num_logit_rows == batch.num_rows
            assert len(batch.update_pages) <= batch.num_rows
        assert batch.num_logit_rows <= limits.max_logit_rows
        assert len(batch.update_pages) <= limits.max_page_updates
        self._check_cost(batch)
        wants_full = False
        for row, slot in enumerate(batch.logit_slots.tolist()):
            state = self.scheduler.tables.requests[slot]
            assert state is not None
            generated = int(batch.logit_positions[row]) - state.num_prompt
            wants_full |= state.needs_full or generated < state.request.min_tokens
        assert (batch.variant == "full") == wants_full
        sequence = self.scheduler.tables.sequence[batch.row_slots]
        assert np.all(np.diff(sequence[:decode]) > 0), "decode rows out of order"
        if limits.policy != "priority":
            assert np.all(np.diff(sequence[decode:]) > 0), "chunks out of order"

    def _check_cost(self, batch: ScheduledBatch) -> None:
        """Only a step's first chunk, and only up to MIN_CHUNK_TOKENS or a wave, may go beyond the
        budget, or what fits into the bucket that the step is padded to anyway.
        """
        limits, decode = self.limits, batch.num_decode_rows
        starts, lens = batch.row_starts[decode:].tolist(), batch.row_lens[decode:].tolist()
        if not lens:
            return
        first = next(b for b in limits.buckets if b.tokens > decode)
        if len(lens) == 1 and lens[0] <= max(
            MIN_CHUNK_TOKENS, min(first.wave, first.tokens - decode)
        ):
            return
        bucket = next(b for b in limits.buckets if b.tokens >= batch.num_tokens)
        pairs = sum(context_pairs(*chunk) for chunk in zip(starts, lens, strict=True))
        deepest, count = max(zip(starts, lens, strict=True))
        pairs = max(pairs, deepest * -(-count // bucket.wave) * bucket.wave)
        cost = bucket.tokens + pairs / bucket.context_unit
        context = int(batch.row_starts[:decode].sum()) / limits.decode_unit
        budget = limits.step_budget * (1 if decode else CHUNKS_ALONE)
        least = MIN_CHUNK_SHARE * limits.step_budget
        allowed = max(budget - context, least)
        before = max(decode + 1, batch.num_tokens - lens[-1])
        if bucket == next(b for b in limits.buckets if b.tokens >= before):
            allowed = max(allowed, bucket.tokens + least)
        assert cost <= allowed + 1e-6

    def _check_cache(self) -> None:
        """Every page of the prefix tree holds the KV of the tokens that the tree says."""
        size, cache = self.limits.page_size, self.scheduler.pages.cache
        ends = {id(cache.root): (0, prefix_hash([]))}
        for node in cache.nodes():
            position, prefix = ends[id(node.parent)]
            tokens = node.tokens.tolist()
            for index, token in enumerate(tokens):
                prefix = extend_hash(prefix, token)
                page = int(node.pages[index // size])
                held = self.device.kv[page * size + index % size]
                assert held == (position + index, token, prefix), "the prefix tree is wrong"
            ends[id(node)] = (position + len(tokens), prefix)

    def _check_progress(self, batch: ScheduledBatch | None) -> None:
        """The most senior running request has a row in nearly every step and is never preempted."""
        running = [
            state for state in self.scheduler.tables.occupied() if state.phase is Phase.RUNNING
        ]
        if not running:
            self._idle = {}
            return
        oldest = min(running, key=lambda state: state.seniority)
        has_row = batch is not None and oldest.slot in batch.row_slots.tolist()
        done = self.scheduler.tables.length[oldest.slot] >= oldest.limit
        idle = 0 if has_row or done else self._idle.get(oldest.request.request_id, 0) + 1
        most = MAX_IDLE_STEPS + GUIDED_IDLE_STEPS * bool(oldest.request.grammar)
        assert idle <= most, "the oldest request starves"
        self._idle = {oldest.request.request_id: idle}


def _entry(prefix: int, token: int, count: int) -> TokenLogprobs:
    tops = top_ids(prefix)[:count]
    return TokenLogprobs(logprob(prefix, token), tops, [logprob(prefix, top) for top in tops])
