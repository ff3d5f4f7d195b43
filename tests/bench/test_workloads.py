"""Workloads repeat from their seeds and share what they should."""

from __future__ import annotations

import json
from pathlib import Path

from bench.workloads import Job, mini_sglang, poisson, read_trace, spread, uniform


def test_mini_sglangs_workload_has_its_known_size() -> None:
    jobs = mini_sglang(seed=0)
    assert len(jobs) == 256
    assert sum(len(job.prompt_ids) for job in jobs) == 142_827
    assert sum(job.num_output for job in jobs) == 133_966
    assert mini_sglang(7) == mini_sglang(7) != jobs


def test_sizes() -> None:
    assert [(len(j.prompt_ids), j.num_output) for j in uniform(3, 5, 7)] == [(5, 7)] * 3
    jobs = spread(200, (2, 4), (1, 3), num_ids=10)
    assert {len(job.prompt_ids) for job in jobs} == {2, 3, 4}
    assert {job.num_output for job in jobs} == {1, 2, 3}
    assert max(max(job.prompt_ids) for job in jobs) == 9


def test_poisson_arrivals_keep_order_and_rate() -> None:
    jobs = poisson(uniform(2000, 1, 1), rate=50.0)
    times = [job.arrival_s for job in jobs]
    assert times == sorted(times) and 36 < times[-1] < 44
    assert poisson(uniform(5, 1, 1), 50.0) == poisson(uniform(5, 1, 1), 50.0)


def write_trace(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    return path


def line(when: float, num_input: int, num_output: int, hash_ids: list[int]) -> dict[str, object]:
    return {
        "timestamp": when,
        "input_length": num_input,
        "output_length": num_output,
        "hash_ids": hash_ids,
    }


def test_a_trace_shares_the_prefixes_that_its_hashes_share(tmp_path: Path) -> None:
    lines = [line(10, 40, 5, [1, 2, 3]), line(12, 35, 0, [1, 2, 4]), line(14, 3, 9, [])]
    jobs = read_trace(write_trace(tmp_path / "t.jsonl", lines), speed=2.0)
    assert [job.arrival_s for job in jobs] == [0, 1, 2]
    assert [len(job.prompt_ids) for job in jobs] == [40, 35, 3]
    assert [job.num_output for job in jobs] == [5, 1, 9]
    assert jobs[0].prompt_ids[:32] == jobs[1].prompt_ids[:32]
    assert jobs[0].prompt_ids[32:35] != jobs[1].prompt_ids[32:35]


def test_a_trace_can_be_cut(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", [line(i, 10 * i + 1, 1, [i]) for i in range(9)])
    assert len(read_trace(path, limit=4)) == 4
    assert [len(job.prompt_ids) for job in read_trace(path, longest=22)] == [1, 11, 21]
    assert read_trace(path, limit=0) == []
    assert all(isinstance(job, Job) for job in read_trace(path, block_size=1))
