"""Every launch that the table gives fits its matrix."""

from __future__ import annotations

import pytest

from models.ops.linear_table import MAX_ROWS, TABLE, Choice, choose_linear

SHAPES = [*TABLE, (576, 576, False), (1536, 576, True), (5120, 17408, False), (40, 100, False)]


@pytest.mark.parametrize(("columns", "inner", "act"), SHAPES)
def test_choices_fit(columns: int, inner: int, act: bool) -> None:
    for rows in range(1, MAX_ROWS + 1):
        choice = choose_linear(rows, columns, inner, act)
        if choice is None:
            continue
        assert choice.fuse_norm in (0, 1, 2)
        if rows == 1:
            assert choice.split == 1, "gemv has no split"
        else:
            assert inner % (choice.split * choice.block_k) == 0, (rows, choice)
            assert choice.block_m >= 16
        for value in (choice.block_n, choice.block_k, choice.block_m):
            assert value & (value - 1) == 0, (rows, choice)


def test_entries_ascend() -> None:
    for entries in TABLE.values():
        limits = [rows for rows, _ in entries]
        assert limits == sorted(set(limits))


def test_more_rows_are_cublas() -> None:
    assert choose_linear(MAX_ROWS + 1, 4096, 1024, False) is None
    assert isinstance(choose_linear(1, 123, 457, True), Choice)
