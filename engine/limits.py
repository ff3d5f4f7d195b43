"""The scheduler's limits, from a resolved configuration and what was measured at start.

Knows nothing of torch.
"""

from __future__ import annotations

from engine.resolve import ResolvedConfig, chunk_kernel
from engine.scheduler.limits import SchedulerLimits, TokenBucket

# What fa2 takes for a pair of tokens, over what fa3 does where it keeps the whole device busy.
_FA2_COST = 1.6
# Multiplications and additions that a GPU does in a step's matrices while it reads a byte of KV.
_FLOPS_A_BYTE = 134


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
    kernel, unit = chunk_kernel(config.attention.extend, num_tokens), config.scheduler.context_unit
    if kernel == "fa3":
        return TokenBucket(num_tokens, unit, wave)
    return TokenBucket(num_tokens, unit / _FA2_COST if kernel == "fa2" else unit)


def max_page_updates(config: ResolvedConfig) -> int:
    """Page-table updates one extend step can carry: a whole sequence's prefix hit, the chunks' own
    pages, one a row.
    """
    page_size = config.kv.page_size
    whole_sequence = -(-config.model.max_model_len // page_size)
    chunks = -(-config.scheduler.max_step_tokens // page_size)
    return whole_sequence + chunks + 2 * config.scheduler.max_running
