"""What is told of a configuration before anything is started, and in which order."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import machine, preflight
from engine.artefacts import prepare
from engine.config import load_config
from engine.errors import ConfigError
from engine.preflight import load_to_start
from tests.conftest import ROOT

Write = Callable[..., Path]
TINY = ROOT / "configs" / "tiny_random.yaml"


def refused(config: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_to_start(config, overrides)
    return str(caught.value)


@pytest.mark.parametrize("key", ["path", "tokenizer"])
@pytest.mark.parametrize("place", ["/no/such", "a/b/c", "./x", "x.gguf", "~nobody", "two words"])
def test_what_is_neither_there_nor_a_hub_id(key: str, place: str) -> None:
    line = refused(TINY, "model.load=auto", f"model.{key}={place}")
    assert line.startswith(f"--set model.{key}={place}: model.{key}: got '")
    assert "allowed: a folder, a .gguf file or a hub id; there is no such" in line


@pytest.mark.parametrize("place", ["gpt2", "Qwen/Qwen3-0.6B", str(TINY.parent), str(TINY)])
def test_what_may_be_a_model(place: str) -> None:
    assert load_to_start(TINY, [f"model.path={place}"]).model.path == place


def test_the_file_and_every_key_are_named(
    write_config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "why_no_cuda", lambda: "there is none")
    text = "device: cuda\nmodel: {path: ./none, chat_template: none.jinja}\n"
    path = write_config(text)
    assert refused(path).splitlines() == [
        f"{path}: device: got cuda, allowed: cpu or auto, for there is none",
        f"{path}: model.path: got '{path.parent}/none', allowed: a folder, a .gguf file or a hub "
        "id; there is no such folder or file",
        f"{path}: model.chat_template: got '{path.parent}/none.jinja', which is no file",
    ]
    monkeypatch.setattr(preflight, "why_no_cuda", lambda: "")
    assert "device" not in refused(path)


def test_what_the_models_own_config_forbids(tmp_path: Path) -> None:
    tiny = TINY.parent / "hf" / "tiny-llama"  # 4 query heads, 2 of keys and values, 512 tokens
    assert load_to_start(TINY, ["model.max_model_len=512", "parallel.tp=4"])
    long, split = "model.max_model_len=513", "parallel.tp=3"
    assert refused(TINY, long, split).splitlines() == [
        f"--set {long}: model.max_model_len: got 513, allowed: at most 512, the model's own limit",
        f"--set {split}: parallel.tp: got 3, but 4 query heads cannot be divided among 3 ranks",
    ]
    shutil.copy(tiny / "config.json", tmp_path)
    real = ["model.load=auto", f"model.path={tmp_path}", long]
    assert load_to_start(TINY, real)  # what counts may be in a GGUF file
    (tmp_path / "model.safetensors").touch()
    assert "got 513" in refused(TINY, *real)
    for text in ("[", "[]", "{}", '{"architectures": ["GPT2LMHeadModel"]}'):
        (tmp_path / "config.json").write_text(text)
        assert load_to_start(TINY, real)  # the engine tells
    (tmp_path / "config.json").unlink()
    assert load_to_start(TINY, real)


def test_an_engine_without_a_preflight_tells_the_same() -> None:
    config = load_config(TINY, ["model.max_model_len=513", "parallel.tp=3"])
    with pytest.raises(ConfigError, match=r"max_model_len: got 513, .*\nparallel.tp: got 3, "):
        prepare(config)


def test_a_hidden_gpu_and_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in machine.why_no_cuda()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    assert machine.why_no_cuda() == ""

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert "no NVIDIA driver" in machine.why_no_cuda()


def serve(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine", "serve", str(TINY), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_server_tells_before_it_starts_anything_the_configuration_before_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        wrong = serve("--port", port, "--set", "model.path=/no/such")
        assert wrong.returncode == 2 and wrong.stdout == ""
        (line,) = wrong.stderr.splitlines()
        assert line.startswith("fullgraph: --set model.path=/no/such: model.path: got '/no/such'")
        busy = serve("--port", port)
        assert busy.returncode == 2
        (line,) = busy.stderr.splitlines()  # nothing of an engine that starts
        assert f"127.0.0.1:{port}, which cannot be listened on: " in line
        assert line.count(port) == 1
