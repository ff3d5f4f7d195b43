"""Signals and sudden death, with a real engine and streams open."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.live_server import live_process
from tests.server.processes import children_of, gone
from tests.server.test_process import open_streams


def test_sigterm_drains(tmp_path: Path) -> None:
    with live_process(tmp_path) as (target, process):
        children = children_of(process.pid)

        async def terminate(http: httpx.AsyncClient) -> None:
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            assert (await http.get("/health")).status_code == 503

        texts = asyncio.run(open_streams(target.url, 300, terminate))
        for text in texts:
            assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text
        assert process.wait(timeout=30) == 0
        assert all(gone(child) for child in children)


@pytest.mark.parametrize("count", [8])
def test_killed_engine(tmp_path: Path, count: int) -> None:
    with live_process(tmp_path) as (target, process):
        (engine,) = children_of(process.pid)

        async def kill(http: httpx.AsyncClient) -> None:
            os.kill(engine, signal.SIGKILL)

        texts: list[Any] = asyncio.run(open_streams(target.url, 1500, kill, count))
        for text in texts:
            assert '"code":"engine_dead"' in text and "[DONE]" not in text
        assert process.wait(timeout=30) == 1
        assert gone(engine)
