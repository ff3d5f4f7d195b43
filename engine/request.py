"""A request's data, and the messages between the API process and the engine process.

Everything here is a msgspec Struct, so that it crosses the process boundary as it stands. Knows
nothing of tokenizers, HTTP, torch or the scheduler's own state: a leaf.

    API process                                   engine process
    Submit, Abort, StatsQuery, Shutdown   --->
                                          <---    Progress*, Ready, StepOutput*, RequestFailed,
                                                  Stats, Fatal
"""

from __future__ import annotations

from typing import Any

import msgspec

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"


class StructuredOutputs(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    r"""What an answer must look like: exactly one of the first five. The names are vLLM's.

    Attributes:
        json: a JSON schema, as an object or as text.
        json_object: any JSON object.
        regex: a regular expression (of Rust's regex crate, but \d, \s and \w are ASCII) that the
            whole answer matches.
        choice: the answer is one of these texts.
        grammar: a context-free grammar in Lark's notation, as llguidance reads it.
        whitespace_pattern: a regular expression for what may stand between the parts of JSON; by
            default up to 20 blanks, tabs and line ends.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample one request. Defaults are OpenAI's, except where a comment says otherwise.

    Attributes:
        n: choices to draw for the prompt; each is a request of its own inside the engine.
        max_tokens: most tokens to generate; None means up to the context's end.
        temperature: 0 (or below 1e-5) is greedy.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: most likely tokens kept; 0 and -1 are off.
        min_p: least probability kept, relative to the most likely token's, in [0, 1]; 0 is off.
        seed: 64-bit seed of the draws; None takes a random one. Choice i of n draws with seed + i.
        frequency_penalty: subtracted per occurrence in the output, in [-2, 2].
        presence_penalty: subtracted once for a token present in the output, in [-2, 2].
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens seen in
            prompt or output.
        logit_bias: token id -> added to its logit, in [-100, 100].
        min_tokens: end-of-sequence and stop tokens are masked before this many tokens were
            generated.
        stop: strings that end the text; never part of it. A single string is taken as one of them.
        stop_token_ids: ids that end the request; the stopping id is not part of the text.
        ignore_eos: do not stop at the model's own end-of-sequence ids.
        logprobs: None, or how many most likely alternatives to report per generated token (0: the
            token's own only).
        prompt_logprobs: the same for the prompt's tokens (echo with logprobs).
        skip_special_tokens: leave special tokens out of the text.
        priority: lower runs earlier under the `priority` policy.
        structured_outputs: what the answer must look like, which min_tokens does not change; it may
            still be cut off by max_tokens or a stop string.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    priority: int = 0
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # its letters would be stops, each
            msgspec.structs.force_setattr(self, "stop", (self.stop,))


class EngineRequest(msgspec.Struct, frozen=True, array_like=True):
    """One choice as the engine core sees it: ids only, every default resolved, every limit checked.

    Attributes:
        request_id: unique in the life of the engine process; given by the submitter, increasing
            with arrival.
        prompt_ids: at least one id, each in [0, vocab_size).
        max_tokens: >= 1 and prompt + max_tokens <= max_model_len; 0 only with prompt_logprobs
            (score only).
        stop_ids: ids that end the request (end-of-sequence ids unless ignored, plus
            stop_token_ids).
        seed: unsigned 64-bit.
        logprobs / prompt_logprobs: as in SamplingParams, -1 for None.
        grammar: of llguidance, which the answer follows; "" for none.
    """

    request_id: int
    prompt_ids: list[int]
    max_tokens: int
    stop_ids: list[int] = []
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1
    priority: int = 0
    grammar: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start these requests."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop these requests now; ids that are unknown or already finished are ignored.

    No output follows.
    """

    request_ids: list[int]


class StatsQuery(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for one Stats message.

    With `check`, the engine also walks the integrity of pages and tree.
    """

    check: bool = False


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the engine process; open requests are dropped (the API process drains before it sends
    this).
    """


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the unscaled model distribution after penalties and
    bias.

    Attributes:
        logprob: of the token itself (natural logarithm, finite: clamped at -9999).
        top_ids / top_logprobs: the most likely alternatives, descending.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A request's end.

    Attributes:
        reason: "stop" (a stop id was sampled, which is the last id sent, or a grammar is at its
            end) or "length".
        stop_id: the stop id that ended it, or -1.
        num_cached_tokens: prompt tokens taken from the prefix cache.
    """

    request_id: int
    reason: str
    stop_id: int = -1
    num_cached_tokens: int = 0


class StepOutput(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What one step produced: parallel lists, one entry per sampled token, in no promised order.

    Attributes:
        request_ids / token_ids: request and the id sampled for it; a request occurs at most once.
        logprobs: empty, or one entry per token (None where the request did not ask).
        prompt_logprobs: (request_id, index of the first prompt token covered, one entry per token),
            chunk by chunk; the prompt's first token has no logprob and is never covered.
        finished: requests that ended with this step, after their last token.
    """

    request_ids: list[int]
    token_ids: list[int]
    finished: list[Finished] = []
    logprobs: list[TokenLogprobs | None] = []
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = []


class RequestFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One request ended by a fault of ours or refused by the core; others go on."""

    request_id: int
    message: str
    status: int = 500


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A line of the start: `phase` ("weights", "compile", ...), `done` of `total` (0: unknown),
    free text.
    """

    phase: str
    done: int
    total: int
    text: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine serves. Sizes in tokens unless they say pages."""

    max_model_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    max_running: int
    settings: dict[str, str] = {}


class Stats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Counters and gauges since the start. Pages: free + cached + held == total whenever the engine
    is quiet.

    `cached` pages belong to the prefix tree and can be evicted; `held` ones are locked or owned by
    live requests. `integrity` is "" when not asked for or intact, else what is broken.
    """

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    steps_decode: int = 0
    steps_extend: int = 0
    eager_steps: int = 0
    recompiles: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    integrity: str = ""


class Fatal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot start or go on; the process ends after this message."""

    message: str


ToEngine = Submit | Abort | StatsQuery | Shutdown
FromEngine = StepOutput | RequestFailed | Progress | Ready | Stats | Fatal
