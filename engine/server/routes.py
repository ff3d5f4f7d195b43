"""The routes: /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, probes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from engine import __version__
from engine.errors import InvalidRequest, NotFound
from engine.metrics import CONTENT_TYPE
from engine.server.answer import whole_answer
from engine.server.http import read_body
from engine.server.protocol import (
    Context,
    Job,
    chat_job,
    chat_prompt,
    check_model,
    completion_job,
    parse_body,
    parse_json,
)
from engine.server.run import Run
from engine.server.schema import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from engine.server.service import Service
from engine.server.stream import EventStream, frames

T = TypeVar("T")
# Bodies above this many bytes are parsed and tokenised in a thread: about a millisecond of work.
_INLINE_BYTES = 4096


class _JSON(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def make_router(service: Service) -> APIRouter:
    """Every route of the server."""
    router = APIRouter()
    _add_generation(router, service)
    _add_tokens(router, service)
    _add_information(router, service)
    return router


def _schema(body: type[Body]) -> dict[str, Any]:
    """For /docs; the bodies are parsed by hand, so that errors have OpenAI's shape."""
    content = {"application/json": {"schema": body.model_json_schema()}}
    return {"requestBody": {"content": content, "required": True}}


async def _prepare(
    request: Request, service: Service, parse: Callable[[bytes, Context], T]
) -> tuple[T, Context]:
    """Read the body and parse it, off the event loop when it is long."""
    context = service.context()
    body = await read_body(request, service.config.server.max_body_bytes)
    if len(body) <= _INLINE_BYTES:
        return parse(body, context), context
    return await asyncio.to_thread(parse, body, context), context


async def _generate(
    request: Request, service: Service, parse: Callable[[bytes, Context], Job], prefix: str
) -> Response:
    arrived = time.monotonic()
    job, context = await _prepare(request, service, parse)
    answer_id = f"{prefix}-{uuid.uuid4().hex}"
    run = Run(job, service.client, context.tokenizer, service.metrics, arrived)
    if job.stream:
        return EventStream(run, frames(job, answer_id, context.tokenizer))
    return await whole_answer(run, answer_id, context.tokenizer, request.receive)


def _add_generation(router: APIRouter, service: Service) -> None:
    @router.post("/v1/completions", openapi_extra=_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        return await _generate(request, service, completion_job, "cmpl")

    @router.post("/v1/chat/completions", openapi_extra=_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await _generate(request, service, chat_job, "chatcmpl")


def _add_tokens(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize", openapi_extra=_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        return _JSON((await _prepare(request, service, _tokenize))[0])

    @router.post("/detokenize", openapi_extra=_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        return _JSON((await _prepare(request, service, _detokenize))[0])


def _tokenize(body: bytes, context: Context) -> dict[str, Any]:
    request = parse_body(TokenizeBody, parse_json(body))
    check_model(request.model, context.config)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("either prompt or messages is needed", param="prompt")
    tokenizer = context.tokenizer
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        ids = tokenizer.encode(request.prompt, add_special_tokens=special)
    else:
        ids = chat_prompt(request, tokenizer)
    strings = [tokenizer.token_text(i) for i in ids] if request.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": context.ready.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


def _detokenize(body: bytes, context: Context) -> dict[str, Any]:
    request = parse_body(DetokenizeBody, parse_json(body))
    check_model(request.model, context.config)
    vocab_size = context.ready.vocab_size
    if any(not 0 <= token_id < vocab_size for token_id in request.tokens):
        raise InvalidRequest.of("tokens", f"an id is outside the vocabulary of {vocab_size}")
    return {"prompt": context.tokenizer.decode(request.tokens, skip_special_tokens=False)}


def _add_information(router: APIRouter, service: Service) -> None:
    @router.get("/health")
    @router.head("/health", include_in_schema=False)  # as some load balancers ask
    async def health() -> Response:
        status, body = service.health()
        headers = {} if status == 200 else {"Retry-After": "1"}
        return _JSON(body, status_code=status, headers=headers)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.render_metrics(), media_type=CONTENT_TYPE)

    @router.get("/version")
    async def version() -> Response:
        return _JSON({"version": __version__})

    @router.get("/v1/models")
    async def models() -> Response:
        return _JSON({"object": "list", "data": [_model_card(service)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        try:
            check_model(name, service.config)
        except NotFound as error:
            error.param = None
            raise
        return _JSON(_model_card(service))


def _model_card(service: Service) -> dict[str, Any]:
    ready = service.client.ready
    return {
        "id": service.config.served_name,
        "object": "model",
        "created": service.created,
        "owned_by": "fullgraph",
        "root": service.config.model.path,
        "parent": None,
        "max_model_len": ready.max_model_len if ready is not None else None,
    }
