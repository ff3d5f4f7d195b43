"""What is packed into a bucket's buffer is viewed again, and padding is as documented."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from engine.scheduler.batch import NUM_FLOATS, NUM_INTS, ScheduledBatch
from engine.step_inputs import Bucket, empty_batch, pack, views

BUCKET = Bucket("extend", 16, 4, 4, 8, dummy_slot=9)


def make_batch(seed: int) -> ScheduledBatch:
    rng = np.random.default_rng(seed)

    def ints(n: int) -> np.ndarray:
        return rng.integers(0, 1000, n).astype(np.int32)

    return dataclasses.replace(
        empty_batch(BUCKET),
        token_ids=ints(7),
        positions=ints(7),
        token_slots=ints(7),
        kv_slots=ints(7),
        row_slots=ints(3),
        row_starts=ints(3),
        row_lens=np.array([1, 2, 4], np.int32),
        logit_tokens=ints(2),
        logit_slots=ints(2),
        logit_targets=ints(2),
        logit_positions=ints(2),
        sampling_floats=rng.random((2, NUM_FLOATS)).astype(np.float32),
        sampling_ints=ints(2 * NUM_INTS).reshape(2, NUM_INTS),
        update_slots=ints(5),
        update_columns=ints(5),
        update_pages=ints(5),
    )


def test_round_trip_and_padding() -> None:
    buffer = torch.full((BUCKET.buffer_length,), 77, dtype=torch.int32)
    batch = make_batch(0)
    pack(batch, BUCKET, buffer.numpy())
    inputs = views(buffer, BUCKET)
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if name == "row_offsets_R":
            continue
        expected = getattr(batch, name.rsplit("_", 1)[0])
        assert (tensor.numpy()[: len(expected)] == expected).all(), name
    assert inputs.row_offsets_R[:3].tolist() == [0, 1, 3]
    assert inputs.token_slots_T[7:].unique().tolist() == [9]
    assert inputs.kv_slots_T[7:].unique().tolist() == [-1]
    assert inputs.row_slots_R[3:].tolist() == [9]
    assert inputs.row_lens_R[3:].tolist() == [0]
    assert inputs.logit_targets_L[2:].unique().tolist() == [-2]
    assert inputs.sampling_floats_LF[2:].tolist() == [[0, 1, 0, 1, 0, 0]] * 2
    assert inputs.update_slots_U[5:].unique().tolist() == [9]
    assert (inputs.update_pages_U[5:] == 0).all()


def test_a_full_bucket_has_no_padding_and_fields_do_not_overlap() -> None:
    bucket = Bucket("extend", 7, 3, 2, 5, dummy_slot=9)
    buffer = torch.zeros(bucket.buffer_length, dtype=torch.int32)
    first, second = make_batch(1), make_batch(2)
    pack(first, bucket, buffer.numpy())
    pack(second, bucket, buffer.numpy())
    inputs = views(buffer, bucket)
    assert (inputs.token_ids_T.numpy() == second.token_ids).all()
    assert (inputs.update_pages_U.numpy() == second.update_pages).all()
    assert (inputs.sampling_floats_LF.numpy() == second.sampling_floats).all()


def resized(field: str, size: int) -> Bucket:
    change: dict[str, Any] = {field: size}
    return dataclasses.replace(BUCKET, **change)


@pytest.mark.parametrize("field", ["num_tokens", "num_rows", "num_logit_rows", "num_updates"])
def test_a_batch_one_larger_than_the_bucket_does_not_fit(field: str) -> None:
    used = {"num_tokens": 7, "num_rows": 3, "num_logit_rows": 2, "num_updates": 5}
    size = used[field]
    exact = resized(field, size)
    small = resized(field, size - 1)
    assert exact.fits(make_batch(0))
    assert not small.fits(make_batch(0))
    with pytest.raises(AssertionError):
        pack(make_batch(0), small, np.zeros(999, np.int32))
