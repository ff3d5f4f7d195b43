"""The command line: its frozen help, its exit statuses, and what it must not import."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from engine import cli
from engine.commands import bench, conversation, generate
from engine.config import load_config
from engine.errors import ConfigError, InvalidRequest, ModelError

Write = Callable[..., Path]
VERBS = ("", "serve", "warmup", "generate", "chat", "bench")


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_frozen(
    root: Path, verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A change of the command line is a change of tests/data/help, seen in review."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"] if verb else ["--help"])
    assert caught.value.code == 0
    frozen = root / f"tests/data/help/{verb or 'fullgraph'}.txt"
    assert capsys.readouterr().out == frozen.read_text()


def test_parsing_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom engine.cli import build_parser\nbuild_parser()\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'fastapi', 'zmq', 'rich'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


def test_the_module_is_the_command() -> None:
    output = subprocess.run(
        [sys.executable, "-m", "engine", "--help"], capture_output=True, text=True, check=True
    )
    assert output.stdout.startswith("usage: fullgraph ")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly", "x.yaml"],
        ["serve"],
        ["serve", "x.yaml", "y.yaml"],
        ["generate", "x.yaml", "Hi", "--port", "3"],
        ["serve", "x.yaml", "--se", "a.b=c"],
        ["generate", "x.yaml", "Hi", "--temperature", "warm"],
        ["chat", "x.yaml", "--top-p", "0.5"],
        ["generate", "x.yaml", "Hi", "--max-tokens", "0"],
        ["generate", "x.yaml", "Hi", "--max-tokens", "1.5"],
        ["bench", "x.yaml", "offline"],
        ["warmup", "x.yaml", "--check", "--export", "f"],
    ],
)
def test_wrong_words_are_a_usage_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: fullgraph")


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "x.yaml", "a", "b", "--set", "k.v=1", "--set", "k.w=2"],
        ["generate", "--set", "k.v=1", "x.yaml", "a", "--set", "k.w=2", "b"],
        ["generate", "x.yaml", "--set", "k.v=1", "--set", "k.w=2", "a", "b"],
    ],
)
def test_prompts_and_overrides_in_any_order(words: list[str]) -> None:
    args = cli.parse(words)
    assert args.config == Path("x.yaml")
    assert args.prompts == ["a", "b"]
    assert args.overrides == ["k.v=1", "k.w=2"]


@pytest.mark.parametrize(
    ("words", "max_tokens"), [([], 50), (["--max-tokens", "7"], 7), (["--max-tokens", "999"], 999)]
)
def test_generates_length(
    words: list[str], max_tokens: int, write_config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_config("model: {path: x}\n"))
    llm = MagicMock(**{"stream.return_value": []})
    llm.engine.config.model.max_model_len = 100
    monkeypatch.setattr(generate, "open_llm", lambda config: llm)
    assert cli.main(["generate", path, *words, "Hi"]) == 0
    llm.default_params.assert_called_once_with(max_tokens=max_tokens)


def test_the_short_forms_of_host_and_port_are_settings_like_others(write_config: Write) -> None:
    words = ["--set", "server.port=1", "--host", "::", "--port", "8010", "--set", "kv.page_size=8"]
    args = cli.parse(["serve", str(write_config("model: {path: x}\n")), *words])
    config = load_config(args.config, args.overrides)
    assert (config.server.host, config.server.port, config.kv.page_size) == ("::", 8010, 8)
    args = cli.parse(["serve", str(args.config), "--port", "many"])
    with pytest.raises(ConfigError, match="^--port many: server.port: got 'many', allowed: an int"):
        load_config(args.config, args.overrides)
    args = cli.parse(["serve", str(args.config), "--port", "99999", "--set", "kv.page_size=0"])
    with pytest.raises(ConfigError) as caught:
        load_config(args.config, args.overrides)
    assert [line.partition(": ")[0] for line in str(caught.value).splitlines()] == [
        "--set kv.page_size=0",
        "--port 99999",
    ]


def test_warmups_files() -> None:
    args = cli.parse(["warmup", "x.yaml", "--import", "f"])
    assert (args.import_file, args.export_file, args.check) == (Path("f"), None, False)


def run_with(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, status: int = 0) -> int:
    class Command:
        load_to_start = MagicMock()

        @staticmethod
        def run(args: Any, config: Any) -> int:
            if error is not None:
                raise error
            return status

    monkeypatch.setattr(importlib, "import_module", lambda name: Command)
    return cli.main(["serve", "x.yaml"])


def test_exit_statuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(monkeypatch, None, 0) == 0
    assert run_with(monkeypatch, None, 3) == 3
    assert run_with(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""
    assert run_with(monkeypatch, ModelError("no such folder: x")) == 2
    assert capsys.readouterr().err == "fullgraph: no such folder: x\n"
    with pytest.raises(ZeroDivisionError):  # a bug of ours keeps its traceback
        run_with(monkeypatch, ZeroDivisionError())


def test_a_reader_that_leaves_is_no_error() -> None:
    program = (
        "import importlib, sys, types\n"
        "from engine import cli\n"
        "def run(*_):\n"
        "    for _ in range(100000): print('word')\n"
        "module = types.SimpleNamespace(run=run, load_to_start=lambda *_: None)\n"
        "importlib.import_module = lambda name: module\n"
        "sys.exit(cli.main(['serve', 'x.yaml']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_ctrl_c_while_a_verb_is_imported() -> None:
    """Not as an exception, which an extension module that is half imported may swallow."""
    program = (
        "import importlib, sys, time\n"
        "from engine import cli\n"
        "def swallow(name):\n"
        "    print(name, flush=True)\n"
        "    try:\n"
        # Not one long sleep: a signal just before it would be handled after it.
        "        for _ in range(6000): time.sleep(0.01)\n"
        "    except BaseException: time.sleep(60)\n"
        "importlib.import_module = swallow\n"
        "sys.exit(cli.main(['generate', 'x.yaml']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130


def test_a_broken_configuration_is_one_line_and_status_2(write_config: Write) -> None:
    path = write_config("model: {path: x}\nkv: {page_size: 0}\n")
    command = [sys.executable, "-m", "engine", "bench", "offline", str(path)]
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    assert output.returncode == 2 and output.stdout == ""
    assert output.stderr == (f"fullgraph: {path}: kv.page_size: got 0, allowed: an integer >= 1\n")


@pytest.mark.parametrize("words", [["generate", "Hi"], ["chat"], ["warmup"], ["serve"]])
def test_what_cannot_start_is_told_before_anything_heavy_is_imported(
    write_config: Write, words: list[str]
) -> None:
    path = write_config("model: {path: ./none}\n")
    program = (
        "import sys\nfrom engine.cli import main\n"
        "assert main(sys.argv[1:]) == 2\n"
        "print(sorted({'torch', 'numpy', 'fastapi', 'zmq', 'rich'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, words[0], str(path), *words[1:]]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
    assert "model.path: got" in output.stderr


def test_bench_runs_the_program_with_the_same_words(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tree/bench"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "offline.py").write_text(
        "import sys, pathlib\n"
        "pathlib.Path(__file__).with_name('seen').write_text(' '.join(sys.argv[1:]))\n"
        "sys.exit(7)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "SOURCE_TREE", tmp_path / "tree")
    path = str(write_config("model: {path: org/name}\n"))
    assert cli.main(["bench", "offline", path, "--set", "kv.page_size=8"]) == 7
    assert (folder / "seen").read_text() == f"{path} --set kv.page_size=8"
    assert cli.main(["bench", "online", path]) == 2  # an installed wheel has no bench/


def test_every_verb_has_its_module(root: Path) -> None:
    for module in cli._COMMANDS.values():
        assert (root / (module.replace(".", os.sep) + ".py")).is_file()


def echo(history: list[list[dict[str, str]]]) -> conversation.Answer:
    def answer(messages: list[dict[str, str]]) -> Any:
        history.append(messages)
        if messages[-1]["content"] == "too long":
            raise InvalidRequest("the prompt has 9 tokens, the context 8")
        yield "you said "
        if messages[-1]["content"] == "stop":
            raise KeyboardInterrupt
        yield messages[-1]["content"]

    return answer


def test_chat_keeps_the_history(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[list[dict[str, str]]] = []
    lines = ["hello", "", "  again  ", "/reset", "new", "/what", "/exit", "never"]
    conversation.converse(lines, echo(seen))
    assert [[message["content"] for message in messages] for messages in seen] == [
        ["hello"],
        ["hello", "you said hello", "again"],
        ["new"],
    ]
    assert [message["role"] for message in seen[1]] == ["user", "assistant", "user"]
    assert capsys.readouterr().out == (
        f"you said hello\nyou said again\nyou said new\n{conversation.HELP}\n"
    )


def test_chat_survives_ctrl_c_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[list[dict[str, str]]] = []
    conversation.converse(["stop", "too long", "more"], echo(seen))
    assert [message["content"] for message in seen[-1]] == ["stop", "you said ", "more"]
    assert "the prompt has 9 tokens" in capsys.readouterr().err
