"""YAML text to a plain tree, strictly: a key given twice is an error, and 1e-3 is a number.

Knows nothing of which keys there are.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from engine.errors import ConfigError

Tree = dict[str, Any]
_SHORT_FORMS = {"--host": 'server.host="{}"', "--port": "server.port={}"}


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and reads floats and booleans as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is not text", problem_mark=key_node.start_mark
                )
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_FLOAT_PATTERN = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _BOOL, re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    _FLOAT, re.compile(f"^(?:{_FLOAT_PATTERN.pattern})$"), list("-+0123456789.")
)


def _parse(text: str, source: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark is not None else source
        raise ConfigError(f"{place}: not valid YAML: {reason}") from None


def read_tree(path: Path) -> Tree:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: no such file, not text, not YAML, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    tree = _parse(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: got {tree!r}, allowed: sections with keys, as in configs/default.yaml"
        )
    return tree


def apply_override(text: str) -> tuple[str, Tree, str]:
    """`a.b=c` to its key path, a tree `{a: {b: c}}`, c parsed as YAML, and what the user typed.

    `--host NAME` and `--port NUMBER` stand for such a text.

    Raises:
        ConfigError: no `=`, an empty part in the key path, or c is not YAML.
    """
    option, _, given = text.partition(" ")
    form = _SHORT_FORMS.get(option)
    typed = f"--set {text}" if form is None else text
    key, equals, value = (text if form is None else form.format(given)).partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{typed}: allowed: key.path=value, for example kv.page_size=8")
    parsed: Any = _parse(value, typed)
    for part in reversed(parts):
        parsed = {part: parsed}
    return key.strip(), parsed, typed
