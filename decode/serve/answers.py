"""The answer to one request: its rows at the worker, and their texts as one JSON object or as a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request as HttpRequest

from decode.serve.schema import ApiError
from decode.serve.worker import BatchRow, RowEvent
from medusa.errors import RequestError


async def reader_left(request: HttpRequest) -> None:
    """Return when the reader has left; the body of the request must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ApiAnswer:
    """The texts of one request."""

    def __init__(self, model: str, is_chat: bool, number: str, created: int, prompt_tokens: int) -> None:
        """`number`: unique to the answer; `created`: seconds since 1970; `prompt_tokens`: of all prompts."""
        self.is_chat, self.prompt_tokens = is_chat, prompt_tokens
        self.head = {"id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{number}", "created": created, "model": model}
        self.rows: list[BatchRow] = []
        """One for each choice, in order."""
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[int, RowEvent]] = asyncio.Queue()

    def listener(self, index: int) -> Callable[[RowEvent], None]:
        """A function that receives the events of a row from the worker's thread."""

        def put(event: RowEvent) -> None:
            self.loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

        return put

    async def whole(self, left: asyncio.Future[None]) -> dict[str, object]:
        """The complete answer; `left` is done when the reader has left.

        Raises:
            ApiError: a row failed, or the reader has left."""
        texts, reasons = [""] * len(self.rows), [""] * len(self.rows)
        try:
            async for index, event in self._until_all_ended(left):
                texts[index] += event.text
                reasons[index] = event.finish_reason or ""
        finally:
            left.cancel()
            self._leave()
        choices = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            said = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
            choices.append({"index": index, "finish_reason": reason, "logprobs": None} | said)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self.head | {"object": kind, "choices": choices, "usage": self._usage()}

    async def chunks(self, usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events, with the usage at the end if asked for.

        Starlette ends this iteration when the reader has left."""
        try:
            if self.is_chat:
                for index in range(len(self.rows)):
                    yield self._line([self._choice(index, RowEvent(), first=True)])
            async for index, event in self._until_all_ended():
                yield self._line([self._choice(index, event)])
            if usage:
                yield self._line([], usage=self._usage())
            yield "data: [DONE]\n\n"
        except ApiError as error:  # the status was sent with the first chunk
            yield f"data: {json.dumps(error.to_json())}\n\n"
        finally:
            self._leave()

    def _line(self, choices: list[dict[str, object]], **more: object) -> str:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return f"data: {json.dumps(self.head | {'object': kind, 'choices': choices} | more)}\n\n"

    def _choice(self, index: int, event: RowEvent, first: bool = False) -> dict[str, object]:
        if not self.is_chat:
            said: dict[str, object] = {"text": event.text}
        elif first:
            said = {"delta": {"role": "assistant", "content": ""}}
        else:
            said = {"delta": {"content": event.text} if event.text else {}}
        return {"index": index, "finish_reason": event.finish_reason, "logprobs": None} | said

    async def _until_all_ended(self, left: asyncio.Future[None] | None = None) -> AsyncIterator[tuple[int, RowEvent]]:
        """The events of all rows until all have ended, or until the reader has `left`.

        Raises:
            ApiError: a row failed, or the reader has left."""
        running = len(self.rows)
        while running:
            following = asyncio.ensure_future(self.events.get())
            await asyncio.wait({following} | ({left} if left else set()), return_when=asyncio.FIRST_COMPLETED)
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

    def _leave(self) -> None:
        """End the rows that are still running."""
        for row in self.rows:
            row.reader.left.set()

    def _usage(self) -> dict[str, int]:
        given, written = self.prompt_tokens, sum(row.new_tokens for row in self.rows)
        return {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}
