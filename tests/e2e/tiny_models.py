"""Tiny random models of every family, saved as HF checkpoints, and HF's greedy answers to compare
with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
VOCAB = 263  # odd on purpose


def hf_config(
    family: str,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    layers: int = 2,
    **extra: Any,
) -> Any:
    """A transformers config of the family with few, small layers."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16 * heads,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": family == "qwen3",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "mistral":
        common["sliding_window"] = 24
    classes = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig,
    }
    return classes[family](**{**common, **extra})


def save_model(
    folder: Path, config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Any:
    """Random weights for the config, saved to the folder; the HF model, in eval mode."""
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM
    model = model.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # not all ones, or a norm that is skipped would go unseen
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.normal_(0, 0.2)
    model.eval().save_pretrained(folder)
    return model


def greedy(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """HF's greedy continuation of each prompt, one by one, never stopping early."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def chosen(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[list[int]]:
    """HF's choice at each place of an answer, given all before it: the answers themselves, if they
    are its greedy ones. One pass each, where `greedy` takes one a token.
    """
    choices = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 :]
        choices.append(logits.argmax(-1).tolist())
    return choices
