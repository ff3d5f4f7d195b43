"""Build the FlashInfer modules that a model's attention needs, on a machine without a GPU.

    python -m bench.build_modules --out kernels --head-dim 128 [--window] [--xqa GROUP ...]

Needs nvcc and FlashInfer. Each module lands in OUT/NAME/NAME.so, where FlashInfer looks for modules
that were built ahead if its package flashinfer_jit_cache gives OUT as its directory.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def specs(args: argparse.Namespace) -> Iterator[Any]:
    """What to build: chunked prefill for each backend, and XQA for each group size."""
    jit = importlib.import_module("flashinfer.jit.attention")
    xqa = importlib.import_module("flashinfer.jit.xqa")
    dtype = getattr(torch, args.dtype)
    for dim in args.head_dim:
        for backend in args.backends:
            yield jit.gen_batch_prefill_module(
                backend, dtype, dtype, dtype, torch.int32, dim, dim, 0, args.window, False, False
            )
        for group in args.xqa:
            yield xqa.gen_xqa_module(
                dtype, dtype, args.page_size, dim, group, args.window, dtype, 1
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Build FlashInfer's modules without a GPU")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", default="9.0a", help="as in FLASHINFER_CUDA_ARCH_LIST")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--backends", nargs="*", default=["fa2", "fa3"])
    parser.add_argument("--window", action="store_true", help="for layers with a sliding window")
    parser.add_argument("--xqa", type=int, nargs="*", default=[], help="query heads per kv head")
    parser.add_argument("--page-size", type=int, default=16, help="of XQA's modules")
    args = parser.parse_args()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", args.arch)
    for spec in specs(args):
        target = args.out / spec.name / f"{spec.name}.so"
        if target.exists():
            print("have", spec.name, flush=True)
            continue
        print("building", spec.name, flush=True)
        spec.build(verbose=False)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.build_dir / target.name, target)


if __name__ == "__main__":
    main()
