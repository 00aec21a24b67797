"""What `medusa serve` answers: OpenAI's completions and chats, in batches, decoded with a drafter.

Starlette takes requests, one thread decodes. Whoever waits longest is put into the next batch, with those that are
alike: sampled in the same way, from prompts of similar length. A batch is decoded to its end, and rows that have ended,
or whose reader has gone, leave it. What the API has and this server has not is refused by name, not passed over.

The API: https://platform.openai.com/docs/api-reference, as far as open servers share it.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from decode.request import prepare, require_fitting
from decode.sequences import Request
from decode.serve.conversation import Writer
from decode.serve.text_stream import TextStream
from decode.settings import Settings
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.records import Record, prompt_ids

LONGEST_BODY = 2**24  # bytes
MOST_CHOICES = 128  # of one request
LEAST_TEMPERATURE, LEAST_PENALTY = 1e-3, 0.01  # below, scores overflow: on a GPU that ends every later batch, too
NEUTRAL: dict[str, Any] = {  # what the API has and this server has not: these values ask for nothing
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "response_format": {"type": "text"},
}
IGNORED = {"user", "metadata", "store", "parallel_tool_calls", "service_tier"}  # said for others than the model
OPTIONS: dict[str, tuple[str, tuple[type, ...]]] = {  # ours by its name in the API, with what it may be
    "max_tokens": ("max_new_tokens", (int,)),
    "max_completion_tokens": ("max_new_tokens", (int,)),
    "temperature": ("temperature", (int, float)),
    "top_p": ("top_p", (int, float)),
    "top_k": ("top_k", (int,)),
    "min_p": ("min_p", (int, float)),
    "repetition_penalty": ("repetition_penalty", (int, float)),
    "ignore_eos": ("ignore_eos", (bool,)),
}
OWN = {"model", "prompt", "messages", "stop", "seed", "n", "stream", "stream_options"}


class ApiError(Exception):
    """What goes back as an error object of the API."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    def to_dict(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


class Event(NamedTuple):
    """Something that happened to a row."""

    text: str = ""
    finish_reason: str | None = None
    error: Exception | None = None


class Gone(StoppingCriteria):
    """Ends a row whose reader has left."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.left.is_set(), device=input_ids.device)


class SaysStop(StoppingCriteria):
    """Ends a row when what it has written holds a stop string; as in OpenAI's API, the prompt does not count."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], prompt_length: int) -> None:
        self.tokenizer, self.stop, self.prompt_length = tokenizer, stop, prompt_length
        # A token may end inside the letter that completes a string, and a letter may take several tokens.
        self.window = 4 * max(map(len, stop)) + 4

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        said = [
            str(self.tokenizer.decode(ids[-self.window :], skip_special_tokens=True))
            for ids in input_ids[:, self.prompt_length :].tolist()
        ]
        found = [any(string in text for string in self.stop) for text in said]
        return torch.tensor(found, device=input_ids.device)


@dataclass
class Row:
    """One text that was asked for, from its prompt to what tells its reader."""

    prompt: list[int]
    settings: Settings
    seed: int
    tell: Callable[[Event], None]
    """Called by the thread that decodes."""
    gone: Gone = field(default_factory=Gone)
    new_tokens: int = 0

    @property
    def alike(self) -> Settings:
        """Rows for which this is equal can share a batch; how long they are and where they stop is each one's own."""
        return replace(self.settings, max_new_tokens=1, stop=(), ignore_eos=False)

    def request(self, writer: Writer) -> Request:
        """Raises:
        RequestError: the model cannot do it."""
        kwargs = replace(self.settings, stop=()).generate_kwargs(writer.tokenizer)
        ends = StoppingCriteriaList([self.gone])
        if self.settings.stop:
            ends.append(SaysStop(writer.tokenizer, self.settings.stop, len(self.prompt)))
        return prepare(writer.model, [self.prompt], [self.seed], stopping_criteria=ends, **kwargs)[0]


class Engine:
    """One thread that decodes what waits, batch after batch."""

    def __init__(self, writer: Writer, batch_size: int) -> None:
        alone = Backbone(writer.model).rope_boundary is not None  # longrope: a long row would turn short ones otherwise
        self.writer, self.batch_size = writer, 1 if alone else batch_size
        self.arrivals: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.batches: list[int] = []
        """The sizes of all batches so far."""
        self.thread: threading.Thread | None = None

    def start(self, warm_up: Callable[[], None]) -> None:
        """Begin to decode, after `warm_up`, which is waited for.

        Raises:
            Exception: what `warm_up` raises."""
        ready: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                warm_up()
            except Exception as error:  # whatever it is, it is raised where it was asked for
                ready.put(error)
                return
            ready.put(None)
            self._run()

        self.thread = threading.Thread(target=run, name="engine", daemon=True)
        self.thread.start()
        if (error := ready.get()) is not None:
            raise error

    def add(self, row: Row) -> None:
        self.arrivals.put(row)

    def stop(self) -> None:
        """End after the step at hand."""
        for row in (*self.waiting, *self.running):
            row.gone.left.set()
        self.arrivals.put(None)
        if self.thread is not None:
            self.thread.join(timeout=10)

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            self.running = batch
            if batch:
                self.batches.append(len(batch))
                self._decode(batch)

    def _next_batch(self) -> list[Row] | None:
        """The row that has waited longest, and of those like it the ones whose prompts are nearest in length."""
        arrived = [] if self.waiting else [self.arrivals.get()]
        while not self.arrivals.empty():
            arrived.append(self.arrivals.get())
        if None in arrived:
            return None
        self.waiting = [row for row in (*self.waiting, *filter(None, arrived)) if not row.gone.left.is_set()]
        if not self.waiting:
            return []
        first = self.waiting[0]
        alike = [row for row in self.waiting if row.alike == first.alike]
        alike.sort(key=lambda row: abs(len(row.prompt) - len(first.prompt)))  # stable: itself, then who came first
        batch = alike[: self.batch_size]
        self.waiting = [row for row in self.waiting if not any(row is taken for taken in batch)]
        return batch

    def _decode(self, asked: list[Row]) -> None:
        rows, requests = [], []
        for row in asked:
            try:
                requests.append(row.request(self.writer))
                rows.append(row)
            except Exception as error:  # of this row alone
                row.tell(Event(error=error))
        if not rows:
            return
        streams = [TextStream(self.writer.tokenizer, row.settings.stop) for row in rows]
        try:
            run = self.writer.run_all(requests, rows[0].settings)
            reasons = run.session.sequences.finish_reason
            told: set[int] = set()
            for step in run:
                for index, ids in step.ids.items():
                    rows[index].new_tokens += len(ids)
                    text = "".join(piece.text for piece in streams[index].step(ids))
                    if reasons[index] is not None:
                        told.add(index)
                        text += "".join(piece.text for piece in streams[index].end())
                        rows[index].tell(Event(text, _reason(reasons[index])))
                    elif text:
                        rows[index].tell(Event(text))
            for index in set(range(len(rows))) - told:  # no room for a single token
                rows[index].tell(Event("", "length"))
        except Exception as error:  # a batch that fails must not end the server; its readers are told
            for row in rows:
                row.tell(Event(error=error))


def _reason(ours: str | None) -> str:
    return "length" if ours == "length" else "stop"


class Asked(NamedTuple):
    """A request of the API, read and checked."""

    prompts: list[list[int]]
    settings: Settings
    seed: int
    is_seeded: bool
    copies: int
    stream: bool
    usage: bool
    """Whether a stream ends with the usage."""
    chat: bool


class Service:
    """The API over an engine."""

    def __init__(self, engine: Engine, name: str, settings: Settings, seed: int = 0) -> None:
        """`settings`: what holds where a request says nothing."""
        self.engine, self.name, self.settings, self.seed = engine, name, settings, seed
        self.writer = engine.writer
        self.backbone = Backbone(self.writer.model)
        self.started, self.answered = int(time.time()), 0

    def app(self, allowed_hosts: Sequence[str]) -> Starlette:
        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            self.engine.stop()

        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chats, methods=["POST"]),
                Route("/health", self.health),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts))],
            exception_handlers={ApiError: _refuse, 404: _no_such_place, 405: _no_such_place},
            lifespan=lifespan,
        )

    async def health(self, request: HttpRequest) -> Response:
        alive = self.engine.thread is not None and self.engine.thread.is_alive()
        return JSONResponse({"status": "ok" if alive else "the engine has ended"}, 200 if alive else 503)

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        self._require_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        about = {"id": self.name, "object": "model", "created": self.started, "owned_by": "medusa"}
        return about | {"max_model_len": self.backbone.context}

    def _require_model(self, name: object) -> None:
        if name != self.name:
            raise ApiError(f"model is {name!r}; this server has {self.name!r}", 404, "model")

    async def completions(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat=False)

    async def chats(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, request: HttpRequest, chat: bool) -> Response:
        asked = self.read(await _body(request), chat)
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

        def tell(index: int) -> Callable[[Event], None]:
            def put(event: Event) -> None:
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

            return put

        rows = []
        for index in range(len(asked.prompts) * asked.copies):
            prompt, copy = asked.prompts[index // asked.copies], index % asked.copies
            # A seed that was asked for gives a prompt the same texts wherever it stands; otherwise all differ.
            own = copy if asked.is_seeded else index
            rows.append(Row(prompt, asked.settings, (asked.seed + own) % 2**63, tell(index)))
        for row in rows:
            self.engine.add(row)
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.name,
        }
        if asked.stream:
            head["object"] = "chat.completion.chunk" if chat else "text_completion"
            return StreamingResponse(self._chunks(asked, rows, events, head), media_type="text/event-stream")
        texts, reasons = [""] * len(rows), [""] * len(rows)
        gone = asyncio.ensure_future(_left(request))
        try:
            async for index, event in _until_all_ended(rows, events, gone):
                texts[index] += event.text
                reasons[index] = event.finish_reason or ""
        finally:
            gone.cancel()
            for row in rows:
                row.gone.left.set()
        choices = [
            {"index": i, "finish_reason": reason, "logprobs": None}
            | ({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
            for i, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        head["object"] = "chat.completion" if chat else "text_completion"
        return JSONResponse(head | {"choices": choices, "usage": _usage(asked, rows)})

    async def _chunks(
        self, asked: Asked, rows: list[Row], events: asyncio.Queue[tuple[int, Event]], head: dict[str, Any]
    ) -> AsyncIterator[str]:
        """The answer as server-sent events; Starlette ends this where the reader has left."""

        def line(choices: list[dict[str, Any]], **beside: Any) -> str:
            return f"data: {json.dumps(head | {'choices': choices} | beside)}\n\n"

        def choice(index: int, event: Event, first: bool = False) -> dict[str, Any]:
            if not asked.chat:
                said: dict[str, Any] = {"text": event.text}
            elif first:
                said = {"delta": {"role": "assistant", "content": ""}}
            else:
                said = {"delta": {"content": event.text} if event.text else {}}
            return {"index": index, "finish_reason": event.finish_reason, "logprobs": None} | said

        try:
            if asked.chat:
                for index in range(len(rows)):
                    yield line([choice(index, Event(), first=True)])
            async for index, event in _until_all_ended(rows, events):
                yield line([choice(index, event)])
            if asked.usage:
                yield line([], usage=_usage(asked, rows))
            yield "data: [DONE]\n\n"
        except ApiError as error:  # the status has been sent long ago
            yield f"data: {json.dumps(error.to_dict())}\n\n"
        finally:
            for row in rows:
                row.gone.left.set()

    def read(self, body: dict[str, Any], chat: bool) -> Asked:
        """Check a request's body.

        Raises:
            ApiError: it asks for what is not to be had, named in one line."""
        known = OWN | set(OPTIONS) | set(NEUTRAL) | IGNORED
        for name, value in body.items():
            if name not in known or name == ("prompt" if chat else "messages"):
                raise ApiError(f"{name} is no parameter here; there are {', '.join(sorted(known))}", param=name)
            if name in NEUTRAL and not _asks_for_nothing(value, NEUTRAL[name]):
                raise ApiError(f"{name} is not supported by this server; leave it out", param=name)
        self._require_model(body.get("model", self.name))
        copies = _whole(body, "n", 1, 1, MOST_CHOICES)
        try:
            settings = self._settings(body)
            prompts = [self._conversation(body)] if chat else self._prompts(body)
            require_fitting(prompts, self.backbone)
        except RequestError as error:
            raise ApiError(str(error)) from None
        if len(prompts) * copies > MOST_CHOICES:
            raise ApiError(f"{len(prompts) * copies} texts were asked for; a request has at most {MOST_CHOICES}")
        self.answered += 1
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise ApiError(f"stream_options is {options!r}; it must be an object", param="stream_options")
        return Asked(
            prompts,
            settings,
            _whole(body, "seed", self.seed + self.answered * MOST_CHOICES, 0, 2**63 - 1),
            body.get("seed") is not None,
            copies,
            _flag(body, "stream"),
            _flag(options, "include_usage"),
            chat,
        )

    def _settings(self, body: dict[str, Any]) -> Settings:
        changes: dict[str, Any] = {}
        for name, (ours, kinds) in OPTIONS.items():
            value = body.get(name)
            if value is None:
                continue
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                allowed = {bool: "true or false", int: "a whole number"}.get(kinds[0], "a number")
                allowed = "a number" if float in kinds else allowed
                raise ApiError(f"{name} is {value!r}; it must be {allowed}", param=name)
            changes[ours] = value
        if body.get("stop") is not None:
            stop = [body["stop"]] if isinstance(body["stop"], str) else body["stop"]
            if not isinstance(stop, list) or not all(isinstance(string, str) for string in stop):
                raise ApiError(f"stop is {stop!r}; it must be a string or a list of strings", param="stop")
            changes["stop"] = tuple(stop)
        if 0 < changes.get("temperature", 0) < LEAST_TEMPERATURE:
            told = f"temperature is {changes['temperature']}; it must be 0 or at least {LEAST_TEMPERATURE}"
            raise ApiError(told, param="temperature")
        if changes.get("repetition_penalty", 1) < LEAST_PENALTY:
            told = f"repetition_penalty is {changes['repetition_penalty']}; it must be at least {LEAST_PENALTY}"
            raise ApiError(told, param="repetition_penalty")
        settings = replace(self.settings, **changes)
        _ = settings.acceptor  # a rule that the server was started with may not fit this temperature
        return settings

    def _prompts(self, body: dict[str, Any]) -> list[list[int]]:
        prompt = body.get("prompt")
        several = isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt)
        out = []
        for part in prompt if several and isinstance(prompt, list) else [prompt]:
            if isinstance(part, str):
                out.append(prompt_ids(Record("prompt", text=part, is_prompt=True), self.writer.tokenizer))
            elif isinstance(part, list) and part and all(type(token) is int for token in part):
                out.append(part)
            else:
                raise ApiError("prompt must be a text or a list of ids, or a list of these, not empty", param="prompt")
        return out

    def _conversation(self, body: dict[str, Any]) -> list[int]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError('messages must be a list of {"role", "content"}, and not empty', param="messages")
        plain = [_message(message) for message in messages]
        if self.writer.tokenizer.chat_template is None:
            raise ApiError(f"{self.name} has no chat template; /v1/completions goes on with a text", param="messages")
        if plain[-1]["role"] == "assistant":
            raise ApiError("the last message is the assistant's; end with the user's", param="messages")
        return prompt_ids(Record("messages", messages=plain), self.writer.tokenizer)


def _message(message: object) -> dict[str, str]:
    """Raises:
    ApiError: it is none, or holds anything but text."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ApiError('a message must be {"role": a word, "content": a text}', param="messages")
    return {"role": role, "content": content}


async def _body(request: HttpRequest) -> dict[str, Any]:
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > LONGEST_BODY:
            raise ApiError(f"the request is longer than {LONGEST_BODY // 2**20} MiB", 413)
    try:
        body = json.loads(content)
    except ValueError as error:
        raise ApiError(f"the request is no JSON ({error})") from None
    if not isinstance(body, dict):
        raise ApiError("the request must be a JSON object")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError(f"the request holds half a character ({error.object[error.start : error.end]!a})") from None
    return body


async def _left(request: HttpRequest) -> None:
    """Returns when the reader has gone; the whole request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _until_all_ended(
    rows: list[Row], events: asyncio.Queue[tuple[int, Event]], gone: asyncio.Future[None] | None = None
) -> AsyncIterator[tuple[int, Event]]:
    """What happens to rows until all have ended, or their reader has `gone`.

    Raises:
        ApiError: what went wrong."""
    running = len(rows)
    while running:
        following = asyncio.ensure_future(events.get())
        await asyncio.wait({following} | ({gone} if gone else set()), return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            following.cancel()
            raise ApiError("the reader has left", 499)
        index, event = following.result()
        if isinstance(event.error, RequestError):
            raise ApiError(str(event.error))
        if event.error is not None:
            raise ApiError(f"decoding failed: {type(event.error).__name__}: {event.error}", 500)
        running -= event.finish_reason is not None
        yield index, event


def _asks_for_nothing(value: object, neutral: object) -> bool:
    """A `logprobs` of 0 asks for something, though 0 equals False."""
    return value is None or (value == neutral and isinstance(value, bool) is isinstance(neutral, bool))


def _whole(body: dict[str, Any], name: str, otherwise: int, least: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return otherwise
    if type(value) is not int or not least <= value <= most:
        raise ApiError(f"{name} is {value!r}; it must be a whole number from {least} to {most}", param=name)
    return value


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False):
        raise ApiError(f"{name} is {value!r}; it must be true or false", param=name)
    return bool(value)


def _usage(asked: Asked, rows: list[Row]) -> dict[str, int]:
    given, written = sum(map(len, asked.prompts)), sum(row.new_tokens for row in rows)
    return {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.to_dict(), error.status)


async def _no_such_place(request: HttpRequest, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    told = ApiError(f"{request.method} {request.url.path}: there are /v1/models, /v1/completions, /v1/chat/completions")
    return JSONResponse(told.to_dict(), status)


def serve(service: Service, host: str, port: int, allowed_hosts: Sequence[str], on_start: Callable[[], None]) -> None:
    """Answer requests until the program is ended."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_start()

    Server(
        uvicorn.Config(
            service.app(allowed_hosts), host=host, port=port, log_level="warning", timeout_graceful_shutdown=3
        )
    ).run()
