"""Attention's host work without a GPU: what FlashInfer's plan is given, and when it is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.flashinfer_plan import AttentionShape, HostRows, PartPlan, load_module
from engine.scheduler.batch import ScheduledBatch
from engine.step_inputs import Bucket, empty_batch

SHAPE = AttentionShape(4, 2, 64, 16, 8, torch.bfloat16, (0,))
BUCKET = Bucket("extend", 64, 8, 8, 8, 8)


def rows_of(*rows: tuple[int, int]) -> HostRows:
    """(tokens in the cache, tokens of the step) of each row."""
    batch = replace(
        empty_batch(BUCKET),
        row_starts=np.array([start for start, _ in rows], np.int32),
        row_lens=np.array([length for _, length in rows], np.int32),
    )
    return HostRows.of(batch)


class Space:
    """Stands in for PlanSpace: no copies, no events."""

    def __init__(self) -> None:
        self.owner: object = None

    def submit(self, plan: Callable[[Tensor], Any]) -> Any:
        return plan(torch.zeros(1))


class Recorder:
    """Stands in for a module's plan function; keeps the three arrays of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int], list[int]]] = []
        self.info = [1, 2, 3]

    def __call__(self, *args: Any) -> list[int]:
        qo, kv, lens = (tensor.tolist() for tensor in args[3:6])
        self.calls.append((qo, kv, lens))
        return self.info


def part_plan(
    recorder: Recorder, backend: str, chunks: bool, num_rows: int, space: Space
) -> PartPlan:
    part = SimpleNamespace(float_workspace=None, int_workspace=None, plan_info=None)
    tokens = 64 if chunks else num_rows
    return PartPlan(part, recorder, backend, chunks, 0, SHAPE, num_rows, tokens, space)  # type: ignore[arg-type]


def test_leading_rows_of_one_token_decode() -> None:
    assert rows_of((5, 1), (0, 1), (3, 4), (9, 1)).num_decode == 2
    assert rows_of((5, 1), (0, 1)).num_decode == 2
    assert rows_of((5, 2)).num_decode == 0
    empty: ScheduledBatch = empty_batch(BUCKET)
    assert HostRows.of(empty).num_decode == 0


def test_decode_pages() -> None:
    recorder = Recorder()
    plan = part_plan(recorder, "fa2", False, 6, Space())
    plan.plan(rows_of((0, 1), (15, 1), (16, 1), (40, 1)))
    qo, kv, _ = recorder.calls[0]
    assert qo == [0, 1, 2, 3, 4, 5, 6]
    # 1, 16, 17 and 41 tokens; the two rows of padding have a page of their own.
    assert kv == [0, 1, 2, 4, 7, 8, 9]


def test_fa2_is_asked_only_when_a_row_reaches_a_page() -> None:
    recorder, space = Recorder(), Space()
    plan = part_plan(recorder, "fa2", False, 2, space)
    for start in range(10, 34):
        plan.plan(rows_of((start, 1), (start + 100, 1)))
    # Row 0 reaches its pages at 16 and 32, row 1 at 112 and 128.
    assert len(recorder.calls) == 5
    part_plan(Recorder(), "fa2", False, 3, space).plan(rows_of((1, 1)))
    plan.plan(rows_of((33, 1), (133, 1)))
    assert len(recorder.calls) == 6, "another bucket's plan took the place of ours"


def test_fa3_is_asked_every_time() -> None:
    recorder = Recorder()
    plan = part_plan(recorder, "fa3", False, 2, Space())
    plan.plan(rows_of((10, 1)))
    plan.plan(rows_of((11, 1)))
    assert [lens for _, _, lens in recorder.calls] == [[11, 1], [12, 1]]


@pytest.mark.parametrize(
    ("backend", "qo"), [("fa2", [0, 0, 2, 7, 27, 27, 27]), ("fa3", [2, 2, 2, 7, 27, 27, 27])]
)
def test_chunks_leave_decode_rows_out(backend: str, qo: list[int]) -> None:
    recorder = Recorder()
    plan = part_plan(recorder, backend, True, 6, Space())
    plan.plan(rows_of((5, 1), (200, 1), (12, 5), (0, 20)))
    assert recorder.calls[0] == (qo, [0, 0, 0, 2, 4, 4, 4], [0, 0, 17, 20, 0, 0])
    plan.plan(rows_of((0, 3)))
    assert recorder.calls[1] == ([0, 3, 3, 3, 3, 3, 3], [0, 1, 1, 1, 1, 1, 1], [3, 0, 0, 0, 0, 0])


def test_a_plan_that_no_longer_fits_its_graph_is_a_bug() -> None:
    recorder = Recorder()
    plan = part_plan(recorder, "fa3", False, 1, Space())
    plan.plan(rows_of((1, 1)))
    recorder.info = [1, 2, 4]
    with pytest.raises(AssertionError, match="captured"):
        plan.plan(rows_of((2, 1)))


class _Keeper:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path | None:
        path = self.folder / name
        return path if path.exists() else None

    def put(self, name: str, data: bytes) -> bool:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_bytes(data)
        return True


def test_a_built_module_is_kept_and_loaded_without_flashinfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, loaded = tmp_path / "built.so", []
    built.write_bytes(b"code")
    tvm_ffi = SimpleNamespace(load_module=lambda path: loaded.append(Path(path).read_bytes()))
    monkeypatch.setitem(sys.modules, "tvm_ffi", tvm_ffi)
    spec = SimpleNamespace(
        name="m", build_and_load=lambda: "module", get_library_path=lambda: built
    )
    keeper: Any = _Keeper(tmp_path)
    assert load_module("m", lambda: spec, keeper) == "module" and not loaded

    def never() -> Any:
        raise AssertionError("FlashInfer was asked")

    load_module("m", never, keeper)
    assert loaded == [b"code"]
    assert load_module("m", lambda: spec, None) == "module"
