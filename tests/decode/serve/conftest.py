"""The embedded backbone behind a server that listens at a free port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext
from decode.texts import TextGenerator
from medusa.heads.independent import MedusaHeads
from medusa.loading import load_backbone
from tests.decode.serve.server_tools import SHORT
from tests.train.templates import CHATML

if TYPE_CHECKING:
    from decode.serve.app import CompletionApi


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    """With a chat template, as the embedded tokenizer has none."""
    loaded = load_backbone("demo")
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = CHATML
    source = drafter_factory(None, DrafterContext(loaded.model, MedusaHeads.from_pretrained("demo"), "eight"))
    return TextGenerator(loaded.model, SHORT, loaded.tokenizer, source)


@pytest.fixture(scope="module")
def api(generator: TextGenerator) -> CompletionApi:
    for needed in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(needed, reason="needs the extra serve")
    from decode.serve.app import CompletionApi
    from decode.serve.worker import BatchWorker

    return CompletionApi(BatchWorker(generator, 4), "demo")


@pytest.fixture(scope="module")
def url(api: CompletionApi) -> Iterator[str]:
    """The server in a thread."""
    import uvicorn

    api.worker.start(lambda: None)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        app = api.app(["127.0.0.1", "localhost"])
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)
    assert not api.worker.thread.is_alive()  # type: ignore[union-attr]
