"""config.json -> ModelConfig: what is read, and that nothing unsupported passes in silence."""

from __future__ import annotations

from typing import Any

import pytest

from models.config import _DIALECTS, ModelConfig
from models.errors import ModelError, UnsupportedModel
from models.registry import FAMILIES, family_of
from models.rope import rope_table
from tests.e2e.tiny_models import hf_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes})


def test_a_short_config_takes_the_class_defaults() -> None:
    model = config()
    assert model.num_kv_heads == model.num_heads == 4
    assert model.head_dim == 16
    assert model.layer_windows == (0, 0, 0, 0)
    assert model.rope.type == "default"
    assert model.rope.theta == 10000.0
    assert model.max_position == 512
    assert not model.tie_embeddings
    assert model.eos_ids == ()
    assert hash(model) == hash(config())


def test_context_unit() -> None:
    """Where attention has as many multiplications for a token as the matrices of its layers."""
    model = config()
    matrices = 4 * (4 * 64 * 64 + 3 * 64 * 96)
    assert model.context_unit == matrices // (4 * 2 * 64)
    bounded = config(**MISTRAL, sliding_window=100)
    assert bounded.layer_windows == (100,) * 4
    assert bounded.context_unit > 3 * model.context_unit


def test_qwen3_has_heads_of_128_unless_it_says_otherwise() -> None:
    assert config(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2).head_dim == 128


def test_registry_and_config_know_the_same_architectures() -> None:
    assert sorted(_DIALECTS) == sorted(FAMILIES)


@pytest.mark.parametrize(("given", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9)), (0, (0,))])
def test_eos_ids(given: Any, ids: tuple[int, ...]) -> None:
    assert config(eos_token_id=given).eos_ids == ids


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
    ],
)
def test_dtype(changes: dict[str, Any], dtype: str) -> None:
    assert config(**changes).dtype == dtype


def test_biases() -> None:
    qwen2 = config(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2)
    assert (qwen2.qkv_bias, qwen2.o_bias) == (True, False)
    llama = config(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("family", "extra", "windows"),
    [
        ("mistral", {"sliding_window": 9}, (9, 9, 9)),
        ("mistral", {"sliding_window": None}, (0, 0, 0)),
        ("qwen2", {"sliding_window": 9}, (0, 0, 0)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
            (0, 0, 9),
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 9}, (0, 0, 0)),
    ],
)
def test_windows(family: str, extra: dict[str, Any], windows: tuple[int, ...]) -> None:
    hf = hf_config(family, layers=3, **extra).to_dict()
    hf["architectures"] = [{"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]]
    hf["architectures"][0] += "ForCausalLM"
    assert ModelConfig.from_hf(hf).layer_windows == windows


def test_layer_types_decide_window_by_window() -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    model = config(**MISTRAL, sliding_window=9, layer_types=kinds)
    assert model.layer_windows == (0, 9, 0, 9)


@pytest.mark.parametrize(
    ("rope", "max_position"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "yarn", "factor": 2.0}, 1024),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_longest_sequence(key: str, rope: dict[str, Any], max_position: int) -> None:
    assert config(**{key: rope}).max_position == max_position


def test_theta_of_both_styles() -> None:
    assert config(rope_theta=7e5).rope.theta == 7e5
    assert config(rope_parameters={"rope_type": "default", "rope_theta": 7e5}).rope.theta == 7e5
    nested = {"full_attention": {"rope_theta": 7e5}, "sliding_attention": {"rope_theta": 7e5}}
    assert config(rope_parameters=nested).rope.theta == 7e5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"architectures": []}, ["known are"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({**MISTRAL, "mlp_bias": True}, ["mlp_bias", "mistral"]),
        ({"architectures": ["Qwen2ForCausalLM"], "attention_bias": True}, ["attention_bias"]),
        ({"sliding_window": 9}, ["sliding_window"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"rope_scaling": {"type": "longrope"}}, ["longrope", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["high_freq", "low_freq"]),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, ["mrope_section"]),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding": {}}},
            ["rope_parameters", "layer types"],
        ),
        (
            {**MISTRAL, "layer_types": ["full_attention"]},
            ["layer_types", "4 layers"],
        ),
        (
            {**MISTRAL, "layer_types": ["chunked_attention"] * 4},
            ["layer_types", "chunked_attention"],
        ),
        ({**MISTRAL, "sliding_window": 0}, ["sliding_window", "0"]),
    ],
)
def test_what_is_unsupported_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as error:
        config(**changes)
    for word in words:
        assert word in str(error.value)
    assert isinstance(error.value, ModelError)


def test_model_type_stands_in_for_missing_architectures() -> None:
    hf = {**LLAMA, "model_type": "llama"}
    del hf["architectures"]
    assert ModelConfig.from_hf(hf).architecture == "LlamaForCausalLM"


def test_an_unknown_family_lists_the_known() -> None:
    with pytest.raises(UnsupportedModel, match="MistralForCausalLM"):
        family_of("Nonesuch")


def test_dynamic_rope_equals_the_default_up_to_its_length_and_ends_there() -> None:
    plain = config()
    dynamic = config(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert rope_table(dynamic.rope, 16, 512, 512).equal(rope_table(plain.rope, 16, 512, 512))
    with pytest.raises(UnsupportedModel, match="512"):
        rope_table(dynamic.rope, 16, 513, 512)
