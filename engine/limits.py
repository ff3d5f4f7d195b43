"""The scheduler's limits, from a resolved configuration and what was measured at start.

Knows nothing of torch.
"""

from __future__ import annotations

from engine.resolve import ResolvedConfig, chunk_kernel
from engine.scheduler.limits import SchedulerLimits, TokenBucket

# Time for a FLOP of attention over that in a step's matrices, on an H200 (bench/NOTES.md).
_CONTEXT_COST = {"fa3": 1.3, "fa2": 2.5}
# FLOPs of a step's matrices in the time in which decode attention reads a byte of KV there.
_FLOPS_A_BYTE = 156


def scheduler_limits(
    config: ResolvedConfig, num_pages: int, vocab_size: int, kv_share: float, wave: int
) -> SchedulerLimits:
    """The scheduler's part of a resolved configuration, with what was measured at start.

    Args:
        kv_share: kv heads over query heads.
        wave: tokens of one chunk that keep the whole device busy; see TokenBucket.
    """
    s, page_size = config.scheduler, config.kv.page_size
    # A pair of tokens is 4 FLOPs a query head and dim, a token of a decode row's context 4 bytes a
    # kv head and dim.
    decode_cost = max(1.0, kv_share * _FLOPS_A_BYTE) if config.device == "cuda" else 1.0
    return SchedulerLimits(
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=config.model.max_model_len,
        max_running=s.max_running,
        max_waiting=s.max_waiting,
        max_step_tokens=s.max_step_tokens,
        step_budget=s.step_budget,
        decode_unit=s.context_unit / decode_cost,
        buckets=tuple(_bucket(config, n, wave) for n in config.compile.extend_buckets),
        policy=s.policy,
        output_estimate=s.output_estimate,
        prefix_cache=config.kv.prefix_cache,
        max_waiting_s=s.max_waiting_s,
        max_logit_rows=s.max_running,
        max_page_updates=max_page_updates(config),
        overlap=s.overlap,
        vocab_size=vocab_size,
    )


def _bucket(config: ResolvedConfig, num_tokens: int, wave: int) -> TokenBucket:
    kernel = chunk_kernel(config.attention.extend, num_tokens, wave)
    unit = config.scheduler.context_unit / _CONTEXT_COST.get(kernel, 1.0)
    return TokenBucket(num_tokens, unit, wave if kernel == "fa3" else 1)


def max_page_updates(config: ResolvedConfig) -> int:
    """Page-table updates one extend step can carry: a whole sequence's prefix hit, the chunks' own
    pages, one a row.
    """
    page_size = config.kv.page_size
    whole_sequence = -(-config.model.max_model_len // page_size)
    chunks = -(-config.scheduler.max_step_tokens // page_size)
    return whole_sequence + chunks + 2 * config.scheduler.max_running
