"""YAML and `--set key.path=value` to a frozen, validated EngineConfig: every knob there is.

The tree has exactly the keys of configs/default.yaml, with the same defaults; "auto" stays "auto"
here (engine/resolve.py fills it in). A mistake is a ConfigError of one line per key: where it was
written, key path, value, what is allowed.

Relative paths in a file are relative to that file's folder, those of a `--set` to the working
directory. A `model.path` or `model.tokenizer` that names nothing on disk is left alone (a hub id),
unless it starts with . or ~ or ends in .gguf.

Knows nothing of torch, devices or checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from engine.config_errors import Problem, Says, key_problems
from engine.config_file import Tree, apply_override, read_tree
from engine.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(value: object) -> object:
    """`"512 MiB"` to 536870912; anything that is not such a text comes back as it is."""
    match = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _UNITS:
        return value
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Auto = Literal["auto"]
Positive = Annotated[int, Ge(1)]
NotNegative = Annotated[int, Ge(0)]
Seconds = Annotated[float, Gt(0)]
Text = Annotated[str, MinLen(1)]
Bytes = Annotated[
    int, BeforeValidator(parse_bytes), Ge(1), Says('a number of bytes >= 1 or "512 MiB"')
]
_BUCKET_WORDS = "a list of integers >= 1, each above the last"
Buckets = Annotated[
    tuple[Positive, ...], MinLen(1), BeforeValidator(_as_tuple), Says(_BUCKET_WORDS)
]


class Options(BaseModel):
    """A section: frozen, no other keys, no coercion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelOptions(Options):
    """Which weights, tokenizer and defaults."""

    path: Text
    revision: Text | None = None
    offline: bool = False
    load: Literal["auto", "safetensors", "gguf", "random"] = "auto"
    seed: NotNegative = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: Positive | Auto = "auto"
    tokenizer: Text | None = None
    chat_template: Text | None = None
    generation_config: bool = True
    served_name: Text | None = None


class CompileOptions(Options):
    """How the step becomes graphs."""

    backend: Literal["auto", "inductor", "eager"] = "auto"
    cudagraphs: Literal["trees", "manual"] = "trees"
    unit: Literal["auto", "step", "layer"] = "auto"
    decode_buckets: Buckets | Auto = "auto"
    extend_buckets: Buckets | Auto = "auto"
    dynamic: bool = True
    autotune: bool = False
    skinny_gemm: bool | Auto = "auto"
    cache: bool = True
    cache_dir: Text | None = None
    threads: Positive | Auto = "auto"
    workers: NotNegative | Auto = "auto"


class AttentionOptions(Options):
    """Which attention kernels. workspace: bytes."""

    decode: Literal["auto", "triton", "fa2", "fa3", "xqa", "reference"] = "auto"
    extend: Literal["auto", "mixed", "fa2", "fa3", "reference"] = "auto"
    workspace: Bytes = 256 * 2**20


class KVOptions(Options):
    """Pages of keys and values. page_size: tokens; num_pages: those that requests can use."""

    page_size: Positive = 16
    prefix_cache: bool = True
    memory_ratio: Annotated[float, Gt(0), Le(1)] = 0.9
    bytes: Bytes = 512 * 2**20
    num_pages: Positive | None = None


class SchedulerOptions(Options):
    """Who runs in a step."""

    policy: Literal["fcfs", "priority", "longest_prefix"] = "fcfs"
    max_running: Positive | Auto = "auto"
    max_waiting: Positive = 1024
    max_step_tokens: Positive | Auto = "auto"
    step_budget: Positive | Auto = "auto"
    context_unit: Positive | Auto = "auto"
    overlap: bool = True
    output_estimate: Annotated[float, Gt(0), Le(1)] = 0.25
    max_waiting_s: Seconds | None = None


class SamplingOptions(Options):
    """Sizes of the sampling tables: what one request may ask for."""

    max_logprobs: NotNegative = 20
    max_logit_bias: NotNegative = 300
    max_stop_ids: Positive = 64


class ParallelOptions(Options):
    """Ranks."""

    tp: Positive = 1
    all_reduce: Literal["auto", "nccl", "symmetric"] = "auto"
    timeout_s: Seconds = 600


class ServerOptions(Options):
    """The HTTP side and its limits."""

    host: Text = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    api_key: Text | None = None
    drain_timeout_s: Annotated[float, Ge(0)] = 30
    start_timeout_s: Seconds = 1800
    max_n: Positive = 16
    max_prompts: Positive = 64
    max_stop: Positive = 16
    max_stop_length: Positive = 512
    max_body_bytes: Bytes = 16 * 2**20


class LogOptions(Options):
    """What is printed. `progress: auto` is decided by the display, which sees the terminal."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    progress: Literal["auto", "bar", "lines", "none"] = "auto"


class EngineConfig(Options):
    """The whole configuration; units as in configs/default.yaml, times in seconds."""

    model: ModelOptions
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: CompileOptions = CompileOptions()
    attention: AttentionOptions = AttentionOptions()
    kv: KVOptions = KVOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    sampling: SamplingOptions = SamplingOptions()
    parallel: ParallelOptions = ParallelOptions()
    server: ServerOptions = ServerOptions()
    log: LogOptions = LogOptions()

    @model_validator(mode="after")
    def _fits_together(self) -> EngineConfig:
        for key, value, allowed in _conflicts(self):
            problem = {"key": key, "value": value, "allowed": allowed}
            raise PydanticCustomError("conflict", "{key}: got {value}, allowed: {allowed}", problem)
        return self

    @property
    def served_name(self) -> str:
        """The name in /v1/models; default: the last part of `model.path`, without .gguf."""
        return self.model.served_name or Path(self.model.path).name.removesuffix(".gguf")


def _conflicts(config: EngineConfig) -> Iterator[tuple[str, object, str]]:
    """Combinations that no single key forbids: (key path, value, what is allowed)."""
    compile_, scheduler, model = config.compile, config.scheduler, config.model
    for key, buckets in (("decode", compile_.decode_buckets), ("extend", compile_.extend_buckets)):
        if buckets != "auto" and any(a >= b for a, b in zip(buckets, buckets[1:], strict=False)):
            yield f"compile.{key}_buckets", list(buckets), _BUCKET_WORDS
    max_tokens, max_running = scheduler.max_step_tokens, scheduler.max_running
    limits = (
        ("decode", compile_.decode_buckets, "max_running", max_running),
        ("extend", compile_.extend_buckets, "max_step_tokens", max_tokens),
    )
    for key, buckets, limit_key, limit in limits:
        if buckets != "auto" and limit != "auto" and buckets[-1] != limit:
            allowed = f"a list that ends with scheduler.{limit_key} = {limit}"
            yield f"compile.{key}_buckets", list(buckets), allowed
    if max_tokens != "auto" and max_running != "auto" and max_tokens < max_running:
        allowed = (
            f"at least scheduler.max_running = {max_running}: each running request takes a token"
        )
        yield "scheduler.max_step_tokens", max_tokens, allowed
    if (model.load == "gguf") != model.path.endswith(".gguf") and model.load != "auto":
        yield "model.load", model.load, f"a format that model.path = {model.path!r} has (or auto)"
    if config.device == "cpu":
        for key, kernel in (
            ("decode", config.attention.decode),
            ("extend", config.attention.extend),
        ):
            if kernel not in ("auto", "reference"):
                yield f"attention.{key}", kernel, "auto or reference, with device = cpu"


Config = TypeVar("Config", bound=EngineConfig)


def validate(cls: type[Config], tree: Tree, source: str, origins: Mapping[str, str]) -> Config:
    """Turn a plain tree, as YAML gives it, into a configuration.

    Args:
        cls: EngineConfig or a narrower one.
        tree: section -> key -> value; an empty section is all defaults.
        source: what messages call the place the tree came from.
        origins: key path -> the option that gave its value, named instead of `source`.

    Raises:
        ConfigError: one line per wrong key.
    """
    empty = {key for key in cls.model_fields if key != "device" and tree.get(key) is None}
    sections = {**tree, **{key: {} for key in empty & (tree.keys() | {"model"})}}
    try:
        return cls.model_validate(sections)
    except ValidationError as error:
        problems = key_problems(error, cls)
    raise _told(problems, source, origins)


def _told(problems: Iterable[Problem], source: str, origins: Mapping[str, str]) -> ConfigError:
    return ConfigError("\n".join(f"{_origin(p.key, source, origins)}: {p}" for p in problems))


def _origin(key: str, source: str, origins: Mapping[str, str]) -> str:
    """Where a key's value was written: the last `--set` of it, of a part or of its section."""
    for override, text in reversed(list(origins.items())):
        if f"{key}.".startswith(f"{override}.") or override.startswith(f"{key}."):
            return text
    return source


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    check: Callable[[EngineConfig], Iterable[Problem]] = lambda _: (),
) -> EngineConfig:
    """Read a YAML file, apply `key.path=value` overrides in order, validate.

    Args:
        path: the file.
        overrides: texts such as `kv.page_size=8`, the value parsed as YAML, or `--port 8000`.
        check: what else is wrong with it.

    Raises:
        ConfigError: the file cannot be read or parsed, or a key or value is wrong.
    """
    tree = _with_absolute_paths(read_tree(path), path.absolute().parent)
    origins: dict[str, str] = {}
    for text in overrides:
        key, patch, typed = apply_override(text)
        _merge(tree, _with_absolute_paths(patch, Path.cwd()))
        origins.pop(key, None)
        origins[key] = typed
    config = validate(EngineConfig, tree, str(path), origins)
    if problems := list(check(config)):
        raise _told(problems, str(path), origins)
    return config


# (section, key, may also be a hub id)
_PATH_KEYS = (
    ("model", "path", True),
    ("model", "tokenizer", True),
    ("model", "chat_template", False),
    ("compile", "cache_dir", False),
)


def _merge(tree: Tree, patch: Tree) -> None:
    for key, value in patch.items():
        old = tree.get(key)
        if isinstance(value, dict) and value and isinstance(old, dict):
            _merge(old, value)
        else:
            tree[key] = value


def _with_absolute_paths(tree: Tree, folder: Path) -> Tree:
    """The tree with relative paths made absolute; hub ids stay (see the top of this file)."""
    for section, key, may_be_id in _PATH_KEYS:
        options = tree.get(section)
        if not isinstance(options, dict):
            continue
        value = options.get(key)
        if not isinstance(value, str) or not value:
            continue
        local = (folder / Path(value).expanduser()).resolve()
        if (
            value.startswith((".", "~"))
            or value.endswith(".gguf")
            or not may_be_id
            or local.exists()
        ):
            options[key] = str(local)
    return tree
