"""What compiled artefacts depend on, as an ordered set of named values: equal fingerprints may
share artefacts.

    parts = machine_parts(device) + compile_config(config) + model_parts(model) + {"source": ...}

A name is a dotted path, a value is a JSON scalar or a list of scalars, so that a difference can be
shown as two short values. Knows nothing of the engine's classes (the configuration arrives as plain
nested dicts) nor of where artefacts lie. Imports torch only inside `machine_parts`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

Scalar = str | int | float | bool | None
Value = Scalar | Sequence[Scalar]

# Keys of the configuration (resolved: no "auto") that decide what is compiled. Everything else may
# change and still hit; a test lists it and demands that every key of configs/default.yaml is either
# here or there.
COMPILE_KEYS = (
    "device",
    "model.dtype",
    "model.max_model_len",  # width of the page table
    "compile.backend",
    "compile.cudagraphs",
    "compile.unit",
    "compile.decode_buckets",
    "compile.extend_buckets",
    "compile.dynamic",
    "compile.autotune",
    "compile.skinny_gemm",
    "compile.threads",  # Inductor writes the number into its C++ kernels
    "attention.decode",
    "attention.extend",
    "kv.page_size",
    "scheduler.max_running",  # slots, and rows of an extend bucket
    "sampling.max_logprobs",
    "sampling.max_logit_bias",
    "sampling.max_stop_ids",
    "parallel.tp",
    "parallel.all_reduce",
)
# Variables that change what Inductor, Triton or the C++ compiler produce, less those that say
# where, how fast or loud.
_ENV_PREFIXES = ("TORCHINDUCTOR_", "TORCH_COMPILE_", "TRITON_", "AOTINDUCTOR_")
_ENV_NAMES = ("ATEN_CPU_CAPABILITY", "CXX", "CC")
_ENV_NEUTRAL = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_WORKER_START",
    "TORCH_COMPILE_DEBUG",
    "TORCH_COMPILE_DEBUG_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "TRITON_PRINT_AUTOTUNING",
)
# Flags of /proc/cpuinfo that name instructions; the rest (mitigations, power) changes with the
# kernel.
_INSTRUCTIONS = re.compile(
    r"sse|ssse|avx|amx|fma|f16c|bmi|abm|adx|aes|vaes|pclmul|vpclmul|gfni|sha|popcnt|movbe|movdir|rdrnd|rdrand|rdseed"
    r"|lzcnt|xop|tbm|3dnow|mmx|asimd|sve|bf16|i8mm|fphp|atomics|crc32|sm[34]"
)
_SOURCE_SUFFIXES = frozenset({".py", ".cu", ".cuh", ".cpp", ".cc", ".h", ".hpp"})


def shown(value: Value) -> str:
    """A value for a person, cut where it is long."""
    text = (
        str(value) if value is None or isinstance(value, (bool, int, float)) else json.dumps(value)
    )
    return text if len(text) <= 120 else f"{text[:117]}..."


@dataclass(frozen=True)
class Difference:
    """One part that two fingerprints do not share; a part that one lacks is None there."""

    part: str
    old: Value
    new: Value

    def __str__(self) -> str:
        old, new = self.old, self.new
        if isinstance(old, list) and isinstance(new, list) and len(str(old)) + len(str(new)) > 160:
            gone, added = [v for v in old if v not in new], [v for v in new if v not in old]
            return f"{self.part}: only there {shown(gone)}, only here {shown(added)}"
        return f"{self.part}: {shown(old)} there, {shown(new)} here"


@dataclass(frozen=True)
class Fingerprint:
    """Ordered named values. Two are the same cache key exactly when `digest` is equal.

    Attributes:
        parts: dotted name to JSON scalar or list of scalars; the order does not matter for the
            digest.
    """

    parts: Mapping[str, Value]

    @property
    def digest(self) -> str:
        """32 hex digits over all names and values."""
        text = json.dumps(dict(self.parts), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def diff(self, old: Fingerprint) -> tuple[Difference, ...]:
        """Every part that differs between `old` (a stored entry) and this one (this start)."""
        names = [*self.parts, *(name for name in old.parts if name not in self.parts)]
        return tuple(
            Difference(name, old.parts.get(name), self.parts.get(name))
            for name in names
            if _text(old.parts, name) != _text(self.parts, name)
        )

    def to_json(self) -> dict[str, Value]:
        """Plain JSON."""
        return dict(self.parts)

    @classmethod
    def from_json(cls, data: object) -> Fingerprint:
        """The inverse of `to_json`.

        Raises:
            ValueError: `data` is not a mapping of names to scalars or lists of scalars.
        """
        if not isinstance(data, dict):
            raise ValueError(f"a fingerprint is an object, not {type(data).__name__}")
        for name, value in data.items():
            items = value if isinstance(value, list) else [value]
            if not isinstance(name, str) or not all(_is_scalar(item) for item in items):
                raise ValueError(f"part {name!r} is not a scalar or a list of scalars")
        return cls(data)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Nested dicts to dotted names; tuples become lists, lists of anything but scalars become JSON
    text.
    """
    parts: dict[str, Value] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            parts.update(flatten(value, f"{name}."))
        elif isinstance(value, (list, tuple)):
            items = list(value)
            simple = all(_is_scalar(item) for item in items)
            parts[name] = items if simple else json.dumps(items, sort_keys=True, default=str)
        else:
            parts[name] = value if _is_scalar(value) else str(value)
    return parts


def compile_config(config: Mapping[str, Any]) -> dict[str, Value]:
    """The parts of a configuration that decide what is compiled: COMPILE_KEYS, nothing else.

    Args:
        config: the resolved configuration as nested dicts, with the keys of configs/default.yaml.

    Raises:
        KeyError: a key of COMPILE_KEYS is not there: the list and the configuration have grown
            apart.
    """
    flat = flatten(config)
    return {f"config.{key}": flat[key] for key in COMPILE_KEYS}


def source_digest(paths: Iterable[Path]) -> str:
    """16 hex digits over the source files given, and over all source files below the folders given.

    Files are told apart by their path below the folder given (or their name), so that the same
    sources elsewhere on the disk, or on another machine, have the same digest.
    """
    total = hashlib.sha256()
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.suffix not in _SOURCE_SUFFIXES or not file.is_file():
                continue
            name = file.relative_to(path.parent).as_posix()
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(f"{name}\0{content}\0".encode())
    return total.hexdigest()[:16]


def environment_parts(environ: Mapping[str, str]) -> dict[str, Value]:
    """Variables of the process that change generated code, by name."""
    names = [
        name
        for name in sorted(environ)
        if (name in _ENV_NAMES or name.startswith(_ENV_PREFIXES)) and name not in _ENV_NEUTRAL
    ]
    return {f"env.{name}": environ[name] for name in names}


def machine_parts(device: str) -> dict[str, Value]:
    """Versions and hardware. Imports torch; on "cuda" it initialises the CUDA context.

    Args:
        device: "cpu" or "cuda" (whose parts are None where no GPU is to be seen: a check needs
            none). A CPU's instruction set counts only where kernels are compiled for it (Inductor
            passes -march=native), the GPU and its driver only where those run them.
    """
    import torch

    parts: dict[str, Value] = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "platform": f"{platform.system()} {platform.machine()}".lower(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "flashinfer": _version("flashinfer-python"),
        "cuda": torch.version.cuda,
    }
    if device == "cuda":
        visible = torch.cuda.is_available()
        gpu = torch.cuda.get_device_properties(0) if visible else None
        parts["gpu.name"] = gpu.name if gpu else None
        parts["gpu.arch"] = f"sm_{gpu.major}{gpu.minor}" if gpu else None
        parts["gpu.multiprocessors"] = gpu.multi_processor_count if gpu else None
        parts["gpu.driver_major"] = driver_major()
    else:
        parts["cpu.capability"] = torch.backends.cpu.get_cpu_capability()
        parts["cpu.instructions"] = [*cpu_instructions()]
    return {**parts, **environment_parts(os.environ)}


def driver_major(version_file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Major version of NVIDIA's driver ("580"), or None where it cannot be read."""
    try:
        match = re.search(r"Kernel Module[^\n]*?\s(\d+)\.\d+", version_file.read_text())
    except OSError:
        return None
    return match[1] if match else None


def cpu_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Sorted names of the instruction sets that the CPU offers; empty where the system does not
    tell.
    """
    try:
        text = cpuinfo.read_text()
    except OSError:
        return []
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return sorted({f for f in match[1].split() if _INSTRUCTIONS.match(f)}) if match else []


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))


def _text(parts: Mapping[str, Value], name: str) -> str:
    # As in the digest: 1, True and 1.0 differ, and so do null and nothing.
    return json.dumps(parts[name]) if name in parts else ""


def explain(differences: Sequence[Difference], most: int = 8) -> str:
    """One line per difference, at most `most` of them."""
    lines = [str(d) for d in differences[:most]]
    if len(differences) > most:
        lines.append(f"and {len(differences) - most} more")
    return "\n".join(lines)
