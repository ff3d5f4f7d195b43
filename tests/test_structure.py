"""The shape of the code: who may import whom, budgets, docstrings. Reads the sources, runs nothing.

Arrows are followed through imports of ours, lazily written ones in functions too, since those are
allowed in one place only.
"""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

from tests.conftest import ROOT

OURS = ("engine", "models", "compile_cache")
MAX_FUNCTION_LINES = 60
# A Triton kernel is one scope: cut up, its parts would pass each other a dozen values.
MAX_KERNEL_LINES = 110
MAX_FILE_LINES = 400
# Tables of cases are long and easy to read.
MAX_TEST_FILE_LINES = 600
# Of the three packages together; counted without docstrings and comments, lest they be saved on.
# 9,000 was the plan; kernels of our own, the compile cache with export and import, and OpenAI's
# protocol to its corners, compile processes, ranks, mixtures of experts, the trial that sizes the
# KV pages, the plan of decode attention, the draw, the kernel between two attentions, the LM
# head that draws on a GPU and answers that follow a grammar took the rest.
MAX_CODE_LINES = 16250

# Importer -> what it may not reach, by any chain of imports of ours. A name stands for the module
# and all below it.
FORBIDDEN = [
    ("models", "engine"),
    ("models", "compile_cache"),
    ("compile_cache", "engine"),
    ("compile_cache", "models"),
    ("engine.scheduler", "torch"),
    ("engine.server", "torch"),
    ("engine.tokenizer", "torch"),
    ("engine.detokenizer", "torch"),
    ("engine.engine_client", "torch"),
    ("engine.commands.serve", "torch"),
    ("engine.preflight", "torch"),
    ("engine.engine_launch", "torch"),
    ("engine.config", "torch"),
    ("engine.resolve", "torch"),
]
# Importing these imports torch, if not always.
TORCH_LIKE = ("torch", "transformers", "safetensors.torch", "flashinfer", "triton", "accelerate")
# Imports nothing of ours (engine/__init__ aside, which the interpreter runs for any of them).
LEAVES = ("engine.errors", "engine.request", "engine.metrics", "models.errors")
# Does not import these at the top: they come with the verb, or on first use.
LIGHT = ("engine", "engine.cli", "engine.config", "engine.errors", "engine.request")
HEAVY = (*TORCH_LIKE, "numpy", "fastapi", "uvicorn", "tokenizers", "zmq")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    """Module name -> file, of everything in the three packages."""
    files = (path for package in OURS for path in (ROOT / package).rglob("*.py"))
    return {module_name(path): path for path in sorted(files)}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _is_type_checking(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def import_nodes(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that happen at run time, wherever they stand."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
        return
    children = node.orelse if _is_type_checking(node) else ast.iter_child_nodes(node)
    for child in children:
        yield from import_nodes(child)


def imported_names(node: ast.Import | ast.ImportFrom, importer: str) -> Iterator[str]:
    """Modules that an import names; `from a import b` gives a, and a.b where that is a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert node.level == 0, f"{importer}: relative import"
    assert node.module is not None
    yield node.module
    for alias in node.names:
        name = f"{node.module}.{alias.name}"
        if name in sources():
            yield name


@cache
def imports_of(name: str) -> frozenset[str]:
    nodes = import_nodes(tree_of(sources()[name]))
    return frozenset(found for node in nodes for found in imported_names(node, name))


def below(name: str, roots: tuple[str, ...] | str) -> bool:
    roots = (roots,) if isinstance(roots, str) else roots
    return any(name == root or name.startswith(f"{root}.") for root in roots)


@cache
def reached_from(start: str) -> dict[str, str]:
    """Every module that `start` reaches, ours or not -> the one that imports it, breadth first."""
    parents: dict[str, str] = {}
    queue = [start]
    while queue:
        importer = queue.pop(0)
        for name in sorted(imports_of(importer)):
            if name not in parents:
                parents[name] = importer
                if name in sources() and name != start:
                    queue.append(name)
    return parents


def chain(start: str, forbidden: tuple[str, ...]) -> str | None:
    """A shortest chain of imports from `start` to something forbidden, or None."""
    parents = reached_from(start)
    hit = next((name for name in parents if below(name, forbidden)), None)
    if hit is None:
        return None
    path = [hit]
    while path[-1] != start or len(path) == 1:
        path.append(parents[path[-1]])
    return " -> ".join(reversed(path))


@pytest.mark.parametrize(("importer", "forbidden"), FORBIDDEN)
def test_arrows(importer: str, forbidden: str) -> None:
    names = TORCH_LIKE if forbidden == "torch" else (forbidden,)
    importers = [name for name in sources() if below(name, importer)]
    assert importers, f"no module below {importer}: the rule is stale"
    broken = [path for name in importers if (path := chain(name, names)) is not None]
    assert not broken


def test_models_ops_import_nothing_else_of_models() -> None:
    for name in sources():
        if below(name, "models.ops"):
            ours = {found for found in imports_of(name) if below(found, OURS)}
            assert all(below(found, "models.ops") for found in ours), (name, ours)


def test_leaves_import_nothing_of_ours() -> None:
    for name in LEAVES:
        if name in sources():
            assert not [found for found in imports_of(name) if below(found, OURS)], name


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_import_nothing_heavy(name: str) -> None:
    assert chain(name, HEAVY) is None


def test_no_import_of_ours_inside_a_function() -> None:
    found = []
    for name, path in sources().items():
        for function in ast.walk(tree_of(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                nodes = import_nodes(function)
                names = {found for node in nodes for found in imported_names(node, name)}
                found += [f"{name}: {other}" for other in names if below(other, OURS)]
    assert not found


def test_no_import_cycles() -> None:
    circles = [chain(name, (name,)) for name in sources() if name in reached_from(name)]
    assert not circles


def long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            kernel = any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
            if length > (MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES):
                yield f"{node.name}: {length} lines"


def python_files() -> list[Path]:
    folders = (*OURS, "tests", "bench")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_functions_and_files_stay_short() -> None:
    long: list[str] = []
    for path in python_files():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        name = path.relative_to(ROOT)
        if lines > (MAX_TEST_FILE_LINES if name.parts[0] == "tests" else MAX_FILE_LINES):
            long.append(f"{name}: {lines} lines")
        long += [f"{name}: {function}" for function in long_functions(path)]
    assert not long, "\n".join(long)


def code_lines(path: Path) -> int:
    """Lines that hold code: docstrings, comments and blank lines cost nothing."""
    tree = tree_of(path)
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    noise = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in noise | {tokenize.ENCODING, tokenize.ENDMARKER}:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_the_packages_together_stay_small() -> None:
    assert sum(code_lines(path) for path in sources().values()) <= MAX_CODE_LINES


def test_every_module_opens_with_a_docstring_and_the_future() -> None:
    for path in python_files():
        tree = tree_of(path)
        if not tree.body and path.name == "__init__.py":
            continue
        assert ast.get_docstring(tree), f"{path}: no docstring"
        if len(tree.body) > 1:
            second = tree.body[1]
            future = isinstance(second, ast.ImportFrom) and second.module == "__future__"
            assert future, f"{path}: no `from __future__ import annotations` atop"


def test_no_module_shadows_the_standard_library_by_a_bare_name() -> None:
    shadows = {"types", "logging", "queue", "tokenize", "token", "select", "signal", "code"}
    assert not [name for name in sources() if name.rpartition(".")[2] in shadows]


def test_every_folder_of_tests_is_a_package() -> None:
    """Two test files of one name would collide otherwise."""
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_the_readme_names_every_module() -> None:
    """Of models/ops/ and engine/commands/ it names the folder."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    folders = ("engine", "engine/server", "engine/scheduler", "models", "compile_cache", "bench")
    files = (path for folder in folders for path in sorted((ROOT / folder).glob("[!_]*.py")))
    assert not [str(path) for path in files if path.name not in readme]


def test_the_rules_can_fail() -> None:
    """The walk sees lazy imports and `from package import module`, and skips TYPE_CHECKING."""
    text = (
        "if TYPE_CHECKING:\n    import a\nelse:\n    import b\n"
        "def f():\n    from engine import config\n"
    )
    nodes = import_nodes(ast.parse(text))
    assert [name for node in nodes for name in imported_names(node, "x")] == [
        "b",
        "engine",
        "engine.config",
    ]
    assert chain("engine.commands.serve", ("pydantic",)) == (
        "engine.commands.serve -> engine.config -> pydantic"
    )
