"""What "auto" becomes, on which machine, for which model."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine.config import EngineConfig, validate
from engine.errors import ConfigError
from engine.limits import scheduler_limits
from engine.machine import Machine
from engine.resolve import (
    ResolvedConfig,
    chunk_kernel,
    decode_buckets,
    extend_buckets,
    resolve,
    settings_of,
)
from engine.scheduler.limits import TokenBucket

MACHINE = Machine(cores=6, compiler="g++")


def config_with(**sections: Any) -> EngineConfig:
    return validate(EngineConfig, {"model": {"path": "x"}} | sections, "test", {})


def resolved(config: EngineConfig, **facts: Any) -> ResolvedConfig:
    defaults: dict[str, Any] = {
        "max_position": 2048,
        "checkpoint_dtype": "bfloat16",
        "cuda": False,
        "machine": MACHINE,
    }
    return resolve(config, **(defaults | facts))


def test_decode_buckets() -> None:
    assert len(decode_buckets(256)) == 35
    assert decode_buckets(256)[:7] == (1, 2, 4, 8, 16, 24, 32)
    assert decode_buckets(1) == (1,)
    assert decode_buckets(3) == (1, 2, 3)
    assert decode_buckets(8) == (1, 2, 4, 8)
    assert decode_buckets(20) == (1, 2, 4, 8, 16, 20)


def test_extend_buckets() -> None:
    assert extend_buckets(4000) == (64, 128, 256, 512, 1024, 2048, 3072, 4000)
    assert extend_buckets(16384)[4:8] == (1024, 2048, 4096, 6144)
    assert extend_buckets(64) == (64,)
    assert extend_buckets(7) == (7,)
    assert extend_buckets(100) == (64, 100)


def test_short_chunks_split_keys() -> None:
    assert [chunk_kernel("mixed", n, 1024) for n in (64, 512, 1024)] == ["fa2", "fa2", "fa3"]
    assert [chunk_kernel("mixed", n, 256) for n in (64, 128, 256)] == ["fa2", "fa2", "fa3"]
    assert chunk_kernel("fa3", 64, 1024) == "fa3" and chunk_kernel("fa2", 8192, 1024) == "fa2"


def test_what_a_step_costs() -> None:
    config = resolved(config_with(), cuda=True, capability=(9, 0), context_unit=3840)
    limits = scheduler_limits(config, 100, 32000, 0.5, 1024)
    small, large = limits.buckets[3], limits.buckets[-1]
    assert (small.tokens, small.wave, large.tokens, large.wave) == (512, 1, 8192, 1024)
    assert 1500 < small.context_unit < large.context_unit / 1.5 < 3000
    assert 45 < limits.decode_unit < 60
    limits = scheduler_limits(resolved(config_with(), context_unit=3840), 100, 32000, 0.5, 1)
    assert limits.buckets[-1] == TokenBucket(512, 3840) and limits.decode_unit == 3840


def test_buckets_increase_to_the_limit() -> None:
    for largest in range(1, 300):
        for buckets in (decode_buckets(largest), extend_buckets(largest)):
            assert list(buckets) == sorted(set(buckets)) and buckets[-1] == largest


def test_cpu() -> None:
    config = resolved(config_with())
    assert (config.device, config.model.dtype, config.model.max_model_len) == (
        "cpu",
        "float32",
        2048,
    )
    assert (config.attention.decode, config.attention.extend) == ("reference", "reference")
    assert (config.scheduler.max_running, config.scheduler.max_step_tokens) == (16, 512)
    assert (config.compile.backend, config.compile.threads) == ("inductor", 6)
    assert config.compile.skinny_gemm is False


def test_gpu() -> None:
    config = resolved(config_with(), cuda=True, capability=(9, 0))
    assert (config.device, config.model.dtype) == ("cuda", "bfloat16")
    assert (config.attention.decode, config.attention.extend) == ("triton", "mixed")
    assert (config.scheduler.max_running, config.scheduler.max_step_tokens) == (256, 8192)
    assert config.scheduler.step_budget == 6144
    assert resolved(config_with(), cuda=True, capability=(8, 0)).attention.extend == "fa2"


def test_nothing_stays_auto_but_the_display() -> None:
    text = resolved(config_with()).model_dump_json()
    assert text.count('"auto"') == 2  # log.progress, and model.load, which names a file format
    assert ResolvedConfig.model_validate_json(text) == resolved(config_with())


def test_what_is_set_is_kept() -> None:
    config = config_with(
        device="cpu",
        model={"path": "x", "dtype": "bfloat16", "max_model_len": 100},
        compile={"backend": "eager", "threads": 1, "unit": "layer", "skinny_gemm": True},
        scheduler={"max_running": 3, "max_step_tokens": 33, "step_budget": 9},
    )
    result = resolved(config, cuda=True)
    assert result.device == "cpu"
    assert (result.model.dtype, result.model.max_model_len) == ("bfloat16", 100)
    assert (result.compile.backend, result.compile.threads) == ("eager", 1)
    assert (result.compile.unit, result.compile.skinny_gemm) == ("layer", True)
    assert result.scheduler.model_dump(include={"max_running", "max_step_tokens"}) == {
        "max_running": 3,
        "max_step_tokens": 33,
    }
    assert result.scheduler.step_budget == 9
    assert result.compile.decode_buckets == (1, 2, 3)
    assert result.compile.extend_buckets == (33,)


def test_limits_follow_the_buckets_and_each_other() -> None:
    config = config_with(compile={"decode_buckets": [1, 32], "extend_buckets": [40, 80]})
    scheduler = resolved(config).scheduler
    assert (scheduler.max_running, scheduler.max_step_tokens) == (32, 80)
    scheduler = resolved(config_with(scheduler={"max_step_tokens": 7})).scheduler
    assert (scheduler.max_running, scheduler.step_budget) == (7, 7)
    scheduler = resolved(config_with(scheduler={"max_running": 600})).scheduler
    assert scheduler.max_step_tokens == 600


def test_layers_are_the_unit_on_a_cpu_and_where_graphs_are_captured_by_hand() -> None:
    assert resolved(config_with()).compile.unit == "layer"
    manual = config_with(compile={"cudagraphs": "manual"})
    assert resolved(manual, cuda=True).compile.unit == "layer"
    assert resolved(config_with(), cuda=True).compile.unit == "step"


def test_no_compiler_means_eager_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    bare = Machine(cores=1, compiler=None)
    with caplog.at_level(logging.WARNING):
        assert resolved(config_with(), machine=bare).compile.backend == "eager"
    assert len(caplog.records) == 1 and "C++ compiler" in caplog.text
    caplog.clear()
    eager = config_with(compile={"backend": "eager"})
    assert resolved(eager, machine=bare).compile.backend == "eager"
    assert not caplog.records
    with pytest.raises(ConfigError, match=r"compile\.backend: got inductor.*no C\+\+ compiler"):
        resolved(config_with(compile={"backend": "inductor"}), machine=bare)
    assert resolved(config_with(), cuda=True, machine=bare).compile.backend == "inductor"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"device": "cuda"}, "device: got cuda, allowed: cpu or auto"),
        (
            {"attention": {"extend": "fa2"}},
            "attention.extend: got 'fa2', allowed: auto or reference",
        ),
        (
            {"compile": {"decode_buckets": [32]}, "scheduler": {"max_step_tokens": 31}},
            "scheduler.max_step_tokens: got 31, allowed: at least scheduler.max_running = 32",
        ),
    ],
)
def test_what_machine_or_model_cannot_honour(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(config_with(**sections))
    assert message in str(caught.value)


def test_the_context_unit_is_the_models_own() -> None:
    assert resolved(config_with(), context_unit=3840).scheduler.context_unit == 3840
    given = config_with(scheduler={"context_unit": 7})
    assert resolved(given, context_unit=3840).scheduler.context_unit == 7


def test_the_table_lists_what_was_auto() -> None:
    config = config_with(device="cpu", scheduler={"max_running": 256, "max_step_tokens": 300})
    table = settings_of(config, resolved(config))
    assert table["compile.decode_buckets"] == "1 2 4 8 16 24 ... 256 (35)"
    assert table["compile.extend_buckets"] == "64 128 256 300 (4)"
    assert table["compile.skinny_gemm"] == "false"
    assert table["parallel.all_reduce"] == "gloo"
    assert table["model.max_model_len"] == "2048"
    assert "device" not in table and "scheduler.max_running" not in table


def test_all_reduce() -> None:
    """Ours where ranks are GPUs of one host; threads are shared out among ranks on a CPU."""
    two = config_with(parallel={"tp": 2})
    assert resolved(two, cuda=True).parallel.all_reduce == "symmetric"
    assert resolved(two, cuda=True, one_host=False).parallel.all_reduce == "nccl"
    assert resolved(config_with(), cuda=True).parallel.all_reduce == "nccl"
    cpu = resolved(two)
    assert (cpu.parallel.all_reduce, cpu.compile.threads) == ("gloo", 3)
    wanted = config_with(parallel={"tp": 2, "all_reduce": "symmetric"})
    for facts in ({"cuda": False}, {"cuda": True, "one_host": False}):
        with pytest.raises(ConfigError, match="all_reduce: got symmetric, allowed: nccl or auto"):
            resolved(wanted, **facts)
