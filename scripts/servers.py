"""Servers for the scripts that check them: `medusa serve` in a process of its own, and a model without our code."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa.errors import RunError

PATIENCE = 300.0  # seconds to wait for an answer; a longer wait is an error


class Served(NamedTuple):
    """A server in a process of its own."""

    address: tuple[str, int]  # host and port
    pid: int

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"


def demo_server(folder: Path, batch_size: int) -> list[str]:
    """The arguments of `medusa serve` for the backbone in `folder` and the demo heads."""
    words = f"demo --name demo --batch-size {batch_size} --device cpu --quiet --backbone".split()
    return [*words, str(folder / "backbone")]


@contextmanager
def served(arguments: Sequence[str], log: IO[str] | None = None) -> Iterator[Served]:
    """Run `medusa serve` with these arguments in a process of its own, at a free port.

    The server's standard error goes to the file `log`, by default to the script's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "medusa", "serve", *arguments, "--port", str(port)]
    process = subprocess.Popen(command, stderr=log)
    try:
        server = Served(("127.0.0.1", port), process.pid)
        while True:
            if process.poll() is not None:
                raise RunError(f"the server ended with status {process.returncode}")
            try:
                urllib.request.urlopen(f"{server.url}/health").close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def ask(address: tuple[str, int], body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, Any]:
    """Send a request for a text; returns the status and the JSON of the answer."""
    with closing(http.client.HTTPConnection(*address, timeout=PATIENCE)) as connection:
        connection.request("POST", path, json.dumps(body))
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


class Stock:
    """A model as transformers runs it, without code of this project."""

    def __init__(self, folder: Path) -> None:
        """Load the model and the tokenizer in `folder`, on the CPU and in float32, as the server does."""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def written(self, prompt: str, tokens: int) -> str:
        """Return the greedy text of `generate` after a prompt, without special tokens."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        ids = self.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
