"""KV pages from injected numbers, and what is said when memory runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig, validate
from engine.errors import ConfigError
from engine.memory import explained, num_kv_pages
from engine.resolve import ResolvedConfig, resolve
from tests.e2e.harness import running_engine
from tests.e2e.tiny_models import hf_config, save_model

GIB = 1 << 30


def resolved(device: str = "cuda", **kv: Any) -> ResolvedConfig:
    config = validate(EngineConfig, {"model": {"path": "m"}, "kv": kv}, "test", {})
    cuda = device == "cuda"
    return resolve(
        config,
        max_position=4096,
        checkpoint_dtype="bfloat16",
        cuda=cuda,
        capability=(9, 0) if cuda else None,
    )


def test_a_gpu_gives_the_ratio_of_what_steps_leave() -> None:
    config = resolved(memory_ratio=0.5)
    assert num_kv_pages(config, GIB, free=[100 * GIB, 101 * GIB], step=20 * GIB) == 40
    assert num_kv_pages(config, GIB, free=[100 * GIB]) == 50


def test_a_cpu_gives_what_it_is_told() -> None:
    assert num_kv_pages(resolved("cpu", bytes="1 GiB"), 1 << 20) == 1024


def test_a_number_of_pages_wins_and_the_dummy_comes_on_top() -> None:
    for device in ("cpu", "cuda"):
        assert num_kv_pages(resolved(device, num_pages=7), GIB) == 8


@pytest.mark.parametrize(
    ("device", "kv", "free", "step", "words"),
    [
        ("cpu", {"bytes": "1 MiB"}, 0, 0, ("kv.bytes", "0.00 GiB")),
        ("cuda", {}, 3 * GIB, 2 * GIB, ("kv.memory_ratio", "3.00 GiB", "2.00 GiB")),
        # Steps alone are more than there is.
        ("cuda", {}, 3 * GIB, 5 * GIB, ("kv: 0 pages", "max_step_tokens (now 8192)")),
    ],
)
def test_no_room_for_a_page(
    device: str, kv: dict[str, Any], free: int, step: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        num_kv_pages(resolved(device, **kv), GIB, [free], step)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("part", "kv", "words"),
    [
        ("weights", {}, ("weights", "parallel.tp")),
        ("state", {}, ("scheduler.max_running",)),
        ("kv", {"num_pages": 9}, ("kv.num_pages", "77 KV pages")),
        ("kv", {}, ("kv.memory_ratio",)),
        ("steps", {}, ("kv.memory_ratio", "scheduler.max_step_tokens (now 8192)")),
    ],
)
def test_out_of_memory_names_the_part_and_the_key(
    part: str, kv: dict[str, Any], words: tuple[str, ...]
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    with (
        pytest.raises(ConfigError, match="^out of memory: ") as caught,
        explained(part, resolved(**kv), 77),
    ):
        raise error
    assert all(word in str(caught.value) for word in words), caught.value


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="^shapes differ$"), explained("steps", resolved()):
        raise RuntimeError("shapes differ")


def test_a_start_that_asks_for_too_much(tmp_path: Path) -> None:
    save_model(tmp_path, hf_config("llama"))
    words = r"out of memory: kv\.bytes: \d+ KV pages do not fit"
    with (
        pytest.raises(ConfigError, match=words),
        running_engine(tmp_path, kv={"bytes": "4096 TiB"}),
    ):
        pass
