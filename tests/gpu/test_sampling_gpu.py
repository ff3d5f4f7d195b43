"""Sampling on a GPU: the Triton kernel against the CPU op, the graph against eager, the cost.

Run with -s to see the times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, library

from bench.gpu_timing import elapsed_ms
from models.inputs import SamplingState, StepInputs, StepState
from models.ops.sampling import filter_threshold
from models.sampling import FLAG_COUNT, admit, sample
from tests.models.sampling_reference import (
    Row,
    assert_distributed,
    make_inputs,
    make_state,
    random_logits,
    reference_probs,
)

pytestmark = pytest.mark.gpu

TEMPERATURES = (1.0, 0.6, 0.0, 1e-5, 2.0, 1e3)
TOP_KS = (0, 1, 20, 50, 300, 2000, 1 << 30)
TOP_PS = (1.0, 0.95, 0.5, 0.1, 0.999)
MIN_PS = (0.0, 0.0, 0.05, 1.0)


def random_rows(num: int, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        Row(
            temperature=float(rng.choice(TEMPERATURES)),
            top_k=int(rng.choice(TOP_KS)),
            top_p=float(rng.choice(TOP_PS)),
            min_p=float(rng.choice(MIN_PS)),
            seed=int(rng.integers(1 << 62)),
            position=i,
        )
        for i in range(num)
    ]


def threshold(logits_LV: Tensor, inputs: StepInputs) -> Tensor:
    floats, ints = inputs.sampling_floats_LF, inputs.sampling_ints_LI
    out: Tensor = filter_threshold(logits_LV, floats[:, 0], ints[:, 0], floats[:, 1], floats[:, 2])
    return out


def graph_microseconds(function: Callable[[], object], repeats: int = 100) -> float:
    """Time of one call in a replayed graph, on the device: the least, for others may be there."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            function()
    graph.replay()
    return min(elapsed_ms(graph.replay) for _ in range(repeats)) * 1000 / 10


@pytest.mark.parametrize("vocab", [257, 5003, 49153, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_threshold_keeps_what_the_cpu_keeps(vocab: int, dtype: torch.dtype, scale: float) -> None:
    num = 64
    logits = random_logits(num, vocab, int(100 * scale) + vocab, scale).to(dtype)
    logits[0] = -math.inf
    logits[1, 10:] = -math.inf
    logits[2, 3] = math.inf
    logits[3] = logits[3].round()
    rows = random_rows(num, vocab)
    expected = threshold(logits, make_inputs(rows))
    got = threshold(logits.cuda(), make_inputs(rows, "cuda")).cpu()
    kept = (logits.float() >= got.unsqueeze(1)).sum(1)
    wanted = (logits.float() >= expected.unsqueeze(1)).sum(1)
    # Summation in another order moves the edge of a flat nucleus by a few of its thousands.
    slack = torch.where(wanted > 1000, wanted // 500, 0)
    assert ((kept - wanted).abs() <= slack).all(), [
        (rows[i], int(kept[i]), int(wanted[i]))
        for i in range(num)
        if abs(int(kept[i] - wanted[i])) > slack[i]
    ]


def test_opcheck() -> None:
    inputs = make_inputs(random_rows(5, 1), "cuda")
    floats, ints = inputs.sampling_floats_LF, inputs.sampling_ints_LI
    logits = random_logits(5, 1000).cuda()
    arguments = (logits, floats[:, 0], ints[:, 0], floats[:, 1], floats[:, 2])
    library.opcheck(filter_threshold, arguments)


@pytest.mark.parametrize("vocab", [257, 49153, 128256])
def test_gpu_draws_what_the_cpu_draws(vocab: int) -> None:
    num = 256
    logits = random_logits(num, vocab)
    logits[5, 1] = math.nan
    rows = random_rows(num, vocab)
    ids = []
    for device in ("cpu", "cuda"):
        state, _ = make_state(1, vocab, device)
        out = sample("plain", logits.to(device), make_inputs(rows, device), state, None, 0)
        ids.append(out.packed_LC[:, 0].cpu())
    assert ids[1][5] == -1
    # Rounding decides between scores that are equal up to it: rare.
    assert (ids[0] != ids[1]).sum() <= 2
    greedy = torch.tensor([row.temperature == 0 for row in rows])
    assert torch.equal(ids[0][greedy], ids[1][greedy])


def test_draws_follow_the_distribution() -> None:
    vocab, num = 40, 20_000
    logits = random_logits(1, vocab, 1, 1.5)
    row = Row(temperature=1.7, top_k=20, top_p=0.95, min_p=0.05)
    inputs = make_inputs([replace(row, seed=i) for i in range(num)], "cuda")
    state, _ = make_state(1, vocab, "cuda")
    big = logits.cuda().expand(num, vocab).contiguous()
    out = sample("plain", big, inputs, state, None, 0)
    assert_distributed(
        out.packed_LC[:, 0].tolist(), reference_probs(logits[0].double().numpy(), row)
    )


def test_compiled_full_counts_in_place_over_replays() -> None:
    """Under reduce-overhead: ids equal to eager's, and the counts equal to the ids."""
    vocab, num, steps = 5003, 4, 6
    state, slots = make_state(num, vocab, "cuda")
    eager_state, eager_slots = make_state(num, vocab, "cuda")
    ids32 = np.array([3, 4], np.int32)
    for admitted in (slots, eager_slots):
        for slot in range(num):
            admit(admitted, slot, ids32, ids32, ids32, np.ones(2, np.float32), ids32)
    for tensor in (*state, *slots):
        torch._dynamo.mark_static_address(tensor)

    def run(
        logits_LV: Tensor, inputs: StepInputs, state: StepState, slots: SamplingState
    ) -> Tensor:
        return sample("full", logits_LV, inputs, state, slots, 5).packed_LC

    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    counted = torch.zeros(num, vocab, dtype=torch.int32)
    counted[:, ids32] = 1
    for step in range(steps):
        logits = random_logits(num, vocab, step).cuda()
        rows = [
            Row(1.0, top_p=0.9, frequency=0.5, seed=i, position=step, slot=i, flags=FLAG_COUNT)
            for i in range(num)
        ]
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(logits, make_inputs(rows, "cuda"), state, slots).clone()
        want = run(logits, make_inputs(rows, "cuda"), eager_state, eager_slots)
        assert torch.equal(got[:, 0], want[:, 0])
        torch.testing.assert_close(got[:, 1].view(torch.float32), want[:, 1].view(torch.float32))
        counted[torch.arange(num), got[:, 0].long().cpu()] += 1
    assert torch.equal(slots.counts_SV[:num].cpu(), counted)
    assert torch.equal(state.last_token_S[:num], got[:, 0])


@pytest.mark.parametrize("num", [1, 64, 256])
def test_what_it_costs(num: int) -> None:
    """Ceilings are several times what an H200 should need; they catch a path gone wrong."""
    vocab = 151936
    logits = random_logits(1, vocab, 0, 4.0).cuda().repeat(num, 1)
    state, _ = make_state(1, vocab, "cuda")

    def plain(logits_LV: Tensor, inputs: StepInputs, state: StepState) -> Tensor:
        return sample("plain", logits_LV, inputs, state, None, 0).packed_LC

    compiled = torch.compile(plain, fullgraph=True)
    cases = {
        "off": (Row(0.7), 15),
        "top_k 20, top_p 0.95": (Row(0.6, top_k=20, top_p=0.95), 300),
        "top_p 0.9": (Row(1.0, top_p=0.9), 400),
        "top_p 0.95, flat": (Row(20.0, top_p=0.95), 3000),
        "min_p 0.05": (Row(1.0, min_p=0.05), 200),
    }
    for name, (row, ceiling) in cases.items():
        inputs = make_inputs([replace(row, seed=i) for i in range(num)], "cuda")
        op = graph_microseconds(partial(threshold, logits, inputs))
        whole = graph_microseconds(partial(compiled, logits, inputs, state))
        print(f"{num} rows, {name}: threshold {op:.1f} us, plain sample {whole:.1f} us")
        assert op < ceiling * max(1, num // 64)
