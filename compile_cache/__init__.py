"""Compiled artefacts kept between starts: what they depend on, where they lie, how they are filled.

Imports neither the engine nor torch (only `machine_parts` and vector_isa.py import torch, when they
are called).
"""

from __future__ import annotations

from compile_cache.aot import AotFunction, compile_or_load, preload, settle_triton
from compile_cache.archive import export, import_
from compile_cache.fingerprint import (
    Difference,
    Fingerprint,
    compile_config,
    explain,
    flatten,
    machine_parts,
    source_digest,
)
from compile_cache.session import Session
from compile_cache.store import (
    CacheError,
    Entry,
    Hit,
    Miss,
    Store,
    default_root,
    format_size,
    part_table,
)
from compile_cache.vector_isa import settle_vector_isa
from compile_cache.warmup import Job, jobs_table, run_jobs

__all__ = [
    "AotFunction",
    "CacheError",
    "Difference",
    "Entry",
    "Fingerprint",
    "Hit",
    "Job",
    "Miss",
    "Session",
    "Store",
    "compile_config",
    "compile_or_load",
    "default_root",
    "explain",
    "export",
    "flatten",
    "format_size",
    "import_",
    "jobs_table",
    "machine_parts",
    "part_table",
    "preload",
    "run_jobs",
    "settle_triton",
    "settle_vector_isa",
    "source_digest",
]
