"""What a person sees while the engine starts or a batch runs: bars on a terminal, lines elsewhere.

Knows phases and counts, not what they stand for. Writes to standard error only, so that standard
output holds nothing but results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Literal, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

Mode = Literal["auto", "bar", "lines", "none"]
_LINE_EVERY_S = 5.0


class ProgressDisplay:
    """Progress of several phases, each `done` of `total`; leaving the context ends the bars.

    Args:
        mode: auto: a bar where `stream` is a terminal, else lines.
        stream: where to write; default: standard error.
    """

    def __init__(self, mode: Mode = "auto", stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        terminal = self._stream.isatty()
        self._mode = mode if mode != "auto" else "bar" if terminal else "lines"
        # `bar` is kept where the stream is no terminal, for those who know better (a CI's log).
        self._console = Console(file=self._stream, force_terminal=terminal or None)
        self._bars = Progress(
            TextColumn("{task.description:>10}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._lines: dict[str, _PhaseLines] = {}

    def __enter__(self) -> Self:
        if self._mode == "bar":
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the bars. More than once is allowed."""
        if self._bars.live.is_started:
            self._bars.stop()

    def update(self, phase: str, done: int, total: int, text: str = "") -> None:
        """Show that `phase` has come to `done` of `total` (0: unknown), with a few words."""
        if self._mode == "bar":
            self._update_bar(phase, done, total, text)
        elif self._mode == "lines":
            lines = self._lines.setdefault(phase, _PhaseLines(phase))
            line = lines.line(done, total, text, time.monotonic())
            if line is not None:
                print(line, file=self._stream, flush=True)

    def _update_bar(self, phase: str, done: int, total: int, text: str) -> None:
        bound = total or max(done, 1)
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=bound, text=text)
        self._bars.update(self._tasks[phase], completed=done, total=bound, text=text)

    def table(self, title: str, rows: Mapping[str, str]) -> None:
        """Print names and values, such as what "auto" became."""
        if self._mode == "none" or not rows:
            return
        if self._mode == "lines":
            for name, value in rows.items():
                print(f"{name} = {value}", file=self._stream, flush=True)
            return
        table = Table("key", "value", title=title, title_justify="left", box=None)
        for name, value in rows.items():
            table.add_row(name, Text(value))
        self._console.print(table)


class _PhaseLines:
    """Which updates of one phase deserve a line: the first, the last, and one every few seconds."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._begin = 0.0
        self._next = 0.0
        self._last_line = ""

    def line(self, done: int, total: int, text: str, now: float) -> str | None:
        """The line to print, or None."""
        first = self._begin == 0.0
        if first:
            self._begin = now
        if not first and done != total and now < self._next:
            return None
        self._next = now + _LINE_EVERY_S
        count = f" {done}/{total}" if total else f" {done}" if done else ""
        words = f"{self._phase}{count} {text}".rstrip()
        if words == self._last_line:
            return None
        self._last_line = words
        return f"[{now - self._begin:6.1f} s] {words}"
