"""GGUF files: tensors dequantised one at a time, a config.json made from the metadata. No torch.

The gguf package's dequantisers do the work. Knows nothing of sharding or of what the tokens mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from models.errors import CheckpointError, UnsupportedModel
from models.gguf_header import read_gguf_header

_ROW_BYTES = 16 * 1024
_SHORT_ARRAY = 64  # longer arrays (the vocabulary) are skipped


@dataclass(frozen=True)
class GgufTensor:
    """A stored tensor: shape in torch's order, ggml type, bytes [start, end) of the file."""

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    start: int
    end: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed header.

    Attributes:
        metadata: key -> number, bool, str or list of at most 64 of them (longer lists are left
            out).
        tensors: GGUF name -> where and what it is.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufFile:
    """Parse a file's header. Raises CheckpointError if it is no GGUF file of version 2 or 3."""
    header, size = read_gguf_header(path, _SHORT_ARRAY), path.stat().st_size
    tensors = {}
    for name, (shape, number, offset) in header.tensors.items():
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise CheckpointError(f"{path}: tensor {name}: {error}") from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        start = header.data + offset
        tensors[name] = GgufTensor(shape, kind, start, start + prod(shape) // block * block_bytes)
        if tensors[name].end > size:
            raise CheckpointError(f"{path}: the file ends inside tensor {name}")
    return GgufFile(path, header.metadata, tensors)


def dequantise(file: GgufFile, name: str) -> NDArray[Any]:
    """A tensor's values, float32 (float16 where it is stored so), in torch's order of dims."""
    tensor = file.tensors[name]
    size = tensor.end - tensor.start
    # A plain view: numpy spends more on each slice of a memmap. Copy on write, for torch.
    data = np.memmap(file.path, np.uint8, "c", tensor.start, (size,)).view(np.ndarray)
    if tensor.type == gguf.GGMLQuantizationType.F32:
        return data.view(np.float32).reshape(tensor.shape)
    if tensor.type == gguf.GGMLQuantizationType.F16:
        return data.view(np.float16).reshape(tensor.shape)
    try:
        values = gguf.dequantize(data.reshape(_long_rows(tensor, size), -1), tensor.type)
    except NotImplementedError as error:
        raise CheckpointError(f"{file.path}: tensor {name}: {error}") from error
    return np.asarray(values).reshape(tensor.shape)


def _long_rows(tensor: GgufTensor, size: int) -> int:
    """Into how many rows to cut the bytes: gguf works through 16 rows at a time, slow if short."""
    rows = prod(tensor.shape[:-1])
    while rows % 2 == 0 and size // rows < _ROW_BYTES:
        rows //= 2
    return rows


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_KEYS = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The config.json that the metadata amounts to.

    Raises:
        UnsupportedModel: an architecture or rope scaling that is not served.
    """
    meta = file.metadata
    name = meta.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: general.architecture {name!r}: known are {', '.join(_ARCHITECTURES)}"
        )
    config = {
        target: meta[f"{name}.{key}"] for key, target in _KEYS.items() if f"{name}.{key}" in meta
    }
    config["architectures"] = [_ARCHITECTURES[name]]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = name == "llama" and "blk.0.attn_q.bias" in file.tensors
    if "token_embd.weight" in file.tensors:
        config.setdefault("vocab_size", file.tensors["token_embd.weight"].shape[0])
    if "tokenizer.ggml.eos_token_id" in meta:
        config["eos_token_id"] = meta["tokenizer.ggml.eos_token_id"]
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if meta.get(f"{name}.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path}: {name}.rope.dimension_count is not the head dim")
    scaling = _rope_scaling(file, name)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _rope_scaling(file: GgufFile, name: str) -> dict[str, Any]:
    meta = file.metadata
    if "rope_freqs.weight" in file.tensors:  # how llama3's scaling is stored
        factors = dequantise(file, "rope_freqs.weight").astype(np.float64).tolist()
        return {"rope_type": "factors", "freq_factors": factors}
    kind = meta.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    keys = {
        "factor": "factor",
        "attn_factor": "attention_factor",
        "original_context_length": "original_max_position_embeddings",
    }
    given = {
        hf: meta[f"{name}.rope.scaling.{key}"]
        for key, hf in keys.items()
        if f"{name}.rope.scaling.{key}" in meta
    }
    return {"rope_type": kind, **given}


_LAYER_NAMES = {
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
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Read into the configuration, or derived: no parameter.
_NOT_PARAMETERS = frozenset({"rope_freqs.weight"})


def hf_names(file: GgufFile) -> dict[str, str]:
    """Hugging Face name -> GGUF name of every parameter; unknown ones keep their own name."""
    names = {}
    for name in file.tensors.keys() - _NOT_PARAMETERS:
        words = name.split(".")
        if words[0] == "blk" and len(words) == 4 and words[2] in _LAYER_NAMES:
            names[f"model.layers.{words[1]}.{_LAYER_NAMES[words[2]]}.{words[3]}"] = name
        else:
            names[_NAMES.get(name, name)] = name
    return names


def unpermute(values: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """llama.cpp stores a Llama's query and key rows with rotary pairs side by side; split them into
    halves again.

    [heads * D, ...] in the order (pair, half) -> the order (half, pair) that
    models.ops.plain.apply_rope expects.
    """
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
