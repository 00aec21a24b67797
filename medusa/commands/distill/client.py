"""A client for OpenAI-compatible servers (vLLM, SGLang, llama.cpp, ...). It uses only the standard library."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

from medusa.errors import RequestError
from medusa.files import Json
from medusa.records.messages import in_api, messages_of, text_of

TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""
EOS = ("tool_calls", "function_call", "eos", "eos_token", "end_turn")
"""Finish reasons of servers for texts that the model itself has ended; `stop` can also mean a stop string."""
BROKEN = ("error", "abort", "cancelled", "content_filter")
"""Finish reasons of servers for texts that lack their rest."""
ATTEMPTS = 6  # of each request
LONGEST_WAIT, TIMEOUT = 60.0, 600.0  # seconds between two attempts, and seconds to wait for a reply


class ServerError(Exception):
    """Error for a request that the server rejected, or whose attempts all failed."""


class NoServerError(ServerError):
    """Error for a request to which nothing replied."""


@dataclass(frozen=True)
class Answer:
    """A text that the server generated."""

    text: str
    finish_reason: str
    """Why the text ended: `eos`, `length`, `stop` or the server's word. Without a `stop_reason`, `stop` can also mean
    EOS."""
    message: Json = field(default_factory=dict)
    """In a chat, the whole answer: a message with the text, the reasoning and the tool calls."""
    tokens: int | None = None
    """The number of its tokens, if the server counts them."""


class Server:
    """Client for one model on one server. It sends the API key OPENAI_API_KEY, but never writes the key to a file."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        sleep: Callable[[float], object] = time.sleep,
        options: tuple[str, str] = ("--server", "--model"),
    ) -> None:
        """Use `model` on the server at `url`, with or without /v1; by default the only model that the server has.

        `options` are those that give the URL and the model, for errors. RequestError if `url` is no HTTP URL, or no
        server is there; without `model`, also if the server has several models, or does not list them."""
        self.options = options
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RequestError(f"{options[0]} is {url!r}; give a URL such as http://localhost:8000/v1")
        self.url = url.rstrip("/") if parts.path.rstrip("/").endswith("/v1") else url.rstrip("/") + "/v1"
        self.sleep = sleep
        served = self._served(model)
        if model is None and len(served) != 1:
            raise RequestError(f"{self.url} serves {', '.join(served) or 'no model'}; choose one with {options[1]}")
        self.model = model or next(iter(served))  # even if it is not listed: some servers take any name
        self.context = served.get(self.model)
        """The context of the model in tokens, if the server tells it, as vLLM and `medusa serve` do."""

    def _served(self, model: str | None) -> dict[str, int | None]:
        """Return the contexts of the server's models by name; raise RequestError as `__init__` does."""
        try:
            listed = self._ask("/models", None, attempts=1)["data"]
            lengths = {str(entry["id"]): entry.get("max_model_len") for entry in listed}
            return {name: length if isinstance(length, int) else None for name, length in lengths.items()}
        except (ServerError, KeyError, TypeError, AttributeError) as error:
            if model and not isinstance(error, NoServerError):  # it does not list its models
                return {}
            way = "" if model else f", or name its model with {self.options[1]}"
            raise RequestError(f"no OpenAI-compatible server at {self.url} ({error}); start one{way}") from None

    def complete(self, prompt: list[int] | str, options: Json) -> Answer:
        """Let the model continue a text or token ids; `options` are request parameters. Failures raise ServerError."""
        reply = self.reply("/completions", {"prompt": prompt} | options)
        return _answer(reply, reply["choices"][0].get("text"), {}, options)

    def chat(self, messages: list[Json], tools: list[Json] | None, options: Json) -> Answer:
        """Let the model answer a conversation; `options` are request parameters. Failures raise ServerError."""
        body = {"messages": in_api(messages)} | ({"tools": tools} if tools else {}) | options
        reply = self.reply("/chat/completions", body)
        choice = reply["choices"][0]
        said = choice.get("message")
        if not isinstance(said, dict):
            raise ServerError(f"the reply has no message: {json.dumps(choice)[:200]}")
        try:
            message = messages_of([{"role": "assistant"} | said], "the reply")[0]
        except RequestError as error:
            raise ServerError(str(error)) from None
        if said.get("content") is None and len(message) == 2:
            raise ServerError(f"the reply has no text: {json.dumps(choice)[:200]}")
        return _answer(reply, text_of(message), message, options)

    def reply(self, path: str, body: Json, attempts: int = ATTEMPTS) -> Json:
        """Send a request about the model to a path after /v1, and return the reply, whose `choices` are not empty.

        Raise ServerError if the server rejects it, or does not answer in so many attempts."""
        reply = self._ask(path, {"model": self.model} | body, attempts)
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
            raise ServerError(f"the reply has no choice: {json.dumps(reply)[:200]}")
        return reply

    def _ask(self, path: str, body: Json | None, attempts: int) -> Json:
        """Send `body` by POST (`None`: send a GET request), in up to `attempts` attempts; return the JSON reply."""
        headers = {"Content-Type": "application/json"}
        # Without line breaks, which no header can hold: the error would quote the key.
        if key := "".join(os.environ.get("OPENAI_API_KEY", "").split()):
            if not key.isascii():
                raise RequestError("OPENAI_API_KEY holds characters that no key has, such as “ or …; copy it again")
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(1, attempts + 1):
            wait, failure = 2.0 ** (attempt - 1), ServerError
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                    content = reply.read()
                found = json.loads(content)
                if b"\\ud" in content.lower():  # a half of a character, which no tokenizer takes, is no text
                    json.dumps(found, ensure_ascii=False).encode()
                return found
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {_excerpt(error)}"
                if error.code not in TRANSIENT:
                    raise ServerError(reason) from None
                asked = error.headers.get("Retry-After", "")
                wait = float(asked) if asked.isdecimal() else wait
            except (OSError, http.client.HTTPException) as error:  # no connection, a broken connection, or a timeout
                reason, failure = str(error) or type(error).__name__, NoServerError
            except ValueError as error:
                reason = f"the reply is not JSON ({error})"
            if attempt < attempts:
                self.sleep(min(LONGEST_WAIT, wait))
        raise failure(reason + (f" ({attempts} attempts)" if attempts > 1 else ""))


def _excerpt(error: urllib.error.HTTPError) -> str:
    """Return the first 200 characters of an error reply, in one line."""
    try:
        text = error.read().decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException):
        text = error.reason
    return " ".join(str(text).split())[:200]


def _answer(reply: Json, text: object, message: Json, options: Json) -> Answer:
    choice, usage = reply["choices"][0], reply.get("usage")
    if not isinstance(text, str):
        raise ServerError(f"the reply has no text: {json.dumps(choice)[:200]}")
    reason = str(choice.get("finish_reason"))
    if reason in BROKEN:
        raise ServerError(f"the server broke the text off, with finish_reason {reason!r}")
    # The `stop_reason` of vLLM is the stop string, or null if the model ended the text. Other servers have none.
    may_be_string = isinstance(choice["stop_reason"], str) if "stop_reason" in choice else bool(options.get("stop"))
    is_eos = reason in EOS or (reason == "stop" and not may_be_string)
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Answer(text, "eos" if is_eos else reason, message, tokens if isinstance(tokens, int) else None)
