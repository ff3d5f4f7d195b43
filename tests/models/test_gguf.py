"""GGUF files written here and read back: metadata, quantised tensors, row order, rope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models.config import ModelConfig
from models.errors import CheckpointError, UnsupportedModel
from models.gguf import dequantise, hf_names, read_header
from models.gguf import hf_config as config_of
from models.rope import inverse_frequencies
from models.weights import resolve_checkpoint
from tests.e2e.tiny_models import hf_config, save_model
from tests.models.harness import Harness, load


def permute(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to the query and key rows of a Llama."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_name(name: str) -> str:
    words = name.split(".")
    if words[1] != "layers":
        return {"embed_tokens": "token_embd", "norm": "output_norm"}.get(
            words[1], "output"
        ) + ".weight"
    back = {hf: short for short, hf in LAYER.items()}
    return f"blk.{words[2]}.{back['.'.join(words[3:-1])]}.{words[-1]}"


def write(folder: Path, architecture: str, changes: Any = None, **metadata: Any) -> Path:
    """The folder's safetensors as a GGUF file beside them."""
    config = ModelConfig.from_hf(resolve_checkpoint(str(folder)).config)
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.ffn_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_eos_token_id(2)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(config.vocab_size)])
    writer.add_array("tokenizer.ggml.scores", [float(i) for i in range(config.vocab_size)])
    for key, value in metadata.items():
        name = f"{architecture}." + key.replace("__", ".")
        (writer.add_string if isinstance(value, str) else writer.add_float32)(name, value)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permute(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        writer.add_tensor(gguf_name(name), values)
    if changes is not None:
        changes(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_computes_what_the_safetensors_do(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, hf_config(family))
    file = write(tmp_path, family)
    model, params = load(file)
    ours, theirs = Harness(model, params), Harness(*load(tmp_path))
    ids = list(range(30))
    assert ours.logits({0: ids})[0].equal(theirs.logits({0: ids})[0])
    assert model.eos_ids == (2,)


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    save_model(tmp_path, hf_config("llama"))
    file = write(tmp_path, "llama")
    assert resolve_checkpoint(str(tmp_path)).kind == "safetensors"
    assert resolve_checkpoint(str(tmp_path), load="gguf").files == (file,)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").unlink()
    assert resolve_checkpoint(str(tmp_path)).files == (file,)
    (tmp_path / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"model.gguf, other.gguf"):
        resolve_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="safetensors"):
        resolve_checkpoint(str(file), load="safetensors")
    assert resolve_checkpoint(str(file), load="random").files == ()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "BF16", "F16"])
@pytest.mark.parametrize("rows", [3, 64])
def test_dequantised_values(kind: str, rows: int, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    stored = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("first", np.zeros(5, np.float32))
    data = values.astype(np.float16) if kind == "F16" else gguf.quantize(values, stored)
    writer.add_tensor("second", data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_header(tmp_path / "a.gguf")
    assert file.tensors["second"].shape == (rows, 64)
    expected = data if kind == "F16" else gguf.dequantize(data, stored)
    np.testing.assert_array_equal(dequantise(file, "second"), expected)


def test_long_lists_are_skipped_and_short_ones_kept(tmp_path: Path) -> None:
    save_model(tmp_path, hf_config("llama"))
    file = write(tmp_path, "llama", lambda writer: writer.add_array("general.tags", ["a", "b"]))
    metadata = read_header(file).metadata
    assert metadata["general.tags"] == ["a", "b"]
    assert "tokenizer.ggml.tokens" not in metadata
    assert "tokenizer.ggml.scores" not in metadata


def test_llama3_scaling_is_stored_as_divisors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 5000.0,
    }
    save_model(tmp_path, hf_config("llama", rope_parameters=rope))
    wanted = inverse_frequencies(load(tmp_path)[0].rope, 32)
    plain = 1.0 / 5000.0 ** (torch.arange(0, 32, 2) / 32)
    file = write(
        tmp_path,
        "llama",
        lambda writer: writer.add_tensor("rope_freqs.weight", (plain / wanted).numpy()),
    )
    model, _ = load(file)
    torch.testing.assert_close(inverse_frequencies(model.rope, 32), wanted)
    assert "rope_freqs.weight" not in hf_names(read_header(file)).values()


def test_yarn_scaling(tmp_path: Path) -> None:
    save_model(tmp_path, hf_config("llama"))
    file = write(tmp_path, "llama", rope__scaling__type="yarn", rope__scaling__factor=4.0)
    model = ModelConfig.from_hf(config_of(read_header(file)))
    assert (model.rope.type, model.rope.factor, model.max_position) == ("yarn", 4.0, 2048)


def test_what_is_not_served_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, hf_config("llama"))
    with pytest.raises(UnsupportedModel, match="'gemma'"):
        resolve_checkpoint(str(write(tmp_path, "gemma")))
    file = write(
        tmp_path, "llama", lambda w: w.add_tensor("blk.0.strange", np.zeros(3, np.float32))
    )
    with pytest.raises(CheckpointError, match=r"1 unknown: blk\.0\.strange"):
        load(file)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"nonsense" * 100])
def test_no_gguf_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.gguf"):
        resolve_checkpoint(str(tmp_path / "a.gguf"))


def test_a_cut_file_says_so(tmp_path: Path) -> None:
    save_model(tmp_path, hf_config("llama"))
    file = write(tmp_path, "llama")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="ends inside tensor"):
        resolve_checkpoint(str(file))
