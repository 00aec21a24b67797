"""The HTTP server of `medusa serve`: an API compatible with OpenAI's, for which a worker thread decodes the texts."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from socket import socket
from weakref import WeakSet

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from decode.request import require_fitting
from decode.serve.logprobs import chat_json, completion_json
from decode.serve.metrics import CountRequests
from decode.serve.schema import MAX_CHOICES, ApiError, ChatRequest, CompletionRequest, ResponseFormat, parse
from decode.serve.worker import BatchRow, BatchWorker, RowEvent
from decode.settings import Settings
from decode.strategies.grammar import json_schema_source
from medusa.backbone import Backbone
from medusa.errors import RequestError, RunError
from medusa.files import Json
from medusa.records.replies import ReplyReader, message_of, response_template

MAX_BODY = 2**24  # largest request, in bytes
GRACE = 3  # seconds that answers may still take when the server stops
LETTERS = 256  # more than the tokens of a text have on average, whatever the tokenizer


class ApiAnswer:
    """Collects the texts for one API request from the worker thread, and sends them as JSON or as a stream."""

    def __init__(
        self,
        model: str,
        is_chat: bool,
        is_stream: bool,
        prompt_tokens: int,
        tokenizer: PreTrainedTokenizerBase,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Make an answer that has no texts yet. `prompt_tokens`: number of tokens in all prompts together.

        `loop` is that of the HTTP thread."""
        self.is_chat, self.prompt_tokens, self.tokenizer, self.loop = is_chat, prompt_tokens, tokenizer, loop
        number = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        kind = "text_completion"
        if is_chat:
            kind = "chat.completion.chunk" if is_stream else "chat.completion"
        self.head: dict[str, object] = {"id": number, "created": int(time.time()), "model": model, "object": kind}
        self.rows: list[BatchRow] = []  # the requested texts, one row for each choice of the answer, in order
        self.returns_ids = False  # whether the choices list the ids of their tokens
        self.echoes: list[str] = []  # the text with which each choice begins
        self.readers: list[ReplyReader] = []  # of the texts that may call tools
        self.events: asyncio.Queue[tuple[int, RowEvent]] = asyncio.Queue()

    def put(self, index: int, event: RowEvent) -> None:
        """Pass an event of the requested text `index` (from 0) from the worker thread to the HTTP thread."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

    async def whole(self, request: HttpRequest) -> dict[str, object]:
        """Return the whole answer as JSON, or raise an `ApiError` if decoding fails or the client disconnects."""
        texts, ends = list(self.echoes), [RowEvent()] * len(self.rows)
        left = asyncio.ensure_future(self._watch(request))
        try:
            async for index, event in self._until_all_ended():
                texts[index] += event.text
                ends[index] = event
        finally:
            left.cancel()
            self._leave()
        choices = []
        for index, (text, end) in enumerate(zip(texts, ends, strict=True)):
            said: dict[str, object] = {"text": text}
            if self.is_chat:
                said = {"message": {"role": "assistant", "content": text}}
            if (reader := self._reader(index)) is not None:
                said = {"message": message_of([*reader.feed(text), *reader.end()])}
            choices.append(self._choice(index, end, said))
        return self.head | {"choices": choices, "usage": self._usage()}

    async def chunks(self, usage: bool) -> AsyncIterator[str]:
        """Yield the answer as server-sent events while its texts grow. With `usage`, the last one has token counts."""
        try:
            for index, echo in enumerate(self.echoes):
                if self.is_chat or echo:
                    first = {"delta": {"role": "assistant", "content": ""}} if self.is_chat else {"text": echo}
                    yield _line(self.head | {"choices": [self._choice(index, RowEvent(), first)]})
            async for index, event in self._until_all_ended():
                for said in self._said(index, event):
                    yield _line(self.head | {"choices": [self._choice(index, RowEvent(), said)]})
                if event.finish_reason is not None:
                    last: dict[str, object] = {"delta": {}} if self.is_chat else {"text": ""}
                    yield _line(self.head | {"choices": [self._choice(index, event, last)]})
            if usage:
                yield _line(self.head | {"choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except ApiError as error:  # too late for an HTTP status, which was sent with the first chunk
            yield _line(error.to_json())
        finally:  # also when the client disconnects, because Starlette then closes this generator
            self._leave()

    def _said(self, index: int, event: RowEvent) -> Iterator[dict[str, object]]:
        """Yield what the chunks of a stream say of an event of the text `index`."""
        reader = self._reader(index)
        if reader is None:
            if event.text:
                yield {"delta": {"content": event.text}} if self.is_chat else {"text": event.text}
            return
        ending = reader.end() if event.finish_reason is not None else ()
        yield from ({"delta": delta} for delta in (*reader.feed(event.text), *ending))

    def _reader(self, index: int) -> ReplyReader | None:
        """Return the reader of the calls in a text; `None` if it may not call tools, or calls have no known format."""
        return self.readers[index] if self.readers else None

    async def _watch(self, request: HttpRequest) -> None:
        """Wait until the client has disconnected, and then end this answer with an error."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.fail(_left())

    async def _until_all_ended(self) -> AsyncIterator[tuple[int, RowEvent]]:
        """Yield pairs of a text's index and its next event until all texts have ended; raise errors as `ApiError`."""
        running = len(self.rows)
        while running:
            index, event = await self.events.get()
            if isinstance(event.error, ApiError):
                raise event.error
            if isinstance(event.error, RequestError):
                raise ApiError(str(event.error))
            if event.error is not None:
                raise ApiError(f"decoding failed: {type(event.error).__name__}: {event.error}", 500)
            running -= event.finish_reason is not None
            yield index, event

    def fail(self, error: ApiError) -> None:
        """End the answer with an error; called in the HTTP thread."""
        self.events.put_nowait((0, RowEvent(error=error)))

    def _leave(self) -> None:  # the worker then stops decoding the rows that are not finished
        for row in self.rows:
            row.left.set()

    def _choice(self, index: int, event: RowEvent, said: Mapping[str, object]) -> dict[str, object]:
        """Make the JSON of a choice: what it says, and the tokens' log-probabilities if it has just ended."""
        scores, reason = None, event.finish_reason
        if event.scored and self.is_chat:
            scores = chat_json(event.scored, self.tokenizer)
        elif event.scored:
            row = self.rows[index]
            scores = completion_json(event.scored, self.tokenizer, () if row.scores_prompt else row.prompt)
        reader = self._reader(index)
        if reason == "stop" and reader is not None and reader.calls:
            reason = "tool_calls"
        ids = {"token_ids": list(event.new_ids)} if self.returns_ids and reason is not None else {}
        return {"index": index, "finish_reason": reason, "logprobs": scores, **ids, **said}

    def _usage(self) -> dict[str, int]:
        given, written = self.prompt_tokens, sum(row.new_tokens for row in self.rows)
        return {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}


def _left() -> ApiError:
    return ApiError("the client has disconnected", 499)


def _line(content: dict[str, object]) -> str:
    return f"data: {json.dumps(content)}\n\n"


class CompletionApi:
    """The HTTP endpoints of the server. They check requests and pass them to a worker thread, which decodes."""

    def __init__(self, worker: BatchWorker, name: str, seed: int = 0, template_options: Json | None = None) -> None:
        """Make the endpoints of the model `name`.

        The generator's settings, `seed` and `template_options` (of the chat template) are for requests that do not set
        their own."""
        self.worker, self.name, self.seed, self.generator = worker, name, seed, worker.generator
        self.template_options: Json = dict(template_options or {})
        self.answered = 0
        self.answers: WeakSet[ApiAnswer] = WeakSet()  # those that are being sent
        self.stopped = False
        self.turn = asyncio.Lock()  # of the requests that are being encoded: a tokenizer encodes one text at a time
        about = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "medusa"}
        self.about = about | {"max_model_len": Backbone(self.generator.model).context}

    def app(self, allowed_hosts: list[str], origins: Sequence[str] = ()) -> Starlette:
        """Make the Starlette application, which stops the worker when the server shuts down.

        Browsers let web pages of the `origins` (CORS; `*`: all pages) read the answers."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            self.worker.stop()

        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", partial(self.texts, kind=CompletionRequest), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.texts, kind=ChatRequest), methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        counted = frozenset(route.path for route in routes)
        middleware = [
            Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts),
            Middleware(CountRequests, metrics=self.worker.metrics, paths=counted),
        ]
        if origins:
            middleware.append(
                Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
            )
        return Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={ApiError: _refuse, 404: _refuse, 405: _refuse, Exception: _apologise},
            lifespan=lifespan,
        )

    def stop(self) -> None:
        """End all answers, because the server stops; called in the HTTP thread."""
        self.stopped = True
        for answer in self.answers:
            answer.fail(ApiError("the server stops; ask again", 503))

    async def health(self, request: HttpRequest) -> Response:
        alive = self.worker.thread is not None and self.worker.thread.is_alive()
        return JSONResponse({"status": "ok" if alive else "the worker has ended"}, 200 if alive else 503)

    async def metrics(self, request: HttpRequest) -> Response:
        return self.worker.metrics.response()

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self.about]})

    async def model(self, request: HttpRequest) -> Response:
        self._require_model(request.path_params["name"])
        return JSONResponse(self.about)

    def _require_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(f"model is {name!r}; this server has {self.name!r}", 404, "model")

    async def texts(self, request: HttpRequest, kind: type[CompletionRequest | ChatRequest]) -> Response:
        """Answer a request for completions or for a chat, whose body is parsed into the class `kind`."""
        content, told = bytearray(), int(request.headers.get("content-length", 0))
        try:
            if told <= MAX_BODY:  # of a larger request nothing is kept, as large buffers fragment the memory
                async for part in request.stream():
                    content += part
                    if len(content) > MAX_BODY:
                        break
        except ClientDisconnect:
            raise _left() from None
        if max(told, len(content)) > MAX_BODY:
            raise ApiError(f"the request is longer than {MAX_BODY // 2**20} MiB", 413)
        asked = await asyncio.to_thread(parse, bytes(content), kind)  # in other threads, so that texts go on meanwhile
        async with self.turn:
            answer = await asyncio.to_thread(self.begin, asked, asyncio.get_running_loop())
        self.answers.add(answer)
        if self.stopped:
            self.stop()
        if not asked.stream:
            return JSONResponse(await answer.whole(request))
        chunks = answer.chunks(bool(asked.stream_options.include_usage))
        return StreamingResponse(chunks, media_type="text/event-stream")

    def _with_format(self, settings: Settings, asked: ResponseFormat | None) -> Settings:
        """Return `settings` with the grammar of a request's `response_format`; without one, they keep their own."""
        if asked is None:
            return settings
        schema = asked.schema_asked
        if schema is None:
            return replace(settings, grammar=None)
        return replace(settings, grammar=self.generator.grammars.compiled(json_schema_source(schema)))

    def begin(self, asked: CompletionRequest | ChatRequest, loop: asyncio.AbstractEventLoop) -> ApiAnswer:
        """Check a request, start its texts in the worker thread, and return the answer; raises an `ApiError`.

        `loop` is that of the HTTP thread."""
        self._require_model(self.name if asked.model is None else asked.model)
        if asked.texts > MAX_CHOICES:  # before anything is encoded
            raise ApiError(f"{asked.texts} texts were asked for; a request has at most {MAX_CHOICES}")
        context = Backbone(self.generator.model).context
        if context is not None and asked.letters > LETTERS * context:  # it is not even encoded
            raise ApiError(f"the prompt has {asked.letters} characters, but the context ends at {context} tokens")
        try:
            settings = self._with_format(asked.settings(self.generator.settings), asked.response_format)
            tokenizer = self.worker.tokenizer
            prompts = asked.prompts(tokenizer, self.template_options)
            for model, name in zip(self.generator.models, ("backbone", "amateur"), strict=False):
                require_fitting(prompts, Backbone(model), name)
            has_echo = isinstance(asked, CompletionRequest) and asked.echo
            echoes = asked.echoes(tokenizer) if isinstance(asked, CompletionRequest) else [""]  # of ids that fit
        except RequestError as error:
            raise ApiError(str(error)) from None
        self.answered += 1
        seed = self.seed + self.answered * MAX_CHOICES if asked.seed is None else asked.seed
        answer = ApiAnswer(
            self.name, isinstance(asked, ChatRequest), asked.stream, sum(map(len, prompts)), tokenizer, loop
        )
        answer.returns_ids = asked.return_token_ids
        for index in range(asked.texts):
            number, copy = divmod(index, asked.n)
            # If the request has a seed, equal prompts get equal texts; otherwise each text gets another seed.
            own = (seed + (index if asked.seed is None else copy)) % 2**63
            put = partial(answer.put, index)
            row = BatchRow(prompts[number], settings, own, put, asked.scores, has_echo, asked.writes)
            row.goes_on = not isinstance(asked, ChatRequest) or asked.continue_final_message
            if isinstance(asked, ChatRequest) and asked.offered and (form := response_template(tokenizer)):
                row.keeps_special = True
                answer.readers.append(ReplyReader(form, str(tokenizer.decode(row.prompt)), tokenizer, asked.offered))
            answer.rows.append(row)
            answer.echoes.append(echoes[number])
        for row in answer.rows:
            self.worker.add(row)
        self.worker.metrics.prompt_tokens.inc(answer.prompt_tokens)
        return answer


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    """Answer an invalid request, or a request for a route that does not exist, with the API's error object."""
    if isinstance(error, HTTPException):
        routes = "there are /v1/models, /v1/completions, /v1/chat/completions, /health, /metrics"
        error = ApiError(f"{request.method} {request.url.path}: {routes}", error.status_code)
    assert isinstance(error, ApiError)
    return JSONResponse(error.to_json(), error.status)


async def _apologise(request: HttpRequest, error: Exception) -> Response:
    """Answer a request at which this server failed with the API's error object; the log gets the traceback."""
    return JSONResponse(ApiError(f"the server failed: {type(error).__name__}", 500).to_json(), 500)


def serve(
    app: Starlette, host: str, port: int, on_start: Callable[[], object], on_end: Callable[[], object] = lambda: None
) -> None:
    """Run the HTTP server until the process is stopped. `on_start` is called when the server begins to listen.

    `on_end` is called if answers still run some seconds after the stop; it should end them."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket] | None = None) -> None:
            try:
                await super().startup(sockets)
            except SystemExit:  # uvicorn has printed the reason
                raise RunError(f"cannot listen at {host}, port {port}; choose another --port or --host") from None
            on_start()

        async def shutdown(self, sockets: list[socket] | None = None) -> None:
            ending = asyncio.get_running_loop().call_later(GRACE, on_end)
            await super().shutdown(sockets)
            ending.cancel()

    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=GRACE + 2)
    Server(config).run()
