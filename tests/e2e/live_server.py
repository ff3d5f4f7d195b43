"""`fullgraph serve` over a tiny random model, as a process of its own, and its Target."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from engine.config import ModelOptions
from engine.tokenizer import load_tokenizer
from tests.server.target import Target
from tests.tiny_tokenizer import BOS, CHAT_TEMPLATE, EOS, byte_level_backend

ROOT = Path(__file__).parent.parent.parent
PAGE_SIZE = 16
NUM_PAGES = 400
MAX_MODEL_LEN = 2048
MODEL = "tiny"
LOG = "serve.log"


def model_folder(folder: Path, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """A checkpoint folder of a two-layer Llama with byte tokens, weights to be drawn at random."""
    path = folder / MODEL
    path.mkdir(parents=True)
    backend = byte_level_backend()
    backend.save(str(path / "tokenizer.json"))
    options: dict[str, Any] = {"eos_token": "<eos>", "bos_token": "<bos>"}
    if template is not None:
        options["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(options))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": backend.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@contextlib.contextmanager
def live_server(folder: Path, changes: Mapping[str, Any] | None = None) -> Iterator[Target]:
    """A server whose engine is real; `changes` are "key.path" -> value on top of the settings."""
    with live_process(folder, changes) as (target, process):
        try:
            yield target
        finally:
            process.terminate()
            status = process.wait(60)
        assert status == 0, (folder / LOG).read_text()


@contextlib.contextmanager
def live_process(
    folder: Path, changes: Mapping[str, Any] | None = None, launcher: Sequence[str] = ()
) -> Iterator[tuple[Target, subprocess.Popen[bytes]]]:
    """The same, with the process; whoever asks for it ends it, or it is killed.

    `launcher` are the interpreter's arguments before `-m engine serve`.
    """
    changes = dict(changes or {})
    template = changes.pop("model.chat_template", CHAT_TEMPLATE)
    path = model_folder(folder, template=template)
    tree: dict[str, Any] = {
        "model": {"path": str(path), "load": "random"},
        "device": "cpu",
        "compile": {"backend": "eager", "threads": 1},
        "kv": {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE},
        "server": {"port": 0},
        "log": {"progress": "none"},
    }
    for key_path, value in changes.items():
        section, key = key_path.split(".")
        tree.setdefault(section, {})[key] = value
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(tree))
    log = folder / LOG
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "engine", "serve", str(file)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=stderr,
            stderr=stderr,
        )
    tokenizer = load_tokenizer(ModelOptions(path=str(path)))
    try:
        target = Target(
            url=_wait_until_ready(process, log),
            model=MODEL,
            vocab_size=tokenizer.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            pool_tokens=tree["kv"]["num_pages"] * PAGE_SIZE,
            eos_ids=sorted(tokenizer.eos_ids),
            count_chat_tokens=lambda messages: len(tokenizer.encode_chat(messages)),
        )
        yield target, process
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, timeout_s: float = 90) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        for line in log.read_text().splitlines():
            if line.startswith("ready on "):
                return line.split()[-1]
        time.sleep(0.05)
    raise AssertionError(f"no server after {timeout_s} s: {log.read_text()}")


def wait_until_quiet(url: str, timeout_s: float = 30) -> dict[str, float]:
    """The engine's gauges once nothing runs or waits; pages must add up then."""
    deadline = time.monotonic() + timeout_s
    while True:
        gauges = read_metrics(url)
        if gauges["running"] == gauges["waiting"] == 0:
            break
        assert time.monotonic() < deadline, f"the engine does not come to rest: {gauges}"
        time.sleep(0.1)
    parts = gauges["pages_free"] + gauges["pages_cached"] + gauges["pages_held"]
    assert parts == gauges["pages_total"], gauges
    assert gauges["pages_held"] == 0, gauges
    return gauges


def read_metrics(url: str) -> dict[str, float]:
    """The engine's part of /metrics, by short name."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    prefix = "fullgraph_engine_"
    pairs = (line.split() for line in lines if line.startswith(prefix) and "{" not in line)
    return {name.removeprefix(prefix): float(value) for name, value in pairs}
