"""The texts of a session: the tokens that each row has written, and the reason why the row ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from decode.ops.draws import RowDraws
from decode.ops.transfer import on_device
from medusa.errors import RequestError

AHEAD = 1024
"""New tokens for which the first cache and buffer of texts have room; both grow with longer texts."""


class Request(NamedTuple):
    """One prompt, with the logits processors, stopping criteria and config that `model.generate` prepared."""

    prompt: list[int]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    max_new_tokens: int
    generator: torch.Generator | None = None
    """The row's source of random numbers; `None`: PyTorch's global generator, as in `model.generate`."""
    draws: type[RowDraws] = RowDraws
    """How tokens are drawn with them."""

    @property
    def do_sample(self) -> bool:
        return bool(self.config.do_sample)


class Sequences:
    """The texts of a session: prompts and the tokens written after them. Each row (text) has its own reason to end.

    EOS and length are checked on plain numbers. Other stopping criteria (stop strings, time, a user's own) see each
    text grow by one token at a time, as in plain decoding."""

    def __init__(self, requests: Sequence[Request], context: int | None, device: torch.device, slack: int = 0) -> None:
        """Start with the prompts of `requests`; the method `prefix` adds about `slack` draft tokens after a text."""
        self.prompts = [list(request.prompt) for request in requests]
        self.new_ids: list[list[int]] = [[] for _ in requests]
        ends = [len(r.prompt) + r.max_new_tokens for r in requests]
        self.limits = [min(end, context or end) - len(prompt) for end, prompt in zip(ends, self.prompts, strict=True)]
        self.finish_reason = ["length" if limit <= 0 else None for limit in self.limits]
        self.eos = [
            {int(i) for c in r.criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.flatten()}
            for r in requests
        ]
        checked = (EosTokenCriteria, MaxLengthCriteria)  # a subclass of a user decides by itself
        self.criteria = [StoppingCriteriaList(c for c in r.criteria if type(c) not in checked) for r in requests]
        # Not for all new tokens that are allowed, which can be any number for models without a context.
        width = max(len(p) + min(max(limit, 0), AHEAD) for p, limit in zip(self.prompts, self.limits, strict=True))
        self.scores: list[list[Tensor]] | None = None  # per row, of each decided token, for criteria that read scores
        self.buffer = torch.zeros(len(requests), width + slack + 1, dtype=torch.long, device=device)
        for row, prompt in enumerate(self.prompts):
            self.buffer[row, : len(prompt)] = on_device(prompt, device)
        self.lengths = [len(prompt) for prompt in self.prompts]
        self.in_buffer = list(self.lengths)
        """Tokens of each row that the buffer holds, which is filled on request: most runs ask for no prefix."""

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, other: Sequences, places: Sequence[int]) -> None:
        """Move the texts of `other` to the rows `places`, which are rows of ended texts, or new ones at the end."""
        for name, theirs in vars(other).items():
            if isinstance(theirs, list):
                mine = getattr(self, name)
                for place, value in zip(places, theirs, strict=True):
                    mine[place : place + 1] = [value]
        old, new = self.buffer, other.buffer
        self.buffer = old.new_zeros(len(self), max(old.shape[1], new.shape[1]))
        self.buffer[: len(old), : old.shape[1]] = old
        self.buffer[list(places), : new.shape[1]] = new

    def prefix(self, row: int, more: Tensor | None = None) -> Tensor:
        """The token ids [1, T] of a row's text, prompt included, followed by the draft tokens `more`, if given."""
        length, held = self.lengths[row], self.in_buffer[row]
        width, needed = self.buffer.shape[1], length + (0 if more is None else len(more))
        if needed > width:
            self.buffer = F.pad(self.buffer, (0, max(needed, 2 * width) - width))
        if held < length:
            new = self.new_ids[row][held - length :]
            self.buffer[row, held:length] = on_device(new, self.buffer.device)
            self.in_buffer[row] = length
        if more is not None:
            self.buffer[row, length : length + len(more)] = more
            length += len(more)
        return self.buffer[row : row + 1, :length]

    def tail(self, row: int, start: int) -> list[int]:
        """The token ids of a row's text, prompt included, from position `start` on."""
        prompt = self.prompts[row]
        if start >= len(prompt):
            return self.new_ids[row][start - len(prompt) :]
        return prompt[start:] + self.new_ids[row]

    def tokens_left(self, row: int) -> int:
        """The number of tokens that may still be written to a row's text."""
        return self.limits[row] - len(self.new_ids[row])

    def extend(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Append `tokens` to a row's text until the text ends; returns the tokens appended, a final EOS included."""
        kept: list[int] = []
        if self.finish_reason[row] is None:
            eos, criteria, left = self.eos[row], self.criteria[row], self.tokens_left(row)
            for token in tokens:
                kept.append(token)
                if token in eos:
                    self.finish_reason[row] = "eos"
                elif criteria and self._stops(row, kept):
                    self.finish_reason[row] = "stop"
                elif len(kept) >= left:
                    self.finish_reason[row] = "length"
                else:
                    continue
                break
        self.lengths[row] += len(kept)
        self.new_ids[row] += kept
        return kept

    def _stops(self, row: int, kept: list[int]) -> bool:
        prefix = self.prefix(row, on_device(kept, self.buffer.device))
        count = len(self.new_ids[row]) + len(kept)
        scores: Any = None if self.scores is None else tuple(self.scores[row][:count])
        found = self.criteria[row](cast(torch.LongTensor, prefix), scores)
        if found.numel() != 1:  # the answer of a user's criterion that was made for a batch
            told = f"a stopping criterion answers for {found.numel()} texts"
            raise RequestError(f"{told}, and in decode sees each text alone; pass the prompts one at a time")
        return bool(found)
