"""What this machine has, found without torch: cores that may be used, a C++ compiler, a GPU's
driver.

Knows nothing of configurations.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Machine:
    """cores: physical ones that this process may use; compiler: a C++ compiler's name, or None."""

    cores: int
    compiler: str | None


def this_machine() -> Machine:
    """The machine we run on."""
    return Machine(physical_cores(), cpp_compiler())


def physical_cores(cpus: Path = _CPUS, quota: Path = _QUOTA) -> int:
    """Cores this process may use, at least 1: hyper-threads count once, a container's quota counts.

    Args:
        cpus: the folder in which Linux describes each logical CPU.
        quota: cgroup v2's file with "QUOTA PERIOD" or "max PERIOD".
    """
    affinity = getattr(os, "sched_getaffinity", None)
    usable = affinity(0) if affinity is not None else set(range(os.cpu_count() or 1))
    cores = {_siblings(cpus, cpu) for cpu in usable}
    return max(1, min(len(cores), _quota_cores(quota)))


def _siblings(cpus: Path, cpu: int) -> str:
    try:
        return (cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota_cores(quota: Path) -> int:
    """Whole cores that the quota allows; a large number where there is none."""
    try:
        limit, period = quota.read_text().split()
        return max(1, int(limit) // int(period))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return 1 << 16


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would call ($CXX, g++ or clang++), or None."""
    candidates = (os.environ.get("CXX"), "g++", "clang++")
    return next((name for name in candidates if name and shutil.which(name)), None)


def why_no_cuda() -> str:
    """Why there can be no CUDA device, "" where there may be one: only torch knows for certain."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver (libcuda.so.1)"
    return ""
