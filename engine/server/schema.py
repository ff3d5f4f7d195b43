"""The bodies of requests: names and types. What numbers are allowed, engine/admission.py says.

Strict types: "5" is no integer, 1.5 neither, true is no number, NaN no temperature. Unknown fields
are ignored, as OpenAI-compatible servers do, except those that would change the answer in a way we
cannot honour: `refuse_unsupported` names them. null is the same as leaving a field out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import InvalidRequest

_INT64 = 2**63  # what a message to the engine can hold


class Body(BaseModel):
    """Strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)
    model: str | None = None


class SamplingBody(Body):
    """What both ways of asking for text share. Fields below `priority` are vLLM's additions."""

    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Any = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class TemplateBody(Body):
    """What a chat template is told besides the messages."""

    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SamplingBody):
    """/v1/completions. prompt: text, list of texts, token ids, or list of lists of token ids."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatBody(SamplingBody, TemplateBody):
    """/v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    function_call: Any = None


class TokenizeBody(TemplateBody):
    """/tokenize: a prompt, or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """/detokenize."""

    tokens: list[int]


# Fields that other servers honour and that would be wrong to ignore in silence.
_UNSUPPORTED = (
    *("suffix", "audio", "web_search_options", "prompt_logprobs", "prompt_embeds"),
    *("use_beam_search", "bad_words", "allowed_token_ids", "logits_processors", "chat_template"),
    *("include_stop_str_in_output", "truncate_prompt_tokens"),
)


def refuse_unsupported(data: Mapping[str, Any]) -> None:
    """Refuse what we cannot do but would be missed.

    Raises:
        InvalidRequest: names the field.
    """
    for name in _UNSUPPORTED:
        value = data.get(name)
        # 0 asks for something, and {} is a schema: any JSON.
        if not (value is None or value is False or value in ("", [])):
            raise InvalidRequest(f"{name} is not supported by this server", param=name)
    if data.get("modalities") not in (None, ["text"]):
        raise InvalidRequest.of("modalities", "only ['text'] is supported")
    forced = data.get("tool_choice"), data.get("function_call")
    for name, choice in zip(("tool_choice", "function_call"), forced, strict=True):
        if choice not in (None, "none", "auto"):
            reason = "a call cannot be forced on this server; allowed: 'none', 'auto'"
            raise InvalidRequest.of(name, reason)
