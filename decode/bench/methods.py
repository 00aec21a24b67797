"""The ways to decode that a benchmark compares. Each takes a batch of prompts and returns finished texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
)

from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext, DrafterFactory, DrafterLike
from decode.drafters.layouts import TreeLike
from decode.generation import Decoding, plain_decoding, tree_decoding
from decode.loop import Timer
from decode.request import prepare
from decode.results import DecodingRun, Result
from decode.sequences import Request
from decode.settings import Settings
from decode.strategies.contrastive import Amateur, ContrastProcessor
from medusa.backbone import Backbone
from medusa.heads.independent import MedusaHeads

OnStep = Callable[[int, list[int]], None]
"""Receives the index of a prompt and the tokens that a step wrote for it."""


class Method(Protocol):
    """Decodes a batch of prompts."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], on_step: OnStep | None = None, seeds: Sequence[int] | None = None
    ) -> list[Result]:
        """Decode `prompts` to their ends. `seeds`: one for each prompt, so that samples do not depend on the batch."""
        ...


def plain_method(
    model: PreTrainedModel,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase | None = None,
    clock: Timer | None = None,
    keep_hidden: bool = False,
) -> Method:
    """Our own autoregressive loop: one token a step."""

    def begin(requests: list[Request]) -> Decoding:
        return plain_decoding(model, requests, clock, keep_hidden, settings.compile, settings.amateur)

    return _method(model, settings, tokenizer, begin)


def medusa_method(
    model: PreTrainedModel,
    heads: MedusaHeads | None,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tree: TreeLike = None,
    clock: Timer | None = None,
    keep_hidden: bool = False,
    drafter: DrafterLike = None,
) -> Method:
    """Decoding with a drafter, by default the heads on `tree`. What the drafter loads is loaded once, here."""
    stop_drafting = 0.0 if isinstance(drafter, DrafterFactory) else settings.stop_drafting
    source = drafter_factory(drafter, DrafterContext(model, heads, tree, tokenizer, stop_drafting=stop_drafting))
    rule, compile, amateur = settings.rule, settings.compile, settings.amateur

    def begin(requests: list[Request]) -> Decoding:
        return tree_decoding(model, source, requests, rule, clock, keep_hidden, compile, amateur)

    return _method(model, settings, tokenizer, begin)


def _method(
    model: PreTrainedModel,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase | None,
    begin: Callable[[list[Request]], Decoding],
) -> Method:
    """A method that decodes what `begin` starts."""

    def decode(
        prompts: Sequence[Sequence[int]], on_step: OnStep | None = None, seeds: Sequence[int] | None = None
    ) -> list[Result]:
        start = perf_counter()
        requests = prepare(model, prompts, seeds, **settings.generate_kwargs(tokenizer))
        run = DecodingRun(begin(requests), perf_counter() - start)
        for step in run:
            if on_step is not None:
                for row, ids in step.ids.items():
                    on_step(row, ids)
        if (kept := run.session.kept_hidden) is not None:
            for row, result in enumerate(run.results):
                length = len(result.input_ids) + len(result.new_ids)  # a text may be cut before its last accepted guess
                result.hidden = torch.cat(kept[row])[:length]
        return run.results

    return decode


def transformers_method(
    model: PreTrainedModel,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **assistance: object,
) -> Method:
    """transformers' own `model.generate`, which has one random stream, seeded by the first seed of a batch.

    `assistance`: options of its assisted generation or beam search, such as `prompt_lookup_num_tokens`. `generate`
    does not report the steps of these, so their results have none."""
    backbone, amateur = Backbone(model), settings.amateur
    contexts = [backbone.context, None if amateur is None else Backbone(amateur.model).context]
    context = min((end for end in contexts if end is not None), default=None)
    stops = StopStringCriteria(tokenizer, list(settings.stop)) if settings.stop and tokenizer is not None else None

    def decode(
        prompts: Sequence[Sequence[int]], on_step: OnStep | None = None, seeds: Sequence[int] | None = None
    ) -> list[Result]:
        start = perf_counter()
        if seeds:
            torch.manual_seed(seeds[0])
        results = [Result(list(prompt)) for prompt in prompts]
        groups: dict[int, list[Result]] = {}
        for result in results:  # a text ends where the context does; one batch has one length
            room = settings.max_new_tokens if context is None else context - len(result.input_ids)
            groups.setdefault(min(settings.max_new_tokens, room), []).append(result)
        for limit, group in groups.items():
            if limit > 0:
                write(group, limit)
        for result in results:
            result.seconds = perf_counter() - start
        return results

    def write(group: list[Result], limit: int) -> None:
        kwargs = settings.generate_kwargs(tokenizer) | {"max_new_tokens": limit} | assistance
        inputs = left_padded([result.input_ids for result in group], backbone.device)
        longest = inputs["input_ids"].shape[1]
        if amateur is not None:
            kwargs |= _contrast_kwargs(amateur, settings, inputs["attention_mask"])
        out = model.generate(**inputs, **kwargs)[:, longest:].tolist()  # type: ignore[operator]
        eos = None if settings.ignore_eos else model.generation_config.eos_token_id
        ends = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        for result, ids in zip(group, out, strict=True):
            result.new_ids = ids
            _cut(result, ends, stops)
            if assistance:
                result.step_lengths, result.uncut_lengths = [], []

    return decode


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """Prompts as `generate` takes a batch: ids [B, T] padded on the left, and the attention mask [B, T]."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _contrast_kwargs(amateur: Amateur, settings: Settings, attention_mask: Tensor) -> dict[str, object]:
    """Arguments that make `generate` decode contrastively.

    `generate` would apply the repetition penalty before the contrast. Our loop applies it after, so it follows here."""
    processors = LogitsProcessorList([ContrastProcessor(amateur, attention_mask)])
    if settings.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    return {"logits_processor": processors, "repetition_penalty": None}


def _cut(result: Result, ends: set[int], stops: StopStringCriteria | None) -> None:
    """Cut a row of a batch where it would have ended alone: `generate` goes on with padding or text until all end."""
    length = len(result.new_ids)
    for at, token in enumerate(result.new_ids, 1):
        if token in ends:
            length, result.finish_reason = at, "eos"
            break
        if stops is not None:
            prefix = torch.tensor([result.input_ids + result.new_ids[:at]])
            if bool(stops(prefix, None).all()):
                length, result.finish_reason = at, "stop"
                break
    result.new_ids = result.new_ids[:length]
    result.step_lengths = [1] * length
    result.uncut_lengths = [1] * length
