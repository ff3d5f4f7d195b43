"""The full variant of `sample`: penalties, bias, masks, logprobs; against sampling_reference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from models.inputs import SamplingState, StepInputs, StepState
from models.sampling import FLAG_COUNT, FLAG_GUIDED, FLAG_MASK_STOP, admit, allow, sample
from tests.models.sampling_reference import (
    TOP_LOGPROBS,
    Row,
    Slot,
    assert_distributed,
    full,
    log_softmax,
    make_inputs,
    make_state,
    random_logits,
    reference_logits,
    reference_probs,
)


def i32(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


NOTHING = i32()
NO_BIAS = np.zeros(0, np.float32)


@st.composite
def full_cases(draw_: st.DrawFn) -> tuple[int, Row, Slot, list[int], set[int]]:
    """Vocabulary, settings, slot, output before admission, grammar."""
    vocab = draw_(st.sampled_from([33, 257, 1229, 1280]))
    ids = st.integers(0, vocab - 1)
    output = draw_(st.lists(ids, max_size=12))
    slot = Slot(
        seen=set(draw_(st.lists(ids, max_size=12))),
        counts={token: output.count(token) for token in output},
        bias=draw_(st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=8)),
        stop=set(draw_(st.lists(ids, max_size=4))),
    )
    row = Row(
        repetition=draw_(st.floats(0.5, 2.0, width=32)),
        frequency=draw_(st.floats(-2, 2, width=32)),
        presence=draw_(st.floats(-2, 2, width=32)),
        flags=draw_(st.integers(0, 7)),
    )
    allowed = draw_(st.sets(ids, min_size=1, max_size=20))
    return vocab, row, slot, output, allowed


def grammar_words(vocab: int, allowed: set[int]) -> NDArray[np.int32]:
    words = np.zeros((1, -(-vocab // 32)), np.uint32)
    for token in allowed:
        words[0, token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


@settings(max_examples=60, deadline=None)
@given(full_cases(), st.integers(0, 1000))
def test_full_agrees_with_the_reference(
    case: tuple[int, Row, Slot, list[int], set[int]], seed: int
) -> None:
    vocab, row, slot, output, allowed = case
    logits = random_logits(1, vocab, seed)
    state, sampling_state = make_state(2, vocab)
    bias = np.array(list(slot.bias.values()), np.float32)
    admit(sampling_state, 0, i32(*slot.seen), i32(*output), i32(*slot.bias), bias, i32(*slot.stop))
    allow(sampling_state, i32(0), grammar_words(vocab, allowed))
    guided = allowed if row.flags & FLAG_GUIDED else None
    expected = reference_logits(
        logits[0].double().numpy(), row, slot, guided, mask_stop=bool(row.flags & FLAG_MASK_STOP)
    )
    before = sampling_state.counts_SV.clone()
    ids, logprobs, top_ids, top_logprobs = full(logits, [row], state, sampling_state)
    if np.isneginf(expected).all():
        assert ids == [-1]
        assert torch.equal(sampling_state.counts_SV, before)
        return
    want = log_softmax(expected)
    assert expected[ids[0]] >= expected.max() - 1e-4
    np.testing.assert_allclose(logprobs, want[ids], atol=2e-4)
    np.testing.assert_allclose(top_logprobs[0], np.sort(want)[::-1][:TOP_LOGPROBS], atol=2e-4)
    np.testing.assert_allclose(want[top_ids[0].numpy()], top_logprobs[0], atol=2e-4)
    before[0, ids[0]] += bool(row.flags & FLAG_COUNT)
    assert torch.equal(sampling_state.counts_SV, before)


def test_counts_and_seen_follow_the_draws() -> None:
    vocab, steps = 40, 12
    state, sampling_state = make_state(3, vocab)
    admit(sampling_state, 1, i32(3, 4), i32(5, 5, 6), NOTHING, NO_BIAS, NOTHING)
    history: list[int] = []
    for step in range(steps):
        rows = [
            Row(temperature=1.5, seed=step, slot=1, flags=FLAG_COUNT),
            Row(temperature=1.5, seed=step, slot=0),  # does not count
            Row(temperature=1.5, seed=step, slot=2, flags=FLAG_COUNT, target=-2),  # discarded
            Row(slot=3, target=-2),  # padding
            Row(slot=3, target=-2),
        ]
        ids, *_ = full(random_logits(5, vocab, step), rows, state, sampling_state)
        history.append(ids[0])
        assert state.last_token_S[1] == ids[0]
    expected = np.bincount([5, 5, 6, *history], minlength=vocab)
    assert sampling_state.counts_SV[1].tolist() == expected.tolist()
    seen = sampling_state.seen_SV[1].nonzero().flatten().tolist()
    assert seen == sorted({3, 4, 5, 6, *history})
    for slot in (0, 2, 3):
        assert not sampling_state.counts_SV[slot].any()
        assert not sampling_state.seen_SV[slot].any()


def test_admission_clears_what_the_slot_held() -> None:
    state, sampling_state = make_state(2, 40)
    rest = [t[1:].clone() for t in sampling_state]
    admit(sampling_state, 0, i32(1), i32(2, 2), i32(9, 8), np.array([5, -5], np.float32), i32(4, 6))
    assert sampling_state.counts_SV[0, 2] == 2
    assert sampling_state.bias_ids_SN[0].tolist() == [9, 8, *[-1] * 6]
    assert sampling_state.bias_values_SN[0].tolist() == [5, -5, *[0] * 6]
    assert sampling_state.stop_ids_SM[0].tolist() == [4, 6, -1, -1]
    admit(sampling_state, 0, i32(1, 1, 3), NOTHING, NOTHING, NO_BIAS, NOTHING)
    assert not sampling_state.counts_SV.any()
    assert sampling_state.seen_SV[0].nonzero().flatten().tolist() == [1, 3]
    assert (sampling_state.bias_ids_SN[0] == -1).all()
    assert (sampling_state.stop_ids_SM[0] == -1).all()
    for now, before in zip(sampling_state, rest, strict=True):
        assert torch.equal(now[1:], before)


def test_sampled_rows_of_full_follow_the_penalised_distribution() -> None:
    vocab, num = 40, 10_000
    logits = random_logits(1, vocab, 5, scale=1.5)
    row = Row(temperature=0.8, top_k=15, top_p=0.9, repetition=1.3, frequency=0.4, presence=0.2)
    slot = Slot(seen={1, 2, 3}, counts={10: 3, 11: 1}, bias={20: 2.0}, stop={int(logits.argmax())})
    state, sampling_state = make_state(1, vocab)
    bias = np.array([2.0], np.float32)
    admit(sampling_state, 0, i32(1, 2, 3), i32(10, 11, 10, 10), i32(20), bias, i32(*slot.stop))
    rows = [replace(row, seed=i, flags=FLAG_MASK_STOP, target=-2) for i in range(num)]
    ids, *_ = full(logits.expand(num, vocab), rows, state, sampling_state)
    expected = reference_logits(logits[0].double().numpy(), row, slot, None, mask_stop=True)
    assert_distributed(ids, reference_probs(expected, row))


def test_scored_rows_report_the_model_s_own_distribution() -> None:
    vocab = 100
    state, sampling_state = make_state(1, vocab)
    admit(sampling_state, 0, i32(1, 2), i32(1), i32(3), np.array([50.0], np.float32), i32(4))
    logits = random_logits(3, vocab)
    settings_ = Row(1.0, repetition=2.0, frequency=2.0, presence=2.0, flags=7, top_k=1)
    rows = [replace(settings_, target=target) for target in (1, 3, 4)]
    counts = sampling_state.counts_SV.clone()
    ids, logprobs, top_ids, top_logprobs = full(logits, rows, state, sampling_state)
    want = logits.log_softmax(1)
    assert ids == [1, 3, 4]
    torch.testing.assert_close(logprobs, want.gather(1, torch.tensor([[1], [3], [4]]))[:, 0])
    expected = want.topk(TOP_LOGPROBS)
    assert torch.equal(top_ids.long(), expected.indices)
    torch.testing.assert_close(top_logprobs, expected.values)
    assert torch.equal(sampling_state.counts_SV, counts)
    assert state.last_token_S[0] == 7


def test_logprobs_are_finite_whatever_the_logits() -> None:
    vocab = 64
    logits = random_logits(7, vocab)
    logits[1] = -math.inf
    logits[2, 3] = math.nan
    logits[3, 2:] = -math.inf
    logits[4] = 3e38
    logits[4, 0] = -3e38
    logits[5, 1] = math.inf
    logits[6] *= 1e30
    rows = [Row(temperature=1.0, slot=i) for i in range(7)]
    rows[6] = Row(target=int(logits[6].argmin()), slot=6)
    ids, logprobs, _, top_logprobs = full(logits, rows, *make_state(7, vocab))
    reported = torch.cat([logprobs.unsqueeze(1), top_logprobs], dim=1)
    assert (reported >= -9999).all()
    assert (reported <= 0).all()
    assert [i for i, id_ in enumerate(ids) if id_ < 0] == [1, 2, 5]
    assert logprobs[6] == -9999
    assert (top_logprobs[:, :-1] >= top_logprobs[:, 1:]).all()
    torch.testing.assert_close(logprobs[4], torch.tensor(-math.log(vocab - 1)))


def test_more_alternatives_than_tokens_are_padded() -> None:
    state, sampling_state = make_state(1, 3)
    out = sample(
        "full",
        torch.tensor([[1.0, 3.0, 2.0]]),
        make_inputs([Row()]),
        state,
        sampling_state,
        5,
    )
    assert out.packed_LC[0, 2:5].tolist() == [1, 2, 0]
    assert (out.packed_LC.view(torch.float32)[0, 10:] == -9999).all()
    none = sample(
        "full",
        torch.tensor([[1.0, 3.0, 2.0]]),
        make_inputs([Row()]),
        state,
        sampling_state,
        0,
    )
    assert none.packed_LC.shape == (1, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_is_eager() -> None:
    """With Inductor, any number of rows, a vocabulary that needs padding, and the state mutated."""
    vocab = 1229

    def run(
        logits_LV: Tensor, inputs: StepInputs, state: StepState, slots: SamplingState
    ) -> Tensor:
        return sample("full", logits_LV, inputs, state, slots, TOP_LOGPROBS).packed_LC

    compiled = torch.compile(run, fullgraph=True)
    masks = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, (9, 39), np.int32)
    states = [make_state(9, vocab), make_state(9, vocab)]
    for _, slots in states:
        for slot in range(9):
            bias = np.array([4.0], np.float32)
            admit(slots, slot, i32(slot, 5), i32(7, 7), i32(11), bias, i32(20))
        allow(slots, np.arange(9, dtype=np.int32), masks)
    for num in (4, 9):
        rows = [
            Row(
                temperature=[0.0, 1.0, 0.6][i % 3],
                top_k=[0, 40][i % 2],
                top_p=[1.0, 0.9][i // 2 % 2],
                repetition=1.2,
                frequency=0.5,
                flags=i % 8,
                seed=i,
                slot=i,
                target=60 if i == 3 else -1,
            )
            for i in range(num)
        ]
        logits = random_logits(num, vocab, num)
        logits[2, 9] = math.nan
        outs = []
        for function, (state, slots) in zip((run, compiled), states, strict=True):
            inputs = make_inputs(rows)
            for tensor in (logits, *inputs):
                if len(tensor) == num:
                    torch._dynamo.mark_dynamic(tensor, 0)
            outs.append(function(logits, inputs, state, slots))
        floats = [out.view(torch.float32) for out in outs]
        ids = slice(0, 1), slice(2, 2 + TOP_LOGPROBS)
        good = [i for i in range(num) if i != 2]
        for columns in ids:
            assert torch.equal(outs[0][good, columns], outs[1][good, columns])
        torch.testing.assert_close(floats[0][good, 1], floats[1][good, 1])
        torch.testing.assert_close(
            floats[0][:, 2 + TOP_LOGPROBS :], floats[1][:, 2 + TOP_LOGPROBS :]
        )
        assert outs[1][2, 0] == -1
        assert all(map(torch.equal, states[0][1], states[1][1]))
        assert torch.equal(states[0][0].last_token_S, states[1][0].last_token_S)
