"""Serve a backbone with its heads by an OpenAI-compatible API: /v1/completions, /v1/chat/completions, /v1/models.

  medusa serve demo
  medusa serve org/heads --batch-size 4 --port 8080

Waiting requests are decoded in batches of prompts of similar length. A request may set its own length, temperature and
so on; the options below set the defaults."""

from __future__ import annotations

from medusa.commands.network import Network
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, Output, require_extra
from medusa.errors import RequestError
from medusa.options import count, group, option


class ServeOptions(CommandOptions):
    shown = "heads host port name batch-size max-new-tokens temperature tree drafter plain backbone device dtype"
    batch_size: int = count(8, "decode at most N texts at a time")
    contrasting: Contrasting = NO_CONTRAST
    output: Output = group(Output, "output", without=("json",))
    network: Network = group(Network, "network")
    name: str | None = option(
        None,
        "serve the model under this name (default: the backbone's name)",
        metavar="NAME",
        brief="serve the model under this name",
    )
    plain: bool = option(False, "decode without a drafter: one token per step")

    @property
    def may_sample(self) -> bool:
        """True, because each request may set its own temperature."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.models.heads is None and self.models.drafter is None and not self.plain:
            raise RequestError("there are no heads; give --heads H, --drafter ngram, or --plain to decode without them")
        if self.settings.compile and self.batch_size > 1:
            raise RequestError(
                f"--compile takes half a minute or more for each batch size, and --batch-size is {self.batch_size}; "
                "add --batch-size 1, or leave out --compile"
            )


def run(options: ServeOptions) -> None:
    from decode.serve.app import CompletionApi, serve
    from decode.serve.texts import TextGenerator
    from decode.serve.worker import BatchWorker
    from medusa.commands import models

    require_extra("serve", "starlette", "uvicorn")
    network = options.network
    network.require_free()
    opened = models.open_models(options, drafters=[] if options.plain else [options.models.drafter])
    loaded, settings = opened.loaded, opened.settings
    generator = TextGenerator(loaded.model, models.require_tokenizer(loaded, "the API"), opened.source)
    worker = BatchWorker(generator, options.batch_size)
    with options.warming_up():
        worker.start(lambda: generator.warm_up([loaded.bos_token_id or 0], settings))
    api = CompletionApi(worker, options.name or options.models.backbone, settings, options.runtime.seed)
    serve(api, network.host, network.port, network.allowed_hosts, lambda: network.announce("serve"))
