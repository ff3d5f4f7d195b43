"""SchedulerLimits: every number the scheduler obeys, and the cost of a chunk.

Knows nothing of configuration files: engine.config validates what a user wrote, here a wrong number
is our own bug.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Policy = Literal["fcfs", "priority", "longest_prefix"]

# A step's first chunk gets this many tokens even when decode rows used the whole budget, so that a
# budget smaller than the running requests need can slow prompts down but never stop them.
MIN_CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of one scheduler.

    Attributes:
        num_pages: pages of the KV cache, the dummy page 0 included, so num_pages - 1 can be used.
        page_size: tokens per page.
        max_model_len: most tokens of one request, prompt and output together.
        max_running: slots, so rows of a step.
        max_waiting: requests that may wait beyond those a free slot is there for.
        max_step_tokens: tokens of one step, at least max_running.
        step_budget: cost of one step (see chunk_cost); decode rows are always part of a step and
            count.
        context_unit: context length at which a token costs twice as much as at none.
        policy: order of the waiting queue.
        output_estimate: share of max_tokens that admission assumes a request will use, in [0, 1].
        prefix_cache: keep pages in the prefix tree.
        max_waiting_s: a request that was never started and waited longer ends with 503; None: no
            limit.
        max_logit_rows: logit rows of an extend step, at least max_running.
        max_page_updates: page-table updates of an extend step, at least max_running. A prefix hit
            longer than max_page_updates - max_running pages is cut to that, so pages_per_sequence
            more is a good value.
        overlap: schedule() of a step is called before process() of the step before (else never).
        vocab_size: size of the vocabulary.
        token_buckets: ascending, tokens that extend steps are padded to; () where none matters.
    """

    num_pages: int
    page_size: int
    max_model_len: int
    max_running: int
    max_waiting: int
    max_step_tokens: int
    step_budget: float
    context_unit: float
    policy: Policy
    output_estimate: float
    prefix_cache: bool
    max_waiting_s: float | None
    max_logit_rows: int
    max_page_updates: int
    overlap: bool
    vocab_size: int
    token_buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("page_size", "max_model_len", "max_running", "vocab_size"):
            assert getattr(self, name) >= 1, f"{name} must be at least 1"
        for name in ("max_step_tokens", "max_logit_rows", "max_page_updates"):
            assert getattr(self, name) >= self.max_running, f"{name} must be at least max_running"
        assert self.num_pages >= 2, "the KV cache has no page besides the dummy"
        assert self.max_waiting >= 0
        assert self.step_budget > 0
        assert self.context_unit > 0
        assert 0 <= self.output_estimate <= 1
        assert self.policy in ("fcfs", "priority", "longest_prefix")

    @property
    def pages_per_sequence(self) -> int:
        """Columns of the page table."""
        return self.pages_for(self.max_model_len)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)


def chunk_cost(start: int, num_tokens: int, context_unit: float) -> float:
    """Cost of `num_tokens` tokens from position `start`: sum over them of 1 + position /
    context_unit.
    """
    positions = num_tokens * start + num_tokens * (num_tokens - 1) / 2
    return num_tokens + positions / context_unit


def tokens_within(start: int, budget: float, context_unit: float) -> int:
    """The most tokens from position `start` whose chunk_cost is at most `budget`."""
    if budget < 1 + start / context_unit:
        return 0
    half = 0.5 / context_unit
    slope = 1 + (start - 0.5) / context_unit
    # The root of half n^2 + slope n = budget, in the form that does not cancel for a small `half`.
    num_tokens = int(2 * budget / (slope + math.sqrt(slope * slope + 4 * half * budget)))
    while chunk_cost(start, num_tokens + 1, context_unit) <= budget:
        num_tokens += 1
    while num_tokens > 0 and chunk_cost(start, num_tokens, context_unit) > budget:
        num_tokens -= 1
    return num_tokens
