"""A backbone with its tokenizer and drafter, ready to write texts: for chats and for the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.drafters.base import DrafterFactory
from decode.generation import plain_decoding, tree_decoding
from decode.request import prepare
from decode.results import DecodingRun
from decode.sequences import Request
from decode.settings import Settings
from decode.tree_check import require_tree_forward

WARM_UP_STEPS = 5


@dataclass
class TextGenerator:
    """A backbone with its tokenizer, and a drafter if there is one."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: DrafterFactory | None

    def __post_init__(self) -> None:
        if self.source is not None:
            require_tree_forward(self.model)  # tried once for each model, so better now than before the first answer

    def models(self, settings: Settings) -> list[PreTrainedModel]:
        """The models whose contexts a text must fit into."""
        return [self.model, *([] if settings.amateur is None else [settings.amateur.model])]

    def run(self, prompt: Sequence[int], settings: Settings, seed: int = 0, plain: bool = False) -> DecodingRun:
        """Begin to write after `prompt`; `plain`: without the drafter.

        Raises:
            RequestError: as `decode.request.prepare`."""
        start = perf_counter()
        requests = prepare(self.model, [prompt], [seed], **settings.generate_kwargs(self.tokenizer))
        return self.run_all(requests, settings, plain, perf_counter() - start)

    def run_all(
        self, requests: Sequence[Request], settings: Settings, plain: bool = False, seconds: float = 0.0
    ) -> DecodingRun:
        """Begin to write a batch of requests, which were prepared in `seconds`.

        `settings`: of all requests; their lengths and stops may differ."""
        start = perf_counter()
        if plain or self.source is None:
            session = plain_decoding(self.model, requests, compile=settings.compile, amateur=settings.amateur)
        else:
            session = tree_decoding(
                self.model,
                self.source,
                requests,
                settings.rule,
                compile=settings.compile,
                amateur=settings.amateur,
            )
        return DecodingRun(session, seconds + perf_counter() - start)

    def warm_up(self, prompt: Sequence[int], settings: Settings) -> None:
        """Write a few tokens with the drafter and without, so that the first answer is not slower than later ones."""
        for plain in [True] if self.source is None else [True, False]:
            for count, _ in enumerate(self.run(prompt, settings, plain=plain), 1):
                if count == WARM_UP_STEPS:
                    break
