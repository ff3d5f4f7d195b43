"""The application: routes, errors, lifespan.

    create_app   an ASGI application over an EngineClient
    serve        the whole server: socket, engine process, signals (lifecycle.py)

Never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine import __version__
from engine.config import EngineConfig
from engine.engine_client import EngineClient
from engine.engine_transport import ProcessTransport
from engine.errors import FullgraphError
from engine.request import Ready
from engine.server.errors import Unsupported, error_response
from engine.server.http import CountRequests, RequireKey
from engine.server.lifecycle import run_server
from engine.server.routes import make_router
from engine.server.service import Service
from engine.tokenizer import Tokenizer, load_tokenizer

__all__ = ["create_app", "serve"]

_CLIENT_LEFT = 499
_COUNTED = frozenset({"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})


def create_app(
    config: EngineConfig,
    client: EngineClient,
    tokenizer: Callable[[], Tokenizer],
    on_ready: Callable[[Ready, Tokenizer], None] | None = None,
) -> FastAPI:
    """The application; its lifespan starts and ends the engine. `app.state.service` is its state.

    Requests are answered with 503 until the engine is ready.

    Args:
        config: limits, names and the API key.
        client: not started yet.
        tokenizer: called once, in a thread.
        on_ready: called when requests are taken.
    """
    service = Service(config, client, tokenizer, on_ready)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(service.run())
        try:
            yield
        finally:
            watch.cancel()
            await service.stop()

    app = FastAPI(title="fullgraph", version=__version__, lifespan=lifespan)
    app.state.service = service
    app.include_router(make_router(service))
    _add_error_handlers(app)
    if config.server.api_key is not None:
        app.add_middleware(RequireKey, key=config.server.api_key)
    app.add_middleware(CountRequests, service=service, paths=_COUNTED)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(FullgraphError)
    async def ours(_: Request, error: FullgraphError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        reason = f"{error.detail}: {request.method} {request.url.path}"
        response = error_response(Unsupported(reason, error.status_code))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return error_response(FullgraphError(f"internal error: {type(error).__name__}"))


def serve(config: EngineConfig, transport: ProcessTransport, listener: socket.socket) -> int:
    """Serve until SIGTERM, Ctrl-C or the engine's end; the process's exit status.

    Answers at once, with 503 and the progress while the engine starts.

    Args:
        config: of the whole server.
        transport: to the engine's process, see engine_launch.launched.
        listener: a socket that listens.
    """
    return run_server(
        config,
        lambda client, on_ready: create_app(
            config, client, lambda: load_tokenizer(config.model), on_ready
        ),
        transport,
        listener,
    )
