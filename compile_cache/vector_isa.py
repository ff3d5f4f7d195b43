"""Settles which vector instructions Inductor's C++ kernels use without probing them one by one.

Inductor compiles a test program per instruction set and loads each in a process of its own: 15 s on
a cold start of a 2-core machine, 2 s on a warm one (14 s with torch 2.11, where each of those
processes imports torch). One probe of the set that it would pick is as safe, and none is needed
where an entry of the same fingerprint says that it passed.

Uses private names of torch: where they are gone or behave otherwise, Inductor's own way is left to
take its course.
"""

from __future__ import annotations

from typing import Any


def settle_vector_isa(trusted: str | None) -> str | None:
    """Fill Inductor's table of instruction sets for this process. Imports torch._inductor; CPU
    only.

    Args:
        trusted: what an earlier process with the same fingerprint got from here, or None.

    Returns:
        The name of the set in use, to be kept with the cache entry; None where Inductor will find
        out by itself.
    """
    try:
        import torch._inductor.config as inductor_config
        from torch._inductor import cpu_vec_isa

        with inductor_config.patch({"cpp.vec_isa_ok": True}):
            cpu_vec_isa.valid_vec_isa_list()
        picked = cpu_vec_isa.pick_vec_isa()
        name = str(picked)
        known = name == trusted or picked is cpu_vec_isa.invalid_vec_isa
        if known or picked.check_build(cpu_vec_isa.VecISA._avx_code):
            return name
        _forget(cpu_vec_isa)
    except Exception:  # whatever a private interface may do: it costs seconds, not correctness
        return None
    return None


def _forget(cpu_vec_isa: Any) -> None:
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for isa in cpu_vec_isa.supported_vec_isa_list:
        for cached in (type(isa).__bool__, getattr(isa, "_VecISA__bool__impl", None)):
            clear = getattr(cached, "cache_clear", None)
            if clear is not None:
                clear()
