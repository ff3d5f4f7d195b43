"""Bodies of requests to EngineRequests: every 4xx is decided here, before anything is sent.

    bytes -> JSON -> schema.py -> limits -> token ids -> Job

Pure functions of a body and a Context, so that a long prompt can be prepared in a thread. Knows
nothing of HTTP or of the engine's state.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from engine.config import EngineConfig
from engine.errors import InvalidRequest, NotFound
from engine.request import EngineRequest
from engine.server.errors import from_validation
from engine.server.limits import (
    Context,
    check_logprobs,
    logit_bias,
    room,
    stop_ids,
    stop_strings,
)
from engine.server.messages import template_messages, template_tools
from engine.server.prompts import Prompt, completion_prompts
from engine.server.schema import Body, ChatBody, CompletionBody, SamplingBody, refuse_unsupported
from engine.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16  # OpenAI's, of /v1/completions
_GREEDY_BELOW = 1e-5
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """A request that can be run.

    Attributes:
        kind: which of the two shapes the answer has.
        requests: one per choice, in the order of their index (prompt * n + choice); none when the
            answer is the prompt alone.
        prompts: as many as were given.
        stop: strings that end a text.
        min_tokens: stop strings count only after this many.
        logprobs: alternatives per token to report; None: none, and no logprobs either.
        return_token_ids: put token ids into the answer.
    """

    kind: Literal["completion", "chat"]
    model: str
    requests: list[EngineRequest]
    prompts: list[Prompt]
    n: int
    stop: tuple[str, ...]
    min_tokens: int
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    echo: bool
    logprobs: int | None
    return_token_ids: bool

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

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
    """Check names, types and ranges.

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


def completion_job(body: bytes, context: Context) -> Job:
    """A Job out of the body of /v1/completions.

    Raises:
        InvalidRequest, NotFound: as the error says.
    """
    data = parse_json(body)
    request = parse_body(CompletionBody, data)
    model = check_model(request.model, context.config)
    refuse_unsupported(data)
    if request.best_of not in (None, request.n or 1):
        raise InvalidRequest("best_of is not supported other than equal to n", param="best_of")
    echo, logprobs = bool(request.echo), request.logprobs
    check_logprobs(logprobs, context, "logprobs")
    max_tokens = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens: 0 is allowed only with echo", param="max_tokens")
    common = _common(request, context)
    prompts = completion_prompts(
        request.prompt,
        context.tokenizer,
        max_prompts=context.config.server.max_prompts,
        vocab_size=context.ready.vocab_size,
        add_special_tokens=request.add_special_tokens is not False,
    )
    scored = logprobs if echo else None
    engine = _engine_requests(request, context, prompts, max_tokens, logprobs, scored)
    return Job(
        kind="completion",
        model=model,
        requests=[] if max_tokens == 0 and scored is None else engine,
        prompts=prompts,
        echo=echo,
        logprobs=logprobs,
        **common,
    )


def chat_job(body: bytes, context: Context) -> Job:
    """A Job out of the body of /v1/chat/completions.

    Raises:
        InvalidRequest, NotFound: as the error says.
    """
    data = parse_json(body)
    request = parse_body(ChatBody, data)
    model = check_model(request.model, context.config)
    refuse_unsupported(data)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs = true", param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    check_logprobs(logprobs, context, "top_logprobs")
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(request, name)
    if max_tokens == 0:
        raise InvalidRequest(f"{name}: at least 1 is needed", param=name)
    common = _common(request, context)
    prompts = [Prompt(None, chat_prompt(request, context.tokenizer))]
    requests = _engine_requests(request, context, prompts, max_tokens, logprobs, None)
    return Job(
        kind="chat",
        model=model,
        requests=requests,
        prompts=prompts,
        echo=False,
        logprobs=logprobs,
        **common,
    )


def chat_prompt(request: Any, tokenizer: Tokenizer) -> list[int]:
    """Token ids of the messages of a ChatBody or TokenizeBody.

    Raises:
        InvalidRequest: a message or tool that is wrong, or that the model's template refuses.
    """
    template = tokenizer.chat_template
    messages = template_messages(
        request.messages, template.knows_role if template is not None else lambda role: True
    )
    choice = getattr(request, "tool_choice", None) or getattr(request, "function_call", None)
    return tokenizer.encode_chat(
        messages,
        tools=template_tools(request.tools, getattr(request, "functions", None), choice),
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        variables=request.chat_template_kwargs,
    )


def _common(request: SamplingBody, context: Context) -> dict[str, Any]:
    """The parts of a Job that both shapes have, their limits checked before any memory is taken."""
    server, n = context.config.server, request.n or 1
    if n > server.max_n:
        raise InvalidRequest(f"n: got {n}, allowed: at most {server.max_n}", param="n")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream = true", param="stream_options")
    include_usage = (request.stream_options or {}).get("include_usage")
    if include_usage not in (None, True, False):
        raise InvalidRequest(
            "stream_options.include_usage: true or false is expected",
            param="stream_options.include_usage",
        )
    return {
        "n": n,
        "stop": stop_strings(request.stop, server.max_stop, server.max_stop_length),
        "min_tokens": request.min_tokens or 0,
        "skip_special_tokens": request.skip_special_tokens is not False,
        "stream": bool(request.stream),
        "include_usage": bool(include_usage),
        "return_token_ids": bool(request.return_token_ids),
    }


def _default(request: SamplingBody, name: str, context: Context, otherwise: float) -> Any:
    """The request's value, or the model authors' recommendation, or OpenAI's default."""
    value = getattr(request, name)
    return context.tokenizer.sampling_defaults.get(name, otherwise) if value is None else value


def _engine_requests(
    request: SamplingBody,
    context: Context,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> list[EngineRequest]:
    """One per choice, every default resolved; seeds differ by the choice's index."""
    least = 0 if max_tokens == 0 else 1
    param = "messages" if isinstance(request, ChatBody) else "prompt"
    rooms = [room(prompt, context, least, param) for prompt in prompts]
    most = [left if max_tokens is None else min(left, max_tokens) for left in rooms]
    min_tokens = request.min_tokens or 0
    if min_tokens > max(most):
        raise InvalidRequest(
            f"min_tokens: got {min_tokens}, allowed: at most max_tokens, here {max(most)}",
            param="min_tokens",
        )
    build = _request_builder(request, context, logprobs, prompt_logprobs)
    n = request.n or 1
    return [
        build(prompt.token_ids, most[p], p * n + choice)
        for p, prompt in enumerate(prompts)
        for choice in range(n)
    ]


def _request_builder(
    request: SamplingBody, context: Context, logprobs: int | None, prompt_logprobs: int | None
) -> Callable[[list[int], int, int], EngineRequest]:
    temperature = _default(request, "temperature", context, 1.0)
    top_k = int(_default(request, "top_k", context, 0))
    shared: dict[str, Any] = {
        "stop_ids": stop_ids(request, context),
        "temperature": temperature if temperature >= _GREEDY_BELOW else 0.0,
        "top_p": _default(request, "top_p", context, 1.0),
        "top_k": top_k if 0 < top_k < context.ready.vocab_size else 0,
        "min_p": _default(request, "min_p", context, 0.0),
        "frequency_penalty": request.frequency_penalty or 0.0,
        "presence_penalty": request.presence_penalty or 0.0,
        "repetition_penalty": _default(request, "repetition_penalty", context, 1.0),
        "logit_bias": logit_bias(request.logit_bias, context),
        "min_tokens": request.min_tokens or 0,
        "logprobs": -1 if logprobs is None else logprobs,
        "prompt_logprobs": -1 if prompt_logprobs is None else prompt_logprobs,
        "priority": request.priority or 0,
    }
    seed = random.getrandbits(64) if request.seed is None else request.seed

    def build(prompt_ids: list[int], max_tokens: int, index: int) -> EngineRequest:
        return EngineRequest(
            request_id=0,  # the client numbers them
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            seed=(seed + index) % 2**64,
            **shared,
        )

    return build
