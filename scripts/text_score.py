"""How well a model predicts documents: nats a token, bits a character, and how often another model agrees.

Shapes: T tokens of a document."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def encode(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> Iterator[Tensor]:
    """Yield the token ids [T] of each document, with BOS at their start."""
    bos = tokenizer.bos_token_id
    for start in range(0, len(documents), 1000):  # verbose would warn about documents longer than the context
        for ids in tokenizer(list(documents[start : start + 1000]), verbose=False)["input_ids"]:
            yield torch.tensor(ids if ids[:1] == [bos] else [bos, *ids], dtype=torch.int32)


class Score(NamedTuple):
    """Sums over the evaluated text."""

    nats: float
    tokens: int  # without BOS
    characters: int
    agreements: int | None = None  # positions where model and teacher prefer the same token

    @property
    def bits_per_character(self) -> float:
        return self.nats / math.log(2) / self.characters

    def __str__(self) -> str:
        told = f"{self.nats / self.tokens:.4f} nats a token, {self.bits_per_character:.4f} bits a character"
        told += f" ({self.tokens} tokens, {self.characters} characters)"
        agreed = "" if self.agreements is None else f", {self.agreements / self.tokens:.4f} agreement with the teacher"
        return told + agreed


def windows(length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield the windows (begin, end, first) that score a document of `length` tokens: each token but BOS once.

    The model reads the tokens begin to end - 1 and scores those from `first` on. Windows advance by half a context,
    so tokens after the first window have at least half a context before them."""
    begin, end = 0, 1
    while end < length:
        first, end = end, min(begin + context, length)
        yield begin, end, first
        begin += max(context // 2, 1)


@torch.inference_mode()
def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    teacher: PreTrainedModel | None = None,
) -> Score:
    """Score whole documents, with BOS at the start of each; `teacher` adds the count of agreements."""
    nats, tokens, agreements = 0.0, 0, 0
    for ids in encode(tokenizer, documents):
        for begin, end, first in windows(len(ids), model.config.max_position_embeddings):
            inputs = ids[None, begin : end - 1].long().to(model.device)
            targets = ids[first:end].long().to(model.device)
            scored = slice(first - begin - 1, None)
            logits = model(input_ids=inputs, use_cache=False).logits[0, scored].float()
            nats += F.cross_entropy(logits, targets, reduction="sum").item()
            tokens += end - first
            if teacher is not None:
                expected = teacher(input_ids=inputs, use_cache=False).logits[0, scored].argmax(-1)
                agreements += int((logits.argmax(-1) == expected).sum())
    return Score(nats, tokens, sum(map(len, documents)), None if teacher is None else agreements)
