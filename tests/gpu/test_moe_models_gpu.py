"""Small mixtures of experts served on a GPU in bfloat16, against HF transformers in float32.

HF is fed the tokens that we generated (teacher forcing), so that one near tie does not hide what
comes after it: every token of ours must be the float32 model's best, or within EPSILON of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.e2e.harness import greedy_requests, run, running_engine
from tests.e2e.test_parity import prompts_for
from tests.e2e.tiny_models import VOCAB, save_model
from tests.gpu.engines import Runner, capture_uncompiled, gpu_sections

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # of torch's compiler and of transformers
]

MAX_TOKENS = 24
EPSILON = 0.25  # of the standard deviation of the float32 model's logits
# bfloat16 may take another expert where two are nearly as good, and such a token is another token:
# only those are judged whose worst chosen expert leads the best one left out by this much, of the
# standard deviation of the router's logits, in every layer.
MARGIN = 0.06

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
}
CONFIGS = {
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **COMMON,
        moe_intermediate_size=96,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "mixtral": transformers.MixtralConfig(**COMMON, num_local_experts=8, num_experts_per_tok=2),
}
RUNNERS: tuple[Runner, ...] = ("plain", "manual", "trees")


def router_lead(logits_TN: torch.Tensor, top_k: int) -> torch.Tensor:
    """[T]: of the last chosen expert over the first left out, in standard deviations."""
    best = logits_TN.topk(top_k + 1, -1).values
    return (best[:, -2] - best[:, -1]) / logits_TN.std()


@pytest.mark.parametrize("kernels", ["ours", "torch"])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_the_float32_models(
    name: str, runner: Runner, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch" and runner != "plain":
        pytest.skip("torch's grouped products are the same however they are captured")
    if runner == "plain":
        capture_uncompiled(monkeypatch)
    reference = save_model(tmp_path, CONFIGS[name], dtype=torch.bfloat16).float()
    prompts, top_k = prompts_for(1), CONFIGS[name].num_experts_per_tok
    sections = gpu_sections([1, 2, 8], [64, 256], runner)
    sections["compile"]["skinny_gemm"] = kernels == "ours"
    with running_engine(tmp_path, "cuda", **sections) as engine:
        answers = run(engine, greedy_requests(prompts, MAX_TOKENS), waves=2)
        answers |= run(engine, greedy_requests(prompts[:1], MAX_TOKENS, first_id=100))
        counters = engine.worker.counters
    assert (counters.recompiles, counters.cudagraph_skips) == (0, 0)
    assert counters.eager_steps == 0 or runner == "plain"
    gaps, clear = [], []
    for number, answer in answers.items():
        prompt = prompts[number % 100]
        with torch.no_grad():
            out = reference(torch.tensor([prompt + answer]), output_router_logits=True)
        logits = out.logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        gaps.append((logits.max(-1).values - chosen) / logits.std())
        leads = [router_lead(router, top_k)[len(prompt) - 1 : -1] for router in out.router_logits]
        clear.append(torch.stack(leads).amin(0) > MARGIN)
    gap, judged = torch.cat(gaps), torch.cat(clear)
    share = judged.float().mean()
    same = (gap == 0).float().mean()
    worst = gap[judged].max()
    print(f"{name} {runner} {kernels}: same {same:.3f}, judged {share:.3f}, worst {worst:.4f}")
    assert share > 0.5
    assert worst < EPSILON
    assert same > 0.9
