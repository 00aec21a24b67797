"""Texts from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...), with nothing but the standard library."""

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
from typing import Any

from medusa.errors import RequestError

BUSY = (408, 409, 425, 429, 500, 502, 503, 504)  # may be gone at the next attempt
BESIDE = ("tool_calls", "reasoning_content")
LONGEST_WAIT = 60.0  # seconds between two attempts


class ServerError(Exception):
    """A text that could not be had: the server refuses it, or did not answer however often it was asked."""


@dataclass(frozen=True)
class Answer:
    """What a server wrote, and why it stopped: `stop` (the text ended) or `length`."""

    text: str
    finish_reason: str
    stopped_by: str | None = None
    """The stop string that ended it, where the server says."""
    beside: dict[str, Any] = field(default_factory=dict)
    """What else its message holds: calls of tools, thoughts kept apart."""


class Server:
    """One model on one server. The key of the environment's OPENAI_API_KEY is sent along, and written nowhere."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        attempts: int = 6,
        timeout: float = 600.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`url` is the server's, with or without /v1; `model` is one that it serves: the only one, unless named.

        Raises:
            RequestError: no such server, or several models to choose from."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RequestError(f"--server is {url!r}; give a URL such as http://localhost:8000/v1")
        self.url = url.rstrip("/") if parts.path.rstrip("/").endswith("/v1") else url.rstrip("/") + "/v1"
        self.attempts, self.timeout, self.sleep = attempts, timeout, sleep
        self.model = model or self._only_model()

    def _only_model(self) -> str:
        try:
            served = [str(entry["id"]) for entry in self._ask("/models", None, attempts=1)["data"]]
        except (ServerError, KeyError, TypeError) as error:
            raise RequestError(
                f"no OpenAI-compatible server at {self.url} ({error}); start it, or give --model"
            ) from None
        if len(served) != 1:
            raise RequestError(f"{self.url} serves {', '.join(served) or 'no model'}; choose one with --model")
        return served[0]

    def complete(self, prompt: list[int] | str, options: dict[str, Any]) -> Answer:
        """Go on with a text, given as it is or as ids.

        Raises:
            ServerError: it cannot be had."""
        choice = self._choice("/completions", {"prompt": prompt} | options)
        return _answer(choice, choice.get("text"), {})

    def chat(self, messages: list[dict[str, Any]], tools: list[Any] | None, options: dict[str, Any]) -> Answer:
        """Answer a conversation.

        Raises:
            ServerError: it cannot be had."""
        body = {"messages": messages} | ({"tools": tools} if tools else {}) | options
        choice = self._choice("/chat/completions", body)
        message = choice.get("message") or {}
        beside = {key: message[key] for key in BESIDE if message.get(key)}
        return _answer(choice, message.get("content") or ("" if beside else None), beside)

    def _choice(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = self._ask(path, {"model": self.model} | body, self.attempts)
        try:
            choice = reply["choices"][0]
        except (KeyError, IndexError, TypeError):
            choice = None
        if not isinstance(choice, dict):
            raise ServerError(f"the reply holds no choice: {json.dumps(reply)[:200]}")
        return choice

    def _ask(self, path: str, body: dict[str, Any] | None, attempts: int) -> Any:
        """JSON for JSON; what may be gone at the next attempt is tried again, after a wait that doubles."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(1, attempts + 1):
            asked_to_wait = None
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {_excerpt(error)}"
                if error.code not in BUSY:
                    raise ServerError(reason) from None
                asked_to_wait = error.headers.get("Retry-After")
            except (OSError, http.client.HTTPException) as error:  # no connection, a broken one, a time limit
                reason = str(error) or type(error).__name__
            except ValueError as error:
                reason = f"the reply is no JSON ({error})"
            if attempt < attempts:
                self.sleep(_seconds(asked_to_wait, attempt))
        raise ServerError(reason + (f" ({attempts} attempts)" if attempts > 1 else ""))


def _seconds(asked: str | None, attempt: int) -> float:
    wait = float(asked) if asked is not None and asked.isdecimal() else 2.0 ** (attempt - 1)
    return min(LONGEST_WAIT, wait)


def _excerpt(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read().decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException):
        text = error.reason
    return " ".join(str(text).split())[:200]


def _answer(choice: dict[str, Any], text: Any, beside: dict[str, Any]) -> Answer:
    if not isinstance(text, str):
        raise ServerError(f"the reply holds no text: {json.dumps(choice)[:200]}")
    stopped_by = choice.get("stop_reason")  # vLLM: the string, or null where the model itself ended
    return Answer(text, str(choice.get("finish_reason")), stopped_by if isinstance(stopped_by, str) else None, beside)
