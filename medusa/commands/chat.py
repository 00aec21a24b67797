"""Chat with the backbone, in the terminal or in the browser; drafted tokens that the backbone accepted are green.

  medusa chat demo          # in the terminal: type /help for the commands
  medusa chat demo --web    # in the browser, side by side with plain decoding

The backbone's chat template formats the conversation. Without a template, or with --raw, the backbone continues your
text."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from medusa.commands.network import Network
from medusa.commands.options import CommandOptions, warn
from medusa.commands.prompting import PromptForm, prompt_form, recorded_form
from medusa.commands.speed import speed_line, warn_if_useless
from medusa.errors import RequestError, require_extra
from medusa.options import group, option
from medusa.records.record import Record

if TYPE_CHECKING:
    from decode.serve.chat import Conversation, Turn
    from decode.texts import Result, TextGenerator
    from medusa.records.pieces import TextPiece

HELP = """\
/plain   turn the drafter off or on
/reset   start a new conversation
/help    print this list
/quit    leave (also Ctrl-D)
Ctrl-C stops an answer."""
COMMANDS = ("/plain", "/reset", "/help", "/quit")


class Page(Network):
    web: bool = option(
        False,
        "chat in the browser instead of the terminal (needs pip install nicegui)",
        brief="chat in the browser instead of the terminal",
    )

    def check_given(self, names: Sequence[str]) -> None:
        if names and not self.web:
            raise RequestError(f"--{names[0]} belongs to the page in the browser; add --web, or leave it out")


class ChatOptions(CommandOptions):
    shown = "heads web system plain max-new-tokens temperature top-p tree drafter backbone device dtype"
    batch_size: int = 1
    system: str | None = option(
        None, "start the conversation with this system message", metavar="TEXT", brief="start with this system message"
    )
    plain: bool = option(False, "start without a drafter: one token a step")
    page: Page = group(Page, "the page in the browser", port=8765)

    @property
    def may_sample(self) -> bool:
        """Whether options such as --top-p have an effect; on the page, the reader can change the temperature."""
        return self.page.web or super().may_sample

    def __post_init__(self) -> None:
        super().__post_init__()
        web = self.page.web
        if self.models.heads is None and self.models.drafter is None and (web or not self.plain):
            raise RequestError("there are no heads; give --heads H or --drafter ngram" + ", or --plain" * (not web))
        for name, given in (("json", self.output.json), ("plain", self.plain)):
            if web and given:
                raise RequestError(f"--{name} belongs to the chat in the terminal; leave out --web or --{name}")


def run(options: ChatOptions) -> None:
    from decode.serve.chat import ChatWorker, Conversation
    from medusa.commands import models

    page = options.page
    if page.web:
        require_extra("web", "nicegui")
        page.require_free()
    drafts = options.models.heads is not None or options.models.drafter is not None
    opened = models.open_models(options, drafters=[options.models.drafter] if drafts else [])
    tokenizer = models.require_tokenizer(opened.loaded, "a chat")
    given = options.models.backbone, options.models.heads, options.template_option
    form = prompt_form(options.raw, tokenizer, *given, default_raw=False)
    asked: dict[str, Any] = {"raw": form.raw, "template_options": form.options}
    conversation = Conversation(tokenizer, options.system, stop=opened.settings.stop or (), **asked)
    _say_form(options, form)
    generator, begin = opened.generator, [opened.loaded.bos_token_id or 0]
    if page.web:
        from decode.drafters import title_of
        from decode.serve.chat_page import PageConfig, serve

        worker = ChatWorker(generator)
        with options.warming_up():
            worker.thread.submit(generator.warm_up, begin).result()
        backbone, drafter = options.models.backbone, title_of(opened.names[0])
        config = PageConfig(worker, backbone, drafter, options.system, options.runtime.seed, **asked)
        serve(config, page.host, page.port, page.allowed_hosts, lambda: page.announce("chat"))
        return
    with options.warming_up():
        generator.warm_up(begin)
    terminal = _Terminal(options, generator, conversation)
    try:
        terminal.run()
    finally:  # a second Ctrl-C ends the program, and keeps the finished answers
        options.output.write(models.results_json(options, opened, terminal.results))


def _say_form(options: ChatOptions, form: PromptForm) -> None:
    """Print whether the chat template is used, and whether the heads were trained on the other form of prompts."""
    output, heads = options.output, options.models.heads
    if line := form.line([Record("the chat", text="a message", is_prompt=True)]):
        output.note(line)
    if heads is not None and not form.raw and recorded_form(heads).raw:
        output.note(
            "note: these heads were trained on answers to plain-text prompts, so fewer of their guesses may be "
            "accepted in a chat"
        )


class _Terminal:
    """A chat in the terminal. Answers go to standard output, everything else to standard error."""

    def __init__(self, options: ChatOptions, generator: TextGenerator, conversation: Conversation) -> None:
        self.options, self.generator, self.conversation = options, generator, conversation
        self.plain = options.plain or generator.source is None
        self.notes = options.output.progress
        self.console = Console(highlight=False, markup=False, emoji=False)
        self.results: list[Result] = []

    def run(self) -> None:
        """Answer every line that the user types, until /quit or the end of the input."""
        say = self.notes.print
        if not self.conversation.has_template:
            reason = "is used without a chat template" if self.options.raw else "has no chat template"
            say(f"{self.options.models.backbone} {reason}, so it continues your text.", highlight=False)
            say("Press Enter on an empty line to continue the last answer.", highlight=False)
        if self.generator.source is not None:
            say("[green]green[/]: drafted tokens that the backbone accepted; each other token took one forward")
        say("Type /help for the commands.", highlight=False)
        for line in _lines():
            typed = line.strip()
            if typed == "/quit":
                break
            word, *rest = typed.split() or [""]
            if word.startswith("/") and word[1:].isalpha():  # not a path such as /etc/hosts
                self._obey(word, bool(rest))
                continue
            try:
                turn = self.conversation.ask(line, *self.generator.models)
            except RequestError as error:
                if typed or not self.conversation.has_template:
                    warn(str(error))
                continue
            self._answer(turn)

    def _obey(self, command: str, has_rest: bool) -> None:
        if command not in COMMANDS:
            warn(f"there is no command {command}; choose {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]}")
        elif has_rest:
            warn(f"{command} takes nothing after it; type {command} alone")
        elif command == "/reset":
            self.conversation.turns.clear()
            self.notes.print("new conversation", style="dim")
        elif command == "/plain" and self.generator.source is None:
            self.notes.print("there is no drafter to turn on; start medusa chat with --heads or --drafter", style="dim")
        elif command == "/plain":
            self.plain = not self.plain
            self.notes.print("drafter off: one token a step" if self.plain else "drafter on", style="dim")
        else:
            self.notes.print(HELP, highlight=False)

    def _answer(self, turn: Turn) -> None:
        from decode.texts import end_of_context, prompt_seeds, tau
        from medusa.records.pieces import TextStream

        generator, settings = self.generator, self.generator.settings
        write = replace(generator, source=None) if self.plain else generator
        decoding = write.start([turn.prompt], prompt_seeds(self.options.runtime.seed, [len(self.results)]))
        before = () if self.conversation.has_template else turn.prompt
        stream, text = TextStream(self.conversation.tokenizer, settings.stop, before=before), ""

        def stopping() -> None:
            if not text:  # the model still reads the prompt, which can take long
                self.notes.print("stopping ...", style="dim")

        with _interruptible(stopping) as interrupts:
            for step in decoding:
                text += self._print(stream.step(step.ids[0]))
                if interrupts:
                    decoding.stop()
                    break
        text += self._print(stream.end())
        print(flush=True)
        result = decoding.results[0]
        self.results.append(result)
        self.conversation.keep(turn, result, text)
        tokens, per_step = len(result.new_ids), tau([result])
        line = speed_line(tokens, result.seconds, per_step)
        if interrupts:
            line += " (stopped)"
        self.notes.print(line, style="dim", highlight=False)
        if (ended := end_of_context([result], settings.max_new_tokens)) is not None:
            self.notes.print(ended, style="dim", highlight=False)
        source = generator.source
        if source is not None and source.heads is not None and not self.plain:
            warn_if_useless(tokens, per_step, source.num_nodes)

    def _print(self, pieces: list[TextPiece]) -> str:
        """Write pieces of text to standard output, and return their text. In a terminal, drafted tokens are green."""
        from medusa.records.pieces import joined

        text = joined(pieces)
        if self.console.is_terminal:
            # An escape character in the text would start a terminal command, so a visible symbol replaces it.
            shown = [(piece.text.replace("\x1b", "\u241b"), "green" if piece.drafted else "") for piece in pieces]
            self.console.print(Text.assemble(*shown), end="", soft_wrap=True)
        else:
            print(text, end="", flush=True)
        return text


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, until the end of the input."""
    if not sys.stdin.isatty():
        if isinstance(sys.stdin, TextIOWrapper):  # a line that is not UTF-8 is refused alone
            sys.stdin.reconfigure(errors="surrogateescape")
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import_module("readline")  # adds history and editing to `input`
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\ntype /quit or Ctrl-D to leave", file=sys.stderr)


@contextlib.contextmanager
def _interruptible(notice: Callable[[], None]) -> Iterator[list[int]]:
    """Yield a list to which the first Ctrl-C adds an item, to stop an answer. A second raises `KeyboardInterrupt`.

    The first one also calls `notice`."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        with contextlib.suppress(RuntimeError):  # the signal has come while the same stream was printed to
            notice()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
