"""The server that is audited, and what it answers: greedy texts, and the first tokens of sampled texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from medusa.commands.distill.client import EOS, Server, ServerError
from medusa.errors import RequestError, RunError
from medusa.files import Json
from medusa.records.record import text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = list[int] | str
Outcome = int | str  # a token's id, or its text on a server that returns no ids
Item = TypeVar("Item")
Answered = TypeVar("Answered")
NEUTRAL: Json = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Parameters that turn off what a server may do by default; one that rejects them is asked without them."""
WITH_IDS: tuple[Json, ...] = (
    {"return_token_ids": True},  # vLLM, `medusa serve`
    {"logprobs": 1, "return_tokens_as_token_ids": True},  # earlier versions of vLLM
    {"logprobs": 1},  # llama.cpp lists ids with the log-probabilities
)
TOGETHER = 32  # sampled texts of one request


class Text(NamedTuple):
    """A text that a server wrote."""

    text: str
    ids: list[int] | None  # `None` if the server does not tell them
    ended: bool  # whether the server says that the model ended it, and not the limit of tokens
    prompt_tokens: int | None  # as the server counts them
    tokens: int | None = None  # of the text, by their ids or as the server counts them

    @property
    def first(self) -> Outcome:
        """The first token; empty text for one that the server leaves out, such as EOS."""
        if self.ids is None:
            return text_class(self.text)
        return self.ids[0] if self.ids else ""


class Setting(NamedTuple):
    """Parameters of sampling."""

    temperature: float
    top_p: float

    def __str__(self) -> str:
        return f"T {self.temperature:g}" + ("" if self.top_p == 1 else f", top-p {self.top_p:g}")


@dataclass
class Asked:
    """A server, with what it turned out to accept."""

    server: Server
    tokenizer: PreTrainedTokenizerBase | None
    concurrency: int
    takes_ids: bool = True
    with_ids: Json = field(default_factory=dict)
    """The parameters with which the server returns token ids; empty if it does not."""
    neutral: Json = field(default_factory=dict)
    """Those of `NEUTRAL` that it accepts."""
    choices: int = 1
    """The sampled texts of one request."""
    limits: list[str] = field(default_factory=list)
    """What the server cannot do, and what this means, in sentences."""

    def probe(self, prompt: Prompt) -> None:
        """Find out what the server accepts, by requests for one token; RequestError if it completes no text at all."""
        if isinstance(prompt, list):
            self.takes_ids = self._accepts(prompt) is None
            if not self.takes_ids and self.tokenizer is None:
                raise RequestError(f"{self.server.url} takes no token ids; give prompts as text")
        if not (isinstance(prompt, list) and self.takes_ids) and (reason := self._accepts(self.in_form(prompt))):
            raise RequestError(f"{self.server.url} completes no text ({reason}); give a server with /v1/completions")
        if not self.takes_ids:
            self.limits.append("it takes no token ids: prompts are sent as text")
        for parameters in WITH_IDS:
            reply = self._try({"prompt": self.in_form(prompt), "max_tokens": 1, "temperature": 0.0} | parameters)
            if reply is not None and token_ids(reply["choices"][0]) is not None:
                self.with_ids = parameters
                break
        else:
            self.limits.append("it returns no token ids: tokens are told apart by their text")
        for name, value in NEUTRAL.items():
            if self._accepts(self.in_form(prompt), {name: value}) is None:
                self.neutral[name] = value
        if missing := [name for name in NEUTRAL if name not in self.neutral]:
            self.limits.append(f"it takes no {', '.join(missing)}: its defaults apply")
        reply = self._try({"prompt": self.in_form(prompt), "max_tokens": 1, "temperature": 1.0, "n": 2})
        if reply is not None and len(reply["choices"]) == 2:
            self.choices = TOGETHER
        else:
            self.limits.append("it takes no n: each sampled text is a request")

    def _try(self, body: Json) -> Json | None:
        try:
            return self.server.reply("/completions", body, attempts=2)
        except ServerError:
            return None

    def _accepts(self, prompt: Prompt, parameters: Json | None = None) -> str | None:
        """Return `None` if the server completes a prompt with these parameters, otherwise the reason why not."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0} | (parameters or {})
        try:
            self.server.reply("/completions", body, attempts=2)
        except ServerError as error:
            return str(error)
        return None

    def in_form(self, prompt: Prompt) -> Prompt:
        """Return a prompt as the server takes it: token ids, or the text that a tokenizer turns into these ids."""
        if self.takes_ids or isinstance(prompt, str) or self.tokenizer is None:
            return prompt
        texts = [str(self.tokenizer.decode(ids)) for ids in (prompt, prompt[1:])]  # many servers add a BOS token
        return next((text for text in texts if text_ids(text, self.tokenizer) == prompt), texts[0])

    def texts(
        self, prompts: Sequence[Prompt], max_tokens: int, together: bool, advance: Callable[[], object]
    ) -> list[Text]:
        """Return the greedy text of each prompt; requests are sent one by one, or all at the same time."""
        parameters = {"max_tokens": max_tokens, "temperature": 0.0} | self.neutral | self.with_ids

        def ask(prompt: Prompt) -> Text:
            return self._one(self.in_form(prompt), parameters)

        return self._all(ask, prompts, len(prompts) if together else 1, advance)

    def _one(self, prompt: Prompt, parameters: Json) -> Text:
        return self._ask({"prompt": prompt, "max_tokens": 1, "temperature": 0.0} | parameters)[0]

    def _ask(self, body: Json) -> list[Text]:
        reply = self.server.reply("/completions", body)
        usage, texts = reply.get("usage") or {}, []
        for choice in reply["choices"]:
            if not isinstance(choice.get("text"), str):
                raise ServerError(f"the reply has no text: {str(choice)[:200]}")
            ids, ended = token_ids(choice), choice.get("finish_reason") in ("stop", *EOS)
            written = usage.get("completion_tokens") if len(reply["choices"]) == 1 else None
            tokens = len(ids) if ids is not None else written if isinstance(written, int) else None
            texts.append(Text(choice["text"], ids, ended, usage.get("prompt_tokens"), tokens))
        return texts

    def samples(
        self, cases: Sequence[tuple[Prompt, Setting]], draws: int, max_tokens: int, advance: Callable[[int], object]
    ) -> list[list[Text]]:
        """Sample `draws` texts after each prompt.

        Requests of all cases are mixed, so that a batch of the server holds prompts of several lengths."""
        sizes = [min(self.choices, draws - start) for start in range(0, draws, self.choices)]
        requests = [(number, size) for size in sizes for number in range(len(cases))]

        def ask(request: tuple[int, int]) -> tuple[int, list[Text]]:
            number, size = request
            prompt, setting = cases[number]
            body = {"prompt": self.in_form(prompt), "max_tokens": max_tokens, **setting._asdict()}
            found = self._ask(body | self.neutral | self.with_ids | ({"n": size} if self.choices > 1 else {}))
            if len(found) != size:
                raise ServerError(f"{size} choices were asked for, and {len(found)} came")
            advance(size)
            return number, found

        texts: list[list[Text]] = [[] for _ in cases]
        for number, found in self._all(ask, requests, self.concurrency, lambda: None):
            texts[number] += found
        return texts

    def _all(
        self, ask: Callable[[Item], Answered], items: Sequence[Item], at_once: int, advance: Callable[[], object]
    ) -> list[Answered]:
        """Call `ask` for each item in threads, `at_once` at a time, and return the answers in order."""

        def counted(item: Item) -> Answered:
            found = ask(item)
            advance()
            return found

        with ThreadPoolExecutor(max(at_once, 1)) as pool:
            try:
                return list(pool.map(counted, items))
            except ServerError as error:
                pool.shutdown(cancel_futures=True)
                raise RunError(f"{self.server.url} failed during the audit: {error}") from None


def text_class(text: str) -> str:
    """Return by what a token is known on a server that returns text only.

    Decoding may strip a space, and parts of characters and special tokens have no text of their own."""
    return "" if "\ufffd" in text else text.strip(" ")


def token_ids(choice: Json) -> list[int] | None:
    """Return the ids of the tokens in a choice of a reply, in the forms of several servers; `None` without ids."""
    ids: Any = choice.get("token_ids")
    scores = choice.get("logprobs")
    if ids is None and isinstance(scores, dict):
        if isinstance(content := scores.get("content"), list):
            ids = [entry.get("id") if isinstance(entry, dict) else None for entry in content]
        elif isinstance(named := scores.get("tokens"), list) and named:
            ids = [_named(name) for name in named]
    return list(ids) if isinstance(ids, Iterable) and all(type(one) is int for one in ids) else None


def _named(name: object) -> int | None:
    kind, _, number = str(name).partition(":")
    return int(number) if kind == "token_id" and number.isdecimal() else None


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Return the index of the first item in which two sequences differ; `None` if they are equal."""
    return next((i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)
