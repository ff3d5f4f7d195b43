"""The host's share of an offline run: the made-up device's clock, and what of it is told."""

from __future__ import annotations

import time

import pytest

from bench.offline_host import make_llm, measure
from bench.workloads import uniform


def test_steps_follow_each_other_on_a_clock_that_nobody_waits_for() -> None:
    llm, device = make_llm()
    begin = time.perf_counter()
    times = measure(llm, device, uniform(250, 100, 600))
    # A step of 250 rows takes 1.25 ms and 27 ns a token of their contexts.
    steps = 599 * (1.25 + 250 * 27e-6 * (100 + 300))
    running = times["total"] - times["before"] - times["after"]
    assert running - times["between"] == pytest.approx(steps, rel=0.1)
    assert time.perf_counter() - begin < times["total"] / 1e3
    assert 0 < times["before"] < 200 and 0 < times["after"] < 200
    assert times["between"] < times["total"] / 10
    assert 0 < times["decode_step"] < times["extend_step_most"]
