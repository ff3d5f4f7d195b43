"""SmolLM2 with its real weights on a GPU: its greedy tokens judged by transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import load_config
from engine.llm import LLM
from engine.request import SamplingParams
from tests.e2e.smollm2 import GGUF
from tests.e2e.test_smollm2 import PROMPTS, ROOT
from tests.gpu.judge import Reference, Verdict, judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not GGUF.is_file(), reason="FULLGRAPH_SMOLLM2_GGUF names no file"),
    pytest.mark.filterwarnings("ignore"),  # of torch's compiler and of transformers
    pytest.mark.timeout(300),
]

NUM_TOKENS = 64
LEAST_SAME = 0.99


def test_greedy_equals_float32(tmp_path: Path) -> None:
    """Of one mixed batch. The float32 model has the weights that we have, rounded to bf16."""
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32
    )
    loaded.is_quantized = False  # its weights were made floats when they were read
    reference = Reference(loaded.bfloat16().eval())
    overrides = [f"model.path={GGUF}", "model.max_model_len=512", f"compile.cache_dir={tmp_path}"]
    overrides += ["device=cuda", "model.dtype=bfloat16", "kv.num_pages=2000"]
    overrides += ["scheduler.max_running=32", "compile.extend_buckets=[64,512]"]
    overrides += ["compile.decode_buckets=[8,32]"]
    verdict = Verdict()
    with LLM(load_config(ROOT / "configs/smollm2_cpu.yaml", overrides)) as llm:
        assert llm.tokenizer is not None
        ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
        for logprobs in (None, 0):
            params = SamplingParams(
                max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=logprobs
            )
            outputs = llm.generate(ids, params, progress=False)
            for prompt, output in zip(ids, outputs, strict=True):
                scores = [entry.logprob for entry in output.logprobs]
                judge(verdict, reference, prompt, output.token_ids, scores)
            print(f"\n{verdict}", flush=True)
        stats = llm.engine.core.stats(check=True)
    assert (stats.eager_steps, stats.recompiles, stats.integrity) == (0, 0, "")
    verdict.check(LEAST_SAME)
