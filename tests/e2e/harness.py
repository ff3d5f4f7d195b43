"""An engine in this process, driven by token ids: what the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from engine.config import load_config
from engine.request import EngineRequest, StepOutput
from engine.startup import Engine, start_engine


def write_config(folder: Path, device: str = "cpu", /, **sections: dict[str, Any]) -> Path:
    """A file for the checkpoint in `folder`, eager unless told otherwise; keyword arguments are
    YAML sections.
    """
    settings: dict[str, Any] = {
        "model": {"path": str(folder), "max_model_len": 256, "dtype": "float32"},
        "device": device,
        "compile": {"backend": "eager", "threads": 1},
        "kv": {"bytes": "16 MiB"},
        "scheduler": {"max_running": 8},
        "log": {"progress": "none"},
    }
    for section, values in sections.items():
        settings[section] = {**settings.get(section, {}), **values}
    file = folder / "fullgraph_test.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@contextmanager
def running_engine(
    folder: Path, device: str = "cpu", /, **sections: dict[str, Any]
) -> Iterator[Engine]:
    """An engine of such a file."""
    file = write_config(folder, device, **sections)
    engine = start_engine(load_config(file), lambda *_: None)
    try:
        yield engine
    finally:
        engine.close()


def run(
    engine: Engine,
    requests: Sequence[EngineRequest],
    *,
    waves: int = 1,
    check: bool = True,
    watch: Callable[[StepOutput], object] = lambda _: None,
) -> dict[int, list[int]]:
    """Ids generated per request.

    Requests arrive in `waves`, a few steps apart, so that phases mix. `watch` sees every output.
    """
    core = engine.core
    outputs: dict[int, list[int]] = {request.request_id: [] for request in requests}
    open_ids = set(outputs)
    queue = [list(requests[i::waves]) for i in range(waves)]
    steps = 0
    while open_ids:
        if queue and steps % 3 == 0:
            failures = core.add(queue.pop(0))
            assert not failures, failures
        output, failed = core.step()
        assert not failed, failed
        steps += 1
        assert steps < 100_000, "the engine does not come to an end"
        if output is None:
            continue
        watch(output)
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            outputs[request_id].append(token_id)
        open_ids -= {finished.request_id for finished in output.finished}
        if check:
            core.scheduler.check_integrity()
    while core.has_work:
        core.step()
    core.scheduler.check_integrity()
    return outputs


def greedy_requests(
    prompts: Sequence[Sequence[int]], max_tokens: int, first_id: int = 0
) -> list[EngineRequest]:
    """Greedy requests that never stop early."""
    return [
        EngineRequest(request_id=first_id + i, prompt_ids=list(prompt), max_tokens=max_tokens)
        for i, prompt in enumerate(prompts)
    ]
