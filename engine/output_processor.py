"""OutputProcessor: what a step drew -> requests advanced, ended or failed, and the message for the
client side.

A row whose request ended while the step was in flight is dropped here. Knows nothing of text, stop
strings or devices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.request import (
    FINISH_LENGTH,
    FINISH_STOP,
    Finished,
    RequestFailed,
    StepOutput,
    TokenLogprobs,
)
from engine.scheduler.batch import I32, ScheduledBatch, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.slots import RequestState
from engine.scheduler.step_plan import DRAW, DRAW_AND_DISCARD

LOWEST_LOGPROB = -9999.0
Rows = NDArray[np.intp]
PromptScores = tuple[int, int, list[TokenLogprobs]]


class OutputProcessor:
    """Applies results to a scheduler's requests, step by step, in the order of the steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tables = scheduler.tables

    def process(
        self, batch: ScheduledBatch, result: StepResult
    ) -> tuple[StepOutput, list[RequestFailed]]:
        """Advance requests by one step's results.

        Returns:
            What the step produced for open requests, and the requests that failed (also those that
            the scheduler gave up on in the queue).
        """
        scheduler, tables = self._scheduler, self._tables
        assert len(result.token_ids) == batch.num_logit_rows, "a result for another batch"
        scheduler.begin_processing(batch.step)
        failed = scheduler.take_failed()
        slots, ids, targets = batch.logit_slots, result.token_ids, batch.logit_targets
        if len(ids) and ids.min() < 0:
            failed += self._fail(batch, ids)
        ended = self._advance_guides(batch, ids, failed) if tables.guides else set()
        alive = tables.alive[slots]
        if batch.kind == "decode":
            self._store(slots, batch.logit_positions, ids)
            output = self._draws(batch, result, alive.nonzero()[0], [], ended)
        else:
            drawn = targets == DRAW
            self._store(slots[drawn], batch.logit_positions[drawn], ids[drawn])
            # Scores first: a draw can end the request and give its slot away.
            scores = self._scores(batch, result, np.flatnonzero((targets >= 0) & alive))
            output = self._draws(batch, result, np.flatnonzero(drawn & alive), scores, ended)
            for row in np.flatnonzero((targets == DRAW_AND_DISCARD) & alive).tolist():
                self._finish(int(slots[row]), FINISH_LENGTH, -1, output)
        scheduler.release_drained()
        return output, failed

    def _fail(self, batch: ScheduledBatch, ids: I32) -> list[RequestFailed]:
        """End the requests of rows without finite logits; their pages are not shared."""
        failed = []
        for row in np.flatnonzero(ids < 0).tolist():
            slot = int(batch.logit_slots[row])
            state = self._tables.requests[slot]
            if state is None:
                continue  # an earlier row of this step failed already
            state.tainted = True
            if self._tables.alive[slot]:
                position = int(batch.logit_positions[row])
                message = f"the model's logits are not finite at position {position}"
                failed.append(RequestFailed(state.request.request_id, message))
                self._scheduler.end(state)
        return failed

    def _advance_guides(
        self, batch: ScheduledBatch, ids: I32, failed: list[RequestFailed]
    ) -> set[int]:
        """Slots whose grammar is at its end; requests whose grammar cannot go on fail."""
        ended, tables = set(), self._tables
        drawn = (batch.logit_targets == DRAW) & tables.alive[batch.logit_slots]
        for row in np.flatnonzero(drawn & np.isin(batch.logit_slots, list(tables.guides))).tolist():
            slot = int(batch.logit_slots[row])
            guide, state = tables.guides[slot], self._state_at(slot)
            if guide.advance(int(ids[row])):
                ended.add(slot)
            elif guide.error:
                message = f"structured_outputs: {guide.error}"
                failed.append(RequestFailed(state.request.request_id, message, 400))
                self._scheduler.end(state)
        return ended

    def _store(self, slots: I32, positions: I32, ids: I32) -> None:
        """Drawn ids into the token table; those of ended requests too, whose pages go to the prefix
        tree by id.
        """
        self._tables.tokens[slots, positions] = ids

    def _draws(
        self,
        batch: ScheduledBatch,
        result: StepResult,
        rows: Rows,
        scores: list[PromptScores],
        ended: set[int],
    ) -> StepOutput:
        """Report the tokens of these logit rows and end requests that are done."""
        tables = self._tables
        slots, ids = batch.logit_slots[rows], result.token_ids[rows]
        lengths = batch.logit_positions[rows] + 1
        token_ids = ids.tolist()
        output = StepOutput(tables.request_id[slots].tolist(), token_ids, [], [], scores)
        self._scheduler.num_generated += len(token_ids)
        if batch.variant == "full" and len(rows):
            output.logprobs.extend(self._logprobs(slots, rows, result))
        stops = (tables.stop_ids[slots] == ids[:, None]).any(axis=1)
        if tables.min_tokens.any():
            stops &= lengths - tables.num_prompt[slots] > tables.min_tokens[slots]
        done = stops | (lengths >= tables.limit[slots])
        if ended:
            done |= np.isin(slots, list(ended))
        for index in done.nonzero()[0].tolist():
            slot = int(slots[index])
            if stops[index]:
                self._finish(slot, FINISH_STOP, token_ids[index], output)
            elif slot in ended:
                self._finish(slot, FINISH_STOP, -1, output)
            else:
                self._finish(slot, FINISH_LENGTH, -1, output)
        return output

    def _logprobs(self, slots: I32, rows: Rows, result: StepResult) -> list[TokenLogprobs | None]:
        """One entry per row; nothing at all when no request of the step asked."""
        counts = [self._state_at(slot).request.logprobs for slot in slots.tolist()]
        if max(counts) < 0:
            return []
        return [
            _token_logprobs(result, row, count) if count >= 0 else None
            for row, count in zip(rows.tolist(), counts, strict=True)
        ]

    def _scores(self, batch: ScheduledBatch, result: StepResult, rows: Rows) -> list[PromptScores]:
        """Prompt logprobs: rows of a request are consecutive, as the prompt tokens they cover."""
        if len(rows) == 0:
            return []
        scores = []
        for run in np.split(rows, np.flatnonzero(np.diff(batch.logit_slots[rows])) + 1):
            request = self._state_at(int(batch.logit_slots[run[0]])).request
            entries = [
                _token_logprobs(result, row, request.prompt_logprobs) for row in run.tolist()
            ]
            scores.append((request.request_id, int(batch.logit_positions[run[0]]), entries))
        return scores

    def _finish(self, slot: int, reason: str, stop_id: int, output: StepOutput) -> None:
        state = self._state_at(slot)
        output.finished.append(
            Finished(state.request.request_id, reason, stop_id, state.num_cached)
        )
        self._scheduler.end(state)

    def _state_at(self, slot: int) -> RequestState:
        state = self._tables.requests[slot]
        assert state is not None, "a step in flight has a row of a slot that was given away"
        return state


def _token_logprobs(result: StepResult, row: int, count: int) -> TokenLogprobs:
    """Entry of one logit row with `count` alternatives."""
    assert result.logprobs is not None and result.top_ids is not None
    assert result.top_logprobs is not None
    tops = np.maximum(result.top_logprobs[row, :count], LOWEST_LOGPROB)
    return TokenLogprobs(
        max(float(result.logprobs[row]), LOWEST_LOGPROB),
        result.top_ids[row, :count].tolist(),
        tops.tolist(),
    )
