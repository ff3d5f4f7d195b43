"""SchedulerLimits: every number the scheduler obeys, and what a step costs.

A step costs the tokens it is padded to, and for attention: of its chunks the pairs of a token and
one before it, over the bucket's context_unit; of its decode rows, which are bound by the bytes they
read, their context over decode_unit.

Knows nothing of configuration files: engine.config validates what a user wrote, here a wrong number
is our own bug.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Policy = Literal["fcfs", "priority", "longest_prefix"]

# A step's first chunk gets this many tokens even when decode rows used the whole budget, so that a
# budget smaller than the running requests need can slow prompts down but never stop them.
MIN_CHUNK_TOKENS = 16
# Of the budget, for the same reason, this share is left for a step's tokens and chunks.
MIN_CHUNK_SHARE = 0.25
# Nobody waits for the tokens of a step of chunks alone: it may cost so many times the budget.
CHUNKS_ALONE = 8


class TokenBucket(NamedTuple):
    """A size that extend steps are padded to, and what contexts cost there.

    Attributes:
        tokens: of the step, padding included.
        context_unit: context length at which a token of a chunk costs twice as much as at none.
        wave: tokens of one chunk that keep the whole device busy where attention does not split
            keys: the context of a chunk costs as much as that of whole waves. 1: it is split.
    """

    tokens: int
    context_unit: float
    wave: int = 1

    def waves(self, num_tokens: int) -> int:
        """`num_tokens` in whole waves, in tokens."""
        return -(-num_tokens // self.wave) * self.wave


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
        step_budget: cost of a step that has decode rows, which are always part of it; a step
            without them may cost CHUNKS_ALONE times as much.
        decode_unit: context length at which a decode row costs twice as much as at none.
        buckets: what extend steps are padded to, ascending; the last has max_step_tokens.
        policy: order of the waiting queue.
        output_estimate: share of max_tokens that admission assumes a request will use, in [0, 1].
        prefix_cache: keep pages in the prefix tree.
        max_waiting_s: a request that was never started and waited longer ends with 503; None: no
            limit.
        max_logit_rows: logit rows of an extend step, at least max_running: so many of its buffers.
        max_page_updates: page-table updates of an extend step, at least max_running. A prefix hit
            longer than max_page_updates - max_running pages is cut to that, so pages_per_sequence
            more is a good value.
        overlap: schedule() of a step is called before process() of the step before (else never).
        vocab_size: size of the vocabulary.
    """

    num_pages: int
    page_size: int
    max_model_len: int
    max_running: int
    max_waiting: int
    max_step_tokens: int
    step_budget: float
    decode_unit: float
    buckets: tuple[TokenBucket, ...]
    policy: Policy
    output_estimate: float
    prefix_cache: bool
    max_waiting_s: float | None
    max_logit_rows: int
    max_page_updates: int
    overlap: bool
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("page_size", "max_model_len", "max_running", "vocab_size"):
            assert getattr(self, name) >= 1, f"{name} must be at least 1"
        for name in ("max_step_tokens", "max_logit_rows", "max_page_updates"):
            assert getattr(self, name) >= self.max_running, f"{name} must be at least max_running"
        assert self.num_pages >= 2, "the KV cache has no page besides the dummy"
        assert self.max_waiting >= 0
        assert self.step_budget > 0
        assert self.decode_unit > 0
        assert self.buckets[-1].tokens == self.max_step_tokens
        assert 0 <= self.output_estimate <= 1
        assert self.policy in ("fcfs", "priority", "longest_prefix")

    @property
    def pages_per_sequence(self) -> int:
        """Columns of the page table."""
        return self.pages_for(self.max_model_len)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)


def context_pairs(start: int, num_tokens: int) -> float:
    """Pairs of a token from position `start` on and one before it: the sum of their positions."""
    return num_tokens * start + num_tokens * (num_tokens - 1) / 2


def tokens_within(start: int, pairs: float) -> int:
    """The most tokens from position `start` with at most so many context_pairs."""
    if pairs < 0:
        return 0
    slope = start - 0.5
    num_tokens = int(math.sqrt(slope * slope + 2 * pairs) - slope)
    while context_pairs(start, num_tokens + 1) <= pairs:
        num_tokens += 1
    while context_pairs(start, num_tokens) > pairs:
        num_tokens -= 1
    return num_tokens
