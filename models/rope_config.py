"""RopeConfig: which rotary position embedding a config.json asks for. No torch here.

Reads transformers 5's rope_parameters and the rope_theta and rope_scaling of before. A type or key
that we do not compute is an error that names it. Knows nothing of tables or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.errors import UnsupportedModel

HF = Mapping[str, Any]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, every optional value resolved.

    Attributes:
        type: default | linear | dynamic | llama3 | yarn | factors.
        theta: base of the geometric series of wavelengths.
        factor: by how much the context was stretched (linear, llama3, yarn).
        original_max_position: the length of pre-training (llama3, yarn).
        attention_factor: multiplies cos and sin (yarn).
        low_freq_factor / high_freq_factor: llama3's band of wavelengths.
        beta_fast / beta_slow / truncate: yarn's band of rotations, and whether it is rounded to
            whole dims.
        freq_factors: [head_dim / 2] divisors of the frequencies (type factors, from a GGUF file).
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()


_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"factor"}),
    "factors": frozenset({"freq_factors"}),
}
_ROPE_OPTIONAL = frozenset(
    {
        "type",
        "rope_type",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "finetuned",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
    }
)


def _rope_dict(hf: HF) -> dict[str, Any]:
    """transformers 5's rope_parameters, or rope_scaling and rope_theta of before, as one dict."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    if rope and all(isinstance(value, dict) for value in rope.values()):
        first, *others = rope.values()
        if any(other != first for other in others):
            raise UnsupportedModel("rope_parameters differ between layer types; not supported")
        rope = dict(first)
    rope = {key: value for key, value in rope.items() if value is not None}
    rope.setdefault("rope_theta", hf.get("rope_theta", 10000.0))
    return rope


def read_rope(hf: HF, max_position: int) -> RopeConfig:
    """The rotary embedding of a config.json.

    Args:
        hf: the parsed file.
        max_position: its max_position_embeddings.

    Raises:
        UnsupportedModel: a type or key that we do not compute, or a missing one; named.
    """
    rope = _rope_dict(hf)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported; supported are {', '.join(_ROPE_KEYS)}"
        )
    missing = _ROPE_KEYS[kind] - rope.keys()
    original = hf.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", max_position
    )
    if kind == "yarn" and "factor" in missing:
        rope["factor"] = max_position / original
        missing = frozenset()
    if missing:
        raise UnsupportedModel(f"rope type {kind!r} needs {', '.join(sorted(missing))}")
    unknown = rope.keys() - _ROPE_OPTIONAL - _ROPE_KEYS[kind]
    if unknown:
        raise UnsupportedModel(f"rope type {kind!r}: unknown keys {', '.join(sorted(unknown))}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor other than 1.0 is not supported")
    return RopeConfig(
        type=kind,
        theta=float(rope["rope_theta"]),
        factor=float(rope.get("factor", 1.0)),
        original_max_position=int(original),
        attention_factor=_attention_factor(rope) if kind == "yarn" else 1.0,
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        freq_factors=tuple(rope.get("freq_factors", ())),
    )


def _attention_factor(rope: HF) -> float:
    """Yarn's scale of cos and sin (Peng et al. 2023, section 3.4), or DeepSeek's mscale variant."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor, mscale, mscale_all = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)
