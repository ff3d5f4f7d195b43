"""LM head and draw in one: the same ids as from logits, and what a trace is told of the operator.

The kernels for Hopper are tested in tests/gpu/test_head_draw_gpu.py.
"""

from __future__ import annotations

import math

import torch
from torch import library

from models.head_draw import head_draw
from models.ops.lm_head import lm_head
from models.sampling import sample, sample_hidden
from tests.models.sampling_reference import Row, make_inputs, make_state

HIDDEN, VOCAB = 32, 1229


def test_the_ids_are_those_of_logits() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(12, HIDDEN), torch.randn(VOCAB, HIDDEN)
    x[3, 5], x[4, 6] = math.nan, math.inf
    rows = [
        Row(
            temperature=[0.0, 0.7, 1.5][i % 3],
            top_k=[0, 8][i % 2],
            top_p=[1.0, 0.9, 1.0, 0.5][i % 4],
            min_p=[0.0, 0.0, 0.1][i % 3],
            seed=i,
            position=i,
            target=[-1, -1, -2, 33][i % 4],
            slot=i,
        )
        for i in range(12)
    ]
    inputs = make_inputs(rows)
    state, _ = make_state(12, VOCAB)
    expected = sample("plain", lm_head(x, weight), inputs, state, None, 0).packed_LC
    ours, _ = make_state(12, VOCAB)
    got = sample_hidden(x, weight, inputs, ours).packed_LC
    assert torch.equal(got, expected)
    assert torch.equal(ours.last_token_S, state.last_token_S)
    assert got[3:5].flatten().tolist() == [-1, -1]


def test_operator() -> None:
    inputs = make_inputs([Row(temperature=float(i), top_k=4 * i, seed=i) for i in range(3)])
    settings = (inputs.sampling_floats_LF, inputs.sampling_ints_LI, inputs.logit_positions_L)
    x, weight = torch.randn(3, HIDDEN).bfloat16(), torch.randn(VOCAB, HIDDEN).bfloat16()
    library.opcheck(head_draw, (x, weight, *settings))
