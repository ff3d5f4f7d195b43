"""SamplingParams and a prompt's ids -> EngineRequests: every limit checked, every default resolved.

The one place where a request's numbers are judged, for HTTP and for LLM alike. Knows nothing of
text, HTTP or the scheduler's state.
"""

from __future__ import annotations

import contextlib
import math
import operator
import random
import re
import reprlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, SupportsIndex

import msgspec

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.request import EngineRequest, SamplingParams
from engine.structured_outputs import grammar_of

GREEDY_BELOW = 1e-5  # temperatures below this are greedy
_SEED_BITS = 64
_SEEDS = random.Random()  # itself seeded by the system, which takes up to 0.1 ms a call


@dataclass(frozen=True)
class RequestLimits:
    """What a request may ask for on this server.

    Attributes:
        max_model_len: tokens of prompt and output together.
        vocab_size: ids are below it.
        kv_tokens: tokens that all KV pages together hold.
        max_n / max_logprobs / max_logit_bias / max_stop_ids: as in the configuration.
    """

    max_model_len: int
    vocab_size: int
    kv_tokens: int
    max_n: int
    max_logprobs: int
    max_logit_bias: int
    max_stop_ids: int

    @classmethod
    def of(
        cls, config: EngineConfig, max_model_len: int, vocab_size: int, kv_tokens: int
    ) -> RequestLimits:
        """Those of a configuration, and of what has been started from it."""
        options, sizes = config.sampling, (max_model_len, vocab_size, kv_tokens)
        most = (options.max_logprobs, options.max_logit_bias, options.max_stop_ids)
        return cls(*sizes, config.server.max_n, *most)

    def room(self, length: int, least: str = "at least ", answer: int = 0) -> int:
        """Tokens that the context and the KV cache leave after a prompt of `least` so many.

        Raises:
            InvalidRequest: fewer than `answer`; names both lengths.
        """
        most = min(self.max_model_len, self.kv_tokens)
        if most - length < answer:
            what = (
                f"this model's context is {self.max_model_len} tokens"
                if most == self.max_model_len
                else f"this server's KV cache holds {self.kv_tokens} tokens"
            )
            raise InvalidRequest(
                f"the prompt has {least}{length} tokens and {what}"
                + (f", of which at least {answer} must be left for the answer" if answer else ""),
                param="prompt",
                code="context_length_exceeded",
            )
        return most - length

    @cached_property
    def ids_type(self) -> Any:
        """Token ids as msgspec checks and copies them, in a third of the time of min and max."""
        return list[Annotated[int, msgspec.Meta(ge=0, lt=self.vocab_size)]]

    @property
    def ids_range(self) -> str:
        """The same in words."""
        return f"token ids from 0 to {self.vocab_size - 1}"


def build_requests(
    prompt_ids: Iterable[SupportsIndex],
    params: SamplingParams,
    limits: RequestLimits,
    eos_ids: Collection[int],
    new_id: Callable[[], int],
) -> list[EngineRequest]:
    """One request per choice of the prompt; choice i draws with seed + i.

    Args:
        prompt_ids: of one prompt; also those of numpy and torch.
        params: of the user, sampling defaults already merged in.
        limits: of this server.
        eos_ids: the model's end-of-sequence ids.
        new_id: gives the next request id.

    Raises:
        InvalidRequest: names the field, the value and what is allowed.
    """
    params, ids = check_params(params, limits), _plain_ids(prompt_ids, limits)
    max_tokens = _output_room(len(ids), params, limits)
    stop_ids = sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)})
    if len(stop_ids) > limits.max_stop_ids:
        raise _refused("stop_token_ids", len(stop_ids), f"at most {limits.max_stop_ids} in all")
    seed = _SEEDS.getrandbits(_SEED_BITS) if params.seed is None else params.seed
    greedy = params.temperature < GREEDY_BELOW
    grammar = grammar_of(params.structured_outputs) if params.structured_outputs else ""
    if grammar and not any(token_id < limits.vocab_size for token_id in eos_ids):
        reason = "the model has no tokenizer with an end-of-sequence token, which ends an answer"
        raise InvalidRequest.of("structured_outputs", reason)
    return [
        EngineRequest(
            request_id=new_id(),
            prompt_ids=ids,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            temperature=0.0 if greedy else params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            seed=(seed + choice) % 2**_SEED_BITS,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias or {},
            min_tokens=params.min_tokens,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            priority=params.priority,
            grammar=grammar,
        )
        for choice in range(params.n)
    ]


def _plain_ids(prompt_ids: Iterable[SupportsIndex], limits: RequestLimits) -> list[int]:
    """A list of their own, each in the vocabulary."""
    try:
        ids: list[int] = msgspec.convert(prompt_ids, limits.ids_type)
        return ids
    except msgspec.ValidationError:  # numpy's, torch's, or wrong
        pass
    try:
        ids = [_index(i) for i in prompt_ids]
    except TypeError:
        raise _refused("prompt", reprlib.repr(prompt_ids), limits.ids_range) from None
    _check_ids("prompt", ids, limits)
    return ids


def _index(value: Any) -> int:
    plain = value.item() if hasattr(value, "item") else value  # numpy's and torch's scalars
    if isinstance(plain, bool):
        raise TypeError("no token id")
    return operator.index(plain)


def _output_room(length: int, params: SamplingParams, limits: RequestLimits) -> int:
    """max_tokens, clamped to what the context and the KV cache leave after a prompt of so many ids.

    Raises:
        InvalidRequest: the prompt is empty or leaves no room; names both lengths.
    """
    if length == 0:
        raise InvalidRequest.of("prompt", "it is empty; at least 1 token is needed")
    room = limits.room(length, "", 0 if params.max_tokens == 0 else 1)
    return room if params.max_tokens is None else min(params.max_tokens, room)


def check_params(params: SamplingParams, limits: RequestLimits) -> SamplingParams:
    """Every field of the parameters has its type and every number is within its range.

    Returns:
        The same with scalars and arrays of numpy and torch as plain numbers and tuples.

    Raises:
        InvalidRequest: names the field, the value and what is allowed.
    """
    params = _typed(params)
    _check_range("n", params.n, 1, limits.max_n)
    least = 0 if params.prompt_logprobs is not None else 1
    _check_range("max_tokens", params.max_tokens, least, math.inf)
    _check_range("temperature", params.temperature, 0, 10**6)
    if not 0 < params.top_p <= 1:
        raise _refused("top_p", params.top_p, "above 0, at most 1")
    _check_range("top_k", params.top_k, -1, math.inf)
    _check_range("min_p", params.min_p, 0, 1)
    _check_range("frequency_penalty", params.frequency_penalty, -2, 2)
    _check_range("presence_penalty", params.presence_penalty, -2, 2)
    # Wider than anyone uses, narrow enough for float32.
    _check_range("repetition_penalty", params.repetition_penalty, 0.001, 1000)
    _check_range("seed", params.seed, -(2**63), 2**_SEED_BITS - 1)
    _check_range("min_tokens", params.min_tokens, 0, limits.max_model_len)
    _check_range("logprobs", params.logprobs, 0, limits.max_logprobs)
    _check_range("prompt_logprobs", params.prompt_logprobs, 0, limits.max_logprobs)
    if any(not string for string in params.stop):
        raise _refused("stop", "''", "strings of at least 1 character")
    _check_ids("stop_token_ids", params.stop_token_ids, limits)
    _check_bias(params.logit_bias or {}, limits)
    return params


def _typed(params: SamplingParams) -> SamplingParams:
    fields = msgspec.structs.asdict(params)
    with contextlib.suppress(msgspec.ValidationError, RecursionError):
        return msgspec.convert(fields, SamplingParams)
    fields = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in fields.items()}
    try:
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:  # "... - at `$.stop[0]`", "... - at `key` in `$.x`"
        name = re.split(r"\W", str(error).rpartition("$.")[2])[0]
        allowed = SamplingParams.__annotations__[name]
        raise _refused(name, reprlib.repr(fields[name]), allowed) from None
    except RecursionError:  # only a schema can be deep
        raise InvalidRequest.of("structured_outputs.json", "it is nested too deeply") from None


def _check_bias(bias: dict[int, float], limits: RequestLimits) -> None:
    if len(bias) > limits.max_logit_bias:
        raise _refused("logit_bias", f"{len(bias)} entries", f"at most {limits.max_logit_bias}")
    _check_ids("logit_bias", bias, limits)
    for value in bias.values():
        _check_range("logit_bias", value, -100, 100)


def _check_ids(name: str, ids: Collection[int], limits: RequestLimits) -> None:
    for token_id in ids:
        if not 0 <= token_id < limits.vocab_size:
            raise _refused(name, token_id, limits.ids_range)


def _check_range(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:  # NaN fails, too
        allowed = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise _refused(name, value, allowed)


def _refused(name: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest.of(name, f"got {value}, allowed: {allowed}")
