"""Texts of the backbone with the ranks of their tokens among the heads' guesses, and what their replay tells of trees.

A step starts where the previous one ended, which is just after a wrong guess. Averages over all positions are therefore
too high (by 5 to 22 % on stories260K), so tau is counted only at positions where steps start.

Shapes: P positions of a text, K heads, V vocabulary, G temperatures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.bench.methods import plain_method
from decode.drafters.layouts import TOP, DynamicTree
from decode.results import prompt_seeds
from decode.settings import Settings
from medusa.backbone import Backbone
from medusa.heads.guesses import MISSED, accepted, ranks_of
from medusa.heads.independent import HeadInputs, MedusaHeads
from medusa.tree import Layout, RankPath, Tree
from medusa.vocabulary import lm_head_for, places_of, token_ids

Text = tuple[list[int], list[int]]
"""The ids of a prompt, and those of its continuation."""
OWN_TEXTS, OPENING_TOKENS, OWN_TOKENS = 32, 16, 96  # number and lengths of the texts of `own_texts`
BATCH_SIZE = 16  # prompts that are continued together
TEMPERATURES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0)
"""The G temperatures that a head can get."""
AT_ONCE = 64  # positions whose logits are held


def continued_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[list[int]],
    settings: Settings,
    seed: int,
) -> list[Text]:
    """Let the backbone continue prompts under `settings`."""
    method, seeds, texts = plain_method(model, settings, tokenizer), prompt_seeds(seed, range(len(prompts))), []
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = slice(start, start + BATCH_SIZE)
        texts += [(result.input_ids, result.new_ids) for result in method(prompts[batch], seeds=seeds[batch])]
    return texts


def own_texts(model: PreTrainedModel, settings: Settings, bos: int | None) -> list[Text]:
    """Let the backbone write texts without prompts. Every call gives the same texts.

    Openings are sampled after the BOS token, or after random tokens if `bos` is `None`. Continuations are written under
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


@dataclass
class Recording:
    """The guesses of the heads in recorded texts.

    Each list has one entry per text, with one line for every position where a root can be.
    """

    ranks: list[Tensor]
    """[P, K] the rank of the correct token among the guesses of head k, made from the hidden state before the root.
    MISSED if the token is not among the TOP best guesses, or if the text has ended."""
    best: list[Tensor] = field(default_factory=list)
    """[P, K, TOP] the logits of the best guesses of each head."""
    log_z: list[Tensor] = field(default_factory=list)
    """[P, K, G] the log-sum-exp of all logits at each of TEMPERATURES."""
    right: list[Tensor] = field(default_factory=list)
    """[P, K] the logit of the correct token; NaN if the text has ended, or if the heads' vocabulary lacks the token."""

    @property
    def tokens(self) -> int:
        """Positions of all texts."""
        return sum(len(ranks) for ranks in self.ranks)

    @property
    def has_steps(self) -> bool:
        """Whether some text is longer than the reach of the heads, so that steps can be replayed on it."""
        return any(len(ranks) > ranks.shape[1] for ranks in self.ranks)

    def part(self, texts: Sequence[int]) -> Recording:
        """The recording of some of the texts, given by index."""
        columns = (self.ranks, self.best, self.log_z, self.right)
        return Recording(*([column[text] for text in texts] if column else [] for column in columns))

    def fit_temperatures(self) -> tuple[float, ...]:
        """The temperature for each head that makes the correct tokens most probable (Guo et al. 2017)."""
        right, log_z = torch.cat(self.right), torch.cat(self.log_z)  # [P, K], [P, K, G]
        loss = (log_z - right[:, :, None] / torch.tensor(TEMPERATURES)).nanmean(0)  # [K, G]
        return tuple(TEMPERATURES[index] for index in loss.argmin(-1).tolist())

    def accepted(self, tree: Layout, text: int) -> Tensor:
        """How many drafted tokens a step from each position of a text would accept [P]."""
        if not isinstance(tree, DynamicTree):
            return accepted(tree.candidates, self.ranks[text])
        depth, scale = tree.max_depth, tree.temperatures[: tree.max_depth]
        log_z = self.log_z[text][:, range(depth), [TEMPERATURES.index(t) for t in scale]]
        guesses = self.best[text][:, :depth, : tree.candidates.max_rank + 1]
        taken = tree.most_probable(tree.path_log_probs(guesses / torch.tensor(scale)[:, None] - log_z[:, :, None]))
        return accepted(tree.candidates, self.ranks[text], taken)


@torch.no_grad()
def record(backbone: Backbone, heads: MedusaHeads, texts: Iterable[Text]) -> Recording:
    """Record texts, with one forward of the backbone for each."""
    recording = Recording([])
    for prompt, new in texts:
        ids = torch.tensor([[*prompt, *new]], device=backbone.device)
        states = backbone.hidden_states(ids[:, :-1], use_cache=False)
        before = torch.arange(len(prompt) - 1, states.shape[1], device=states.device)  # the position before each token
        _record(recording, heads, backbone, heads.inputs(states, ids, backbone.embed, place=before), new)
    return recording


def _record(recording: Recording, heads: MedusaHeads, backbone: Backbone, inputs: HeadInputs, new: list[int]) -> None:
    """Record the guesses made at P positions, one before each of the P tokens `new`.

    Head k guesses the token k + 1 positions after the root.
    """
    num_heads, ahead = heads.config.num_heads, torch.tensor(new, device=inputs.hidden.device)
    targets = torch.stack([ahead.roll(-k) for k in range(1, num_heads + 1)])  # [K, P]; wrapped tokens are masked below
    features, parts, lm_head = heads.features(inputs), [], lm_head_for(heads, backbone)
    # In parts, because logits [K, P, V] of a long text would not fit into memory.
    for part, target in zip(features.split(AT_ONCE, dim=1), targets.split(AT_ONCE, dim=1), strict=True):
        logits = heads.logits(part, lm_head).float()
        top = logits.topk(min(TOP, logits.shape[-1]), dim=-1)
        ranks = ranks_of(target, token_ids(heads, top.indices))
        log_z = torch.stack([(logits / t).logsumexp(-1) for t in TEMPERATURES], dim=-1)
        place = target.to(logits.device)
        if heads.vocabulary is not None:
            place = places_of(heads.vocabulary, place, backbone.vocab_size)
        right = logits.gather(2, place.clamp_min(0)[:, :, None])[:, :, 0].masked_fill(place < 0, torch.nan)
        parts.append([found.transpose(0, 1).cpu() for found in (ranks, top.values, log_z, right)])
    ranks, best, log_z, right = (torch.cat(column) for column in zip(*parts, strict=True))
    for head in range(num_heads):
        ended = slice(max(len(new) - head - 1, 0), None)
        ranks[ended, head], right[ended, head] = MISSED, torch.nan
    for name, found in {"ranks": ranks, "best": best, "log_z": log_z, "right": right}.items():
        getattr(recording, name).append(found)


MAX_ROUNDS = 8  # of growing and replaying; three are usual


def starts(lengths: Tensor, num_heads: int) -> list[int]:
    """Accepted lengths [P] -> the positions where steps start, without those that might pass the end of the text."""
    numbers, at, found = lengths.tolist(), 0, []
    while at < len(numbers) - num_heads:
        found.append(at)
        at += 1 + numbers[at]
    return found


def predicted_tau(tree: Layout, recording: Recording) -> float:
    """Mean tokens per step, the root included, when the recorded texts are decoded with `tree`."""
    steps = tokens = 0
    for text, ranks in enumerate(recording.ranks):
        lengths = recording.accepted(tree, text)
        at = starts(lengths, ranks.shape[1])
        steps, tokens = steps + len(at), tokens + len(at) + int(lengths[at].sum())
    return tokens / max(steps, 1)


def predicted_tau_held_out(nodes: int, recording: Recording) -> float:
    """tau of a grown tree of `nodes` nodes on held-out texts: each half of the texts with the tree of the other half.

    On the texts that a tree was grown from, tau is too high, most of all for few texts and many nodes.
    """
    halves = [recording.part(range(first, len(recording.ranks), 2)) for first in range(2)]
    if not all(half.has_steps for half in halves):
        return predicted_tau(grow(recording, nodes), recording)
    steps = tokens = 0.0
    for of, on in (halves, halves[::-1]):
        steps += on.tokens / predicted_tau(grow(of, nodes), on)
        tokens += on.tokens
    return tokens / steps


def grow(recording: Recording, nodes: int) -> Tree:
    """The best tree of `nodes` nodes, the root included. If fewer paths are ever correct, the tree is smaller.

    The value of a node is the number of positions where its whole path holds the correct tokens. A path is never
    correct more often than its beginning, so the most frequent paths form a tree. They are counted where the steps of
    the tree start. Since these positions depend on the tree, counting and growing are repeated, at first with all
    positions, until a tree recurs. The tree with the highest predicted tau on the way is returned.
    """
    best, best_tau, seen, tree = Tree.chain(0), 0.0, set(), None
    for _ in range(MAX_ROUNDS):
        counts = path_counts(recording, tree)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
        paths = [path for path, _ in ranked[: nodes - 1]]
        tree = Tree.from_paths(paths)
        if (found := predicted_tau(tree, recording)) > best_tau:
            best, best_tau = tree, found
        if (key := frozenset(paths)) in seen:
            break
        seen.add(key)
    return best


def path_counts(recording: Recording, tree: Tree | None) -> Counter[RankPath]:
    """How often each path of ranks holds the correct tokens, where the steps of `tree` start or at all positions."""
    counts: Counter[RankPath] = Counter()
    for ranks in recording.ranks:
        rows = ranks if tree is None else ranks[starts(accepted(tree, ranks), ranks.shape[1])]
        for line in rows.tolist():
            right = line[: line.index(MISSED)] if MISSED in line else line
            counts.update(tuple(right[:depth]) for depth in range(1, len(right) + 1))
    return counts
