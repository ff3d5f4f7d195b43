"""Compile processes: which jobs there are, that an engine finds all they made, what happens when
they fail.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from engine import LLM, SamplingParams, artefacts, cli, compiler
from engine.artefacts import fingerprint_of, open_cache, prepare, store_of
from engine.compile_jobs import VARIANTS, CompileJob, compile_jobs, hint
from engine.config import load_config
from engine.errors import FullgraphError
from engine.machine import Machine
from engine.resolve import ResolvedConfig, resolve
from engine.worker import configure_threads
from tests.conftest import ROOT

TINY = ROOT / "configs" / "tiny_random.yaml"
SMALL = [
    "compile.backend=inductor",
    "compile.decode_buckets=[1, 2]",
    "scheduler.max_running=2",
    "scheduler.max_step_tokens=64",
    "compile.extend_buckets=[64]",
    "log.progress=none",
]


def jobs_on_a_gpu(*overrides: str) -> list[list[CompileJob]]:
    config = resolve(
        load_config(ROOT / "configs" / "qwen3_0_6b.yaml", overrides),
        max_position=4096,
        checkpoint_dtype="bfloat16",
        cuda=True,
        capability=(9, 0),
        machine=Machine(16, None),
    )
    assert config.compile.workers == 12, "three of four cores"
    return compile_jobs(config, VARIANTS)


def test_jobs_of_whole_steps_are_one_a_process() -> None:
    groups = jobs_on_a_gpu("compile.decode_buckets=[1, 2, 4, 8, 16]", "compile.extend_buckets=[64]")
    assert [[job.name for job in group] for group in groups] == [
        ["decode 2..16 plain"],
        ["decode 2..16 full", "kernels decode 1..16 full"],
        ["decode 1 plain"],
        ["decode 1 full"],
        ["extend 64 plain"],
        ["extend 64 full", "kernels extend 64 full"],
        ["kernels decode 1..16 plain"],
        ["kernels extend 64 plain"],
    ]
    assert groups[0][0].buckets == (8,), "compiled for the size that is the hint"
    assert not groups[-1][0].compiled


def test_what_triton_is_told_is_told_before_the_entry_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU the assembler's path goes into the environment, which compile processes inherit: an
    entry that is named before that is not the one which they fill.
    """
    prepared = prepare(load_config(TINY, [*SMALL, f"compile.cache_dir={tmp_path}"]))
    cuda = prepared.config.model_copy(update={"device": "cuda"})
    prepared = dataclasses.replace(prepared, config=cuda)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))  # open_cache changes them
    monkeypatch.setattr(
        artefacts, "settle_triton", lambda: monkeypatch.setenv("TRITON_PTXAS_PATH", "/ptxas")
    )
    first = fingerprint_of(prepared)
    with open_cache(prepared) as session:
        assert session.manifest.fingerprint == first == fingerprint_of(prepared)


def test_variants_of_a_layer_share_a_process() -> None:
    groups = jobs_on_a_gpu("compile.cudagraphs=manual", "compile.extend_buckets=[64, 512]")
    assert [job.name for job in groups[0]] == [
        "decode 2..256 plain",
        "decode 2..256 full",
        "kernels decode 1..256 full",
    ]
    kernels = [job.buckets for group in groups for job in group if not job.compiled]
    assert sum(len(buckets) for buckets in kernels) == 2 * (35 + 2), "each once a variant"


def test_without_a_dynamic_batch_every_bucket_is_a_job() -> None:
    groups = jobs_on_a_gpu(
        "compile.dynamic=false", "compile.decode_buckets=[1, 2]", "compile.extend_buckets=[64]"
    )
    names = [job.name for group in groups for job in group if job.compiled]
    assert names[:4] == ["decode 1 plain", "decode 1 full", "decode 2 plain", "decode 2 full"]


def test_the_hint_is_a_middle_size() -> None:
    assert hint([1, 2, 4, 8, 16]) == 8 and hint([1, 2]) == 2 and hint([64, 128]) == 64


def test_a_start_after_a_warm_up_compiles_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*SMALL, f"compile.cache_dir={tmp_path / 'cache'}"]
    command = [str(TINY), *(word for text in settings for word in ("--set", text))]
    assert cli.main(["warmup", "--check", *command]) == 1
    nothing, verdict = capsys.readouterr().out.splitlines()
    assert "nothing is cached" in nothing
    assert verdict.startswith("6 of 6 jobs are missing") and f"warmup {TINY} --set " in verdict
    assert cli.main(["warmup", "--export", str(tmp_path / "no" / "file"), *command]) == 2
    assert "folder is missing" in capsys.readouterr().err
    packed = tmp_path / "packed"
    assert cli.main(["warmup", "--export", str(packed), *command]) == 0
    out = capsys.readouterr().out
    names = [f"{name} {v}" for name in ("decode 1", "decode 2", "extend 64") for v in VARIANTS]
    assert all(f"{name}  " in out for name in names) and out.count(" built ") == 6
    assert cli.main(["warmup", "--check", *command]) == 0
    hit, verdict = capsys.readouterr().out.splitlines()
    assert hit.startswith("hit: ") and verdict.endswith("a start finds all of 6 jobs")
    (entry,) = (tmp_path / "cache").glob("*/objects/")
    next(entry.iterdir()).write_bytes(b"")
    assert cli.main(["warmup", "--check", *command]) == 1
    hit, verdict = capsys.readouterr().out.splitlines()
    assert hit.endswith("1 of them damaged") and verdict.startswith("files are damaged; to")
    other = ["--set", "compile.decode_buckets=[1, 3]", "--set", "scheduler.max_running=3"]
    assert cli.main(["warmup", "--check", *command, *other]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "differs in" in lines[0] and lines[-1].startswith("6 of 6") and len(lines) < 12

    elsewhere = [*SMALL, f"compile.cache_dir={tmp_path / 'elsewhere'}"]
    command = [str(TINY), *(word for text in elsewhere for word in ("--set", text))]
    assert cli.main(["warmup", "--import", str(packed), *command]) == 0
    assert capsys.readouterr().out.count(" found ") == 6, "nothing is built after an import"
    # As many pages as this process happens to have room for do not decide whether it hits.
    with LLM(TINY, [*elsewhere, "kv.num_pages=77"]) as llm:
        worker = llm.engine.worker
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        (out_plain,) = llm.generate([[1, 2, 3]], params, progress=False)
        params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2)
        (out_full,) = llm.generate([[1, 2, 3]], params, progress=False)
        assert len(out_plain.token_ids) == len(out_full.token_ids) == 4
        log, counters = worker.compile_log, worker.counters
    with pytest.raises(FullgraphError, match="closed"):
        llm.generate([[1, 2, 3]], params, progress=False)
    assert not log.compiled and log.frozen and len(log.loaded) == 12
    assert counters.eager_steps == counters.recompiles == 0


def test_processes_that_fail_leave_it_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(TINY, [*SMALL, f"compile.cache_dir={tmp_path}", "compile.workers=2"])
    monkeypatch.setattr(compiler, "_MODULE", "engine.no_such_module")
    prepared = prepare(config)
    session = store_of(config).open(fingerprint_of(prepared))
    with session, caplog.at_level(logging.WARNING):
        processes = compiler.Compiler(config, prepared.config, session)
        processes.start(VARIANTS)
        told: list[tuple[str, int, int, str]] = []
        processes.wait(VARIANTS, lambda *call: told.append(call))
        assert not session.jobs
    assert told[-1][:3] == ("compile", 0, 6)
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 2 and all("ended with status 1; left" in w for w in warnings)
    assert sum("decode 1 full" in w for w in warnings) == 1


def test_threads_are_the_configurations_on_every_device() -> None:
    """A launcher sets another number, with which nothing compiled would be accepted."""
    before = torch.get_num_threads()
    try:
        for device, threads in (("cuda", before + 1), ("cpu", before + 2)):
            options = SimpleNamespace(threads=threads)
            configure_threads(cast(ResolvedConfig, SimpleNamespace(device=device, compile=options)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
