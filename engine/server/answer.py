"""Answers sent whole: every choice collected, then one JSON body."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from engine.server.deltas import Delta
from engine.server.logprobs import logprobs_of
from engine.server.protocol import Job
from engine.server.run import Run
from engine.server.stream import close_on_disconnect, usage
from engine.tokenizer import Tokenizer

_CLIENT_LEFT = 499  # seen by nobody but the access log


async def whole_answer(
    run: Run, answer_id: str, tokenizer: Tokenizer, receive: Receive
) -> Response:
    """Wait for the end of every choice and answer. A client that goes away aborts the run.

    Raises:
        RequestError, EngineDead: as `Run.next` does.
    """
    pieces: list[list[Delta]] = [[] for _ in range(run.job.num_choices)]
    watcher = asyncio.create_task(close_on_disconnect(run, receive))
    try:
        while (batch := await run.next(list)) is not None:
            for index, delta in batch:
                pieces[index].append(delta)
    finally:
        run.close()
        watcher.cancel()
    if not all(part and part[-1].finish_reason for part in pieces):
        return Response(status_code=_CLIENT_LEFT)
    choices = [_choice(run.job, i, _join(part), tokenizer) for i, part in enumerate(pieces)]
    body = {
        "id": answer_id,
        "object": "chat.completion" if run.job.kind == "chat" else "text_completion",
        "created": int(time.time()),
        "model": run.job.model,
        "choices": choices,
        "usage": usage(run.job, run.num_completion_tokens),
    }
    return Response(msgspec.json.encode(body), media_type="application/json")


def _join(parts: Sequence[Delta]) -> Delta:
    """The parts of a choice as one."""
    if len(parts) == 1:
        return parts[0]
    whole = Delta("".join(part.text for part in parts), [], finish_reason=parts[-1].finish_reason)
    for part in parts:
        whole.token_ids += part.token_ids
        whole.logprob_ids += part.logprob_ids
        whole.logprobs += part.logprobs
        whole.offsets += part.offsets
    return whole


def _choice(job: Job, index: int, delta: Delta, tokenizer: Tokenizer) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if job.kind == "chat":
        choice["message"] = {"role": "assistant", "content": delta.text, "refusal": None}
    else:
        choice["text"] = delta.text
    choice["logprobs"] = logprobs_of(job, delta, tokenizer)
    choice["finish_reason"] = delta.finish_reason
    if job.return_token_ids:
        choice["token_ids"] = delta.token_ids
        choice["prompt_token_ids"] = job.prompts[index // job.params.n].token_ids
    return choice
