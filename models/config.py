"""ModelConfig: what a model computes, read once from a Hugging Face config.json. No torch here.

Everything a family of models may differ in is a field; a key that asks for something we do not
compute is an error that names it, never ignored. Knows nothing of weights, devices or parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Hashable: a compile-time constant of the step.

    Attributes:
        architecture: Hugging Face class name, the key into models.registry.
        head_dim: of queries, keys and values alike.
        ffn_size: width of the gated MLP.
        max_position: longest sequence the rotary embedding is meant for, scaling included.
        layer_windows: per layer, how many tokens (its own included) a token sees; 0 is all before
            it.
        qkv_bias / o_bias / mlp_bias / qk_norm: which optional parameters there are.
        dtype: of the checkpoint, a torch dtype's name.
        eos_ids: end-of-sequence ids of config.json; empty if it gives none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    max_position: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    layer_windows: tuple[int, ...] = ()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, hf: HF) -> ModelConfig:
        """The config of a parsed config.json.

        Raises:
            UnsupportedModel: an architecture or option that we do not compute, or a missing or
                absurd value; the message names the key.
        """
        architecture = _architecture(hf)
        dialect = _DIALECTS[architecture]
        hf = {
            **dialect.defaults,
            **{k: v for k, v in hf.items() if v is not None or k in _NULLABLE},
        }
        _refuse_unsupported(hf, dialect)
        num_heads = _positive(hf, "num_attention_heads")
        hidden_size = _positive(hf, "hidden_size")
        num_layers = _positive(hf, "num_hidden_layers")
        head_dim = hf.get("head_dim") or hidden_size // num_heads
        num_kv_heads = hf.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        if head_dim % 2:
            raise UnsupportedModel(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
        rope = _rope(hf)
        return cls(
            architecture=architecture,
            vocab_size=_positive(hf, "vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            ffn_size=_positive(hf, "intermediate_size"),
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            max_position=_max_position(hf, rope),
            rope=rope,
            layer_windows=_windows(hf, dialect, num_layers),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=dialect.qkv_bias or bool(hf.get("attention_bias", False)),
            o_bias=bool(hf.get("attention_bias", False)) and not dialect.qkv_bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
            qk_norm=dialect.qk_norm,
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
            eos_ids=_ids(hf.get("eos_token_id")),
        )


class _Dialect(NamedTuple):
    """How one architecture reads config.json: Hugging Face's class defaults and what its code adds.

    Attributes:
        window_rule: "none": always full attention. "opt_in": only with use_sliding_window, from
            layer max_window_layers on unless layer_types says which. "always": wherever
            sliding_window is not null.
        options: boolean keys that the architecture knows; another family's set to true is an error.
    """

    model_type: str
    defaults: HF
    window_rule: str = "none"
    qkv_bias: bool = False
    qk_norm: bool = False
    options: frozenset[str] = frozenset()


_DIALECTS: dict[str, _Dialect] = {
    "LlamaForCausalLM": _Dialect("llama", {}, options=frozenset({"attention_bias", "mlp_bias"})),
    "Qwen2ForCausalLM": _Dialect(
        "qwen2",
        {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        window_rule="opt_in",
        qkv_bias=True,
    ),
    "Qwen3ForCausalLM": _Dialect(
        "qwen3",
        {
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        window_rule="opt_in",
        qk_norm=True,
        options=frozenset({"attention_bias"}),
    ),
    "MistralForCausalLM": _Dialect(
        "mistral", {"num_key_value_heads": 8, "sliding_window": 4096}, window_rule="always"
    ),
    "MinistralForCausalLM": _Dialect(
        "ministral", {"num_key_value_heads": 8, "sliding_window": 4096}, window_rule="always"
    ),
}
# A null in config.json means something else than the class default for these.
_NULLABLE = frozenset({"sliding_window", "num_key_value_heads"})
_BOOLEAN_OPTIONS = ("attention_bias", "mlp_bias")
_ACTIVATIONS = ("silu", "swish")


def known_architectures() -> tuple[str, ...]:
    """Hugging Face class names that `ModelConfig.from_hf` reads."""
    return tuple(_DIALECTS)


def _architecture(hf: HF) -> str:
    names = hf.get("architectures") or []
    for name in names:
        if name in _DIALECTS:
            return str(name)
    if not names:
        for name, dialect in _DIALECTS.items():
            if dialect.model_type == hf.get("model_type"):
                return name
    raise UnsupportedModel(
        f"architectures {list(names)} (model_type {hf.get('model_type')!r}): "
        f"known are {', '.join(_DIALECTS)}"
    )


def _positive(hf: HF, key: str) -> int:
    value = hf.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{key} is {value!r}; a positive integer is needed")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def _refuse_unsupported(hf: HF, dialect: _Dialect) -> None:
    """Keys that would change the result and that we do not compute."""
    activation = hf.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"hidden_act {activation!r}: supported are {', '.join(_ACTIVATIONS)}"
        )
    for key in _BOOLEAN_OPTIONS:
        if hf.get(key) and key not in dialect.options:
            raise UnsupportedModel(f"{key} is set, which {dialect.model_type} models do not have")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(f"quantization_config (quant_method {method!r}) is not supported")
    if hf.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"partial_rotary_factor {hf['partial_rotary_factor']} is not supported, only 1.0"
        )
    if dialect.window_rule == "none" and hf.get("sliding_window"):
        raise UnsupportedModel(
            f"sliding_window is set, which {dialect.model_type} models do not have"
        )


def _windows(hf: HF, dialect: _Dialect, num_layers: int) -> tuple[int, ...]:
    """Window of each layer, 0 for full attention."""
    window = hf.get("sliding_window")
    if dialect.window_rule == "opt_in" and not hf.get("use_sliding_window", False):
        window = None
    layer_types = hf.get("layer_types")
    if layer_types is None:
        first = hf["max_window_layers"] if dialect.window_rule == "opt_in" else 0
        sliding = [i >= first for i in range(num_layers)]
    else:
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown or len(layer_types) != num_layers:
            raise UnsupportedModel(
                f"layer_types must name {num_layers} layers full_attention or sliding_attention, "
                f"not {list(layer_types)}"
            )
        sliding = [kind == "sliding_attention" for kind in layer_types]
    if window is None:
        return (0,) * num_layers
    if not isinstance(window, int) or window < 1:
        raise UnsupportedModel(f"sliding_window is {window!r}; a positive integer is needed")
    return tuple(window if slides else 0 for slides in sliding)


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


def _rope(hf: HF) -> RopeConfig:
    rope = _rope_dict(hf)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported; supported are {', '.join(_ROPE_KEYS)}"
        )
    missing = _ROPE_KEYS[kind] - rope.keys()
    max_position = _positive(hf, "max_position_embeddings")
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


def _max_position(hf: HF, rope: RopeConfig) -> int:
    """Longest sequence: config.json gives the unscaled length for linear and yarn."""
    given = _positive(hf, "max_position_embeddings")
    if rope.type == "linear":
        return int(given * rope.factor)
    if rope.type == "yarn":
        return max(given, int(rope.original_max_position * rope.factor))
    return given
