"""The texts that calibrations are made from, written by the backbone itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.bench.methods import plain_method
from decode.results import prompt_seeds
from decode.settings import Settings
from medusa.backbone import Backbone

Text = tuple[list[int], list[int]]
"""The ids of a prompt, and those of its continuation."""
OWN_TEXTS, OPENING_TOKENS, OWN_TOKENS = 32, 16, 96  # number and lengths of the texts of `own_texts`
AT_ONCE = 16  # prompts in a batch


def continued_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[list[int]],
    settings: Settings,
    seed: int,
) -> list[Text]:
    """Let the backbone continue prompts under `settings`."""
    method, texts = plain_method(model, settings, tokenizer), []
    for start in range(0, len(prompts), AT_ONCE):
        batch = prompts[start : start + AT_ONCE]
        seeds = prompt_seeds(seed, range(start, start + len(batch)))
        texts += [(result.input_ids, result.new_ids) for result in method(batch, seeds=seeds)]
    return texts


def own_texts(model: PreTrainedModel, settings: Settings, bos: int | None) -> list[Text]:
    """Let the backbone write texts without prompts, the same at every call.

    Openings are sampled after the BOS token, or after random tokens if there is none. Continuations are written under
    `settings`.
    """
    backbone = Backbone(model)
    random_ids = torch.randint(backbone.vocab_size, (OWN_TEXTS,), generator=torch.Generator().manual_seed(0))
    first = [[token if bos is None else bos] for token in random_ids.tolist()]
    seeds = list(range(OWN_TEXTS))
    length = min(OWN_TOKENS, max((backbone.context or 1 << 30) - OPENING_TOKENS - 1, 1))
    opening = plain_method(model, Settings(max_new_tokens=OPENING_TOKENS, temperature=1.0, ignore_eos=True))
    openings = [result.input_ids + result.new_ids for result in opening(first, seeds=seeds)]
    written = plain_method(model, replace(settings, max_new_tokens=length, stop=(), ignore_eos=True))
    return [(result.input_ids, result.new_ids) for result in written(openings, seeds=seeds)]
