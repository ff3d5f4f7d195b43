"""Servers to test: in a thread over a FakeTransport, or as a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from engine.config import EngineConfig, validate
from engine.engine_client import EngineClient
from engine.server.app import create_app
from engine.server.lifecycle import DrainingServer
from engine.server.listener import listen
from engine.tokenizer import Tokenizer
from tests.server.fake_engine import VOCAB_SIZE, FakeTransport, Limits
from tests.server.fake_engine_process import ENVIRONMENT
from tests.server.target import Target
from tests.tiny_tokenizer import CHAT_TEMPLATE, EOS, byte_level_backend, byte_level_tokenizer

ROOT = Path(__file__).parent.parent.parent
MODEL = "tiny"


def config_of(**changes: Any) -> EngineConfig:
    """A configuration with "key.path" -> value changed."""
    tree: dict[str, Any] = {"model": {"path": f"/nowhere/{MODEL}"}, "server": {"port": 0}}
    for path, value in changes.items():
        section, key = path.split(".")
        tree.setdefault(section, {})[key] = value
    return validate(EngineConfig, tree, "test", {})


def target_of(url: str, limits: Limits, tokenizer: Tokenizer) -> Target:
    return Target(
        url=url,
        model=MODEL,
        vocab_size=VOCAB_SIZE,
        max_model_len=limits.max_model_len,
        pool_tokens=limits.num_pages * limits.page_size,
        eos_ids=sorted(tokenizer.eos_ids),
        count_chat_tokens=lambda messages: len(tokenizer.encode_chat(messages)),
        emoji_prompt="say:\U0001f469\u200d\U0001f469\u200d\U0001f467 ok",
    )


@contextlib.contextmanager
def serving(
    limits: Limits | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    transport: FakeTransport | None = None,
    load: Callable[[], Tokenizer] | None = None,
    **changes: Any,
) -> Iterator[Target]:
    """A server in a thread of this process, over real sockets.

    Args:
        limits: of the fake engine. `kv.num_pages` in `changes` goes there too.
        tokenizer: default: bytes, with a template.
        transport: an engine made by the test.
        load: what loads the tokenizer.
        changes: to the configuration, "key.path" -> value.
    """
    limits = transport.limits if transport is not None else limits or Limits()
    limits = replace(limits, num_pages=changes.get("kv.num_pages", limits.num_pages))
    tokenizer = tokenizer or byte_level_tokenizer()
    config = config_of(**changes)
    wire = transport or FakeTransport(limits)
    client = EngineClient(wire, max_waiting=config.scheduler.max_waiting)
    app = create_app(config, client, load or (lambda: tokenizer))
    with listen("127.0.0.1", 0) as listener:
        server = DrainingServer(
            uvicorn.Config(app, log_level="error", ws="none", timeout_graceful_shutdown=3),
            app.state.service,
            sys.exit,
        )
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            if transport is None:
                wait_for_status(url, 200)
            yield target_of(url, limits, tokenizer)
        finally:
            server.should_exit = True
            thread.join()


def wait_for_status(url: str, status: int, timeout_s: float = 20) -> httpx.Response:
    """Poll /health until it has this status."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            response = httpx.get(f"{url}/health", timeout=5)
            if response.status_code == status:
                return response
        assert time.monotonic() < deadline, f"/health is not {status}"
        time.sleep(0.01)


def model_folder(folder: Path) -> Path:
    """A folder that `load_tokenizer` can read."""
    path = folder / MODEL
    path.mkdir()
    byte_level_backend().save(str(path / "tokenizer.json"))
    options = {"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(options))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    return path


class ServerProcess:
    """`fullgraph serve` with fake_engine_process as the engine. A context manager.

    Attributes:
        process: the server.
        url: where it listens.
        lines: of its standard error so far.
        temporary: its folder for temporary files.
    """

    def __init__(self, folder: Path, engine: dict[str, Any], **changes: Any) -> None:
        config = config_of(**{**changes, "model.path": str(model_folder(folder))})
        code = (
            "import sys\n"
            "from engine.config import EngineConfig\n"
            "from engine.server.app import create_app\n"
            "from engine.engine_launch import launched\n"
            "from engine.server.lifecycle import run_server\n"
            "from engine.server.listener import listen\n"
            "from engine.tokenizer import load_tokenizer\n"
            "config = EngineConfig.model_validate_json(sys.argv[1])\n"
            "load = lambda: load_tokenizer(config.model)\n"
            "make = lambda client, ready: create_app(config, client, load, ready)\n"
            "listener = listen(config.server.host, config.server.port)\n"
            "with launched(config, 'tests.server.fake_engine_process') as transport:\n"
            "    status = run_server(config, make, transport, listener)\n"
            "sys.exit(status)\n"
        )
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, config.model_dump_json()],
            cwd=ROOT,
            env={
                **os.environ,
                ENVIRONMENT: json.dumps(engine),
                "PYTHONPATH": str(ROOT),
                "TMPDIR": str(self.temporary),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> ServerProcess:
        self._reader.start()
        self.url = self.wait_for_line("listening on ").split()[-1]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_for_line(self, text: str, timeout_s: float = 20) -> str:
        """The first line of standard error with this text."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in self.lines:
                if text in line:
                    return line
            time.sleep(0.01)
        raise AssertionError(f"no line with {text!r} in {self.lines}")
