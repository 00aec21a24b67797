"""An OpenAI-compatible server of a backbone with its heads: /v1/completions, /v1/chat/completions, /v1/models.

  medusa serve --backbone demo --heads demo
  medusa serve --backbone org/model --heads org/heads --batch-size 4 --port 8080

Requests that wait are decoded together, those of similar length first. What a request does not say (how long its text
may be, the temperature) is as the options below say.
"""

from __future__ import annotations

import argparse
import sys

from medusa.commands import common
from medusa.errors import RequestError

PORT = 8000
HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser, required=False)
    parser.add_argument("--name", metavar="NAME", help="what the model is called (default: as --backbone)")
    common.add_generation(parser, batch_size=8)
    common.add_drafter(parser)
    parser.add_argument("--plain", action="store_true", help="decode without a drafter: one token a step")
    common.add_listening(parser, PORT)
    common.add_machine(parser, json=False)


def run(args: argparse.Namespace) -> None:
    settings = common.settings_of(args)
    if args.heads is None and args.drafter is None and not args.plain:
        raise RequestError("no heads: give --heads H, --drafter ngram, or --plain to decode without any")
    if settings.compile and args.batch_size > 1:
        raise RequestError(
            f"--compile takes half a minute and more for each size of a batch, and there are {args.batch_size}; "
            "add --batch-size 1, or leave it out"
        )
    plan = None if args.plain else common.plan_of(args, args.drafter)
    common.require_extra("serve", "starlette", "uvicorn")
    host, port = args.host or HOST, args.port or PORT
    common.require_listening(host, port)
    common.check_models(args, *([] if plan is None else [plan]))

    from decode.serve.app import CompletionApi, serve
    from decode.serve.texts import TextGenerator
    from decode.serve.worker import BatchWorker

    loaded, tokenizer = common.open_for_text(args, plan, "the API is of texts")
    source = None if plan is None else common.open_source(args, loaded, plan, settings)
    generator = TextGenerator(loaded.model, tokenizer, source)
    worker = BatchWorker(generator, args.batch_size)
    with common.warming_up(args):
        worker.start(lambda: generator.warm_up([loaded.bos_token_id or 0], settings))
    api = CompletionApi(worker, args.name or args.backbone, settings, args.seed)

    def say_where() -> None:  # the one thing that must be seen, also with --quiet
        print(f"serve: {common.url_of(host, port)} (Ctrl-C ends it)", file=sys.stderr, flush=True)

    serve(api, host, port, common.allowed_hosts(host), say_where)
