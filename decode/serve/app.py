"""The HTTP side of `medusa serve`: an OpenAI-compatible API over the thread that decodes.

Routes are /v1/completions, /v1/chat/completions, /v1/models and /health.
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from decode.request import require_fitting
from decode.serve.answers import ApiAnswer, reader_left
from decode.serve.schema import MAX_CHOICES, ApiError, ChatRequest, CompletionRequest, parse
from decode.serve.worker import BatchRow, BatchWorker
from decode.settings import Settings
from medusa.backbone import Backbone
from medusa.errors import RequestError

MAX_BODY = 2**24  # bytes of a request


class CompletionApi:
    """The API over a worker."""

    def __init__(self, worker: BatchWorker, name: str, settings: Settings, seed: int = 0) -> None:
        """`name`: of the model; `settings`: defaults of all requests; `seed`: of requests without one."""
        self.worker, self.name, self.settings, self.seed = worker, name, settings, seed
        self.generator = worker.generator
        self.backbone = Backbone(self.generator.model)
        self.started, self.answered = int(time.time()), 0

    def app(self, allowed_hosts: Sequence[str]) -> Starlette:
        """The web application. It ends the worker when it ends."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            self.worker.stop()

        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chats, methods=["POST"]),
                Route("/health", self.health),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts))],
            exception_handlers={ApiError: _refuse, 404: _no_such_route, 405: _no_such_route},
            lifespan=lifespan,
        )

    async def health(self, request: HttpRequest) -> Response:
        """Whether the worker is alive."""
        alive = self.worker.is_alive
        return JSONResponse({"status": "ok" if alive else "the worker has ended"}, 200 if alive else 503)

    async def models(self, request: HttpRequest) -> Response:
        """The only model, as a list."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        """The only model."""
        self._require_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, object]:
        about = {"id": self.name, "object": "model", "created": self.started, "owned_by": "medusa"}
        return about | {"max_model_len": self.backbone.context}

    def _require_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(f"model is {name!r}; this server has {self.name!r}", 404, "model")

    async def completions(self, request: HttpRequest) -> Response:
        """Continue texts."""
        return await self._respond(request, parse(await _body(request), CompletionRequest))

    async def chats(self, request: HttpRequest) -> Response:
        """Answer a conversation."""
        return await self._respond(request, parse(await _body(request), ChatRequest))

    async def _respond(self, request: HttpRequest, asked: CompletionRequest | ChatRequest) -> Response:
        answer = self.begin(asked)
        if asked.stream:
            return StreamingResponse(answer.chunks(asked.wants_usage), media_type="text/event-stream")
        return JSONResponse(await answer.whole(asyncio.ensure_future(reader_left(request))))

    def begin(self, asked: CompletionRequest | ChatRequest) -> ApiAnswer:
        """Give the texts of a request to the worker.

        Raises:
            ApiError: the request cannot be answered."""
        self._require_model(asked.model or self.name)
        try:
            settings = asked.settings(self.settings)
            prompts = asked.prompts(self.generator.tokenizer)
            require_fitting(prompts, self.backbone)
        except RequestError as error:
            raise ApiError(str(error)) from None
        count = len(prompts) * asked.copies
        if count > MAX_CHOICES:
            raise ApiError(f"{count} texts were asked for; a request has at most {MAX_CHOICES}")
        self.answered += 1
        seed = self.seed + self.answered * MAX_CHOICES if asked.seed is None else asked.seed
        prompt_tokens, is_chat = sum(map(len, prompts)), isinstance(asked, ChatRequest)
        answer = ApiAnswer(self.name, is_chat, uuid.uuid4().hex, int(time.time()), prompt_tokens)
        for index in range(count):
            number, copy = divmod(index, asked.copies)
            # If the request has a seed, equal prompts get equal texts; otherwise all texts differ.
            offset = index if asked.seed is None else copy
            answer.rows.append(BatchRow(prompts[number], settings, (seed + offset) % 2**63, answer.listener(index)))
        for row in answer.rows:
            self.worker.add(row)
        return answer


async def _body(request: HttpRequest) -> bytes:
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MAX_BODY:
            raise ApiError(f"the request is longer than {MAX_BODY // 2**20} MiB", 413)
    return bytes(content)


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.to_json(), error.status)


async def _no_such_route(request: HttpRequest, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    refusal = ApiError(
        f"{request.method} {request.url.path}: there are /v1/models, /v1/completions, /v1/chat/completions"
    )
    return JSONResponse(refusal.to_json(), status)


class _AnnouncedServer(uvicorn.Server):
    """A server that says when it listens."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], object]) -> None:
        super().__init__(config)
        self.on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_start()


def serve(
    api: CompletionApi, host: str, port: int, allowed_hosts: Sequence[str], on_start: Callable[[], object]
) -> None:
    """Answer requests until the program is ended. `on_start` is called when the server listens."""
    app = api.app(allowed_hosts)
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=3)
    _AnnouncedServer(config, on_start).run()
