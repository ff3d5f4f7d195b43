"""Rotary position embedding as a table: fp32 cosines and sines per position, gathered by the step.

Trigonometry stays out of the graph: it compiles slowly and loses precision in half types. Knows
nothing of layers.

Legend: D head dim, N positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.errors import UnsupportedModel
from models.rope_config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int, max_position: int) -> Tensor:
    """float32 [N, D] on the CPU: cosines in the first D / 2 columns, sines in the rest.

    cos[p, i] = attention_factor * cos(p * inv_freq[i]), the angle taken in float32 as Hugging Face
    does.

    Args:
        rope: the embedding.
        head_dim: D.
        num_positions: N, rows of the table.
        max_position: ModelConfig.max_position.

    Raises:
        UnsupportedModel: dynamic scaling past max_position, where it would depend on the whole
            sequence's length and no cached key would stay valid. Up to there it equals the default
            embedding.
    """
    if rope.type == "dynamic" and num_positions > max_position:
        raise UnsupportedModel(
            f"rope type 'dynamic' is served up to max_position_embeddings {max_position}, "
            f"not to {num_positions}: past it the keys of a sequence change with its length"
        )
    freq_D = inverse_frequencies(rope, head_dim)
    angles_ND = torch.arange(num_positions, dtype=torch.float32)[:, None] * freq_D
    return torch.cat((angles_ND.cos(), angles_ND.sin()), -1) * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [D / 2]: radians per position of each pair of dims."""
    exponents_D = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    freq_D = 1.0 / (rope.theta**exponents_D)
    if rope.type == "linear":
        return freq_D / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, freq_D)
    if rope.type == "yarn":
        return _yarn(rope, freq_D, head_dim)
    if rope.type == "factors":
        factors_D = torch.tensor(rope.freq_factors, dtype=torch.float32)
        if factors_D.shape != freq_D.shape:
            raise UnsupportedModel(
                f"freq_factors has {factors_D.numel()} values for a head_dim of {head_dim}"
            )
        return freq_D / factors_D
    assert rope.type in ("default", "dynamic"), rope.type
    return freq_D


def _llama3(rope: RopeConfig, freq_D: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by factor, short ones kept, a ramp between."""
    rotations_D = rope.original_max_position * freq_D / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep_D = ((rotations_D - low) / (high - low)).clamp(0, 1)
    return keep_D * freq_D + (1 - keep_D) * freq_D / rope.factor


def _yarn(rope: RopeConfig, freq_D: Tensor, head_dim: int) -> Tensor:
    """YaRN's "NTK by parts" (Peng et al. 2023, section 3.2): a ramp over dims."""

    def dim_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp_D = torch.arange(head_dim // 2, dtype=torch.float32).sub(low).div(high - low).clamp(0, 1)
    return freq_D * (1 - ramp_D) + freq_D / rope.factor * ramp_D
