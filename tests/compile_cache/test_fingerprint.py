"""What hits and what misses: every part of the fingerprint, and every key of the configuration."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import compile_cache.fingerprint as fingerprint_module
from compile_cache.fingerprint import (
    COMPILE_KEYS,
    Fingerprint,
    Value,
    compile_config,
    cpu_instructions,
    driver_major,
    environment_parts,
    explain,
    flatten,
    machine_parts,
    source_digest,
)

# Keys that must not decide it, each for a reason: where things lie, who is served, what is logged,
# how much memory.
NEUTRAL_KEYS = (
    "model.path",
    "model.revision",
    "model.offline",
    "model.load",
    "model.seed",
    "model.tokenizer",
    "model.chat_template",
    "model.generation_config",
    "model.served_name",
    "compile.cache",
    "compile.cache_dir",
    "compile.workers",
    "attention.workspace",
    "kv.prefix_cache",
    "kv.memory_ratio",
    "kv.bytes",
    "kv.num_pages",  # the pages dimension is dynamic: free memory must not decide a hit
    "scheduler.policy",
    "scheduler.max_waiting",
    "scheduler.max_step_tokens",  # its effect is in compile.extend_buckets
    "scheduler.step_budget",
    "scheduler.context_unit",
    "scheduler.overlap",
    "scheduler.output_estimate",
    "scheduler.max_waiting_s",
    "parallel.timeout_s",
    "server",
    "log",
)

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "default.yaml").read_text())
# What "auto" and null could become, and another value of the same key.
RESOLVED: dict[str, tuple[Any, Any]] = {
    "device": ("cpu", "cuda"),
    "model.dtype": ("float32", "bfloat16"),
    "model.max_model_len": (2048, 4096),
    "compile.backend": ("inductor", "eager"),
    "compile.cudagraphs": ("trees", "manual"),
    "compile.unit": ("step", "layer"),
    "compile.decode_buckets": ((1, 2, 4), (1, 2, 4, 8)),
    "compile.extend_buckets": ((64, 128), (64,)),
    "compile.dynamic": (True, False),
    "compile.autotune": (False, True),
    "compile.skinny_gemm": (False, True),
    "compile.threads": (2, 4),
    "attention.decode": ("fa2", "fa3"),
    "attention.extend": ("fa2", "fa3"),
    "kv.page_size": (16, 1),
    "scheduler.max_running": (16, 32),
    "sampling.max_logprobs": (20, 5),
    "sampling.max_logit_bias": (300, 10),
    "sampling.max_stop_ids": (64, 8),
    "parallel.tp": (1, 2),
    "parallel.all_reduce": ("nccl", "symmetric"),
}


def with_value(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(tree)
    *sections, last = key.split(".")
    node = changed
    for section in sections:
        node = node[section]
    assert last in node, key
    node[last] = value
    return changed


def resolved() -> dict[str, Any]:
    tree = DEFAULTS
    for key, (value, _) in RESOLVED.items():
        tree = with_value(tree, key, value)
    return tree


def fingerprint(tree: dict[str, Any]) -> Fingerprint:
    return Fingerprint({"torch": "2.13.0", **compile_config(tree), "source": "abc"})


def test_every_key_of_the_configuration_is_classified() -> None:
    sections = {key for key in NEUTRAL_KEYS if "." not in key}
    leaves = {key for key in flatten(DEFAULTS) if key.split(".")[0] not in sections}
    classified = set(COMPILE_KEYS) | set(NEUTRAL_KEYS) - sections
    assert leaves == classified
    assert not set(COMPILE_KEYS) & set(NEUTRAL_KEYS)
    assert set(RESOLVED) == set(COMPILE_KEYS)


@pytest.mark.parametrize("key", COMPILE_KEYS)
def test_a_key_that_decides_what_is_compiled_misses(key: str) -> None:
    before, after = RESOLVED[key]
    old = fingerprint(resolved())
    new = fingerprint(with_value(resolved(), key, after))
    assert old.digest != new.digest
    (difference,) = new.diff(old)
    plain = [list(v) if isinstance(v, tuple) else v for v in (before, after)]
    assert difference.part == f"config.{key}"
    assert [difference.old, difference.new] == plain


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("server.port", 9000),
        ("server.host", "0.0.0.0"),
        ("server.api_key", "secret"),
        ("log.level", "debug"),
        ("log.progress", "none"),
        ("model.path", "/elsewhere/model"),
        ("model.served_name", "other"),
        ("compile.cache_dir", "/elsewhere/cache"),
        ("kv.bytes", "1 GiB"),
        ("kv.num_pages", 77),
        ("kv.memory_ratio", 0.5),
        ("scheduler.policy", "priority"),
        ("scheduler.overlap", False),
    ],
)
def test_a_key_that_does_not_decide_it_hits(key: str, value: Any) -> None:
    new = fingerprint(with_value(resolved(), key, value))
    assert new.digest == fingerprint(resolved()).digest
    assert new.diff(fingerprint(resolved())) == ()


def test_no_secret_and_no_path_is_stored() -> None:
    tree = with_value(with_value(resolved(), "server.api_key", "s3cret"), "model.path", "/home/x")
    text = json.dumps(fingerprint(tree).to_json())
    assert "s3cret" not in text and "/home/x" not in text


def test_a_key_that_vanished_from_the_configuration_is_our_bug() -> None:
    tree = resolved()
    del tree["kv"]["page_size"]
    with pytest.raises(KeyError):
        compile_config(tree)


MACHINE: dict[str, Value] = {
    "python": "3.11",
    "platform": "linux x86_64",
    "torch": "2.13.0+cpu",
    "triton": None,
    "flashinfer": "0.6.13",
    "cuda": "13.0",
    "gpu.name": "NVIDIA H200",
    "gpu.arch": "sm_90",
    "gpu.driver_major": "580",
    "model.num_layers": 28,
    "static_input_marks": True,
    "source": "0123456789abcdef",
}


@pytest.mark.parametrize("part", MACHINE)
def test_each_other_part_misses_with_both_values(part: str) -> None:
    old = Fingerprint(MACHINE)
    changed: Value = "other"
    new = Fingerprint({**MACHINE, part: changed})
    assert new.digest != old.digest
    (difference,) = new.diff(old)
    assert (difference.part, difference.old, difference.new) == (part, MACHINE[part], changed)
    if MACHINE[part] is not None:
        assert str(MACHINE[part]) in str(difference)
    assert "other" in str(difference)


def test_a_part_that_only_one_has_is_a_difference() -> None:
    old, new = Fingerprint({"a": 1, "gone": None}), Fingerprint({"a": 1, "added": None})
    assert old.digest != new.digest
    assert [d.part for d in new.diff(old)] == ["added", "gone"]


def test_digest_depends_on_types_and_not_on_order() -> None:
    digests = {Fingerprint({"x": value}).digest for value in (1, True, 1.0, "1", [1], None)}
    assert len(digests) == 6
    assert Fingerprint({"x": 1}).diff(Fingerprint({"x": True}))
    assert Fingerprint({"a": 1, "b": 2}).digest == Fingerprint({"b": 2, "a": 1}).digest


def test_json_round_trip() -> None:
    original = fingerprint(resolved())
    restored = Fingerprint.from_json(json.loads(json.dumps(original.to_json())))
    assert restored.digest == original.digest
    assert restored.diff(original) == ()
    assert list(restored.parts) == list(original.parts)


@pytest.mark.parametrize("data", [None, [], "x", {"a": {"b": 1}}, {"a": [[1]]}, {"a": object()}])
def test_from_json_refuses_what_is_no_fingerprint(data: object) -> None:
    with pytest.raises(ValueError):
        Fingerprint.from_json(data)


def test_long_lists_are_explained_by_what_differs() -> None:
    old = Fingerprint({"cpu.instructions": [f"avx{i}" for i in range(40)]})
    new = Fingerprint({"cpu.instructions": [f"avx{i}" for i in range(1, 40)] + ["amx_tile"]})
    assert str(new.diff(old)[0]) == (
        'cpu.instructions: only there ["avx0"], only here ["amx_tile"]'
    )
    many = Fingerprint({str(i): i for i in range(20)}).diff(Fingerprint({}))
    assert explain(many).splitlines()[-1] == "and 12 more"


def test_flatten_makes_dotted_names_and_keeps_nested_lists() -> None:
    tree = {"rope": {"kind": "yarn", "factors": (1.0, 2.0)}, "pairs": [[1, 2]], "dtype": Path("x")}
    assert flatten(tree, "model.") == {
        "model.rope.kind": "yarn",
        "model.rope.factors": [1.0, 2.0],
        "model.pairs": "[[1, 2]]",
        "model.dtype": "x",
    }


def test_source_digest_sees_every_change_and_no_place(tmp_path: Path) -> None:
    def tree(name: str) -> Path:
        folder = tmp_path / name / "models"
        (folder / "ops").mkdir(parents=True)
        (folder / "step.py").write_text("a = 1\n")
        (folder / "ops" / "attention.py").write_text("b = 2\n")
        return folder

    first, second = tree("one"), tree("two")
    base = source_digest([first])
    assert source_digest([second]) == base
    (second / "notes.txt").write_text("not source")
    (second / "__pycache__").mkdir()
    (second / "__pycache__" / "step.cpython-311.pyc").write_bytes(b"x")
    assert source_digest([second]) == base
    (second / "ops" / "attention.py").write_text("b = 3\n")
    changed = source_digest([second])
    (second / "ops" / "attention.py").rename(second / "attention.py")
    moved = source_digest([second])
    (second / "more.py").write_text("")
    assert len({base, changed, moved, source_digest([second])}) == 4
    assert source_digest([first, second / "step.py"]) != base


def test_environment_that_changes_code_counts_and_that_of_places_does_not() -> None:
    parts = environment_parts(
        {
            "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
            "TRITON_INTERPRET": "1",
            "TORCHINDUCTOR_CACHE_DIR": "/a",
            "TRITON_CACHE_DIR": "/b",
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
            "HOME": "/root",
            "OMP_NUM_THREADS": "1",
        }
    )
    assert parts == {"env.TORCHINDUCTOR_MAX_AUTOTUNE": "1", "env.TRITON_INTERPRET": "1"}


def test_driver_major(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        "GCC version: gcc 12.3.0\n"
    )
    assert driver_major(file) == "580"
    file.write_text("something else\n")
    assert driver_major(file) is None
    assert driver_major(tmp_path / "missing") is None


def test_cpu_instructions_leave_out_what_the_kernel_adds(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags\t\t: fpu avx2 ibrs md_clear amx_tile sse4_2 avx2\n")
    assert cpu_instructions(file) == ["amx_tile", "avx2", "sse4_2"]
    assert cpu_instructions(tmp_path / "missing") == []


def test_machine_parts_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = machine_parts("cpu")
    assert parts["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert {"torch", "triton", "flashinfer", "cuda", "platform", "cpu.capability"} <= set(parts)
    assert not [name for name in parts if name.startswith("gpu.")]
    assert Fingerprint.from_json(dict(parts)).digest == Fingerprint(machine_parts("cpu")).digest
    monkeypatch.setattr(fingerprint_module, "_version", lambda name: f"{name} 9")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    changed = Fingerprint(machine_parts("cpu")).diff(Fingerprint(parts))
    assert [d.part for d in changed] == ["triton", "flashinfer", "env.TORCHINDUCTOR_MAX_AUTOTUNE"]


def test_machine_parts_of_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parts = machine_parts("cuda")
    assert parts["gpu.name"] is None and parts["gpu.arch"] is None
    assert not [name for name in parts if name.startswith("cpu.")]


def test_the_package_imports_neither_torch_nor_the_engine() -> None:
    code = "import sys, compile_cache; print([m for m in sys.modules if m in ('torch', 'engine')])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
