"""A batch comes out of the wire as it went in."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bench.decode_step import decode_batch
from engine.batch_wire import decode, encode
from engine.scheduler.batch import SlotAdmission, SlotMask


def assert_same(a: Any, b: Any) -> None:
    for field in dataclasses.fields(a):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if isinstance(one, np.ndarray):
            assert other.dtype == one.dtype and other.flags.writeable, field.name
            np.testing.assert_array_equal(one, other, field.name)
        elif field.name in ("admissions", "masks"):
            for x, y in zip(one, other, strict=True):
                assert_same(x, y)
        else:
            assert one == other, field.name


def test_round_trip() -> None:
    ids, floats = np.arange(3, dtype=np.int32), np.array([0.5, -np.inf], np.float32)
    admission = SlotAdmission(7, ids, ids[:0], ids[:2], floats, ids[1:])
    parts: dict[str, Any] = {
        "admissions": (admission,),
        "masks": (SlotMask(3, ids), SlotMask(0, -ids)),
    }
    batch = dataclasses.replace(decode_batch(5, 100, 16), variant="full", step=2**40, **parts)
    assert_same(batch, decode(encode(batch)))


def test_an_empty_batch_keeps_its_columns() -> None:
    batch = decode_batch(1, 16, 16)
    empty: dict[str, Any] = {
        name: getattr(batch, name)[:0] for name in ("sampling_floats", "sampling_ints")
    }
    without = dataclasses.replace(batch, **empty)
    assert decode(encode(without)).sampling_floats.shape == without.sampling_floats.shape
