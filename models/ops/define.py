"""Defines an operator of the `fullgraph` namespace with as little cost per call as torch allows.

torch's `custom_op` adds Python to every call: 60 us between matrix products on a CPU, where
caches are cold, twice a layer. This is what it builds upon, without the parts that inference does
not need (autograd, version counters). CUDA implementations are added with its `impl`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import library


def define(
    name: str,
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
    mutates: Sequence[str] = (),
) -> Any:
    """`fullgraph::name`, defined.

    Args:
        cpu: the implementation; it returns no view of its arguments. Its annotations are the
            operator's.
        fake: of the outputs' shapes.
        mutates: names of the arguments that it writes to.
    """
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    full = f"fullgraph::{name}"
    library.define(full, library.infer_schema(cpu, mutates_args=mutates), tags=tags)
    library.impl(full, "cpu")(cpu)
    library.register_fake(full)(fake)
    return getattr(torch.ops.fullgraph, name).default
