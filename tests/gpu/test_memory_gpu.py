"""Memory at start on a GPU: what was measured is enough, and running out says what to set."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from tests.e2e.harness import greedy_requests, run, running_engine
from tests.e2e.test_parity import prompts_for
from tests.e2e.tiny_models import hf_config, save_model
from tests.gpu.engines import Runner, gpu_sections, warm_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # of torch's compiler and of transformers
]


def sections_of(runner: Runner, **kv: Any) -> dict[str, dict[str, Any]]:
    sections = gpu_sections([1, 8, 64], [64, 4096], runner)
    sections["kv"] = kv
    return sections


@contextmanager
def only(num_bytes: int) -> Iterator[None]:
    """Let torch take so much more of the device's memory; 0: as much as there is."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    share = (torch.cuda.memory_reserved() + num_bytes) / total if num_bytes else 1.0
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_steps_need_no_more_than_was_measured(tmp_path: Path) -> None:
    save_model(tmp_path, hf_config("qwen3", head_dim=128), dtype=torch.bfloat16)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with running_engine(tmp_path, "cuda", **sections_of("manual", memory_ratio=0.05)) as engine:
        capacity, config = engine.worker.capacity, engine.config
        warm_all(engine)
        run(engine, greedy_requests(prompts_for(1), 8))
        taken = torch.cuda.max_memory_reserved() - before
        total = torch.cuda.mem_get_info()[1]
    pages = capacity.num_pages * capacity.page_bytes
    print(f"\n{capacity}, reserved {taken}, without pages {taken - pages}")
    assert config.kv.num_pages is None and 0.01 * total < pages < 0.05 * total
    assert 0 < taken - pages < capacity.step_bytes


@pytest.mark.parametrize(
    ("most", "kv", "words"),
    [
        (0, {"num_pages": 10**9}, ("kv.num_pages: 1000000001 KV pages do not fit",)),
        (1536 << 20, {}, ("kv.memory_ratio: ", "KV pages do not fit")),
        (128 << 20, {}, ("steps and their graphs", "scheduler.max_step_tokens (now 4096)")),
    ],
)
def test_running_out_says_what_to_set(
    most: int,
    kv: dict[str, Any],
    words: tuple[str, ...],
    tmp_path: Path,
) -> None:
    save_model(tmp_path, hf_config("qwen3", head_dim=128), dtype=torch.bfloat16)
    engine = running_engine(tmp_path, "cuda", **sections_of("plain", **kv))
    with only(most), pytest.raises(ConfigError) as caught, engine:
        pass
    assert all(word in str(caught.value) for word in words), caught.value
