"""`fullgraph warmup`: compile everything that a start needs into the cache; carry artefacts about.

Knows the verb's options; what is compiled and where it is kept is the engine's and the cache's.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from compile_cache.archive import export, import_
from compile_cache.store import CacheError, Hit, format_size
from compile_cache.warmup import jobs_table
from engine.artefacts import Prepared, fingerprint_of, open_cache, prepare, store_of
from engine.compile_jobs import VARIANTS, compile_jobs
from engine.compiler import Compiler
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.resolve import settings_of
from engine.terminal import ProgressDisplay

NOT_THERE = 1


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Check, or take in artefacts, compile, and hand artefacts out."""
    if args.check:
        words = [word for text in args.overrides for word in ("--set", text)]
        return _check(config, shlex.join(["fullgraph", "warmup", str(args.config), *words]))
    if not config.compile.cache:
        raise ConfigError("compile.cache: got false, allowed: true, for warmup fills the cache")
    try:
        if args.export_file is not None and not os.access(args.export_file.parent, os.W_OK):
            raise CacheError(f"{args.export_file}: its folder is missing or cannot be written to")
        if args.import_file is not None:
            _import(config, args.import_file)
        _compile(config)
        if args.export_file is not None:
            _export(config, args.export_file)
    except CacheError as error:
        raise ConfigError(str(error)) from error
    return 0


def _check(config: EngineConfig, remedy: str) -> int:
    """Say what is missing, the verdict last; `remedy` is the command that builds it."""
    prepared = prepare(config)
    names, found = _names(prepared), store_of(config).lookup(fingerprint_of(prepared))
    print(found)
    done, damaged = (found.manifest.jobs, found.damaged) if isinstance(found, Hit) else ({}, {})
    missing = [name for name in names if name not in done]
    if done and missing:
        print(f"missing: {', '.join(missing)}")
    if not missing and not damaged:
        print(f"nothing is missing: a start finds all of {len(names)} jobs")
        return 0
    what = f"{len(missing)} of {len(names)} jobs are missing" if missing else "files are damaged"
    print(f"{what}; to build them: {remedy}")
    return NOT_THERE


def _compile(config: EngineConfig) -> None:
    begin = time.perf_counter()
    prepared = prepare(config)
    with ProgressDisplay(config.log.progress) as display, open_cache(prepared) as cache:
        display.table("resolved", settings_of(config, prepared.config))
        names, before = _names(prepared), cache.jobs
        if set(names) - before.keys():
            if not cache.can_keep():
                raise CacheError("the cache cannot be written to; the warning above says why")
            with cache.building(_tell_of_another):
                before = cache.jobs
                compiler = Compiler(config, prepared.config, cache)
                compiler.start(VARIANTS, least_workers=1)
                compiler.wait(VARIANTS, display.update)
        after = cache.jobs
    print(jobs_table(names, before, after))
    size = store_of(config).size(fingerprint_of(prepared))
    print(f"{time.perf_counter() - begin:.1f} s; on disk: {format_size(size)}")
    missing = [name for name in names if name not in after]
    if missing:
        raise CacheError(f"not compiled: {', '.join(missing)}; the warnings above say why")


def _tell_of_another() -> None:
    text = "another warm-up fills this entry of the cache: waiting for it"
    print(text, file=sys.stderr, flush=True)


def _names(prepared: Prepared) -> list[str]:
    return [job.name for group in compile_jobs(prepared.config, VARIANTS) for job in group]


def _import(config: EngineConfig, file: Path) -> None:
    manifest = import_(store_of(config), fingerprint_of(prepare(config)), file)
    print(f"{file}: {len(manifest.files)} files, {format_size(manifest.size)}")


def _export(config: EngineConfig, file: Path) -> None:
    size = export(store_of(config), fingerprint_of(prepare(config)), file)
    print(f"{file}: {format_size(size)}")
