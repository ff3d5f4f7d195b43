"""Logprobs in OpenAI's two shapes. Knows nothing of where they come from."""

from __future__ import annotations

from typing import Any

from engine.request import TokenLogprobs
from engine.server.deltas import Delta
from engine.server.protocol import Job
from engine.tokenizer import Tokenizer


def logprobs_of(job: Job, delta: Delta, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """In the shape of the job's answer; None where they were not asked for."""
    if job.params.logprobs is None:
        return None
    return (_chat if job.kind == "chat" else _completion)(delta, tokenizer)


def _completion(delta: Delta, tokenizer: Tokenizer) -> dict[str, Any]:
    """`{tokens, token_logprobs, top_logprobs, text_offset}` of /v1/completions."""
    text = tokenizer.token_text
    return {
        "tokens": [text(token_id) for token_id in delta.logprob_ids],
        "token_logprobs": [entry and entry.logprob for entry in delta.logprobs],
        "top_logprobs": [
            entry and _alternatives(token_id, entry, tokenizer)
            for token_id, entry in zip(delta.logprob_ids, delta.logprobs, strict=True)
        ],
        "text_offset": delta.offsets,
    }


def _alternatives(token_id: int, entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Text -> logprob, likeliest first, the token itself too. Of equal texts the likelier wins."""
    result: dict[str, float] = {}
    for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        result.setdefault(tokenizer.token_text(top_id), logprob)
    result.setdefault(tokenizer.token_text(token_id), entry.logprob)
    return result


def _chat(delta: Delta, tokenizer: Tokenizer) -> dict[str, Any]:
    """`{content: [{token, logprob, bytes, top_logprobs}]}` of /v1/chat/completions."""
    content = []
    for token_id, entry in zip(delta.logprob_ids, delta.logprobs, strict=True):
        assert entry is not None, "a chat answers with generated tokens only"
        tops = zip(entry.top_ids, entry.top_logprobs, strict=True)
        top = [_chat_token(top_id, logprob, tokenizer) for top_id, logprob in tops]
        content.append({**_chat_token(token_id, entry.logprob, tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
