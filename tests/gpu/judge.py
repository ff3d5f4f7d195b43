"""Judges tokens of a bf16 engine by the same model in float32.

One pass of the float32 model over a prompt and our answer gives its logits at every position of the
answer, given our own tokens before it: teacher forcing along the path that was really taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# How far below the float32 maximum the logit of a token of ours may be, in standard deviations of
# the logits at its position. bf16 keeps 8 bits of every activation: two logits that differ by less
# are a tie to it.
EPSILON = 0.06


@dataclass
class Verdict:
    """What was seen so far.

    Attributes:
        total / same: tokens judged, and those that are the float32 maximum.
        worst: the largest gap between a token's float32 logit and the maximum, and
        worst_score: between a log-probability of ours and the float32 one, in standard deviations.
    """

    total: int = 0
    same: int = 0
    worst: float = 0.0
    worst_score: float = 0.0

    def check(self, least_same: float) -> None:
        """Every token within EPSILON, and this share of them the float32 model's own choice."""
        assert self.total and self.worst <= EPSILON, self
        assert self.worst_score <= EPSILON, self
        assert self.same >= least_same * self.total, self


@torch.no_grad()
def logits_of(model: Any, ids: Sequence[int]) -> Tensor:
    """float32 [len(ids), V]."""
    logits: Tensor = model(torch.tensor([list(ids)], device=model.device)).logits[0].float()
    return logits


def judge(
    verdict: Verdict,
    model: Any,
    prompt: Sequence[int],
    answer: Sequence[int],
    scores: Sequence[float] = (),
    prompt_scores: Sequence[float] = (),
) -> None:
    """Add one answer.

    Args:
        scores: our log-probabilities of the answer's tokens, or none at all.
        prompt_scores: the same of the prompt's tokens but the first.
    """
    ids = [*prompt, *answer]
    logits = logits_of(model, ids)[:-1]
    spread, drawn = logits.std(-1), torch.tensor(ids[1:], device=logits.device)
    own = logits.gather(1, drawn[:, None])[:, 0]
    gaps = ((logits.amax(-1) - own) / spread)[len(prompt) - 1 :]
    verdict.total += len(answer)
    verdict.same += int((gaps == 0).sum())
    verdict.worst = max(verdict.worst, float(gaps.max()))
    expected = own - logits.logsumexp(-1)
    for ours, begin in ((scores, len(prompt) - 1), (prompt_scores, 0)):
        if ours:
            part = slice(begin, begin + len(ours))
            off = (torch.tensor(list(ours), device=logits.device) - expected[part]).abs()
            verdict.worst_score = max(verdict.worst_score, float((off / spread[part]).max()))
