"""A fake OpenAI-compatible server: it gives scripted answers and records its requests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], str] | None
"""Status, headers and body; `None`: the connection is closed without a word."""


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.models = ["the-model"]
        self.context: int | None = None
        self.trouble: Callable[[int, dict[str, Any]], Reply | bool] = lambda number, body: False
        """Given the number of the request and its body: what to reply instead of an answer, or False."""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *args: Any) -> None:
        """Ignore clients that disconnect."""


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        told = {} if self.server.context is None else {"max_model_len": self.server.context}
        self._reply(200, {}, json.dumps({"data": [{"id": name} | told for name in self.server.models]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, body, dict(self.headers)))
            number = len(self.server.asked)
        reply = self.server.trouble(number, body)
        if reply is None:
            self.connection.close()
        elif reply is not False:
            self._reply(*reply)  # type: ignore[misc]
        else:
            self._reply(200, {}, json.dumps({"choices": [answer(self.path, body)]}))

    def _reply(self, status: int, headers: dict[str, str], text: str) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Answer with the question backwards, in at most `max_tokens` letters."""
    chat = path.endswith("/chat/completions")
    if chat:
        said = body["messages"][-1]["content"][::-1]
    elif isinstance(body["prompt"], str):
        said = body["prompt"][::-1]
    else:
        said = "".join(chr(ord("a") + token % 26) for token in reversed(body["prompt"]))
        said *= 3 if len(said) == 1 else 1  # most answers of one token would end `medusa distill`
    reason = "length" if len(said) > body["max_tokens"] else "stop"
    text = said[: body["max_tokens"]]
    held = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return held | {"index": 0, "finish_reason": reason}


@contextlib.contextmanager
def serving() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
