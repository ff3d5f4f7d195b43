"""Slices of all ranks put together are the whole; what cannot be split says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from models.config import ModelConfig
from models.errors import UnsupportedModel
from models.inputs import TensorParallel
from models.param_spec import ParamSpec, leaves
from models.registry import param_specs
from models.sharding import local_shape, part_slices, placement
from models.weights import load_params, resolve_checkpoint
from tests.e2e.tiny_models import FAMILIES, VOCAB, hf_config, save_model
from tests.models.harness import load

CPU = torch.device("cpu")


def model_of(**changes: Any) -> ModelConfig:
    hf = hf_config("llama", **changes).to_dict()
    return ModelConfig.from_hf({**hf, "architectures": ["LlamaForCausalLM"]})


def at(tree: Any, path: tuple[Any, ...]) -> Tensor:
    for key in path:
        tree = tree[key]
    result: Tensor = tree
    return result


def reassemble(model: ModelConfig, spec: ParamSpec, shards: list[Tensor]) -> Tensor:
    """Write every rank's part of every part where it belongs; padding must be zero."""
    size = len(shards)
    whole = torch.full(spec.shape, torch.nan)
    for rank, shard in enumerate(shards):
        tp = TensorParallel(rank, size, "tp")
        rest = shard.clone()
        local_row = row = 0
        for part in spec.parts:
            slices = part_slices(model, tp, part)
            target = tuple(slice(s.start, s.stop) for s in slices)
            source = tuple(slice(0, s.stop - s.start) for s in slices)
            block = rest.narrow(0, local_row, slices[0].size)
            whole.narrow(0, row, part.shape[0])[target] = block[source]
            block[source] = 0
            local_row += slices[0].size
            row += part.shape[0]
        assert local_row == shard.shape[0]
        assert not rest.any(), "padding is not zero"
    return whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
def test_slices_reassemble_to_the_whole(family: str, size: int, tmp_path: Path) -> None:
    """Odd vocab, an ffn that no rank count divides, fewer kv heads than ranks."""
    save_model(tmp_path, hf_config(family, heads=8, kv_heads=2, intermediate_size=101))
    model, whole = load(tmp_path)
    checkpoint = resolve_checkpoint(str(tmp_path))
    ranks = [
        load_params(model, TensorParallel(rank, size, "tp"), checkpoint, torch.float32, CPU)
        for rank in range(size)
    ]
    specs = param_specs(model)
    for path, spec in leaves(specs):
        shards = [at(params, path) for params in ranks]
        expected = local_shape(model, TensorParallel(0, size, "tp"), spec)
        assert {tuple(shard.shape) for shard in shards} == {expected}, path
        assert reassemble(model, spec, shards).equal(at(whole, path)), path


def test_every_query_head_keeps_its_kv_head() -> None:
    """With more ranks than kv heads, a rank holds the one head that its queries read."""
    model = model_of(heads=8, kv_heads=2, head_dim=4)
    (qkv,) = [spec for path, spec in leaves(param_specs(model)) if path == ("layers", 0, "qkv")]
    for rank in range(4):
        q, k, v = (part_slices(model, TensorParallel(rank, 4, "tp"), p)[0] for p in qkv.parts)
        assert (q.start // 4, q.size // 4) == (2 * rank, 2)
        assert k == v
        assert (k.start // 4, k.size // 4) == (rank // 2, 1)


def test_placements() -> None:
    model = model_of(attention_bias=True)
    found = {path[-1]: placement(spec) for path, spec in leaves(param_specs(model))}
    assert found == {
        "embed": Shard(0),
        "lm_head": Shard(0),
        "input_norm": Replicate(),
        "qkv": Shard(0),
        "qkv_bias": Shard(0),
        "o": Shard(1),
        "o_bias": Replicate(),
        "post_norm": Replicate(),
        "gate_up": Shard(0),
        "down": Shard(1),
        "final_norm": Replicate(),
    }


def test_vocab_is_padded_alike_on_all_ranks() -> None:
    model = model_of()
    embed = param_specs(model)["embed"]
    slices = [
        part_slices(model, TensorParallel(rank, 4, "tp"), embed.parts[0])[0] for rank in range(4)
    ]
    assert {s.size for s in slices} == {-(-VOCAB // 4)}
    assert [s.start for s in slices[1:]] == [s.stop for s in slices[:-1]]
    assert slices[-1].stop == VOCAB


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "word"),
    [(6, 6, 4, "6 query heads"), (12, 3, 2, "3 key-value heads"), (12, 4, 6, "4 key-value heads")],
)
def test_heads_that_cannot_be_shared_out(heads: int, kv_heads: int, size: int, word: str) -> None:
    model = model_of(heads=heads, kv_heads=kv_heads, hidden_size=48)
    with pytest.raises(UnsupportedModel, match=word):
        model.check_ranks(size)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(12, 4, 2), (12, 2, 4), (9, 3, 9)])
def test_heads_that_can(heads: int, kv_heads: int, size: int) -> None:
    model_of(heads=heads, kv_heads=kv_heads, hidden_size=36).check_ranks(size)
