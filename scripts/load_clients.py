"""Clients of `medusa serve` that join and leave, send nonsense and stop reading, for scripts/load_test.py.

Each client checks every text, and every beginning of a text, against the text that was written alone."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

COPIES = 8  # texts in a request whose client stops reading, so that the answer outgrows the buffers of its connection
PATIENCE = 300.0  # seconds to wait for an answer; a longer wait is an error
PAUSE = 1.0, 8.0  # shortest and longest time in seconds for which a client stops reading


class Wanted(NamedTuple):
    """A request, and the text that it must get."""

    body: dict[str, Any]
    text: str


class Nonsense(NamedTuple):
    """A request that must be refused."""

    name: str
    content: bytes  # what the client sends: a whole HTTP request
    status: int


def http_request(body: bytes, path: str = "/v1/completions", method: str = "POST", length: int | None = None) -> bytes:
    """Return the bytes of an HTTP request; `length`: the number of bytes that its header promises."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body) if length is None else length}"
    return head.encode() + b"\r\n\r\n" + body


def refused(**body: object) -> bytes:
    return http_request(json.dumps({"prompt": "The dog"} | body).encode())


NONSENSE = [
    Nonsense("not HTTP", b"\x16\x03\x01 hello\r\n\r\n", 400),
    Nonsense("not JSON", http_request(b'{"prompt": '), 400),
    Nonsense("no object", http_request(b"[1, 2]"), 400),
    Nonsense("nested deeply", http_request(b"[" * 100_000), 400),
    Nonsense("half a character", http_request(b'{"prompt": "\\ud83d"}'), 400),
    Nonsense("too large", http_request(b" " * (2**24 + 1)), 413),
    Nonsense("unknown parameter", refused(temprature=1), 400),
    Nonsense("wrong type", refused(max_tokens="many"), 400),
    Nonsense("out of range", refused(top_p=2), 400),
    Nonsense("too many texts", refused(n=129), 400),
    Nonsense("unknown id", refused(prompt=[10**6]), 400),
    Nonsense("too long", refused(prompt="word " * 2000), 400),
    Nonsense("unknown model", refused(model="other"), 404),
    Nonsense("unknown path", http_request(b"{}", path="/v2/nothing"), 404),
    Nonsense("wrong method", http_request(b"", method="GET"), 405),
]


@dataclass
class Found:
    """What all clients found together."""

    requests: Counter[str] = field(default_factory=Counter)  # by what the client did
    refused: Counter[str] = field(default_factory=Counter)  # nonsense, by its name and status
    errors: Counter[str] = field(default_factory=Counter)  # what should not happen, by name
    compared: Counter[str] = field(default_factory=Counter)  # whole `texts`, and `beginnings` for clients that left
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, counter: Counter[str], name: str, number: int = 1) -> None:
        """Add to one of the counters, which all clients share."""
        with self.lock:
            counter[name] += number


class Client:
    """A client that sends one request after the other, and checks what it receives."""

    def __init__(self, address: tuple[str, int], pool: Sequence[Wanted], found: Found, seed: int) -> None:
        """Make a client of the server at `address` (host and port), which asks for texts of `pool`."""
        self.address, self.pool, self.found, self.rng = address, pool, found, random.Random(seed)

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Send requests until `goes_on()` is false. An error ends a request, and is counted by its name."""
        acts = [self.ask, self.stream, self.leave, self.nonsense, self.half_a_request, self.stop_reading]
        while goes_on():
            (act,) = self.rng.choices(acts, weights=[8, 8, 6, 6, 2, 1])
            name = act.__name__.replace("_", " ")
            self.found.add(self.found.requests, name)
            try:
                act()
            except Exception as error:
                self.found.add(self.found.errors, f"{name}: {type(error).__name__}: {error}"[:200])
            time.sleep(self.rng.random() ** 3)

    def ask(self) -> None:
        """Ask for a whole text."""
        wanted = self.rng.choice(self.pool)
        status, answer = ask(self.address, wanted.body)
        assert status == 200, f"status {status}"
        self.compare([choice["text"] for choice in answer["choices"]], wanted)

    def stream(self) -> None:
        """Ask for a text in pieces."""
        wanted = self.rng.choice(self.pool)
        with closing(self.connected(wanted.body | {"stream": True})) as connection:
            self.compare(list(joined(events(connection.getresponse())).values()), wanted)

    def leave(self) -> None:
        """Ask for a text, and leave after some pieces."""
        wanted = self.rng.choice(self.pool)
        with closing(self.connected(wanted.body | {"stream": True})) as connection:
            pieces = events(connection.getresponse())
            text = joined(piece for piece, _ in zip(pieces, range(self.rng.randrange(6)), strict=False)).get(0, "")
        assert wanted.text.startswith(text), "a beginning differs"
        self.found.add(self.found.compared, "beginnings")

    def stop_reading(self) -> None:
        """Ask for several equal texts, read nothing for some seconds, and then leave or read everything."""
        wanted = self.rng.choice(self.pool)
        with closing(self.connected(wanted.body | {"stream": True, "n": COPIES}, buffer=4096)) as connection:
            time.sleep(self.rng.uniform(*PAUSE))
            if self.rng.random() < 0.5:
                texts = joined(events(connection.getresponse()))
                first = texts.pop(0)  # samples: the copies have other seeds
                self.compare([first, *texts.values()] if not wanted.body.get("temperature") else [first], wanted)

    def nonsense(self) -> None:
        """Send a request that must be refused."""
        sent = self.rng.choice(NONSENSE)
        with socket.create_connection(self.address, PATIENCE) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):  # the server may answer before it has read everything
                connection.sendall(sent.content)
            line = connection.makefile("rb").readline().decode()
        status = int(line.split(" ")[1]) if line.startswith("HTTP/1.1 ") else 0
        assert status == sent.status, f"{sent.name}: {line.strip() or 'no answer'}"
        self.found.add(self.found.refused, f"{sent.name}: {status}")

    def half_a_request(self) -> None:
        """Send half of a request, and leave."""
        with socket.create_connection(self.address, PATIENCE) as connection:
            connection.sendall(http_request(b'{"prompt": "The', length=1000))
            time.sleep(self.rng.random())

    def connected(self, body: dict[str, Any], buffer: int | None = None) -> http.client.HTTPConnection:
        """Send a request for a text. `buffer`: the size of the connection's receive buffer in bytes."""
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        if buffer is not None:
            connection.sock = socket.socket()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)  # before it connects
            connection.sock.settimeout(PATIENCE)
            connection.sock.connect(self.address)
        connection.request("POST", "/v1/completions", json.dumps(body))
        return connection

    def compare(self, texts: Sequence[str], wanted: Wanted) -> None:
        """Raise AssertionError unless all `texts` are the wanted one."""
        assert texts, "no text"
        assert all(text == wanted.text for text in texts), "a text differs from the one written alone"
        self.found.add(self.found.compared, "texts", len(texts))


def ask(address: tuple[str, int], body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, Any]:
    """Send a request for a text; returns the status and the JSON of the answer."""
    with closing(http.client.HTTPConnection(*address, timeout=PATIENCE)) as connection:
        connection.request("POST", path, json.dumps(body))
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the choices in the events of a stream; raise AssertionError if it does not end with [DONE]."""
    assert reply.status == 200, f"status {reply.status}"
    for line in reply:
        if line == b"data: [DONE]\n":
            return
        if line.strip():
            yield from json.loads(line.removeprefix(b"data: "))["choices"]
    raise AssertionError("the stream ended early")


def joined(choices: Iterator[dict[str, Any]]) -> dict[int, str]:
    """Join the pieces of each text, by the index of the text."""
    texts: dict[int, str] = {}
    for choice in choices:
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts
