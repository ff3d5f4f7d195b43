"""Mixtures of experts: logits equal HF's, no token dropped, ranks share the experts' width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.config import ModelConfig
from models.errors import UnsupportedModel
from models.inputs import TensorParallel
from models.moe import route
from models.ops.experts import grouped_experts, mixture, sorted_experts
from models.param_spec import leaves
from models.registry import param_specs
from models.sharding import placement
from models.weights import load_params, resolve_checkpoint
from tests.e2e.tiny_models import VOCAB, save_model
from tests.models.harness import Harness, load
from tests.models.test_parity import assert_close, by_chunks, hf_logits, ids_of

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def qwen3_moe(**changes: Any) -> Any:
    sizes = {
        "head_dim": 32,
        "moe_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    }
    return transformers.Qwen3MoeConfig(**{**COMMON, **sizes, **changes})


def mixtral(**changes: Any) -> Any:
    return transformers.MixtralConfig(**{**COMMON, "num_local_experts": 4, **changes})


CONFIGS = {
    "qwen3_moe": qwen3_moe(norm_topk_prob=True),
    "qwen3_moe, weights as they are": qwen3_moe(norm_topk_prob=False),
    "qwen3_moe, some dense layers": qwen3_moe(mlp_only_layers=[1], tie_word_embeddings=True),
    "qwen3_moe, every second": qwen3_moe(decoder_sparse_step=2),
    "qwen3_moe, windows": qwen3_moe(use_sliding_window=True, sliding_window=8),
    "mixtral": mixtral(),
    "mixtral, one expert, windows": mixtral(num_experts_per_tok=1, sliding_window=8),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_hugging_face(name: str, tmp_path: Path) -> None:
    reference = save_model(tmp_path, CONFIGS[name])
    harness = Harness(*load(tmp_path))
    ids = ids_of(40, 2)
    theirs = hf_logits(reference, ids)
    for slot, size in enumerate((len(ids), 1, 7)):
        assert_close(by_chunks(harness, slot, ids, size), theirs)


def test_a_token_computes_the_same_whatever_its_batch(tmp_path: Path) -> None:
    """Routed alone, or among many that all want the same experts."""
    save_model(tmp_path, CONFIGS["mixtral"])
    model, params = load(tmp_path)
    alone = Harness(model, params).logits({0: [7, 9, 7]})[0]
    crowd = Harness(model, params, padding=20)
    batch = crowd.logits({0: [7, 9, 7], 1: [7] * 60, 2: [9] * 50})
    torch.testing.assert_close(batch[0], alone, atol=1e-5, rtol=0)


def experts(tokens: int, chosen: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    choice = torch.stack([torch.randperm(8)[:chosen] for _ in range(tokens)])
    choice[choice == 5] = 4 if chosen == 1 else 5  # with one choice, expert 5 gets no token
    return (
        torch.randn(tokens, 64, dtype=dtype),
        torch.rand(tokens, chosen),
        choice,
        torch.arange(tokens, dtype=torch.int32),
        (torch.randn(8, 96, 64) * 0.1).to(dtype),
        (torch.randn(8, 64, 48) * 0.1).to(dtype),
    )


@pytest.mark.parametrize("compute", [grouped_experts, sorted_experts])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (1, 8), (7, 2), (50, 1), (50, 3)])
def test_experts_one_token_at_a_time(compute: Any, tokens: int, chosen: int) -> None:
    arguments = experts(tokens, chosen)
    x_TE, weights_TK, experts_TK, _, gate_up_NGE, down_NEF = (a.double() for a in arguments)
    expected = torch.zeros_like(x_TE)
    for t in range(tokens):
        for weight, expert in zip(weights_TK[t], experts_TK[t].long(), strict=True):
            gate, up = (gate_up_NGE[expert] @ x_TE[t]).chunk(2)
            expected[t] += weight * (down_NEF[expert] @ (F.silu(gate) * up))
    got = compute(*arguments)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("compute", [grouped_experts, sorted_experts])
def test_padding_is_zero_and_touches_no_expert(compute: Any) -> None:
    arguments = experts(20, 3)
    x_TE, slots_T = arguments[0], arguments[3]
    padding = torch.rand(20) < 0.5
    expected = compute(*arguments)
    x_TE[padding], slots_T[padding] = torch.nan, -1
    got = compute(*arguments)
    assert not got[padding].any()
    torch.testing.assert_close(got[~padding], expected[~padding], atol=1e-6, rtol=0)


def test_both_implementations_agree_in_bfloat16() -> None:
    arguments = experts(20, 2, torch.bfloat16)
    got, other = grouped_experts(*arguments), sorted_experts(*arguments)
    assert got.dtype == other.dtype == torch.bfloat16
    torch.testing.assert_close(got, other, atol=2e-2, rtol=0)


def test_experts_are_a_proper_operator() -> None:
    library.opcheck(grouped_experts, experts(7, 2))
    x_TE, _, _, slots_T, *weights = experts(7, 2)
    router_NE, norm_E = torch.randn(8, 64), torch.rand(64)
    for norm, residual in ((norm_E, x_TE), (None, None)):
        arguments = (x_TE, norm, 1e-5, router_NE, slots_T, *weights, 2, True, residual, False)
        library.opcheck(mixture, arguments)


def test_weights_of_the_chosen() -> None:
    hf = {**CONFIGS["mixtral"].to_dict(), "architectures": ["MixtralForCausalLM"]}
    model = ModelConfig.from_hf(hf)
    weights_TK, experts_TK = route(model, torch.randn(4, 64), torch.randn(9, 64))
    assert weights_TK.dtype == torch.float32
    torch.testing.assert_close(weights_TK.sum(-1), torch.ones(9))
    assert (weights_TK[:, 0] >= weights_TK[:, 1]).all()
    assert (experts_TK[:, 0] != experts_TK[:, 1]).all()


def test_what_config_json_says(tmp_path: Path) -> None:
    hf = {
        **CONFIGS["qwen3_moe, some dense layers"].to_dict(),
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    model = ModelConfig.from_hf(hf)
    assert model.moe_layers == (True, False, True)
    assert (model.num_experts, model.num_experts_per_token, model.expert_ffn_size) == (8, 3, 40)
    hub = {key: value for key, value in hf.items() if key != "num_local_experts"}
    assert ModelConfig.from_hf({**hub, "num_experts": 8}) == model
    with pytest.raises(UnsupportedModel, match=r"num_experts_per_tok 9 .* 8"):
        ModelConfig.from_hf({**hf, "num_experts_per_tok": 9})


class Allocations(TorchDispatchMode):
    """Bytes of every storage that an operator handed out, by address."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                size = max(storage.nbytes(), self.sizes.get(storage.data_ptr(), 0))
                self.sizes[storage.data_ptr()] = size
        return out


@pytest.mark.parametrize("kind", ["safetensors", "random"])
def test_experts_load_without_a_second_copy(kind: str, tmp_path: Path) -> None:
    """Nothing but the stacked parameter itself is larger than one expert's matrix."""
    save_model(tmp_path, qwen3_moe(num_hidden_layers=1, vocab_size=8))
    checkpoint = resolve_checkpoint(str(tmp_path), load=kind)
    model = ModelConfig.from_hf(checkpoint.config)
    with Allocations() as allocations:
        params = load_params(
            model, TensorParallel(), checkpoint, torch.bfloat16, torch.device("cpu")
        )
    stacked = {params["layers"][0][name].data_ptr() for name in ("experts_gate_up", "experts_down")}
    assert stacked < set(allocations.sizes)
    rope = params["rope"].nbytes
    others = [size for at, size in allocations.sizes.items() if at not in stacked]
    assert max(others) <= max(4 * 40 * 64, 2 * 128 * 64, rope), "a copy of more than one expert"
    assert min(allocations.sizes[at] for at in stacked) == 2 * 8 * 40 * 64


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_every_expert(size: int, tmp_path: Path) -> None:
    config = qwen3_moe(moe_intermediate_size=41, num_attention_heads=8)
    save_model(tmp_path, config)
    checkpoint = resolve_checkpoint(str(tmp_path))
    model, whole = load(tmp_path)
    ranks = [
        load_params(
            model, TensorParallel(rank, size, "tp"), checkpoint, torch.float32, torch.device("cpu")
        )["layers"][2]
        for rank in range(size)
    ]
    layer = whole["layers"][2]
    down = torch.cat([p["experts_down"] for p in ranks], dim=2)
    assert down[:, :, :41].equal(layer["experts_down"])
    assert not down[:, :, 41:].any()
    halves = [torch.cat([p["experts_gate_up"].chunk(2, 1)[i] for p in ranks], 1) for i in (0, 1)]
    assert torch.cat([half[:, :41] for half in halves], 1).equal(layer["experts_gate_up"])
    assert all(p["router"].equal(layer["router"]) for p in ranks)
    placements = {path[-1]: placement(spec) for path, spec in leaves(param_specs(model))}
    assert placements["experts_gate_up"].is_shard(1)
    assert placements["experts_down"].is_shard(2)
    assert placements["router"].is_replicate()
