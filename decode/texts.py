"""The one place where texts are written: for Python, the commands, the server, the chats and the benchmarks.

    write = TextGenerator(model, settings, tokenizer, source)       # resolved once
    results = write(prompts)                                        # whole texts
    for step in write.start(prompts): ...                           # or step by step

`decode.generation` makes the requests of `model.generate`'s arguments itself, and starts with `Decoding`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from time import perf_counter

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.compiled.stepper import CompiledStepper
from decode.draft import NoDraft
from decode.drafters.base import DrafterFactory
from decode.loop import Step, Stepper, Timer, run
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.sequences import Request
from decode.session import Session
from decode.settings import CUDA_GRAPHS, Settings
from decode.stable import require_stable
from decode.strategies.contrastive import Amateur
from decode.strategies.grammar import Grammars
from decode.target import STATEFUL, truncated
from decode.tree_check import require_tree_forward
from medusa.errors import RequestError
from medusa.records.pieces import TokenBytes, text_of

WARM_UP_STEPS = 5
Prompts = Sequence[Sequence[int]]
Seeds = Sequence[int] | None  # a random seed for each prompt, whose text then does not depend on the other prompts
OnStep = Callable[[int, list[int]], object]  # receives the index of a prompt, and the tokens that one step wrote for it


@dataclass
class Result:
    """The text decoded from one prompt, the number of tokens of each step, why the text ended, and the time."""

    input_ids: list[int]
    new_ids: list[int] = field(default_factory=list)
    step_lengths: list[int] = field(default_factory=list)
    """Tokens written by each step. The last step is cut where the text ends, so they sum to `len(new_ids)`."""
    uncut_lengths: list[int] = field(default_factory=list)
    """1 + accepted tokens of each step, before any cut. tau is the mean of these numbers."""
    finish_reason: str = "length"
    """`eos`, `stop`, `length`, or `stopped` for an interrupted text."""
    seconds: float = 0.0
    """Time from the prompt to the last token. Results of one batch share the time of the batch."""
    hidden: torch.Tensor | None = None
    """[T, H] hidden states of the prompt and the new tokens, if requested. The last token's state may be missing."""

    def to_json(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] | None = ()) -> dict[str, object]:
        """The result as JSON values, as `medusa generate --json` writes them."""
        return {
            "input_ids": self.input_ids,
            "new_ids": self.new_ids,
            "text": text_of(self.new_ids, tokenizer, stop),
            "steps": len(self.step_lengths),
            "step_lengths": self.step_lengths,
            "finish_reason": self.finish_reason,
            "seconds": self.seconds,
        }


def tau(results: Sequence[Result]) -> float:
    """Mean tokens per step of all results: root and accepted tokens, even past the text's end; 0 without steps."""
    lengths = [length for result in results for length in result.uncut_lengths]
    return sum(lengths) / len(lengths) if lengths else 0.0


def mean_tau(results: Sequence[Result]) -> float:
    """Mean over the texts of each text's tau, so that long texts count no more than short ones; 0 without steps."""
    taus = [tau([result]) for result in results if result.uncut_lengths]
    return sum(taus) / len(taus) if taus else 0.0


def end_of_context(results: Sequence[Result], max_new_tokens: int) -> str | None:
    """Return a sentence that names the context if it ended texts before `max_new_tokens`, else `None`."""
    ended = [one for one in results if one.finish_reason == "length" and len(one.new_ids) < max_new_tokens]
    if not ended:
        return None
    context = len(ended[0].input_ids) + len(ended[0].new_ids)
    if len(results) == 1:
        return f"the context of {context} tokens ends the text after {len(ended[0].new_ids)} new tokens"
    return (
        f"the context of {context} tokens ends {len(ended)} of {len(results)} texts before {max_new_tokens} new tokens"
    )


def prompt_seeds(seed: int, indices: Iterable[int]) -> list[int]:
    """Derive one seed for each prompt from `seed` and the prompt's index in its file; index 0 gets `seed` itself."""
    return [seed if index == 0 else random.Random(f"{seed} {index}").getrandbits(63) for index in indices]


def stepper_for(
    model: PreTrainedModel,
    factory: DrafterFactory | None,
    requests: Sequence[Request],
    rule: AcceptanceRule,
    compile: bool | str = False,
    amateur: Amateur | None = None,
    stable: bool = False,
    keep_hidden: bool = False,
    keep_drafts: bool = False,
    sizes: Sequence[int] | None = None,
) -> Stepper:
    """Make the stepper of requests, with a new session; `factory` makes its drafter, and `None` means plain decoding.

    The number of new tokens, the sampling options and the stop strings are those of `requests`. Plain decoding ignores
    `rule`. With `keep_hidden`, the session records the hidden states of all tokens. With `keep_drafts`, each step of a
    drafter holds the drafts that it verified. `compile` may also be one of `decode.settings.CUDA_GRAPHS`, which says
    how compiled steps use CUDA graphs; `True` means "own". `sizes`, in ascending order: texts may join compiled steps,
    which have one of so many rows; eager steps need no such numbers. `stable`: see `decode.stable`. Raise a
    `RequestError` if the acceptance rule, the drafter or the amateur does not fit, or steps cannot be compiled or be
    stable."""
    config = requests[0].config
    if factory is not None:
        if not rule.kind.walks and (config.output_scores or config.output_logits):
            exact = "rejection" if config.do_sample else "greedy"
            raise RequestError(f"acceptance {rule.name!r} gives no output_scores or output_logits; use {exact!r}")
        kept = next((one for request in requests for one in request.processors if isinstance(one, STATEFUL)), None)
        if not rule.kind.walks and kept is not None:
            why = f"{type(kept).__name__} (of guidance_scale or watermarking_config) must read a text in order"
            raise RequestError(f"{why}, and acceptance {rule.name!r} scores all drafted tokens; use 'greedy'")
        if rule.draft == "sample" and not factory.can_draw:
            raise RequestError(
                "this drafter cannot draw its guesses; use draft topk (a draft model: leave confidence out)"
            )
        require_tree_forward(model)
        if factory.num_nodes == 1 and rule.kind.lossless:  # the same text, without the cost of a tree
            factory = None
    if compile and keep_drafts:
        raise RequestError("compiled steps keep no drafts; leave out compile or keep_drafts")
    if amateur is not None:
        amateur.require_fitting(model, requests, bool(compile))
    for some in [model, *([] if amateur is None else [amateur.model])] if stable else ():
        require_stable(some)
    if sizes is not None and sizes[-1] == 1:
        sizes = None  # none can join, and the prompt is read into its place
    fixed = bool(compile) and sizes is None
    if factory is None:
        rule = AcceptanceRule("rejection" if config.do_sample else "greedy")
        session = Session(model, requests, int(bool(compile)), keep_hidden, None, amateur, fixed)
    else:
        if rule.kind.truncates:
            requests = [truncated(request, rule) for request in requests]
        session = Session(model, requests, factory.num_nodes, keep_hidden, factory.heads, amateur, fixed)
    session.reader.be_stable(stable)
    if compile:
        return CompiledStepper(session, rule, factory, CUDA_GRAPHS[0] if compile is True else compile, sizes)
    drawn = rule.draft == "sample"
    drafter = NoDraft(session.backbone.device) if factory is None else factory.start(session, drawn)
    return Stepper(session, drafter, rule, keep_drafts and factory is not None)


class Decoding:
    """The decoding of a batch of prompts. Iterating over it runs the steps; `results` grow with each step."""

    def __init__(self, stepper: Stepper, timer: Timer | None = None) -> None:
        """Begin with the prompts of the stepper's session."""
        self.session = stepper.session
        self.results = [Result(prompt) for prompt in self.session.sequences.prompts]
        self.seconds = 0.0
        """Time spent decoding. Time that the caller spends between two steps does not count."""
        self._loop = run(stepper, timer or Timer())

    def __iter__(self) -> Iterator[Step]:
        """Decode step by step. An iterator that is dropped ends the decoding."""
        otherwise = "stopped"
        try:
            start = perf_counter()
            for step in self._loop:
                for row, ids in step.ids.items():
                    self.results[row].step_lengths.append(len(ids))
                    self.results[row].uncut_lengths.append(step.lengths[row])
                    self.results[row].new_ids += ids
                self.seconds += perf_counter() - start
                yield step
                start = perf_counter()
            self.seconds += perf_counter() - start
            otherwise = "length"
        finally:
            self._loop.close()
            self._end(otherwise)

    def finish(self, on_step: OnStep | None = None) -> list[Result]:
        """Decode all texts to their ends, and return the results."""
        for step in self:
            if on_step is not None:
                for row, ids in step.ids.items():
                    on_step(row, ids)
        return self.results

    def stop(self) -> None:
        """End decoding now. Texts that were not finished get the finish reason "stopped"."""
        self._loop.close()
        self._end("stopped")

    def _end(self, otherwise: str) -> None:
        for row, result in enumerate(self.results):
            result.finish_reason = self.session.sequences.finish_reason[row] or otherwise
            result.seconds = self.seconds
            if (kept := self.session.kept_hidden) is not None:
                length = len(result.input_ids) + len(result.new_ids)  # a text may be cut before its last accepted guess
                result.hidden = torch.cat(kept[row])[:length]


@dataclass(frozen=True, eq=False)
class TextGenerator:
    """A backbone with all that decides how it continues prompts: settings, tokenizer and drafter.

    Called with prompts, it is a method that benchmarks can compare (`decode.bench.methods.Method`)."""

    model: PreTrainedModel
    settings: Settings
    tokenizer: PreTrainedTokenizerBase | None = None
    source: DrafterFactory | None = None
    """Makes the drafter; `None`: plain decoding."""
    clock: Timer | None = None
    keep_hidden: bool = False
    """Whether each result contains the hidden states of its text."""

    def __call__(self, prompts: Prompts, on_step: OnStep | None = None, seeds: Seeds = None) -> list[Result]:
        """Decode `prompts` (token ids) until every text ends, and return one result per prompt."""
        return self.start(prompts, seeds).finish(on_step)

    def start(self, prompts: Prompts, seeds: Seeds = None, keep_drafts: bool = False) -> Decoding:
        """Begin to decode prompts, or raise a `RequestError`. `keep_drafts`: see `decode.steps`."""
        start = perf_counter()
        requests = prepare(self.model, prompts, seeds, **self.settings.generate_kwargs(self.tokenizer))
        how = *self.settings.how, self.keep_hidden, keep_drafts
        begun = Decoding(stepper_for(self.model, self.source, requests, *how), self.clock)
        begun.seconds = perf_counter() - start
        return begun

    @property
    def models(self) -> list[PreTrainedModel]:
        """The models whose contexts must hold the text: the backbone, and the amateur of contrastive decoding."""
        return [self.model, *([] if self.settings.amateur is None else [self.settings.amateur.model])]

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What each token adds to a text, for stop strings."""
        assert self.tokenizer is not None, "strings need a tokenizer"
        return TokenBytes(self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars; the first use takes about a second, and raises a `RequestError` without llguidance."""
        assert self.tokenizer is not None, "grammars need a tokenizer"
        return Grammars(self.model, self.tokenizer)

    def warm_up(self, prompt: Sequence[int]) -> None:
        """Decode a few tokens, with and without the drafter, so that the first answer is as fast as later answers."""
        for source in [None] if self.source is None else [None, self.source]:
            list(islice(replace(self, source=source).start([prompt]), WARM_UP_STEPS))
