"""A conversation with the backbone, in the terminal or in the browser; what the heads guessed is coloured.

  medusa chat --backbone demo --heads demo          # in the terminal: /help says what else can be typed
  medusa chat --backbone demo --heads demo --web    # in the browser, plain decoding beside it

The backbone's chat template is used. One without a template is no assistant: it goes on with the text as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from medusa.commands import common
from medusa.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from decode.results import Result
    from decode.serve.conversation import Conversation, Turn
    from decode.serve.texts import TextGenerator, TextPiece
    from decode.settings import Settings

PORT = 8765
HELP = """\
/plain   switch the drafter off, or on again
/reset   forget everything, begin anew
/help    this
/quit    leave (also Ctrl-D)
Ctrl-C stops an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser, required=False)
    parser.add_argument("--system", metavar="TEXT", help="what the assistant is told beforehand")
    parser.add_argument("--web", action="store_true", help="a page for the browser (pip install 'medusa-heads[web]')")
    common.add_generation(parser, batch_size=None)
    common.add_drafter(parser)
    common.add_amateur(parser)
    parser.add_argument("--plain", action="store_true", help="begin without a drafter: one token a step")
    common.add_listening(parser, PORT)
    common.add_machine(parser)


def run(args: argparse.Namespace) -> None:
    settings = common.settings_of(args)
    common.contrast_of(args)
    if args.heads is None and args.drafter is None and (args.web or not args.plain):
        raise RequestError("no heads: give --heads H or --drafter ngram" + ("" if args.web else ", or --plain"))
    plan = None if args.heads is None and args.drafter is None else common.plan_of(args, args.drafter)
    _check_place(args)
    common.check_models(args, *([] if plan is None else [plan]))

    from decode.serve.conversation import Conversation
    from decode.serve.texts import TextGenerator

    loaded, tokenizer = common.open_for_text(args, plan, "a chat is text")
    Conversation(tokenizer, args.system)  # refused now, if at all
    settings = common.with_amateur(args, loaded, settings)
    source = None if plan is None else common.open_source(args, loaded, plan, settings)
    generator = TextGenerator(loaded.model, tokenizer, source)
    begin = [loaded.bos_token_id or 0]
    if args.web:
        _serve_page(args, generator, settings, begin)
    else:
        with common.warming_up(args):
            generator.warm_up(begin, settings)
        _Terminal(args, generator, settings).run()


def _check_place(args: argparse.Namespace) -> None:
    """Raises:
    RequestError: options of the page without it, or those of the terminal with it; a page that cannot be had."""
    if not args.web:
        for name in ("host", "port"):
            if getattr(args, name) is not None:
                raise RequestError(f"--{name} belongs to the page in the browser; add --web, or leave it out")
        common.check_output(args.json)
        return
    for name in ("json", "plain"):
        if getattr(args, name):
            raise RequestError(f"--{name} belongs to the chat in the terminal; leave out --web or --{name}")
    common.require_extra("web", "nicegui")
    args.host, args.port = args.host or "127.0.0.1", args.port or PORT
    common.require_listening(args.host, args.port)


def _serve_page(args: argparse.Namespace, generator: TextGenerator, settings: Settings, begin: list[int]) -> None:
    from decode.serve.chat_page import PageConfig, serve
    from decode.serve.race import ChatWorker

    worker = ChatWorker(generator)
    with common.warming_up(args):
        worker.call(generator.warm_up, begin, settings)
    drafter = args.drafter or "heads"
    config = PageConfig(worker, settings, args.backbone, drafter, args.system, args.seed)

    def say_where() -> None:  # the one thing that must be seen, also with --quiet
        print(f"chat: {common.url_of(args.host, args.port)} (Ctrl-C ends it)", file=sys.stderr, flush=True)

    serve(config, args.host, args.port, common.allowed_hosts(args.host), say_where)


class _Terminal:
    """Reads lines, writes answers: those to standard output, all else to standard error."""

    def __init__(self, args: argparse.Namespace, generator: TextGenerator, settings: Settings) -> None:
        from decode.serve.conversation import Conversation

        self.args, self.generator, self.settings = args, generator, settings
        self.conversation: Conversation = Conversation(generator.tokenizer, args.system)
        self.plain = args.plain or generator.source is None
        self.aside: Console = common.console(args)
        self.printer = _Printer()
        self.results: list[Result] = []

    def run(self) -> None:
        self._say_what_this_is()
        for line in _lines():
            word = line.strip()
            if word == "/quit":
                break
            if word.startswith("/"):
                self._obey(word)
                continue
            try:
                turn = self.conversation.ask(line, *self.generator.models(self.settings))
            except RequestError as error:
                if word or not self.conversation.has_template:
                    common.warn(str(error))
                continue
            self._answer(turn)
        about = self.settings.to_dict() | {"backbone": self.args.backbone, "heads": self.args.heads}
        about |= common.drafter_json(self.args.drafter, self.generator.source)
        written = [result.to_json(self.generator.tokenizer, self.settings.stop) for result in self.results]
        common.write_results(self.args, {"settings": about, "results": written})

    def _say_what_this_is(self) -> None:
        say = self.aside.print
        if not self.conversation.has_template:
            say(
                f"{self.args.backbone} has no chat template, so it is no assistant: it goes on with your text as it "
                "is. An empty line lets it go on.",
                highlight=False,
            )
        if self.generator.source is not None:
            say("[green]green[/]: guessed ahead and accepted; the rest: the backbone's own, one forward each")
        say("/help says what else can be typed.", highlight=False)

    def _obey(self, word: str) -> None:
        if word == "/reset":
            self.conversation.reset()
            self.aside.print("forgotten", style="dim")
        elif word == "/plain" and self.generator.source is None:
            self.aside.print("there is no drafter to switch on: start with --heads or --drafter", style="dim")
        elif word == "/plain":
            self.plain = not self.plain
            self.aside.print("one token a step" if self.plain else "guessing ahead again", style="dim")
        elif word == "/help":
            self.aside.print(HELP, highlight=False)
        else:
            common.warn(f"no command {word.split()[0]}; there are /plain, /reset, /help and /quit")

    def _answer(self, turn: Turn) -> None:
        from decode.results import prompt_seeds, tau
        from decode.serve.texts import TextStream

        tokenizer, templated = self.generator.tokenizer, self.conversation.has_template
        seed = prompt_seeds(self.args.seed, [len(self.results)])[0]
        run = self.generator.run(turn.prompt, self.settings, seed, self.plain)
        stream = TextStream(tokenizer, self.settings.stop, before=() if templated else turn.prompt)
        text = ""
        with _interruptible() as interrupts:
            for step in run:
                text += self.printer(stream.step(step.ids[0]))
                if interrupts:
                    run.stop()
                    break
        text += self.printer(stream.end())
        print(flush=True)
        result = run.results[0]
        self.results.append(result)
        self.conversation.keep(turn, result, text)
        per_step = tau([result])
        told = common.how_it_went(len(result.new_ids), result.seconds, per_step)
        self.aside.print(told + (" (stopped)" if interrupts else ""), style="dim", highlight=False)
        if self.generator.source is not None and self.generator.source.heads is not None and not self.plain:
            common.warn_if_useless(len(result.new_ids), per_step)


class _Printer:
    """Writes pieces of text to standard output, the drafted ones in green where that is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False, markup=False, emoji=False)

    def __call__(self, pieces: list[TextPiece]) -> str:
        from rich.text import Text

        from decode.serve.texts import joined

        text = joined(pieces)
        if self.console.is_terminal:
            # A model may write an escape character, which a terminal would obey.
            shown = [(piece.text.replace("\x1b", "\u241b"), "green" if piece.drafted else "") for piece in pieces]
            self.console.print(Text.assemble(*shown), end="", soft_wrap=True)
        else:
            sys.stdout.write(text)
        sys.stdout.flush()
        return text


def _lines() -> Iterator[str]:
    """What is typed, line by line, until there is no more."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives `input` history and editing, where Python has it
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n/quit or Ctrl-D leaves", file=sys.stderr)


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Ctrl-C is put on a list, to be looked at between two steps; a second one ends the program."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
