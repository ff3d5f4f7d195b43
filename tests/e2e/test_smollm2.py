"""SmolLM2 with its real weights: greedy tokens equal HF's, compiled, in one mixed batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import load_config
from engine.llm import LLM
from engine.request import SamplingParams
from tests.e2e.smollm2 import GGUF, reference
from tests.e2e.tiny_models import chosen

ROOT = Path(__file__).parent.parent.parent
NUM_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Q: What is 17 + 25?\nA:",
    "The three laws of robotics are:\n1.",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969,",
    "<html>\n<head>\n<title>",
    "Ingredients:\n- 2 cups of flour\n- ",
    "To be, or not to be,",
    "SELECT name FROM users WHERE",
    "La capitale de l'Allemagne est",
    "The mitochondria is the powerhouse of the cell. It",
    "A haiku about autumn:\n",
    "1, 1, 2, 3, 5, 8,",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "import numpy as np\nimport torch\n\nclass Attention(nn.Module):\n",
    "Yesterday I went to the market and bought apples, pears, and",
    "x",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not GGUF.is_file(), reason="FULLGRAPH_SMOLLM2_GGUF names no file")
@pytest.mark.filterwarnings("ignore")  # transformers' own, while it reads GGUF
def test_greedy_equals_hf() -> None:
    overrides = [f"model.path={GGUF}", "model.max_model_len=512", "compile.cache=false"]
    overrides += ["compile.decode_buckets=[4, 16]"]
    with LLM(load_config(ROOT / "configs/smollm2_cpu.yaml", overrides)) as llm:
        assert llm.tokenizer is not None
        ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        outputs = llm.generate(ids, params, progress=False)
        stats = llm.engine.core.stats(check=True)
    answers = [list(output.token_ids) for output in outputs]
    assert {len(answer) for answer in answers} == {NUM_TOKENS}
    assert answers == chosen(reference(), ids, answers)
    assert (stats.eager_steps, stats.recompiles, stats.integrity) == (0, 0, "")
