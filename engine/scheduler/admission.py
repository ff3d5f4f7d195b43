"""What a request must be to be queued, and how far the next chunk of one goes. Pure functions of
limits and state.

Knows nothing of the queue or of who holds which page.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.request import EngineRequest
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.slots import RequestState, SlotTables
from engine.scheduler.step_plan import DRAW, DRAW_AND_DISCARD, Chunk, StepPlan


def reason_to_refuse(
    request: EngineRequest, prompt: NDArray[np.int64], limits: SchedulerLimits
) -> str:
    """Why a request can never run, or "". The submitter has checked all this; here nothing may slip
    through.

    Args:
        prompt: int64 [n], the request's prompt ids.
    """
    total = len(prompt) + request.max_tokens
    if len(prompt) == 0:
        return "the prompt is empty"
    if request.max_tokens < 0:
        return f"max_tokens is {request.max_tokens}"
    if prompt.min() < 0 or prompt.max() >= limits.vocab_size:
        return f"the prompt has a token id outside the vocabulary of {limits.vocab_size}"
    if total > limits.max_model_len:
        return (
            f"prompt and max_tokens are {total} tokens, more than the {limits.max_model_len} "
            "that the model is served with"
        )
    # The last token drawn has no keys and values.
    num_pages = limits.pages_for(max(len(prompt), total - 1))
    if num_pages > limits.num_pages - 1:
        return f"the request may need {num_pages} KV pages; there are {limits.num_pages - 1}"
    return ""


def next_chunk(
    state: RequestState, tables: SlotTables, plan: StepPlan, available_pages: int, logit_rows: int
) -> Chunk | None:
    """The most of a running request's known tokens that the step has room for, or None.

    Args:
        available_pages: pages that the request could get besides those it has.
        logit_rows: that it may have of the step's.
    """
    slot = state.slot
    start, total = int(tables.computed[slot]), int(tables.length[slot])
    held = int(tables.num_pages[slot])
    new_pages = min(available_pages, plan.updates_left - (held - state.num_shipped))
    if new_pages < 0:
        return None
    room = (held + new_pages) * plan.limits.page_size - start
    count = min(total - start, room, plan.affordable(start))
    scored_from = max(start, state.num_scored - 1)
    if state.scores_prompt:
        # From there on every token has a logit row.
        count = min(count, scored_from - start + logit_rows)
    elif count == total - start and logit_rows == 0:
        count -= 1
    if count <= 0:
        return None
    stop = start + count
    last_target = None
    if stop == total:
        last_target = DRAW if state.request.max_tokens else DRAW_AND_DISCARD
    if state.scores_prompt:
        logits_from = min(stop, scored_from)
    else:
        logits_from = stop if last_target is None else stop - 1
    return Chunk(slot, start, stop, logits_from, last_target)
