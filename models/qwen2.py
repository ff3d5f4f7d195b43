"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values (ModelConfig.qkv_bias)."""

from __future__ import annotations

from models.llama import FAMILY as LLAMA

FAMILY = LLAMA
