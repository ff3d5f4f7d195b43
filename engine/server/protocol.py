"""Bodies of requests to EngineRequests: every 4xx is decided here, before anything is sent.

    bytes -> JSON -> schema.py (names, types) -> SamplingParams -> engine/admission.py (numbers)
          -> token ids -> Job

Pure functions of a body and a Context, so that a long prompt can be prepared in a thread. Knows
nothing of HTTP or of the engine's state.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import ValidationError

from engine.admission import RequestLimits, build_requests, check_params
from engine.config import EngineConfig
from engine.errors import InvalidRequest, NotFound
from engine.messages import template_tools
from engine.request import EngineRequest, Ready, SamplingParams
from engine.server.answer_format import answer_format, format_field
from engine.server.errors import from_validation
from engine.server.prompts import Prompt, completion_prompts
from engine.server.schema import (
    Body,
    ChatBody,
    CompletionBody,
    SamplingBody,
    TokenizeBody,
    refuse_unsupported,
)
from engine.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16  # OpenAI's, of /v1/completions
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SEEDS = 2**64
# Fields that are no business of ours: what their numbers may be, admission says.
_AS_GIVEN = (
    *("n", "temperature", "top_p", "top_k", "min_p", "priority"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)


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
    def limits(self) -> RequestLimits:
        """For engine/admission.py."""
        ready = self.ready
        kv_tokens = ready.num_pages * ready.page_size
        return RequestLimits.of(self.config, ready.max_model_len, ready.vocab_size, kv_tokens)


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """A request that can be run.

    Attributes:
        kind: which of the two shapes the answer has.
        requests: one per choice, in the order of their index (prompt * n + choice); none when the
            answer is the prompt alone.
        prompts: as many as were given.
        params: the same for all of them.
        return_token_ids: put token ids into the answer.
        format_field: of the body, which says what the answer must look like, or "".
    """

    kind: Literal["completion", "chat"]
    model: str
    requests: list[EngineRequest]
    prompts: list[Prompt]
    params: SamplingParams
    stream: bool
    include_usage: bool
    echo: bool
    return_token_ids: bool
    format_field: str = ""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once however many choices it has."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. NaN and Infinity pass; the schema refuses them with their name.

    Raises:
        InvalidRequest: no JSON object, or half a surrogate pair in it.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest("the body is not a JSON object")
    if _SURROGATE.search(body):
        for name, value in data.items():
            try:
                json.dumps({name: value}, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise InvalidRequest(
                    f"{name!a}: the text holds half a surrogate pair, which is no character",
                    param=name if name.isascii() else None,
                ) from None
    return data


B = TypeVar("B", bound=Body)


def parse_body(cls: type[B], data: Mapping[str, Any]) -> B:
    """Check names and types.

    Raises:
        InvalidRequest: names the field, and the value it got.
    """
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None


def check_model(name: str | None, config: EngineConfig) -> str:
    """The model's name as the answer gives it.

    Raises:
        NotFound: another model was asked for.
    """
    if name is not None and name != config.served_name:
        raise NotFound(
            f"the model {name!r} does not exist; this server has {config.served_name!r}",
            param="model",
            code="model_not_found",
        )
    return config.served_name


S = TypeVar("S", bound=SamplingBody)


def _supported(cls: type[S], body: bytes, context: Context) -> tuple[S, str]:
    """A body that asks for nothing we lack, and the model's name."""
    data = parse_json(body)
    request = parse_body(cls, data)
    model = check_model(request.model, context.config)
    refuse_unsupported(data)
    return request, model


def completion_job(body: bytes, context: Context) -> Job:
    """A Job out of the body of /v1/completions.

    Raises:
        InvalidRequest, NotFound: as the error says.
    """
    request, model = _supported(CompletionBody, body, context)
    if request.best_of not in (None, 1 if request.n is None else request.n):
        raise InvalidRequest("best_of is not supported other than equal to n", param="best_of")
    echo, logprobs = bool(request.echo), request.logprobs
    max_tokens = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    prompt_alone = echo and max_tokens == 0 and logprobs is None
    scored = 0 if prompt_alone else logprobs  # of the prompt; 0 also lets max_tokens be 0
    params = _sampling_params(request, context, max_tokens, logprobs, scored if echo else None)
    check_params(params, context.limits)
    special = request.add_special_tokens is not False
    tokenizer, check = context.tokenizer, context.limits.room
    encode = functools.partial(tokenizer.encode, add_special_tokens=special, check=check)
    prompts = completion_prompts(request.prompt, encode, context.config.server.max_prompts)
    requests = _engine_requests(prompts, params, context)
    return Job(
        kind="completion",
        model=model,
        requests=[] if prompt_alone else requests,
        prompts=prompts,
        params=params,
        echo=echo,
        **_answer_options(request),
    )


def chat_job(body: bytes, context: Context) -> Job:
    """A Job out of the body of /v1/chat/completions.

    Raises:
        InvalidRequest, NotFound: as the error says.
    """
    request, model = _supported(ChatBody, body, context)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs = true", param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    limit = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    with _named(prompt="messages", logprobs="top_logprobs", max_tokens=limit):
        params = _sampling_params(request, context, getattr(request, limit), logprobs, None)
        check_params(params, context.limits)
        prompts = [Prompt(None, chat_prompt(request, context.tokenizer, context.limits.room))]
        requests = _engine_requests(prompts, params, context)
    return Job(
        kind="chat",
        model=model,
        requests=requests,
        prompts=prompts,
        params=params,
        echo=False,
        **_answer_options(request),
    )


@contextmanager
def _named(**names: str) -> Iterator[None]:
    """Errors name the chat's fields, not those of the completion that it becomes."""
    try:
        yield
    except InvalidRequest as error:
        param = names.get(error.param or "", error.param)
        if param == error.param:
            raise
        message = error.message.replace(f"{error.param}:", f"{param}:", 1)
        raise InvalidRequest(message, param=param, code=error.code) from None


def chat_prompt(
    request: ChatBody | TokenizeBody, tokenizer: Tokenizer, check: Callable[[int], object] = int
) -> list[int]:
    """Token ids of the messages of a request; `check` is as in Tokenizer.encode().

    Raises:
        InvalidRequest: a message or tool that is wrong, or that the model's template refuses.
    """
    functions, choice = None, None
    if isinstance(request, ChatBody):
        functions, choice = request.functions, request.tool_choice or request.function_call
    return tokenizer.encode_chat(
        request.messages or (),
        tools=template_tools(request.tools, functions, choice),
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        variables=request.chat_template_kwargs,
        check=check,
    )


def _answer_options(request: SamplingBody) -> dict[str, Any]:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream = true", param="stream_options")
    include_usage = (request.stream_options or {}).get("include_usage")
    if include_usage not in (None, True, False):
        raise InvalidRequest.of("stream_options.include_usage", "true or false is expected")
    return {
        "stream": bool(request.stream),
        "include_usage": bool(include_usage),
        "return_token_ids": bool(request.return_token_ids),
        "format_field": format_field(request),
    }


def _stop_strings(stop: object, most: int, longest: int) -> tuple[str, ...]:
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list):
        raise InvalidRequest.of("stop", "a text or a list of texts is expected")
    if len(strings) > most:
        raise InvalidRequest.of("stop", f"got {len(strings)} strings, allowed: at most {most}")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest.of("stop", "each string must be a non-empty text")
        if len(string) > longest:
            raise InvalidRequest.of(
                "stop", f"got {len(string)} characters, allowed: at most {longest}"
            )
    return tuple(dict.fromkeys(strings))


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """The field with ids for keys; what is allowed of them is admission's business."""
    for key in bias or ():
        if not re.fullmatch("[0-9]{1,12}", key):
            raise InvalidRequest.of("logit_bias", f"{key[:20]!r} is no token id")
    return {int(key): value for key, value in bias.items()} if bias else None


def _sampling_params(
    request: SamplingBody,
    context: Context,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Fields that were not given take the model authors' values, or else OpenAI's."""
    server, tokenizer = context.config.server, context.tokenizer
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max(max_tokens, 0):
        raise InvalidRequest.of(
            "min_tokens", f"got {min_tokens}, allowed: at most max_tokens, which is {max_tokens}"
        )
    given = {name: getattr(request, name) for name in _AS_GIVEN}
    known = {name: value for name, value in given.items() if value is not None}
    params = SamplingParams(
        **{**tokenizer.sampling_defaults, **known},
        max_tokens=max_tokens,
        seed=secrets.randbelow(_SEEDS) if request.seed is None else request.seed,
        logit_bias=_logit_bias(request.logit_bias),
        min_tokens=min_tokens,
        stop=_stop_strings(request.stop, server.max_stop, server.max_stop_length),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=request.skip_special_tokens is not False,
        structured_outputs=answer_format(request),
    )
    if params.top_k >= context.ready.vocab_size:
        return msgspec.structs.replace(params, top_k=0)  # all of the vocabulary
    return params


def _no_id() -> int:
    return 0  # the client numbers them


def _engine_requests(
    prompts: Sequence[Prompt], params: SamplingParams, context: Context
) -> list[EngineRequest]:
    """One per choice; their seeds differ by the choice's index, prompt * n + choice."""
    vocab_size, limits = context.ready.vocab_size, context.limits
    eos_ids = [token_id for token_id in context.tokenizer.eos_ids if token_id < vocab_size]
    assert params.seed is not None
    requests = []
    for index, prompt in enumerate(prompts):
        seed = (params.seed + index * params.n) % _SEEDS
        own = msgspec.structs.replace(params, seed=seed)
        requests += build_requests(prompt.token_ids, own, limits, eos_ids, _no_id)
    return requests
