"""Results of decoding a batch of prompts: each text with the tokens of its steps, and the run that decodes them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from decode.loop import Step
from decode.stop_strings import before_stop

if TYPE_CHECKING:
    from decode.generation import Decoding


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


def text_of(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] | None = ()) -> str:
    """Decode token ids to text without special tokens, cut before the first stop string; empty without a tokenizer.

    A stop string may be a special token, or contain one."""
    if tokenizer is None:
        return ""
    kept, surplus = before_stop(ids, tokenizer, stop or ())
    text = str(tokenizer.decode(kept, skip_special_tokens=True))
    return text[: len(text) - surplus]


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


class DecodingRun:
    """The decoding of a batch of prompts. Iterating over it runs the steps; `results` grow with each step."""

    def __init__(self, begun: Decoding, seconds: float = 0.0) -> None:
        """Start a run over the steps of `begun`; `seconds` is the time already spent on preparing the requests."""
        self.session, self.steps = begun.session, begun.steps
        self.results = [Result(prompt) for prompt in self.session.sequences.prompts]
        self.seconds = seconds
        """Time spent decoding. Time that the caller spends between two steps does not count."""

    def __iter__(self) -> Iterator[Step]:
        start = perf_counter()
        for step in self.steps:
            for row, ids in step.ids.items():
                self.results[row].step_lengths.append(len(ids))
                self.results[row].uncut_lengths.append(step.lengths[row])
                self.results[row].new_ids += ids
            self.seconds += perf_counter() - start
            yield step
            start = perf_counter()
        self.seconds += perf_counter() - start
        self._finish("length")

    def stop(self) -> None:
        """End decoding now. Texts that were not finished get the finish reason "stopped"."""
        self.steps.close()
        self._finish("stopped")

    def _finish(self, otherwise: str) -> None:
        for row, result in enumerate(self.results):
            result.finish_reason = self.session.sequences.finish_reason[row] or otherwise
            result.seconds = self.seconds
