"""Requests to a server, and the texts that it must answer."""

from __future__ import annotations

import http.client
import json
from dataclasses import replace
from typing import Any

from decode.settings import Settings
from decode.texts import Decoding, TextGenerator
from medusa.records.pieces import text_of

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
    result = TextGenerator(generator.model, settings, generator.tokenizer)([ids])[0]
    return text_of(result.new_ids, generator.tokenizer, settings.stop)


def begin(
    generator: TextGenerator, ids: list[int], settings: Settings | None = None, seed: int = 0, **how: Any
) -> Decoding:
    return replace(generator, settings=settings or generator.settings, **how).start([ids], [seed])
