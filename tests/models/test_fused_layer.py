"""Layers of fused operators compute what the plain layers do, in decode and extend steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.forward import make_backbone
from models.fused_layer import can_fuse
from models.inputs import KVCache, StepInputs, StepState, TensorParallel
from models.ops.linear import Kernels
from models.param_spec import ParamSpec, map_tree
from models.registry import family_of, param_specs
from models.rope import rope_table

PAGE, SLOTS, COLUMNS = 4, 4, 8
I32 = torch.int32


def tiny(architecture: str, **more: Any) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "architectures": [architecture],
            "vocab_size": 50,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 48,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 128,
            "hidden_act": "silu",
            **more,
        }
    )


MODELS = {
    "qwen3": tiny("Qwen3ForCausalLM"),
    "qwen2": tiny("Qwen2ForCausalLM"),
    "llama": tiny("LlamaForCausalLM", attention_bias=True, mlp_bias=True),
    "mistral": tiny("MistralForCausalLM", sliding_window=5),
    "mixtral": tiny("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": tiny(
        "Qwen3MoeForCausalLM",
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        mlp_only_layers=[1],
    ),
}


def parameters(model: ModelConfig) -> dict[str, Any]:
    """Random everywhere: biases of zero and norms of one would hide a mistake."""
    generator = torch.Generator().manual_seed(1)

    def draw(_: object, spec: ParamSpec) -> Tensor:
        return torch.randn(spec.shape, generator=generator) * 0.4 + (len(spec.shape) == 1)

    params = dict(map_tree(draw, param_specs(model, torch.float32)))
    params["rope"] = rope_table(model.rope, model.head_dim, 64, model.max_position)
    return params


def inputs_of(table: Tensor, rows: list[tuple[int, int, int]], padding: int) -> StepInputs:
    """rows: (slot, tokens in the cache, tokens of this step)."""
    ids, positions, slots, kv = [], [], [], []
    for slot, start, length in rows:
        for position in range(start, start + length):
            ids.append((7 * slot + 3 * position) % 50)
            positions.append(position)
            slots.append(slot)
            kv.append(int(table[slot, position // PAGE]) * PAGE + position % PAGE)

    def column(values: list[int], pad: int) -> Tensor:
        return torch.tensor([*values, *[pad] * padding], dtype=I32)

    lens = [length for _, _, length in rows]
    offsets = [sum(lens[:i]) for i in range(len(lens))]
    none = torch.zeros(0, dtype=I32)
    return StepInputs(
        token_ids_T=column(ids, 0),
        positions_T=column(positions, 0),
        token_slots_T=column(slots, SLOTS),
        kv_slots_T=column(kv, -1),
        row_slots_R=column([slot for slot, _, _ in rows], SLOTS),
        row_starts_R=column([start for _, start, _ in rows], 0),
        row_lens_R=column(lens, 0),
        row_offsets_R=column(offsets, 0),
        logit_tokens_L=none,
        logit_slots_L=none,
        logit_targets_L=none,
        logit_positions_L=none,
        sampling_floats_LF=torch.zeros(0, 6),
        sampling_ints_LI=torch.zeros(0, 4, dtype=I32),
        update_slots_U=none,
        update_columns_U=none,
        update_pages_U=none,
    )


STEPS = (
    ("extend", [(0, 0, 9), (2, 0, 1), (1, 0, 5)]),
    ("decode", [(0, 9, 1), (1, 5, 1)]),
    ("extend", [(0, 10, 1), (1, 6, 7)]),
    ("decode", [(2, 1, 1), (0, 11, 1), (1, 13, 1)]),
)


def run(model: ModelConfig, kernels: Kernels) -> tuple[list[Tensor], KVCache]:
    """Hidden states of the real tokens of each step."""
    params, tp = parameters(model), TensorParallel()
    table = torch.zeros(SLOTS + 1, COLUMNS, dtype=I32)
    table[:SLOTS] = torch.arange(SLOTS * COLUMNS, dtype=I32).view(SLOTS, COLUMNS).flip(0) + 1
    state = StepState(table, torch.zeros(SLOTS + 1, dtype=I32))
    shape = (SLOTS * COLUMNS + 1, 2, PAGE, model.num_kv_heads, model.head_dim)
    cache = KVCache(tuple(torch.zeros(shape) for _ in model.layer_windows))
    hidden = []
    for kind, rows in STEPS:
        backbone = make_backbone(model, tp, kind, kernels=kernels)
        x_TE, residual_TE = backbone(params, cache, state, inputs_of(table, rows, padding=2))
        x_TE = x_TE if residual_TE is None else x_TE + residual_TE
        hidden.append(x_TE[: sum(length for _, _, length in rows)])
    return hidden, cache


@pytest.mark.parametrize("name", MODELS)
def test_fused_layers_equal_plain_ones(name: str) -> None:
    model = MODELS[name]
    assert can_fuse(family_of(model.architecture))
    plain, plain_cache = run(model, Kernels())
    fused, fused_cache = run(model, Kernels(fused=True))
    for step, (expected, got) in enumerate(zip(plain, fused, strict=True)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=f"step {step}")
    for expected, got in zip(plain_cache.layers, fused_cache.layers, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert not got[0].any(), "padding wrote to the dummy page"
