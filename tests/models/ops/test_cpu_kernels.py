"""Building the C++ kernels: once for a machine, and never in the way of one that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from models.ops import cpu_kernels


@pytest.fixture(name="cache")
def fixture_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a library that is not loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_kernels.compiled.cache_clear()
    yield tmp_path
    cpu_kernels.compiled.cache_clear()


def built(cache: Path) -> list[Path]:
    return list(cache.glob("fullgraph/cpu_kernels/*.so"))


def test_built_once_and_repaired(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu_kernels.compiled() is None:
        pytest.skip("no C++ compiler")
    (file,) = built(cache)
    assert list(file.parent.iterdir()) == [file]  # nothing is left over
    stamp = file.stat().st_mtime_ns
    cpu_kernels.compiled.cache_clear()
    assert cpu_kernels.compiled() is not None
    assert file.stat().st_mtime_ns == stamp
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "other"))
    broken = cache / "other" / file.relative_to(cache)
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"broken")
    cpu_kernels.compiled.cache_clear()
    assert cpu_kernels.compiled() is not None
    assert broken.stat().st_size > 1000


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    assert cpu_kernels.compiled() is None


def test_a_compiler_that_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    assert cpu_kernels.compiled() is None
    assert built(cache) == []


def test_nowhere_to_write(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    assert cpu_kernels.compiled() is None
