"""Starts the decoding of texts for the server and the chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.drafters.base import DrafterFactory
from decode.generation import decoding
from decode.request import prepare
from decode.results import DecodingRun
from decode.settings import Settings
from decode.tree_check import require_tree_forward

WARM_UP_STEPS = 5


@dataclass
class TextGenerator:
    """A backbone with its tokenizer and, if given, a drafter. It starts the decoding of texts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: DrafterFactory | None

    def __post_init__(self) -> None:
        if self.source is not None:
            require_tree_forward(self.model)  # a check once per model, done now so that the first answer is fast

    def models(self, settings: Settings) -> list[PreTrainedModel]:
        """List the models whose contexts must hold the text: the backbone, and the amateur of contrastive decoding."""
        return [self.model, *([] if settings.amateur is None else [settings.amateur.model])]

    def run(self, prompt: Sequence[int], settings: Settings, seed: int = 0, plain: bool = False) -> DecodingRun:
        """Start decoding after the token ids `prompt`, with `plain` without the drafter, or raise a `RequestError`."""
        start = perf_counter()
        requests = prepare(self.model, [prompt], [seed], **settings.generate_kwargs(self.tokenizer))
        begun = decoding(self.model, None if plain else self.source, requests, settings)
        return DecodingRun(begun, perf_counter() - start)

    def warm_up(self, prompt: Sequence[int], settings: Settings) -> None:
        """Decode a few tokens, with and without the drafter, so that the first answer is as fast as later answers."""
        for plain in [True] if self.source is None else [True, False]:
            list(islice(self.run(prompt, settings, plain=plain), WARM_UP_STEPS))
