"""Decoding methods that a benchmark compares. A method takes a batch of prompts and returns the finished texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import LogitsProcessorList, StopStringCriteria

from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext, DrafterFactory, DrafterLike
from decode.drafters.layouts import TreeLike
from decode.loop import Timer
from decode.request import with_stop_strings
from decode.settings import Settings
from decode.strategies.contrastive import Amateur, ContrastProcessor
from decode.texts import OnStep, Prompts, Result, Seeds, TextGenerator
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.loading import Loaded
from medusa.options import dtype_name

StartProgress = Callable[[str, int], Callable[..., object]]  # starts a bar (title, total), returns what advances it


class Method(Protocol):
    """A decoding method, which decodes a batch of prompts when it is called."""

    def __call__(self, prompts: Prompts, on_step: OnStep | None = None, seeds: Seeds = None) -> list[Result]:
        """Decode `prompts` (token ids) until every text ends, and return one result per prompt."""


def one_by_one(method: Method, prompts: Prompts, seeds: Sequence[int]) -> list[Result]:
    """Decode the prompts one at a time, each with its own random seed."""
    return [result for prompt, seed in zip(prompts, seeds, strict=True) for result in method([prompt], seeds=[seed])]


def plain_method(
    model: PreTrainedModel,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase | None = None,
    keep_hidden: bool = False,
) -> TextGenerator:
    """Make a method that decodes in this package's loop without a drafter, one token per step."""
    return TextGenerator(model, settings, tokenizer, keep_hidden=keep_hidden)


def medusa_method(
    model: PreTrainedModel,
    heads: MedusaHeads | None,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tree: TreeLike = None,
    drafter: DrafterLike = None,
    keep_hidden: bool = False,
) -> TextGenerator:
    """Make a method that decodes with `drafter`, by default with `heads` on `tree`. This call loads the drafter."""
    stop_drafting = 0.0 if isinstance(drafter, DrafterFactory) else settings.stop_drafting
    source = drafter_factory(drafter, DrafterContext(model, heads, tree, tokenizer, stop_drafting=stop_drafting))
    return TextGenerator(model, settings, tokenizer, source, keep_hidden=keep_hidden)


def transformers_method(
    model: PreTrainedModel, settings: Settings, tokenizer: PreTrainedTokenizerBase | None = None, **assistance: object
) -> Method:
    """Make a method that calls transformers' `model.generate`.

    `generate` draws all samples of a batch from one random stream, which gets the seed of the first prompt.
    `assistance`: options of `generate` for assisted or beam search. With them, results have no `step_lengths`."""
    settings = settings.of_checkpoint(model.generation_config)
    device, amateur = Backbone(model).device, settings.amateur
    models = [model] if amateur is None else [model, amateur.model]
    context = min(Backbone(some).context or 1 << 30 for some in models)
    stops = None
    if settings.stop:
        if tokenizer is None:
            raise RequestError("the stop strings need a tokenizer, and this backbone has none")
        stops = StopStringCriteria(tokenizer, list(settings.stop))
    eos = None if settings.ignore_eos else model.generation_config.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]

    def decode(prompts: Prompts, on_step: OnStep | None = None, seeds: Seeds = None) -> list[Result]:
        start = perf_counter()
        if seeds:
            torch.manual_seed(seeds[0])
        results = [Result(list(prompt)) for prompt in prompts]
        limits = [min(settings.max_new_tokens, context - len(prompt)) for prompt in prompts]
        for limit in dict.fromkeys(limits):  # `generate` takes one limit for all rows
            if limit > 0:
                write([result for result, own in zip(results, limits, strict=True) if own == limit], limit)
        for result in results:
            result.seconds = perf_counter() - start
        return results

    def write(group: list[Result], limit: int) -> None:
        kwargs = settings.generate_kwargs(tokenizer) | {"max_new_tokens": limit} | assistance
        inputs = left_padded([result.input_ids for result in group], device)
        if amateur is not None:
            kwargs = with_stop_strings(model, kwargs)
            kwargs |= {"custom_generate": partial(contrasted, amateur, inputs["attention_mask"])}
        stock: Any = type(model)  # a checkpoint with code of its own may replace the model's attribute `generate`
        out = stock.generate(model, **inputs, **kwargs)[:, inputs["input_ids"].shape[1] :].tolist()
        for result, ids in zip(group, out, strict=True):
            result.new_ids = ids
            _cut(result, ends, stops)
            steps = 0 if assistance else len(result.new_ids)
            result.step_lengths, result.uncut_lengths = [1] * steps, [1] * steps

    return decode


def contrasted(
    amateur: Amateur,
    mask: Tensor,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    **kwargs: Any,
) -> Tensor:
    """Decode as `model.generate` does, but contrast with the amateur before all other processors, as our own loop does.

    `model.generate` calls it for prompts [B, T] with the attention mask `mask` [B, T]; without it, `generate` applies
    penalties first."""
    processors = LogitsProcessorList([ContrastProcessor(amateur, mask), *logits_processor])
    stock: Any = type(model)
    return stock._sample(model, input_ids, logits_processor=processors, **kwargs)


def left_padded(prompts: Prompts, device: torch.device) -> dict[str, Tensor]:
    """Make the inputs of `generate`, each [B, T]: ids of B prompts left-padded to T tokens, and the attention mask."""
    ids = [torch.tensor(list(prompt), dtype=torch.long) for prompt in prompts]
    rows = {"input_ids": ids, "attention_mask": [torch.ones_like(row) for row in ids]}
    return {name: pad_sequence(row, batch_first=True, padding_side="left").to(device) for name, row in rows.items()}


def _cut(result: Result, ends: list[int | None], stops: StopStringCriteria | None) -> None:
    """Cut the new tokens of one text after its first end token or stop string, and set the finish reason.

    `generate` continues a finished text until all texts of the batch have ended."""
    for at, token in enumerate(result.new_ids, 1):
        stopped = stops is not None and stops(torch.tensor([result.input_ids + result.new_ids[:at]]), None).all()
        if token in ends or stopped:
            result.new_ids, result.finish_reason = result.new_ids[:at], "eos" if token in ends else "stop"
            return


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a benchmark or a verification tests: a drafter, with the models, the options and the prompts."""

    loaded: Loaded
    source: DrafterFactory
    settings: Settings
    prompts: Sequence[list[int]]
    heads: str | None = None  # the name of the heads; `None` for a drafter without heads
    drafter: str = "heads"  # the drafter with its options, as the user typed it
    tree: object = None  # the tree's description for the result: its paths, or the options of a dynamic tree
    batch_size: int = 1
    seed: int = 0
    start_progress: StartProgress = lambda title, total: lambda count=1: None

    @property
    def dtype(self) -> str:
        return dtype_name(self.loaded.model.dtype)

    def plain(self, settings: Settings, clock: Timer | None = None) -> Method:
        """Make a method that decodes with the backbone alone, one token per step."""
        return TextGenerator(self.loaded.model, settings, self.loaded.tokenizer, None, clock)

    def drafted(self, settings: Settings, clock: Timer | None = None, source: DrafterFactory | None = None) -> Method:
        """Make a method that decodes with the drafter of `source`, by default with the drafter under test."""
        return TextGenerator(self.loaded.model, settings, self.loaded.tokenizer, source or self.source, clock)
