"""What a case of fuzz.py needs: its model, heads, drafter, and the arguments of `model.generate` made from its options.

Nothing here decodes. Shapes: B rows, N nodes of a draft, D its depth, T tokens."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

from decode.draft import Draft, Drafter, Frontier
from decode.drafters.base import DrafterFactory
from decode.drafters.layouts import resolve_tree
from decode.drafters.model import DraftModel
from decode.drafters.retrieval.datastore import Piece, build
from decode.sequences import Sequences
from decode.session import Session
from decode.topology import Topology
from fuzz_cases import Case, Numbers
from medusa import MedusaHeads
from medusa.backbone import Backbone
from medusa.vocabulary import lm_head_for
from tiny_models import VOCAB, letter_tokenizer, random_heads, tiny_model


def make_model(case: Case) -> PreTrainedModel:
    """Make the random backbone of a case, in float64."""
    settings = {"dtype": torch.float64, "attn_implementation": case.attention}
    return cast(PreTrainedModel, tiny_model(case.family, case.seed % 1000, **settings, **case.model))


def make_heads(case: Case, model: PreTrainedModel, texts: list[Numbers]) -> MedusaHeads:
    """Make random heads; those that are `fitted` learn the `texts`, if there are any, so that more is accepted."""
    settings = dict(case.heads)
    steps = settings.pop("fitted")
    torch.manual_seed(case.seed)
    heads = random_heads(model, settings.pop("num_heads"), 0.3, **settings)
    backbone = Backbone(model, heads.config.feature_layers)
    if steps and heads.vocabulary is None:
        optimizer = torch.optim.Adam(heads.parameters(), 0.03)
        rows = [torch.tensor([text]) for text in texts if len(text) > 2]
        hidden = [backbone.hidden_states(row).detach() for row in rows]
        for step in range(steps if rows else 0):
            row = step % len(rows)
            _loss(heads, backbone, rows[row], hidden[row]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return heads.requires_grad_(False)


def _loss(heads: MedusaHeads, backbone: Backbone, ids: Tensor, hidden: Tensor) -> Tensor:
    """Compute the heads' cross-entropy on a text [1, T] with hidden states [1, T, H]: head i guesses i + 2 ahead."""
    logits = heads(heads.inputs(hidden, ids, backbone.embed), lm_head_for(heads, backbone))[:, 0]
    ahead = range(2, min(len(logits) + 2, ids.shape[1]))
    return torch.stack([F.cross_entropy(logits[far - 2, :-far], ids[0, far:]) for far in ahead]).sum()


def make_drafter(case: Case, model: PreTrainedModel, expected: list[Numbers], folder: Path) -> dict[str, Any]:
    """Return the arguments `heads`, `tree` and `drafter` of `decode.generate`; `expected` are the rows' new tokens."""
    texts = [prompt + new for prompt, new in zip(case.rows, expected, strict=True)]
    name, _, settings = case.drafter.partition(":")
    if name == "scripted":
        return {"drafter": Scripted(expected, case.seed)}
    if name == "model":
        tree = resolve_tree(case.tree or "chain", make_heads(case, model, []))
        return {"drafter": DraftModel(noisy_copy(model, case.seed), tree)}
    if name == "rest":
        rng = random.Random(case.seed)
        texts += [rng.choices(range(VOCAB), k=30) for _ in range(3)]
        pieces = [Piece(f"text {number}", text) for number, text in enumerate(texts)]
        about = {"backbone": "tiny", "tokenizer": None, "vocab_size": VOCAB}
        build(folder / "store", pieces, lambda piece: cast(Numbers, piece.content), about)
        return {"drafter": f"rest:{folder / 'store'},{settings}"}
    takes_tree = name == "heads" or "heads" in settings
    needs_heads = takes_tree or name == "blockwise" or "blockwise" in settings
    chosen = {"tree": case.tree} if takes_tree and case.tree is not None else {}
    return {"heads": make_heads(case, model, texts) if needs_heads else None, "drafter": case.drafter, **chosen}


def noisy_copy(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Copy a model with a little noise on its weights: a draft model whose guesses are often right, but not always."""
    torch.manual_seed(seed)
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return noisy


class Scripted(DrafterFactory):
    """A factory of drafters that know the text: another random tree for each row and step, with some right tokens."""

    def __init__(self, texts: list[Numbers], seed: int) -> None:
        self.texts, self.rng = texts, random.Random(seed)
        self.num_nodes = self.rng.choice([2, 6, 20, 40])

    def start(self, session: Session, drawn: bool = False) -> Drafter:
        return ScriptedDrafter(self, session.sequences)


@dataclass
class ScriptedDrafter:
    """Drafts of a `Scripted` factory for the texts of one session."""

    factory: Scripted
    sequences: Sequences

    def propose(self, frontier: Frontier) -> Draft:
        count = self.factory.rng.randint(1, self.factory.num_nodes)
        drafts = [self._row(row, count) for row in frontier.rows]
        ids, parents, depths = (torch.tensor([draft[part] for draft in drafts]) for part in range(3))
        children = max(draft[1][1:].count(node) for draft in drafts for node in range(count))
        return Draft(ids, Topology.from_parents(parents, depths, int(depths.max()), children))

    def _row(self, row: int, count: int) -> tuple[Numbers, Numbers, Numbers]:
        """Draw the tokens, parents and depths of `count` nodes; siblings differ, and a right token needs luck."""
        rng, written = self.factory.rng, self.sequences.new_ids[row]
        text, reach = self.factory.texts[row][len(written) :], rng.randint(1, 5)
        ids, parents, depths, right = [written[-1]], [0], [0], [True]
        while len(ids) < count:
            parent = rng.randrange(max(len(ids) - reach, 0), len(ids))
            depth = depths[parent] + 1
            truth = text[depth - 1] if right[parent] and depth <= len(text) else None
            taken = [ids[node] for node in range(1, len(ids)) if parents[node] == parent]
            token = truth if truth is not None and rng.random() < 0.8 else rng.randrange(VOCAB)
            if token in taken:
                continue
            ids, parents, depths = [*ids, token], [*parents, parent], [*depths, depth]
            right.append(token == truth)
        return ids, parents, depths


class Shift(LogitsProcessor):
    """A user's processor: raises tokens by amounts that depend on the length of the text and its last tokens."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        place = torch.arange(scores.shape[1]) + input_ids[:, -2:].sum(1, keepdim=True) * self.by + input_ids.shape[1]
        return cast(torch.FloatTensor, scores + (place % 7).to(scores.dtype) * 0.31)


class LastTokens(StoppingCriteria):
    """A user's criterion: a text ends where the sum of its last two tokens is a multiple of a number."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        return cast(torch.BoolTensor, input_ids[:, -2:].sum(1) % self.divisor == 0)


def allow(modulus: int, first: int, row: int, ids: Tensor) -> Numbers:
    """Allow the tokens that differ from the last one modulo a number of the row (`prefix_allowed_tokens_fn`)."""
    number = modulus + first + row
    return [token for token in range(VOCAB) if token % number != int(ids[-1]) % number]


def arguments(options: dict[str, Any], first: int = 0) -> dict[str, Any]:
    """Turn the options of a case into arguments of `model.generate`; processors and criteria are new objects.

    `first` is the number of the first row that the call decodes."""
    made: dict[str, Callable[[Any], dict[str, Any]]] = {
        "sequence_bias": lambda biases: {"sequence_bias": {tuple(words): bias for words, bias in biases}},
        "exponential_decay_length_penalty": lambda pair: {"exponential_decay_length_penalty": tuple(pair)},
        "stop_strings": lambda stops: {"stop_strings": stops, "tokenizer": letter_tokenizer()},
        "allowed": lambda modulus: {"prefix_allowed_tokens_fn": partial(allow, modulus, first)},
        "processor": lambda by: {"logits_processor": [Shift(by)]},
        "criterion": lambda divisor: {"stopping_criteria": [LastTokens(divisor)]},
        "sampled": lambda how: {"do_sample": True} | {name: how[name] for name in how if name not in ("draft", "seed")},
        "copies": lambda count: {"num_return_sequences": count},
    }
    given: dict[str, Any] = {"do_sample": False}
    for name, value in options.items():
        given |= made[name](value) if name in made else {name: value}
    if {"output_scores", "output_logits"} & options.keys():
        given["return_dict_in_generate"] = True
    return given
