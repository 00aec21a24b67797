"""Requests to a server, and the texts that it must answer."""

from __future__ import annotations

import http.client
import json
from typing import Any

from decode.bench.methods import plain_method
from decode.results import text_of
from decode.serve.texts import TextGenerator
from decode.settings import Settings

SHORT = Settings(max_new_tokens=12)
PROMPTS = ["Once upon a time", "The dog", "One day, a girl named Mia went to the park with her red ball"]


def ask(url: str, path: str, body: Any = None, host: str | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, content, {"Host": host} if host else {})
    reply = connection.getresponse()
    text = reply.read().decode()
    return reply.status, json.loads(text) if text.startswith("{") else text


def expected(generator: TextGenerator, text: str, settings: Settings = SHORT) -> str:
    return written(generator, generator.tokenizer(text)["input_ids"], settings)


def written(generator: TextGenerator, ids: list[int], settings: Settings = SHORT) -> str:
    """By plain decoding."""
    result = plain_method(generator.model, settings, generator.tokenizer)([ids])[0]
    return text_of(result.new_ids, generator.tokenizer, settings.stop)
