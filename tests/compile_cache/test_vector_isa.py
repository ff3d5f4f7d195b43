"""One probe instead of many, none with a trusted name, and torch's own way when the probe fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compile_cache.vector_isa import settle_vector_isa

cpu_vec_isa = pytest.importorskip("torch._inductor.cpu_vec_isa")
config = pytest.importorskip("torch._inductor.config")


class Probes(list[str]):
    """Stands for the test programs: what is compiled, and which of them work."""

    works = True


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Probes]:
    probes = Probes()

    def check_build(isa: object, code: str) -> bool:
        base = code == cpu_vec_isa.VecISA._avx_code
        probes.append("base" if base else "extra")
        return probes.works or not base

    def forget() -> None:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        for isa in cpu_vec_isa.supported_vec_isa_list:
            for cached in (type(isa).__bool__, cpu_vec_isa.VecISA._VecISA__bool__impl):
                getattr(cached, "cache_clear", lambda: None)()

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    forget()
    yield probes
    monkeypatch.undo()
    forget()


def test_one_base_probe_settles_all(probes: Probes) -> None:
    name = settle_vector_isa(None)
    assert name == str(cpu_vec_isa.pick_vec_isa())
    assert probes.count("base") <= 1
    seen = len(probes)
    cpu_vec_isa.pick_vec_isa()
    assert len(probes) == seen
    assert config.cpp.vec_isa_ok is None  # part of torch's cache keys: must be as it was


def test_a_trusted_name_needs_no_base_probe(probes: Probes) -> None:
    name = settle_vector_isa(None)
    probes.clear()
    assert settle_vector_isa(name) == name
    assert "base" not in probes


def test_a_probe_that_fails_leaves_the_choice_to_torch(probes: Probes) -> None:
    if settle_vector_isa(None) == str(cpu_vec_isa.invalid_vec_isa):
        pytest.skip("this CPU has no instruction set that Inductor knows")
    probes.works = False
    assert settle_vector_isa("another") is None
    assert cpu_vec_isa.valid_vec_isa_list() == []


def test_a_torch_without_these_names_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_vec_isa, "valid_vec_isa_list")
    assert settle_vector_isa("avx2") is None
