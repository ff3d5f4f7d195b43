"""Mistral and Ministral: Llama with sliding windows (ModelConfig.layer_windows)."""

from __future__ import annotations

from models.llama import FAMILY as LLAMA

FAMILY = LLAMA
