"""Prompts in, finished texts out, by any of the methods that can be compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, cast

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
)

from decode.draft import DrafterContext, DrafterFactory
from decode.drafters import DrafterLike, drafter_factory
from decode.generation import medusa_session
from decode.loop import Session, Step
from decode.reference import plain_session
from decode.request import TreeLike, prepare
from decode.settings import Settings
from decode.strategies.contrastive import Amateur, ContrastProcessor
from decode.timers import Timer
from medusa.backbone import Backbone
from medusa.heads.independent import MedusaHeads

OnStep = Callable[[int, list[int]], None]
"""Called with a prompt's index and the tokens that a step gave it."""


class Method(Protocol):
    """Decodes a batch of prompts."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], on_step: OnStep | None = None, seeds: Sequence[int] | None = None
    ) -> list[Result]:
        """`seeds`: one a prompt, so that a sample does not depend on the batch it is drawn in."""
        ...


def prompt_seeds(seed: int, indices: Iterable[int]) -> list[int]:
    """Seeds of the prompts with these indices in a file; the first one's is `seed` itself, as for a prompt alone."""
    return [seed if index == 0 else random.Random(f"{seed} {index}").getrandbits(63) for index in indices]


@dataclass
class Result:
    """One finished text; `to_dict` gives it the names of the JSON."""

    input_ids: list[int]
    new_ids: list[int] = field(default_factory=list)
    step_lengths: list[int] = field(default_factory=list)
    """Cut: they sum to `len(new_ids)`."""
    uncut_lengths: list[int] = field(default_factory=list)
    """1 + accepted, from which tau is computed."""
    finish_reason: str = "length"
    seconds: float = 0.0
    """From the prompt to the last token; of the whole batch where there is one."""
    hidden: torch.Tensor | None = None
    """[T, H] hidden states of prompt and new ids, where they were asked for; the last tokens may not have been read."""

    def to_dict(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "input_ids": self.input_ids,
            "new_ids": self.new_ids,
            "text": text_of(self.new_ids, tokenizer, stop),
            "steps": len(self.step_lengths),
            "step_lengths": self.step_lengths,
            "finish_reason": self.finish_reason,
            "seconds": self.seconds,
        }


def text_of(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] = ()) -> str:
    """The text of new ids without special tokens, ending before the first stop string."""
    if tokenizer is None:
        return ""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
    cuts = [text.index(string) for string in stop if string in text]
    return text[: min(cuts)] if cuts else text


def tau(results: Sequence[Result]) -> float:
    """Mean tokens per step, the root included, before any cut; 0 where there was no step."""
    lengths = [length for result in results for length in result.uncut_lengths]
    return sum(lengths) / len(lengths) if lengths else 0.0


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """Prompts as `generate` takes batches: padded on the left, with a mask (never guessed from an id)."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def plain_method(
    model: PreTrainedModel,
    settings: Settings,
    tokenizer: Any = None,
    clock: Timer | None = None,
    keep_hidden: bool = False,
) -> Method:
    """Our own autoregressive loop."""

    def decode(
        prompts: Sequence[Sequence[int]], on_step: OnStep | None = None, seeds: Sequence[int] | None = None
    ) -> list[Result]:
        start = perf_counter()
        requests = prepare(model, prompts, seeds, **settings.generate_kwargs(tokenizer))
        session = plain_session(model, requests, clock, keep_hidden, settings.compile, settings.amateur)
        return _collect(session, start, on_step)

    return decode


def medusa_method(
    model: PreTrainedModel,
    heads: MedusaHeads | None,
    settings: Settings,
    tokenizer: Any = None,
    tree: TreeLike = None,
    clock: Timer | None = None,
    keep_hidden: bool = False,
    drafter: DrafterLike = None,
) -> Method:
    """A drafter, the heads by default, and a tree; what it loads is loaded once."""
    stop_drafting = 0.0 if isinstance(drafter, DrafterFactory) else settings.stop_drafting
    source = drafter_factory(drafter, DrafterContext(model, heads, tree, tokenizer, stop_drafting=stop_drafting))

    def decode(
        prompts: Sequence[Sequence[int]], on_step: OnStep | None = None, seeds: Sequence[int] | None = None
    ) -> list[Result]:
        start = perf_counter()
        requests = prepare(model, prompts, seeds, **settings.generate_kwargs(tokenizer))
        session = medusa_session(
            model,
            heads,
            requests,
            None,
            settings.acceptor,
            clock,
            keep_hidden,
            settings.compile,
            source,
            settings.amateur,
        )
        return _collect(session, start, on_step)

    return decode


class Run:
    """Prompts being decoded: iterate over it for the steps; `results` grow with them."""

    def __init__(self, session_and_steps: tuple[Session, Iterator[Step]], seconds: float = 0.0) -> None:
        """`seconds`: what it took already, to prepare the requests."""
        self.session, steps = session_and_steps
        self.steps = cast("Generator[Step, None, None]", steps)  # as all loops are
        self.results = [Result(prompt) for prompt in self.session.sequences.prompts]
        self.seconds = seconds
        """Of decoding alone: what is done with a step while the next one waits does not count."""

    def __iter__(self) -> Iterator[Step]:
        while True:
            start = perf_counter()
            step = next(self.steps, None)
            if step is not None:
                for row, ids in step.ids.items():
                    self.results[row].step_lengths.append(len(ids))
                    self.results[row].uncut_lengths.append(step.lengths[row])
                    self.results[row].new_ids += ids
            self.seconds += perf_counter() - start
            if step is None:
                break
            yield step
        self._finish("length")

    def stop(self) -> None:
        """Write no more; a text that was not at its end has the finish reason "stopped"."""
        self.steps.close()
        self._finish("stopped")

    def _finish(self, otherwise: str) -> None:
        for row, result in enumerate(self.results):
            result.finish_reason = self.session.sequences.finish_reason[row] or otherwise
            result.seconds = self.seconds


def _collect(session_and_steps: tuple[Session, Iterator[Step]], start: float, on_step: OnStep | None) -> list[Result]:
    run = Run(session_and_steps, perf_counter() - start)
    for step in run:
        if on_step is not None:
            for row, ids in step.ids.items():
                on_step(row, ids)
    kept = run.session.kept_hidden
    for row, result in enumerate(run.results):
        if kept is not None:
            length = len(result.input_ids) + len(result.new_ids)  # a text may be cut before its last accepted guess
            result.hidden = torch.cat(kept[row])[:length]
    return run.results


def transformers_method(model: PreTrainedModel, settings: Settings, tokenizer: Any = None, **assistance: Any) -> Method:
    """transformers' own `model.generate`; it has one stream of random numbers, seeded by a batch's first seed.

    `assistance`: of its assisted generation, `prompt_lookup_num_tokens` or `assistant_model`, or of its beam search; it
    does not tell its steps, so such results have none."""
    backbone, amateur = Backbone(model), settings.amateur
    contexts = [backbone.context, None if amateur is None else Backbone(amateur.model).context]
    context = min((end for end in contexts if end is not None), default=None)
    stops = StopStringCriteria(tokenizer, list(settings.stop)) if settings.stop else None

    def decode(
        prompts: Sequence[Sequence[int]], on_step: OnStep | None = None, seeds: Sequence[int] | None = None
    ) -> list[Result]:
        start = perf_counter()
        if seeds:
            torch.manual_seed(seeds[0])
        results = [Result(list(prompt)) for prompt in prompts]
        groups: dict[int, list[Result]] = {}
        for result in results:  # like ours, a text ends where the context does; one batch has one length
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
            kwargs |= _contrasted(amateur, settings, inputs["attention_mask"])
        out = model.generate(**inputs, **kwargs)[:, longest:].tolist()  # type: ignore[operator]
        eos = None if settings.ignore_eos else model.generation_config.eos_token_id
        ends = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        for result, ids in zip(group, out, strict=True):
            result.new_ids = ids
            _cut(result, ends, stops)
            if assistance:
                result.step_lengths, result.uncut_lengths = [], []

    return decode


def _contrasted(amateur: Amateur, settings: Settings, attention_mask: torch.Tensor) -> dict[str, Any]:
    """The contrast as `generate` can have it, and behind it the penalty, which `generate` would put before it."""
    processors = LogitsProcessorList([ContrastProcessor(amateur, attention_mask)])
    if settings.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    return {"logits_processor": processors, "repetition_penalty": None}


def _cut(result: Result, ends: set[int], stops: StopStringCriteria | None) -> None:
    """End a row of a batch where it ended alone: behind it `generate` writes padding, or goes on."""
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
