"""Serve a backbone with its heads by an OpenAI-compatible API: /v1/completions, /v1/chat/completions, /v1/models.

  medusa serve demo
  medusa serve org/heads --batch-size 4 --port 8080

Waiting requests join the running batch in the order of their arrival. A request may set its own length, temperature and
so on; the options below set the defaults."""

from __future__ import annotations

import argparse
import re

from medusa.commands.network import Network
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, Output
from medusa.commands.structured import Structured
from medusa.errors import RequestError, require_extra
from medusa.options import count, group, option

ORIGIN = re.compile(r"https?://[^/\s]+")


class ServeOptions(CommandOptions):
    shown = "heads host port name batch-size max-new-tokens temperature tree drafter plain backbone device dtype"
    raw: bool | None = None  # /v1/completions takes plain text, /v1/chat/completions uses the template
    batch_size: int = count(8, "decode at most N texts at a time")
    contrasting: Contrasting = NO_CONTRAST
    structured: Structured = group(Structured, "structured output")
    output: Output = group(Output, "output", without=("json",))
    network: Network = group(Network, "network")
    name: str | None = option(
        None,
        "serve the model under this name (default: the backbone's name)",
        metavar="NAME",
        brief="serve the model under this name",
    )
    cors: tuple[str, ...] = option(
        (), "let web pages of this origin read the answers (CORS); repeatable, and * is every page", metavar="ORIGIN"
    )
    plain: bool = option(False, "decode without a drafter: one token per step")
    adapt: bool = option(
        True,
        "draft less, or nothing, in steps in which this is faster, as the server measures (--no-adapt: always draft)",
        action=argparse.BooleanOptionalAction,
    )

    @property
    def uses_typical(self) -> bool:
        return True  # a request may ask for it

    @property
    def may_sample(self) -> bool:
        """True, because each request may set its own temperature."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.models.heads is None and self.models.drafter is None and not self.plain:
            raise RequestError("there are no heads; give --heads H, --drafter ngram, or --plain to decode without them")
        if self.plain and not self.adapt:
            raise RequestError("--no-adapt always drafts, and --plain never does; leave one of them out")
        self.structured.require_fitting(self.settings)
        for origin in self.cors:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise RequestError(f"--cors is {origin!r}; give an origin such as http://localhost:3000, or *")


def run(options: ServeOptions) -> None:
    from decode.serve.app import CompletionApi, serve
    from decode.serve.worker import BatchWorker
    from medusa.commands import models

    require_extra("serve", "starlette", "uvicorn", "prometheus_client")
    network = options.network
    network.require_free()
    opened = models.open_models(options, drafters=[] if options.plain else [options.models.drafter])
    models.require_tokenizer(opened.loaded, "the API")
    opened.structure(options.structured, "the API")
    worker = BatchWorker(opened.generator, options.batch_size, options.adapt)
    with options.warming_up():
        worker.start(lambda: worker.warm_up([opened.loaded.bos_token_id or 0]))
    name = options.name or options.models.backbone
    api = CompletionApi(worker, name, options.runtime.seed, opened.form.options)
    app = api.app(network.allowed_hosts, options.cors)
    serve(app, network.host, network.port, lambda: network.announce("serve"), api.stop)
