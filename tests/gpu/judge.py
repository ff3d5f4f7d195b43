"""Judges tokens of a bf16 engine by the same model in float32.

One pass of the float32 model over a prompt and our answer gives its logits at every position of the
answer, given our own tokens before it: teacher forcing along the path that was really taken.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# How far below the float32 maximum the logit of a token of ours may be, in standard deviations of
# the logits at its position. bf16 keeps 8 bits of every activation: two logits that differ by less
# are a tie to it. transformers itself, in bf16, is off by up to 0.065 in these models.
EPSILON = 0.08
# Our log-probabilities may be off by so much more than those of transformers in bf16 (RMS).
LEAST_PRECISE = 1.3


@dataclass
class Verdict:
    """What was seen so far.

    Attributes:
        total / same: tokens judged, and those that are the float32 maximum.
        worst: the largest gap between a token's float32 logit and the maximum, and
        worst_score / rounded_worst: between a log-probability of ours and the float32 one, in
            standard deviations, and of the same model in bf16.
        squares / rounded_squares: sums of squares of such differences.
    """

    total: int = 0
    same: int = 0
    worst: float = 0.0
    worst_score: float = 0.0
    rounded_worst: float = 0.0
    squares: float = 0.0
    rounded_squares: float = 0.0

    def check(self, least_same: float) -> None:
        """Every token within EPSILON, and this share of them the float32 model's own choice."""
        assert self.total and self.worst <= EPSILON, self
        assert self.worst_score <= max(EPSILON, LEAST_PRECISE * self.rounded_worst), self
        assert self.squares <= LEAST_PRECISE**2 * self.rounded_squares, self
        assert self.same >= least_same * self.total, self


class Reference:
    """A model of transformers on the GPU, in float32 and in bf16."""

    def __init__(self, model: Any) -> None:
        self._rounded = copy.deepcopy(model).bfloat16().cuda()
        self._exact = model.float().cuda()

    @torch.no_grad()
    def logits(self, ids: Sequence[int], *, rounded: bool = False) -> Tensor:
        """float32 [len(ids), V], computed in bf16 with `rounded`."""
        model = self._rounded if rounded else self._exact
        logits: Tensor = model(torch.tensor([list(ids)], device=model.device)).logits[0].float()
        return logits


def judge(
    verdict: Verdict,
    reference: Reference,
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
    logits = reference.logits(ids)[:-1]
    spread, drawn = logits.std(-1), torch.tensor(ids[1:], device=logits.device)[:, None]
    own = logits.gather(1, drawn)[:, 0]
    gaps = ((logits.amax(-1) - own) / spread)[len(prompt) - 1 :]
    verdict.total += len(answer)
    verdict.same += int((gaps == 0).sum())
    verdict.worst = max(verdict.worst, float(gaps.max()))
    if not scores:
        return
    ours = torch.tensor([*prompt_scores, *scores], device=logits.device)
    scored = slice(len(ids) - 1 - len(ours), None)
    expected = (own - logits.logsumexp(-1))[scored]
    rounded = reference.logits(ids, rounded=True)[:-1].log_softmax(-1).gather(1, drawn)[scored, 0]
    off, rounded_off = (ours - expected) / spread[scored], (rounded - expected) / spread[scored]
    verdict.worst_score = max(verdict.worst_score, float(off.abs().max()))
    verdict.rounded_worst = max(verdict.rounded_worst, float(rounded_off.abs().max()))
    verdict.squares += float(off.square().sum())
    verdict.rounded_squares += float(rounded_off.square().sum())
