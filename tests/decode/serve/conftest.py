"""The embedded backbone behind a server that listens at a free port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext, DrafterFactory
from decode.texts import TextGenerator
from tests.decode.serve.server_tools import demo_generator
from tests.helpers import FORMS, random_heads, shared_model
from tests.train.templates import CHATML

if TYPE_CHECKING:
    from decode.serve.app import CompletionApi


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    return demo_generator(template=CHATML)


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


@pytest.fixture(scope="module")
def factory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DrafterFactory]:
    """The drafters of `shared_model` by name: kinds of heads, `dynamic` trees, and drafters without heads."""
    model, folder = shared_model(), tmp_path_factory.mktemp("small")
    shared_model(seed=1).save_pretrained(folder)

    def made(kind: str) -> DrafterFactory:
        if kind == "model":
            return drafter_factory(f"model:model={folder},widths=2x2x1", DrafterContext(model))
        if kind in ("ngram", "lookahead"):
            return drafter_factory(kind, DrafterContext(model))
        settings = FORMS.get(kind, {"prefix_layers": 1} if kind == "prefix" else {})
        tree = "dynamic:12" if kind in ("dynamic", "mix, shared") else "topk:3,2,2"
        context = DrafterContext(model, random_heads(model, **settings), tree)
        mixes = {"mix": "mix:heads+ngram", "mix, shared": "mix:nodes=12,least=0.4,heads+ngram:n=5,tokens=8,matches=2"}
        return drafter_factory(mixes.get(kind), context)

    return made
