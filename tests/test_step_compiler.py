"""The few layers that stand for all of a model when its kernels are built; the planner's part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import step_compiler
from engine.config import EngineConfig, ModelOptions
from engine.graph_programs import StepTensors
from engine.step_compiler import Setup, few_layers
from models.forward import make_backbone
from models.inputs import KVCache, StepState, TensorParallel
from models.ops.linear import Kernels
from models.sampling import init_sampling_state
from tests.models.test_fused_layer import MODELS, SLOTS, inputs_of, parameters, tiny

MIXED = tiny(
    "Qwen3MoeForCausalLM",
    num_hidden_layers=5,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
    mlp_only_layers=[0, 2],
)


def tensors_of(model: Any) -> StepTensors:
    cache = torch.zeros(9, 2, 4, model.num_kv_heads, model.head_dim)
    table = torch.zeros(SLOTS + 1, 8, dtype=torch.int32)
    return StepTensors(
        parameters(model),
        KVCache(tuple(cache.clone() for _ in model.layer_windows)),
        StepState(table, torch.zeros(SLOTS + 1, dtype=torch.int32)),
        init_sampling_state(SLOTS, model.vocab_size, 2, 2, torch.device("cpu")),
    )


@pytest.mark.parametrize(
    ("model", "count"), [(MODELS["qwen3"], 2), (MODELS["mixtral"], 2), (MIXED, 2)]
)
def test_one_layer_of_each_sort(model: Any, count: int) -> None:
    tensors = tensors_of(model)
    table = tensors.state.page_table_SP
    few, fewer = few_layers(model, tensors)
    assert few.num_layers == len(few.layer_windows) == len(fewer.params["layers"]) == count
    for kind in ("decode", "extend"):  # it can run
        backbone = make_backbone(few, TensorParallel(), kind, kernels=Kernels(fused=True))
        backbone(fewer.params, fewer.kv_cache, fewer.state, inputs_of(table, [(0, 0, 1)], 1))


def test_attention_keeps_its_modules_in_the_compile_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(step_compiler, "AttentionPlanner", lambda *args: given.extend(args))
    config: Any = EngineConfig(model=ModelOptions(path="any"))
    session: Any = object()
    model = MODELS["qwen3"]
    setup = Setup(config, model, TensorParallel(), torch.device("cpu"), session)
    step_compiler._planner(setup, tensors_of(model), [])
    shape, *_, keeper = given
    assert keeper is session
    assert (shape.num_heads, shape.num_kv_heads) == (model.num_heads, model.num_kv_heads)
    assert (shape.max_pages, shape.windows) == (8, (0,))
