"""OutputProcessor with results made by hand; the scheduler around it is the real one."""

from __future__ import annotations

import numpy as np
import pytest

from engine.output_processor import OutputProcessor
from engine.request import EngineRequest, Finished, RequestFailed, StepOutput, TokenLogprobs
from engine.scheduler.batch import ScheduledBatch, StepResult
from engine.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import make_limits


class Engine:
    """Scheduler and processor; the test is the device."""

    def __init__(self, *requests: EngineRequest, overlap: bool = False) -> None:
        self.scheduler = Scheduler(make_limits(overlap=overlap, max_logit_rows=8))
        self.processor = OutputProcessor(self.scheduler)
        for request in requests:
            assert self.scheduler.add(request) is None

    def schedule(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        assert batch is not None
        return batch

    def process(self, batch: ScheduledBatch, *ids: int) -> tuple[StepOutput, list[RequestFailed]]:
        return self.processor.process(batch, result(batch, list(ids)))

    def step(self, *ids: int) -> StepOutput:
        output, failed = self.process(self.schedule(), *ids)
        assert failed == []
        return output


def result(batch: ScheduledBatch, ids: list[int]) -> StepResult:
    """Logprob of row r: -r; alternatives 10 r, 10 r + 1 with -r, minus infinity."""
    rows = np.arange(len(ids), dtype=np.float32)
    if batch.variant == "plain":
        return StepResult(np.array(ids, np.int32))
    tops = np.stack([10 * rows, 10 * rows + 1], axis=1).astype(np.int32)
    logprobs = np.stack([-rows, np.full(len(ids), -np.inf, np.float32)], axis=1)
    return StepResult(np.array(ids, np.int32), -rows, tops, logprobs)


def test_tokens_then_length() -> None:
    engine = Engine(EngineRequest(5, [1, 2], 2))
    assert engine.step(7) == StepOutput([5], [7])
    assert engine.step(8) == StepOutput([5], [8], [Finished(5, "length")])
    assert not engine.scheduler.has_work


def test_the_stop_id_is_the_last_token_even_at_the_limit() -> None:
    engine = Engine(EngineRequest(5, [1], 9, [3, 4]), EngineRequest(6, [2], 1, [4]))
    output = engine.step(9, 4)
    assert output.token_ids == [9, 4]
    assert output.finished == [Finished(6, "stop", 4)]
    assert engine.step(3) == StepOutput([5], [3], [Finished(5, "stop", 3)])


def test_stop_ids_of_others_do_not_stop() -> None:
    engine = Engine(EngineRequest(5, [1], 9, [3]), EngineRequest(6, [2], 9))
    assert engine.step(4, 3).finished == []


def test_a_stop_id_before_min_tokens_does_not_stop() -> None:
    engine = Engine(EngineRequest(5, [1], 9, [3], min_tokens=2))
    assert [engine.step(3).finished for _ in range(2)] == [[], []]
    assert engine.step(3).finished == [Finished(5, "stop", 3)]


def test_min_tokens_of_one_request_do_not_keep_another_going() -> None:
    engine = Engine(EngineRequest(5, [1], 9, [3], min_tokens=4), EngineRequest(6, [2], 9, [3]))
    assert engine.step(3, 3).finished == [Finished(6, "stop", 3)]


def test_logprobs_for_those_who_asked() -> None:
    engine = Engine(
        EngineRequest(5, [1], 9), EngineRequest(6, [2], 9, logprobs=0),
        EngineRequest(7, [3], 9, logprobs=2),
    )  # fmt: skip
    output = engine.step(1, 2, 3)
    assert output.logprobs == [
        None,
        TokenLogprobs(-1.0, [], []),
        TokenLogprobs(-2.0, [20, 21], [-2.0, -9999.0]),
    ]


def test_no_logprobs_where_nobody_asked() -> None:
    engine = Engine(EngineRequest(5, [1], 9, presence_penalty=1.0))
    assert engine.step(1).logprobs == []


def test_prompt_logprobs_come_chunk_by_chunk() -> None:
    engine = Engine(EngineRequest(5, list(range(1, 12)), 1, prompt_logprobs=1))
    first = engine.step(*range(2, 10))
    assert (first.request_ids, first.token_ids) == ([], [])
    ((request_id, index, entries),) = first.prompt_logprobs
    assert (request_id, index, len(entries)) == (5, 1, 8)
    assert entries[3] == TokenLogprobs(-3.0, [30], [-3.0])
    last = engine.step(10, 11, 20)
    assert [(r, i, len(e)) for r, i, e in last.prompt_logprobs] == [(5, 9, 2)]
    assert last.token_ids == [20]
    assert last.finished == [Finished(5, "length")]


def test_two_prompts_scored_in_one_step() -> None:
    engine = Engine(
        EngineRequest(5, [1, 2, 3], 2, prompt_logprobs=0),
        EngineRequest(6, [4, 5], 2, prompt_logprobs=0),
    )
    output = engine.step(2, 3, 9, 5, 9)
    assert [(r, i, len(e)) for r, i, e in output.prompt_logprobs] == [(5, 1, 2), (6, 1, 1)]
    assert output.request_ids == [5, 6]


@pytest.mark.parametrize("prompt", [[1, 2, 3], [1]])
def test_scoring_only_ends_after_the_prompt(prompt: list[int]) -> None:
    engine = Engine(EngineRequest(5, prompt, 0, prompt_logprobs=0))
    batch = engine.schedule()
    assert batch.logit_targets.tolist() == [*prompt[1:], -2]
    output, failed = engine.process(batch, *prompt[1:], 9)
    assert (output.token_ids, failed) == ([], [])
    assert sum(len(entries) for _, _, entries in output.prompt_logprobs) == len(prompt) - 1
    assert output.finished == [Finished(5, "length")]
    assert not engine.scheduler.has_work


def test_non_finite_logits_fail_only_their_request() -> None:
    engine = Engine(EngineRequest(5, [1, 2], 9), EngineRequest(6, [3], 9))
    output, (failed,) = engine.process(engine.schedule(), -1, 4)
    assert (output.request_ids, output.token_ids, output.finished) == ([6], [4], [])
    assert (failed.request_id, failed.status) == (5, 500)
    assert "position 2" in failed.message
    assert engine.step(5).request_ids == [6]
    engine.scheduler.check_integrity()


def test_a_scored_prompt_fails_once() -> None:
    engine = Engine(EngineRequest(5, [1, 2, 3, 4], 9, prompt_logprobs=0))
    output, failed = engine.process(engine.schedule(), 2, -1, -1, 7)
    assert [f.request_id for f in failed] == [5]
    assert output == StepOutput([], [])
    assert not engine.scheduler.has_work
    engine.scheduler.check_integrity()


def test_failed_requests_are_not_shared() -> None:
    engine = Engine(EngineRequest(5, list(range(1, 9)), 9))
    engine.process(engine.schedule(), -1)
    assert engine.scheduler.stats().pages_cached == 0


def test_the_row_in_flight_of_a_request_that_stopped_is_dropped() -> None:
    engine = Engine(EngineRequest(5, [1], 9, [3]), EngineRequest(6, [2], 9), overlap=True)
    first = engine.schedule()
    second = engine.schedule()
    assert engine.process(first, 3, 8)[0].finished == [Finished(5, "stop", 3)]
    assert engine.scheduler.stats().pages_held == 2, "its page is still in use"
    third = engine.schedule()
    assert (second.num_rows, third.num_rows) == (2, 1)
    output, failed = engine.process(second, -1, 8)
    assert (output, failed) == (StepOutput([6], [8]), [])
    assert engine.scheduler.stats().pages_held == 1
    engine.scheduler.check_integrity()


def test_an_abort_in_flight_leaves_no_output() -> None:
    engine = Engine(EngineRequest(5, [1], 9, logprobs=1), overlap=True)
    first, second = engine.schedule(), engine.schedule()
    engine.scheduler.abort([5])
    for batch in (first, second):
        assert engine.process(batch, 7) == (StepOutput([], []), [])
    assert not engine.scheduler.has_work
    engine.scheduler.check_integrity()


def test_the_number_of_cached_tokens_is_told_at_the_end() -> None:
    engine = Engine(EngineRequest(5, list(range(1, 10)), 1))
    assert engine.step(3).finished == [Finished(5, "length")]
    assert engine.scheduler.add(EngineRequest(6, list(range(1, 10)), 1)) is None
    assert engine.step(3).finished == [Finished(6, "length", -1, 8)]


def test_generated_tokens_are_counted_once() -> None:
    engine = Engine(EngineRequest(5, [1], 3), EngineRequest(6, [1], 2))
    for ids in ((7, 7), (7, 7), (7,)):
        engine.step(*ids)
    assert engine.scheduler.stats().generated_tokens == 5


def test_a_result_of_another_batch_is_our_bug() -> None:
    engine = Engine(EngineRequest(5, [1], 3))
    with pytest.raises(AssertionError, match="another batch"):
        engine.processor.process(engine.schedule(), StepResult(np.zeros(2, np.int32)))
