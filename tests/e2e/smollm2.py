"""SmolLM2's GGUF file, where there is one, and HF's model of it, read once a session."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

GGUF = Path(os.environ.get("FULLGRAPH_SMOLLM2_GGUF", ""))


@cache
def reference() -> Any:
    """HF's model in float32, in eval mode: reading it takes half a minute."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32
    )
    return model.eval()
