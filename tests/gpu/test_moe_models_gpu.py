"""Small mixtures of experts served on a GPU in bfloat16, against HF transformers in float32.

HF is fed the tokens that we generated (teacher forcing), so that one near tie does not hide what
comes after it. bfloat16 takes another expert where two are nearly as good, which changes that token
and those that attend to it. So ours are judged beside those of transformers in bfloat16; 1 % of its
Mixtral's are further than EPSILON from the best even where none of their experts is in doubt.
"""

from __future__ import annotations

import copy
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
# No expert is in doubt: in every layer the worst chosen one leads the best one left out by this
# much, of the standard deviation of the router's logits.
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


def gap_of(logits_TV: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
    """[T]: how far the tokens' logits are from the best, in standard deviations."""
    chosen_T = logits_TV.gather(1, tokens_T[:, None])[:, 0]
    return (logits_TV.max(-1).values - chosen_T) / logits_TV.std()


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
    half = save_model(tmp_path, CONFIGS[name], dtype=torch.bfloat16)
    reference = copy.deepcopy(half).float()
    prompts, top_k = prompts_for(1), CONFIGS[name].num_experts_per_tok
    sections = gpu_sections([1, 2, 8], [64, 256], runner)
    sections["compile"]["skinny_gemm"] = kernels == "ours"
    with running_engine(tmp_path, "cuda", **sections) as engine:
        answers = run(engine, greedy_requests(prompts, MAX_TOKENS), waves=2)
        answers |= run(engine, greedy_requests(prompts[:1], MAX_TOKENS, first_id=100))
        counters = engine.worker.counters
    assert (counters.recompiles, counters.cudagraph_skips) == (0, 0)
    assert counters.eager_steps == 0 or runner == "plain"
    gaps, half_gaps, clear = [], [], []
    for number, answer in answers.items():
        prompt = prompts[number % 100]
        with torch.no_grad():
            out = reference(torch.tensor([prompt + answer]), output_router_logits=True)
            half_out = half(torch.tensor([prompt + answer]))
        logits = out.logits[0, len(prompt) - 1 : -1]
        gaps.append(gap_of(logits, torch.tensor(answer)))
        half_gaps.append(gap_of(logits, half_out.logits[0, len(prompt) - 1 : -1].argmax(-1)))
        leads = [router_lead(router, top_k)[len(prompt) - 1 : -1] for router in out.router_logits]
        clear.append(torch.stack(leads).amin(0) > MARGIN)
    gap, half_gap, sure = torch.cat(gaps), torch.cat(half_gaps), torch.cat(clear)
    share = sure.float().mean()
    far = (gap[sure] > EPSILON).float().mean()
    same, half_same = ((x == 0).float().mean() for x in (gap, half_gap))
    mean, half_mean = (x.clamp(max=1).mean() for x in (gap, half_gap))
    print(
        f"{name} {runner} {kernels}: same {same:.3f} ({half_same:.3f}), mean {mean:.4f}"
        f" ({half_mean:.4f}), without doubt {share:.3f}, of them far {far:.4f}"
    )
    assert share > 0.5
    assert far < 0.03
    assert same > half_same - 0.06
    assert mean < 2 * half_mean + 0.02
