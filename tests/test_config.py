"""Configurations: what loads, what default.yaml promises, and how mistakes are told."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from engine.config import EngineConfig, ModelOptions, load_config, parse_bytes
from engine.errors import ConfigError

Write = Callable[..., Path]
MINIMAL = "model: {path: org/name}\n"


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in tree.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        result |= {f"{prefix}{key}": value} if inner is None else inner
    return result


def test_default_yaml_lists_every_key_with_the_codes_default(root: Path) -> None:
    path = root / "configs/default.yaml"
    written = flat(yaml.safe_load(path.read_text()))
    in_code = flat(EngineConfig(model=ModelOptions(path="unset")).model_dump())
    assert list(written) == list(in_code)
    assert written.pop("model.path") is None  # the one key without a default
    sizes = {key: parse_bytes(value) for key, value in written.items()}
    assert sizes == {key: value for key, value in in_code.items() if key != "model.path"}


def test_default_yaml_says_something_about_every_key(root: Path) -> None:
    for line in (root / "configs/default.yaml").read_text().splitlines():
        match = re.fullmatch(r"(?: {2})?(\w+): *[^# ][^#]*?(?:\s+#\s*(.+))?", line)
        if match:
            assert match[2], f"no comment: {line}"


@pytest.mark.parametrize("name", sorted(p.name for p in Path("configs").glob("*.yaml")))
def test_every_shipped_config_loads(root: Path, name: str) -> None:
    if name != "default.yaml":
        assert load_config(root / "configs" / name).model.path


def test_empty_sections_are_defaults(write_config: Write) -> None:
    config = load_config(write_config(MINIMAL + "kv:\nserver:\n"))
    assert config == EngineConfig(model=ModelOptions(path="org/name"))


def test_the_tree_is_frozen(write_config: Write) -> None:
    config = load_config(write_config(MINIMAL))
    with pytest.raises(ValidationError, match="frozen"):
        config.kv.page_size = 8  # type: ignore[misc]
    assert hash(config) == hash(load_config(write_config(MINIMAL)))


def test_round_trips_through_json_and_dicts(write_config: Write) -> None:
    config = load_config(write_config(MINIMAL), ["compile.decode_buckets=[1, 2, 4]"])
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config
    assert EngineConfig.model_validate(config.model_dump()) == config
    # JSON is YAML: a tree can be handed to another process as a file.
    assert load_config(write_config(config.model_dump_json(), "again.json")) == config


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7),
        ("512 MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("2 kb", 2000),
        ("10 B", 10),
        ("3 TB", 3 * 10**12),
    ],
)
def test_sizes_in_bytes(write_config: Write, text: str, size: int) -> None:
    assert load_config(write_config(MINIMAL), [f"kv.bytes={text}"]).kv.bytes == size


def test_numbers_are_read_as_yaml_1_2(write_config: Write) -> None:
    path = write_config(MINIMAL + "kv: {memory_ratio: 5e-1}\nscheduler: {max_waiting_s: 1e3}\n")
    config = load_config(path)
    assert (config.kv.memory_ratio, config.scheduler.max_waiting_s) == (0.5, 1000)
    assert load_config(path, ["server.host=on"]).server.host == "on"


BAD = [
    ("kv: {page_size: 0}", "kv.page_size: got 0, allowed: an integer >= 1"),
    ("kv: {page_size: true}", "kv.page_size: got true, allowed: an integer >= 1"),
    ("kv: {page_size: 16.0}", "kv.page_size: got 16.0, allowed: an integer >= 1"),
    ("kv: {page_size: '16'}", "kv.page_size: got '16', allowed: an integer >= 1"),
    ("kv: {prefix_cache: 1}", "kv.prefix_cache: got 1, allowed: true or false"),
    ("kv: {bytes: 12 XB}", "kv.bytes: got '12 XB', allowed: a number of bytes >= 1 or \"512 MiB\""),
    ("kv: {memory_ratio: 1.5}", "kv.memory_ratio: got 1.5, allowed: a number > 0 and <= 1"),
    ("kv: {memory_ratio: .nan}", "kv.memory_ratio: got nan, allowed: a number > 0 and <= 1"),
    ("kv: {num_pages: auto}", "kv.num_pages: got 'auto', allowed: an integer >= 1 or null"),
    ("kv: 3", "kv: got 3, allowed: a section with keys"),
    ("log: {level: loud}", "log.level: got 'loud', allowed: debug | info | warning | error"),
    ("device: null", "device: got null, allowed: auto | cpu | cuda"),
    ("server: {port: 65536}", "server.port: got 65536, allowed: an integer >= 0 and <= 65535"),
    ("server: {host: ''}", "server.host: got '', allowed: text that is not empty"),
    (
        "scheduler: {max_running: maybe}",
        "scheduler.max_running: got 'maybe', allowed: an integer >= 1 or auto",
    ),
    (
        "scheduler: {max_waiting_s: 0}",
        "scheduler.max_waiting_s: got 0, allowed: a number > 0 or null",
    ),
    (
        "compile: {decode_buckets: [1, two]}",
        "compile.decode_buckets: got 'two', allowed: a list of integers >= 1, each above the last "
        "or auto",
    ),
    (
        "compile: {decode_buckets: []}",
        "compile.decode_buckets: got (), allowed: a list of integers >= 1, each above the last "
        "or auto",
    ),
    ("kv: {page_sise: 8}", "kv.page_sise: unknown key (value 8), did you mean kv.page_size?"),
    ("shceduler: {}", "shceduler: unknown key (value {}), did you mean scheduler?"),
    ("page_size: 8", "page_size: unknown key (value 8), did you mean kv.page_size?"),
    ("server: {max_running: 8}", "did you mean scheduler.max_running?"),
    ("log: {xyzzy: 8}", "log.xyzzy: unknown key (value 8), allowed: level, progress"),
    # Combinations.
    (
        "compile: {extend_buckets: [64, 64]}",
        "compile.extend_buckets: got [64, 64], allowed: a list of integers >= 1, each above the",
    ),
    (
        "compile: {extend_buckets: [64, 1024]}\nscheduler: {max_step_tokens: 512}",
        "compile.extend_buckets: got [64, 1024], allowed: a list that ends with "
        "scheduler.max_step_tokens = 512",
    ),
    (
        "compile: {decode_buckets: [1, 4]}\nscheduler: {max_running: 8}",
        "compile.decode_buckets: got [1, 4], allowed: a list that ends with "
        "scheduler.max_running = 8",
    ),
    (
        "scheduler: {max_running: 8, max_step_tokens: 7}",
        "scheduler.max_step_tokens: got 7, allowed: at least scheduler.max_running = 8",
    ),
    (
        "device: cpu\nattention: {decode: fa3}",
        "attention.decode: got 'fa3', allowed: auto or reference, with device = cpu",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[text for text, _ in BAD])
def test_a_mistake_names_file_key_value_and_what_is_allowed(
    write_config: Write, text: str, message: str
) -> None:
    path = write_config(MINIMAL + text)
    error = error_of(path)
    assert error.startswith(f"{path}: ") and message in error
    assert len(error.splitlines()) == 1


def test_combinations_with_the_model(write_config: Write) -> None:
    path = write_config("model: {path: org/name, max_model_len: 64}\nkv: {num_pages: 4}")
    assert load_config(path).kv.num_pages == 4
    problem = error_of(path, "model.load=gguf")
    assert problem.startswith("--set model.load=gguf: model.load: got ")


def test_every_mistake_gets_its_line(write_config: Write) -> None:
    path = write_config("kv: {page_size: 0, byts: 1}\n")
    assert [line.split(": ")[1] for line in error_of(path, "log.level=x").splitlines()] == [
        "model.path",
        "kv.page_size",
        "kv.byts",
        "log.level",
    ]


def test_overrides_win_in_order_and_are_named_in_errors(write_config: Write) -> None:
    path = write_config(MINIMAL + "kv: {page_size: 4}\n")
    config = load_config(path, ["kv.page_size=8", "kv.page_size=2", "server={port: 1}"])
    assert (config.kv.page_size, config.server.port) == (2, 1)
    assert error_of(path, "kv.page_size=-1").startswith("--set kv.page_size=-1: kv.page_size: got")
    assert error_of(path, "kv.size.x=1").startswith("--set kv.size.x=1: kv.size: unknown key")
    for broken in ("kv.page_size", "=3", "kv..page_size=3", ".x=1"):
        expected = f"--set {broken}: allowed: key.path=value, for example kv.page_size=8"
        assert error_of(path, broken) == expected
    assert "not valid YAML" in error_of(path, "kv.page_size=[")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 3", "allowed: sections with keys"),
        ("model: {path: a}\nmodel: {path: b}", ":2: not valid YAML: key 'model' is given twice"),
        ("kv: {page_size: 1, page_size: 2}", "key 'page_size' is given twice"),
        ("kv: [", "not valid YAML"),
        ("1: 2", "key 1 is not text"),
        ("model: !!python/object:os.system {}", "not valid YAML"),
        ("", "model.path: required, allowed: text that is not empty"),
        ("model: {path: null}", "model.path: got null, allowed: text that is not empty"),
    ],
)
def test_files_that_are_no_configuration(write_config: Write, text: str, message: str) -> None:
    assert message in error_of(write_config(text))


def test_files_that_cannot_be_read(tmp_path: Path, write_config: Write) -> None:
    missing = tmp_path / "missing.yaml"
    assert error_of(missing) == f"{missing}: cannot be read: No such file or directory"
    assert "cannot be read: Is a directory" in error_of(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert error_of(binary) == f"{binary}: cannot be read: not UTF-8 text"


def test_paths_are_relative_to_the_file_and_those_of_set_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "configs", tmp_path / "elsewhere"
    (folder / "model").mkdir(parents=True)
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    path = folder / "a.yaml"
    cases = {
        "model": str(folder / "model"),  # is there
        "./absent": str(folder / "absent"),
        "../m.gguf": str(tmp_path / "m.gguf"),
        "m.gguf": str(folder / "m.gguf"),
        "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B",
        "/abs/olute": "/abs/olute",
        "~/x": str(Path("~/x").expanduser()),
    }
    for written, loaded in cases.items():
        path.write_text(f"model: {{path: '{written}', chat_template: t.jinja}}\n")
        config = load_config(path)
        assert config.model.path == loaded
        assert config.model.chat_template == str(folder / "t.jinja")
    config = load_config(path, ["model.path=./here", "compile.cache_dir=cache"])
    assert config.model.path == str(elsewhere / "here")
    assert config.compile.cache_dir == str(elsewhere / "cache")


@pytest.mark.parametrize(
    ("path", "name"),
    [("org/name-1.5", "name-1.5"), ("/a/b.gguf", "b"), ("/a/b/", "b")],
)
def test_served_name(path: str, name: str) -> None:
    assert EngineConfig(model=ModelOptions(path=path)).served_name == name
    named = EngineConfig(model=ModelOptions(path=path, served_name="mine"))
    assert named.served_name == "mine"


def test_importing_the_configuration_loads_nothing_heavy() -> None:
    program = (
        "import sys, engine.resolve\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'fastapi'} & sys.modules.keys()))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


def test_every_section_documents_itself() -> None:
    sections = [field.annotation for field in EngineConfig.model_fields.values()]
    for section in sections:
        if isinstance(section, type) and issubclass(section, BaseModel):
            assert section.__doc__
