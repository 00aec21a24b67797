"""Requests to a server, the texts that it must answer, and rows that its worker decodes in the thread of a test."""

from __future__ import annotations

import http.client
import json
from dataclasses import replace
from typing import Any

from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext
from decode.settings import Settings
from decode.texts import Decoding, TextGenerator
from medusa.heads.independent import MedusaHeads
from medusa.loading import load_backbone
from medusa.records.pieces import text_of

SHORT = Settings(max_new_tokens=8)
PROMPTS = ["Once upon a time", "The dog", "One day, a girl named Mia went to the park with her red ball"]


def demo_generator(settings: Settings = SHORT, template: str | None = None) -> TextGenerator:
    """The embedded backbone, whose tokenizer has no chat template unless one is given, with its heads."""
    loaded = load_backbone("demo")
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = template
    source = drafter_factory(None, DrafterContext(loaded.model, MedusaHeads.from_pretrained("demo"), "eight"))
    return TextGenerator(loaded.model, settings, loaded.tokenizer, source)


def ask(url: str, path: str, body: Any = None, host: str | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, content, {"Host": host} if host else {})
    reply = connection.getresponse()
    text = reply.read().decode()
    return reply.status, json.loads(text) if text.startswith("{") else text


def choices_of(stream: str) -> list[Any]:
    """The choices in the chunks of a streamed answer."""
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    return [choice for chunk in chunks for choice in chunk["choices"]]


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


def admit(worker: Any, *rows: Any) -> None:
    """Let rows join the batch as the worker's thread does, as far as it has room."""
    for row in rows:
        worker.add(row)
    worker.receive()
    worker.admit()


def decode(worker: Any, *rows: Any) -> list[list[Any]]:
    """Decode rows as the worker's thread does; returns the events of each."""
    events: list[list[Any]] = [[] for _ in rows]
    for row, own in zip(rows, events, strict=True):
        tell = row.tell
        row.tell = lambda event, own=own, tell=tell: (own.append(event), tell(event))
        worker.add(row)
    while (worker.waiting or worker.running or not worker.arrivals.empty()) and worker.receive():
        worker.admit()
        if worker.running:
            worker.step()
    return events


def said(events: list[Any]) -> str:
    """The text of a row's events."""
    return "".join(event.text for event in events)
