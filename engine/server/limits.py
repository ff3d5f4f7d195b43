"""Limits that depend on the configuration or the model, checked before any memory is taken.

Every function refuses with InvalidRequest, naming the field, its value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.request import Ready
from engine.server.prompts import Prompt
from engine.server.schema import SamplingBody
from engine.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Context:
    """What a request is judged by.

    Attributes:
        config: limits of the configuration.
        ready: limits of the engine.
        tokenizer: of the model.
    """

    config: EngineConfig
    ready: Ready
    tokenizer: Tokenizer

    @property
    def pool_tokens(self) -> int:
        """Tokens whose keys and values fit the KV pages."""
        return self.ready.num_pages * self.ready.page_size


def stop_strings(stop: object, most: int, longest: int) -> tuple[str, ...]:
    """The `stop` field, each string once: at most `most`, of at most `longest` characters."""
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list):
        raise InvalidRequest("stop: a text or a list of texts is expected", param="stop")
    if len(strings) > most:
        raise InvalidRequest(
            f"stop: got {len(strings)} strings, allowed: at most {most}", param="stop"
        )
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest("stop: each string must be a non-empty text", param="stop")
        if len(string) > longest:
            raise InvalidRequest(
                f"stop: a string has {len(string)} characters, allowed: at most {longest}",
                param="stop",
            )
    return tuple(dict.fromkeys(strings))


def check_logprobs(count: int | None, context: Context, name: str) -> None:
    """Refuse more alternatives than the engine was built for; `name` is the field's."""
    most = context.config.sampling.max_logprobs
    if count is not None and count > most:
        raise InvalidRequest(f"{name}: got {count}, allowed: at most {most}", param=name)


def stop_ids(request: SamplingBody, context: Context) -> list[int]:
    """Ids that end the request: the model's own, unless ignored, and `stop_token_ids`."""
    vocab_size, most = context.ready.vocab_size, context.config.sampling.max_stop_ids
    extra = request.stop_token_ids or []
    if len(extra) > most:
        raise InvalidRequest(
            f"stop_token_ids: got {len(extra)} ids, allowed: at most {most}",
            param="stop_token_ids",
        )
    for token_id in extra:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"stop_token_ids: {token_id} is outside the vocabulary of {vocab_size}",
                param="stop_token_ids",
            )
    eos = set() if request.ignore_eos else context.tokenizer.eos_ids
    ids = sorted({*extra, *(token_id for token_id in eos if token_id < vocab_size)})
    if len(ids) > most:
        raise InvalidRequest(
            f"stop_token_ids: with the model's own there are {len(ids)} ids, allowed: at most "
            f"{most}",
            param="stop_token_ids",
        )
    return ids


def logit_bias(bias: Mapping[str, float] | None, context: Context) -> dict[int, float]:
    """The `logit_bias` field with token ids for keys."""
    vocab_size, most = context.ready.vocab_size, context.config.sampling.max_logit_bias
    if bias is not None and len(bias) > most:
        raise InvalidRequest(
            f"logit_bias: got {len(bias)} entries, allowed: at most {most}", param="logit_bias"
        )
    result = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: {key[:20]!r} is no token id below the vocabulary's {vocab_size}",
                param="logit_bias",
            )
        if not -100 <= value <= 100:
            raise InvalidRequest(
                f"logit_bias: got {value} for {key}, allowed: -100 to 100", param="logit_bias"
            )
        result[int(key)] = value
    return result


def room(prompt: Prompt, context: Context, least: int, param: str) -> int:
    """Most tokens that can follow the prompt; at least `least`, or the request is refused."""
    length, limit, pool = len(prompt.token_ids), context.ready.max_model_len, context.pool_tokens
    if length + least > limit:
        asked = f" and at least {least} token to generate" if least else ""
        raise InvalidRequest(
            f"the prompt has {length} tokens; with it{asked} that is more than the model's context "
            f"of {limit} tokens",
            param=param,
            code="context_length_exceeded",
        )
    if length > pool:
        raise InvalidRequest(
            f"the prompt has {length} tokens; that is more than the {pool} tokens that the KV "
            f"cache holds ({context.ready.num_pages} pages of {context.ready.page_size})",
            param=param,
            code="context_length_exceeded",
        )
    # The last token's keys and values are never written.
    return min(limit, pool + 1) - length
