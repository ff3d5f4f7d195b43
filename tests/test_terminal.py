"""The progress display, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from engine import terminal
from engine.terminal import ProgressDisplay


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(terminal, "time", clock)
    return clock


def test_lines_are_few(clock: Clock) -> None:
    stream = io.StringIO()
    with ProgressDisplay("auto", stream) as display:
        for done in range(101):
            clock.now = 100 + done / 10
            display.update("weights", done, 100, f"layer {done}")
        display.update("compile", 0, 0, "decode")
        display.update("compile", 0, 0, "decode")
        clock.now += 9
        display.update("compile", 0, 0, "decode")
        display.table("settings", {"device": "cpu"})
    assert stream.getvalue().splitlines() == [
        "[   0.0 s] weights 0/100 layer 0",
        "[   5.0 s] weights 50/100 layer 50",
        "[  10.0 s] weights 100/100 layer 100",
        "[   0.0 s] compile decode",
        "device = cpu",
    ]


def test_a_bar_on_a_terminal(clock: Clock) -> None:
    stream = FakeTerminal()
    with ProgressDisplay("auto", stream) as display:
        display.update("weights", 1, 4)
        display.update("weights", 4, 4)
        display.update("compile", 2, 0, "bucket [8]")
        display.table("settings", {"device": "cpu [x]"})
    text = stream.getvalue()
    assert "4/4" in text and "━" in text and "bucket [8]" in text and "cpu [x]" in text


@pytest.mark.parametrize("mode", ["none", "lines"])
def test_modes_win_over_the_terminal(clock: Clock, mode: terminal.Mode) -> None:
    stream = FakeTerminal()
    with ProgressDisplay(mode, stream) as display:
        display.update("weights", 1, 2)
        display.table("settings", {"a": "b"})
    assert stream.getvalue() == {
        "none": "",
        "lines": "[   0.0 s] weights 1/2\na = b\n",
    }[mode]  # fmt: skip
