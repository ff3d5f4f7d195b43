"""`fullgraph warmup`: start once, so that every graph is compiled and kept; carry artefacts about.

Knows the verb's options; what is compiled and where it is kept is the engine's and the cache's.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from compile_cache import CacheError, Hit, export, format_size, import_
from engine.artefacts import fingerprint_of, prepare, store_of
from engine.config import EngineConfig, load_config
from engine.errors import ConfigError
from engine.startup import start_engine
from engine.terminal import ProgressDisplay

NOT_THERE = 1


def run(args: argparse.Namespace) -> int:
    """Check, or take in artefacts, compile, and hand artefacts out."""
    config = load_config(args.config, args.overrides)
    if args.check:
        return _check(config)
    if not config.compile.cache:
        raise ConfigError("compile.cache: got false, allowed: true, for warmup fills the cache")
    try:
        if args.import_file is not None:
            _import(config, args.import_file)
        _compile(config)
        if args.export_file is not None:
            _export(config, args.export_file)
    except CacheError as error:
        raise ConfigError(str(error)) from error
    return 0


def _check(config: EngineConfig) -> int:
    found = store_of(config).lookup(fingerprint_of(prepare(config)))
    print(found)
    return 0 if isinstance(found, Hit) and not found.damaged else NOT_THERE


def _compile(config: EngineConfig) -> None:
    begin = time.perf_counter()
    with ProgressDisplay(config.log.progress) as display:
        engine = start_engine(config, display.update)
    display.table("resolved", engine.settings)
    engine.close()
    print(f"every graph is compiled after {time.perf_counter() - begin:.1f} s")


def _import(config: EngineConfig, file: Path) -> None:
    manifest = import_(store_of(config), fingerprint_of(prepare(config)), file)
    print(f"{file}: {len(manifest.files)} files, {format_size(manifest.size)}")


def _export(config: EngineConfig, file: Path) -> None:
    size = export(store_of(config), fingerprint_of(prepare(config)), file)
    print(f"{file}: {format_size(size)}")
