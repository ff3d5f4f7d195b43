"""Checkpoints: found, checked, loaded whole and in slices; every mistake is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import ModelConfig
from models.errors import CheckpointError
from models.inputs import TensorParallel
from models.param_spec import init_part, leaves
from models.registry import param_specs
from models.weights import load_params, resolve_checkpoint
from tests.e2e.tiny_models import FAMILIES, hf_config, save_model
from tests.models.harness import ONE_RANK, load

CPU = torch.device("cpu")


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    save_model(tmp_path, hf_config("llama", attention_bias=True, mlp_bias=True))
    return tmp_path


def edit(folder: Path, change: Any) -> None:
    """Rewrite model.safetensors after `change(tensors)`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_fit_their_specs(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, hf_config(family))
    model, params = load(tmp_path)
    specs = param_specs(model)
    table = params.pop("rope")
    assert table.shape == (model.max_position, model.head_dim)
    assert table.dtype == torch.float32
    shapes = {path: leaf.shape for path, leaf in leaves(params)}
    assert shapes == {path: torch.Size(spec.shape) for path, spec in leaves(specs)}
    for _, spec in leaves(specs):
        assert len(spec.axes) == len(spec.shape)


def test_fused_parameters_are_their_parts(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    _, params = load(folder)
    attention = "model.layers.1.self_attn."
    names = [f"{attention}{name}_proj" for name in "qkv"]
    layer = params["layers"][1]
    assert layer["qkv"].equal(torch.cat([tensors[f"{name}.weight"] for name in names]))
    assert layer["qkv_bias"].equal(torch.cat([tensors[f"{name}.bias"] for name in names]))
    assert layer["o_bias"].equal(tensors[attention + "o_proj.bias"])
    parts = [tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert layer["gate_up"].equal(torch.cat(parts))


def test_loading_casts(folder: Path) -> None:
    _, params = load(folder, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    assert params["embed"].equal(tensors["model.embed_tokens.weight"].bfloat16())
    assert params["rope"].dtype == torch.float32


def test_shards_and_progress(tmp_path: Path) -> None:
    """Several files behind an index, remapped now and then."""
    reference = save_model(tmp_path / "one", hf_config("llama"))
    reference.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    whole = load(tmp_path / "one")[1]
    checkpoint = resolve_checkpoint(str(tmp_path / "many"))
    model = ModelConfig.from_hf(checkpoint.config)
    calls: list[tuple[str, int, int]] = []
    params = load_params(
        model, ONE_RANK, checkpoint, torch.float32, CPU, lambda *call: calls.append(call)
    )
    for (path, ours), (_, theirs) in zip(leaves(params), leaves(whole), strict=True):
        assert ours.equal(theirs), path
    names = [name for name, _, _ in calls]
    assert "model.layers.1.self_attn.k_proj.weight" in names
    assert [done for _, done, _ in calls] == list(range(len(calls)))
    assert {total for _, _, total in calls} == {len(calls) - 1}


def test_a_file_is_mapped_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(folder)[1]
    monkeypatch.setattr("models.weights._REMAP_BYTES", 0)
    assert load(folder)[1]["layers"][1]["down"].equal(whole["layers"][1]["down"])


def test_missing_extra_and_misshaped_tensors_are_all_named(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.down_proj.weight"]
        tensors["model.layers.7.strange"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(63)

    edit(folder, change)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    message = str(error.value)
    assert "1 missing: model.layers.1.mlp.down_proj.weight" in message
    assert "1 unknown: model.layers.7.strange" in message
    assert "model.norm.weight [63] instead of [64]" in message
    assert "model.safetensors" in message


def test_many_missing_tensors_make_a_short_message(folder: Path) -> None:
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors)[1:]])
    with pytest.raises(CheckpointError, match=r"and \d+ more"):
        load(folder)


def test_known_extras_are_no_error(tmp_path: Path) -> None:
    save_model(tmp_path, hf_config("llama", tie_word_embeddings=True))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(tmp_path, change)
    assert "lm_head" not in load(tmp_path)[1]


def test_a_broken_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="model.safetensors: not a readable"):
        load(folder)


def test_an_index_with_a_missing_file(tmp_path: Path) -> None:
    reference = save_model(tmp_path / "one", hf_config("llama"))
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "load_as", "words"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "auto", ["safetensors or *.gguf"]),
        (lambda f: (f / "model.safetensors").unlink(), "safetensors", ["no *.safetensors"]),
        (lambda f: None, "gguf", ["no *.gguf"]),
        (lambda f: (f / "config.json").unlink(), "auto", ["config.json", "cannot be read"]),
        (lambda f: (f / "config.json").write_text("{"), "auto", ["config.json"]),
        (lambda f: (f / "config.json").write_text("[]"), "random", ["no JSON object"]),
    ],
)
def test_unusable_folders(folder: Path, change: Any, load_as: str, words: list[str]) -> None:
    change(folder)
    with pytest.raises(CheckpointError) as error:
        resolve_checkpoint(str(folder), load=load_as)
    for word in [str(folder), *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "no_such.gguf"])
def test_paths_that_do_not_exist_are_not_sought_on_a_hub(path: str) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        resolve_checkpoint(path)


def test_offline_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"nobody/nothing at revision v1.*offline"):
        resolve_checkpoint("nobody/nothing", "v1", offline=True)


def random_params(folder: Path, seed: int = 3) -> tuple[ModelConfig, dict[str, Any]]:
    checkpoint = resolve_checkpoint(str(folder), load="random")
    model = ModelConfig.from_hf(checkpoint.config)
    return model, load_params(model, ONE_RANK, checkpoint, torch.float32, CPU, seed=seed)


def test_random_weights_need_only_the_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model, params = random_params(folder)
    again = random_params(folder)[1]
    other = random_params(folder, seed=4)[1]
    for path, spec in leaves(param_specs(model)):
        drawn = torch.cat([init_part(spec, part, 3, CPU) for part in spec.parts])
        assert drawn.view(spec.shape).equal(params_of(params, path)), path
    assert params["layers"][1]["qkv"].equal(again["layers"][1]["qkv"])
    assert not params["layers"][1]["qkv"].equal(other["layers"][1]["qkv"])
    assert not params["layers"][1]["qkv"].equal(params["layers"][0]["qkv"])
    assert params["final_norm"].eq(1).all()
    assert params["layers"][0]["o_bias"].eq(0).all()
    assert 0.015 < params["embed"].std().item() < 0.025


def params_of(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def rank_params(folder: Path, size: int) -> list[dict[str, Any]]:
    checkpoint = resolve_checkpoint(str(folder))
    model = ModelConfig.from_hf(checkpoint.config)
    return [
        load_params(model, TensorParallel(rank, size, "tp"), checkpoint, torch.float32, CPU)
        for rank in range(size)
    ]


def test_random_ranks_agree_on_the_model(folder: Path) -> None:
    checkpoint = resolve_checkpoint(str(folder), load="random")
    model = ModelConfig.from_hf(checkpoint.config)
    whole = load_params(model, ONE_RANK, checkpoint, torch.float32, CPU)
    ranks = [
        load_params(model, TensorParallel(rank, 2, "tp"), checkpoint, torch.float32, CPU)
        for rank in range(2)
    ]
    down = torch.cat([params["layers"][0]["down"] for params in ranks], dim=1)
    assert down.equal(whole["layers"][0]["down"])
