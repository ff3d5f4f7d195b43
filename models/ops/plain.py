"""RMS norm and rotary embedding in plain torch: traced where layers are not fused, and what the
operators that fuse them compute on a CPU. Imports nothing of ours.

Legend: T tokens, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32 (Zhang, Sennrich 2019)."""
    x_float = x.float()
    scale = torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
    return (x_float * scale).to(x.dtype) * weight


def apply_rope(x_THD: Tensor, rope_TD: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head by the token's angles.

    Args:
        x_THD: [T, heads, D].
        rope_TD: float32 [T, D], cosines then sines (models.rope.rope_table).
    """
    cos, sin = rope_TD[:, None].chunk(2, -1)
    low, high = x_THD.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x_THD.dtype)
