"""ModelConfig: what a model computes, read once from a Hugging Face config.json. No torch here.

Everything a family of models may differ in is a field; a key that asks for something we do not
compute is an error that names it, never ignored. Knows nothing of weights, devices or parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from models.errors import UnsupportedModel
from models.rope_config import HF, RopeConfig, read_rope


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
        num_experts: of a mixture-of-experts layer; 0 in a dense model.
        num_experts_per_token / expert_ffn_size: how many a token goes to, and their width.
        normalise_experts: the chosen experts' weights sum to one.
        moe_layers: per layer, whether it has experts; empty in a dense model.
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
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_ffn_size: int = 0
    normalise_experts: bool = False
    moe_layers: tuple[bool, ...] = ()
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
        rope = read_rope(hf, _positive(hf, "max_position_embeddings"))
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
            **_experts(hf, dialect, num_layers),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
            eos_ids=_ids(hf.get("eos_token_id")),
        )

    def check_ranks(self, size: int) -> None:
        """Raises UnsupportedModel if the heads cannot be shared out among so many ranks."""
        heads = self.num_kv_heads
        if self.num_heads % size:
            raise UnsupportedModel(
                f"{self.num_heads} query heads cannot be divided among {size} ranks"
            )
        if heads % size and size % heads:
            raise UnsupportedModel(
                f"{heads} key-value heads can neither be divided among {size} ranks nor repeated "
                "evenly on them"
            )

    @property
    def context_unit(self) -> int:
        """Context length, in tokens, at which attention multiplies as many numbers for a token as
        the layers' matrices do: a token costs twice there what it costs at none.
        """
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        num_moe = sum(self.moe_layers)
        widths = self.num_layers * heads + 3 * (
            num_moe * self.num_experts_per_token * self.expert_ffn_size
            + (self.num_layers - num_moe) * self.ffn_size
        )
        # A sliding window bounds what its layers pay.
        unbounded = self.layer_windows.count(0) if self.layer_windows else self.num_layers
        attention = 2 * self.num_heads * self.head_dim * max(1, unbounded)
        return max(1, self.hidden_size * widths // attention)


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
    moe: bool = False
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
    "Qwen3MoeForCausalLM": _Dialect(
        "qwen3_moe",
        {
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
        },
        window_rule="opt_in",
        qk_norm=True,
        moe=True,
        options=frozenset({"attention_bias"}),
    ),
    "MixtralForCausalLM": _Dialect(
        "mixtral",
        {
            "num_key_value_heads": 8,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        window_rule="always",
        moe=True,
    ),
}
# A null in config.json means something else than the class default for these.
_NULLABLE = frozenset({"sliding_window", "num_key_value_heads"})
_BOOLEAN_OPTIONS = ("attention_bias", "mlp_bias")
_ACTIVATIONS = ("silu", "swish")


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
        # Qwen3-MoE slides in every layer, whatever max_window_layers says.
        first = hf["max_window_layers"] if "max_window_layers" in dialect.defaults else 0
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


def _experts(hf: HF, dialect: _Dialect, num_layers: int) -> dict[str, Any]:
    """The fields of a mixture of experts (none of a dense model)."""
    if not dialect.moe:
        return {}
    # The hub's Qwen3-MoE says num_experts; transformers 5 saves num_local_experts for both.
    key = "num_experts" if "num_experts" in hf else "num_local_experts"
    num_experts, chosen = _positive(hf, key), _positive(hf, "num_experts_per_tok")
    if chosen > num_experts:
        raise UnsupportedModel(f"num_experts_per_tok {chosen} is more than {key} {num_experts}")
    dense = set(hf.get("mlp_only_layers") or ())
    step = hf.get("decoder_sparse_step", 1)
    width = "moe_intermediate_size" if "moe_intermediate_size" in hf else "intermediate_size"
    return {
        "num_experts": num_experts,
        "num_experts_per_token": chosen,
        "expert_ffn_size": _positive(hf, width),
        "normalise_experts": bool(hf["norm_topk_prob"]),
        "moe_layers": tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)
        ),
    }


def _max_position(hf: HF, rope: RopeConfig) -> int:
    """Longest sequence: config.json gives the unscaled length for linear and yarn."""
    given = _positive(hf, "max_position_embeddings")
    if rope.type == "linear":
        return int(given * rope.factor)
    if rope.type == "yarn":
        return max(given, int(rope.original_max_position * rope.factor))
    return given
