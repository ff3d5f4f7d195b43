"""Defines an operator of the `fullgraph` namespace with as little cost per call as torch allows.

torch's `custom_op` adds Python to every call: 60 us between matrix products on a CPU, where
caches are cold, twice a layer. This is what it builds upon, without the parts that inference does
not need (autograd, version counters). CUDA implementations are added with its `impl`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library


def define(name: str, schema: str, cpu: Callable[..., Any]) -> None:
    """Define `fullgraph::name` with its CPU implementation; a fake must be registered beside it.

    Args:
        name: of the operator.
        schema: from `infer_schema`, which says what is mutated.
        cpu: the implementation; it returns no view of its arguments.
    """
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    library.define(f"fullgraph::{name}", schema, tags=tags)
    library.impl(f"fullgraph::{name}", "cpu")(cpu)
