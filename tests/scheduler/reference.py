"""A fake model whose next token depends on every token before it, and what each request must come
to.

The hash of a prefix stands for the keys and values of its last token: as in a model, they depend on
all tokens so far. Whatever is shared, recomputed or overwritten wrongly changes a hash, and with it
the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.request import EngineRequest
from engine.scheduler.batch import I32

VOCAB = 23
MAX_LOGPROBS = 4
_MODULUS = (1 << 61) - 1
_SEED = 1469598103934665603
# About one prefix in this many has no finite logits.
FAILURE_RATE = 307


def extend_hash(before: int, token: int) -> int:
    """Hash of a prefix with one token more."""
    return (before * 1099511628211 + token + 17) % _MODULUS


def prefix_hash(tokens: list[int]) -> int:
    value = _SEED
    for token in tokens:
        value = extend_hash(value, token)
    return value


def empty_hash() -> int:
    return _SEED


@dataclass(frozen=True)
class Draw:
    """Everything a draw depends on besides the prefix."""

    seed_lo: int
    position: int
    greedy: bool
    bias: tuple[int, ...]
    masked: frozenset[int]


def fails(prefix: int) -> bool:
    """Whether the logits after this prefix are not finite."""
    return (prefix >> 7) % FAILURE_RATE == 0


def next_token(prefix: int, draw: Draw) -> int:
    """The token drawn after a prefix; -1 when its logits are not finite."""
    if fails(prefix):
        return -1
    value = prefix >> 3
    if not draw.greedy:
        value += draw.seed_lo * 31 + draw.position * 7
    token = (value + sum(draw.bias)) % VOCAB
    while token in draw.masked:
        token = (token + 1) % VOCAB
    return token


def allowed_after(grammar: str, output: list[int]) -> frozenset[int]:
    """Ids that a made-up grammar allows after an answer's first tokens: a few."""
    value = prefix_hash([ord(letter) for letter in grammar] + output)
    return frozenset((value >> shift) % VOCAB for shift in (3, 11, 19))


def is_over(grammar: str, output: list[int]) -> bool:
    """Whether the answer ends the grammar."""
    return (prefix_hash([ord(letter) for letter in grammar] + output) >> 5) % 6 == 0


def breaks(grammar: str, output: list[int]) -> bool:
    """Whether the grammar cannot go on after the answer."""
    return (prefix_hash([ord(letter) for letter in grammar] + output) >> 9) % 40 == 0


@dataclass
class FakeGuide:
    """A place in a made-up grammar; now and then not ready when it is first asked."""

    grammar: str
    output: list[int] = field(default_factory=list)
    error: str = ""
    waits: bool = False

    def wait(self, seconds: float) -> bool:
        waits, self.waits = self.waits, False
        return not waits

    def mask(self) -> I32:
        bits = sum(1 << token for token in allowed_after(self.grammar, self.output))
        return np.array([bits], np.int32)

    def advance(self, token_id: int) -> bool:
        assert token_id in allowed_after(self.grammar, self.output), "drawn against the grammar"
        self.output.append(token_id)
        if breaks(self.grammar, self.output):
            self.error = "broken"
            return False
        self.waits = len(self.output) % 3 == 0
        return is_over(self.grammar, self.output)


def logprob(prefix: int, token: int) -> float:
    """Exact in float32."""
    return -float((prefix ^ (token * 7919)) % 4096) / 16


def top_ids(prefix: int) -> list[int]:
    return [(prefix + rank) % VOCAB for rank in range(MAX_LOGPROBS)]


@dataclass
class Expected:
    """What a request must produce. `reason`: "stop", "length" or "failed"."""

    tokens: list[int]
    reason: str
    stop_id: int


def run_alone(request: EngineRequest) -> Expected:
    """The reference: one request, nothing shared, token by token."""
    tokens = list(request.prompt_ids)
    if request.prompt_logprobs >= 0 and any(
        fails(prefix_hash(tokens[:end])) for end in range(1, len(tokens) + 1)
    ):
        return Expected([], "failed", -1)
    if request.max_tokens == 0:
        return Expected([], "failed" if fails(prefix_hash(tokens)) else "length", -1)
    output: list[int] = []
    while True:
        least = 0 if request.grammar else request.min_tokens
        masked = set(request.stop_ids) if len(output) < least else set()
        if request.grammar:
            masked |= set(range(VOCAB)) - allowed_after(request.grammar, output)
        draw = Draw(
            request.seed & 0xFFFF, len(tokens), request.temperature < 1e-5,
            tuple(request.logit_bias), frozenset(masked),
        )  # fmt: skip
        token = next_token(prefix_hash(tokens), draw)
        if token < 0:
            return Expected(output, "failed", -1)
        if request.grammar and breaks(request.grammar, [*output, token]):
            return Expected(output, "failed", -1)
        tokens.append(token)
        output.append(token)
        if token in request.stop_ids:
            return Expected(output, "stop", token)
        if request.grammar and is_over(request.grammar, output):
            return Expected(output, "stop", -1)
        if len(output) >= request.max_tokens:
            return Expected(output, "length", -1)
