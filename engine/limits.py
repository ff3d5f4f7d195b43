"""The scheduler's limits, from a resolved configuration and what was measured at start.

Knows nothing of torch.
"""

from __future__ import annotations

from engine.resolve import ResolvedConfig
from engine.scheduler.limits import SchedulerLimits


def scheduler_limits(config: ResolvedConfig, num_pages: int, vocab_size: int) -> SchedulerLimits:
    """The scheduler's part of a resolved configuration, with what was measured at start."""
    s, page_size = config.scheduler, config.kv.page_size
    return SchedulerLimits(
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=config.model.max_model_len,
        max_running=s.max_running,
        max_waiting=s.max_waiting,
        max_step_tokens=s.max_step_tokens,
        step_budget=s.step_budget,
        context_unit=s.context_unit,
        policy=s.policy,
        output_estimate=s.output_estimate,
        prefix_cache=config.kv.prefix_cache,
        max_waiting_s=s.max_waiting_s,
        max_logit_rows=s.max_running,
        max_page_updates=max_page_updates(config),
        overlap=s.overlap,
        vocab_size=vocab_size,
        token_buckets=config.compile.extend_buckets,
    )


def max_page_updates(config: ResolvedConfig) -> int:
    """Page-table updates one extend step can carry: a whole sequence's prefix hit, the chunks' own
    pages, one a row.
    """
    page_size = config.kv.page_size
    whole_sequence = -(-config.model.max_model_len // page_size)
    chunks = -(-config.scheduler.max_step_tokens // page_size)
    return whole_sequence + chunks + 2 * config.scheduler.max_running
