"""Records the heads' guesses in texts of the backbone, and predicts from this recording how trees perform.

The ranks of the correct tokens among the guesses show how many tokens a step accepts with any tree, without a forward.
Most steps start just after a wrong guess, where guesses are worse than elsewhere. So averages over all positions are
too high (by 5 to 22 % with the model stories260K), and tau is counted only at positions where steps start.

Shapes: P positions of a text, K heads, V vocabulary, G temperatures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.bench.methods import Prompts, plain_method
from decode.drafters.layouts import TOP, DynamicTree, Layout
from decode.settings import Settings
from decode.texts import prompt_seeds
from medusa.backbone import Backbone
from medusa.heads.guesses import MISSED, accepted, ranks_of
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.tree import RankPath, Tree
from medusa.vocabulary import lm_head_for, places_of, token_ids

Column = list[Tensor] | tuple[Tensor, ...]
Text = tuple[list[int], list[int]]  # the token ids of a prompt, and of its continuation
OWN_TEXTS, OPENING_TOKENS, OWN_TOKENS = 32, 16, 96  # number of texts in `own_texts`, and their lengths in tokens
BATCH_SIZE = 16  # prompts that are decoded together
TEMPERATURES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0)  # the G that are tried
AT_ONCE = 64  # positions whose logits are in memory at the same time
MAX_ROUNDS = 8  # repetitions of counting and growing in `grow`; three are usual


def continued_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, prompts: Prompts, settings: Settings, seed: int
) -> list[Text]:
    """Continue prompts by plain decoding with `settings`. The random seed of each prompt is derived from `seed`."""
    method, seeds, texts = plain_method(model, settings, tokenizer), prompt_seeds(seed, range(len(prompts))), []
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = slice(start, start + BATCH_SIZE)
        texts += [(result.input_ids, result.new_ids) for result in method(prompts[batch], seeds=seeds[batch])]
    return texts


def own_texts(model: PreTrainedModel, settings: Settings, bos: int | None) -> list[Text]:
    """Generate texts with the backbone and `settings`, for a user without prompts. All calls return the same texts.

    The prompts are sampled at temperature 1 after the BOS token `bos`, or after random tokens if `bos` is `None`."""
    backbone, seeds = Backbone(model), list(range(OWN_TEXTS))
    random_ids = torch.randint(backbone.vocab_size, (OWN_TEXTS,), generator=torch.Generator().manual_seed(0))
    first = [[token if bos is None else bos] for token in random_ids.tolist()]
    length = min(OWN_TOKENS, max((backbone.context or 1 << 30) - OPENING_TOKENS - 1, 1))
    opening = plain_method(model, Settings(max_new_tokens=OPENING_TOKENS, temperature=1.0, ignore_eos=True, stop=()))
    openings = [result.input_ids + result.new_ids for result in opening(first, seeds=seeds)]
    written = plain_method(model, replace(settings, max_new_tokens=length, stop=(), ignore_eos=True))
    return [(result.input_ids, result.new_ids) for result in written(openings, seeds=seeds)]


class Recording(NamedTuple):
    """The guesses of the heads at every position of some texts, compared with the correct tokens.

    Each field has one tensor per text. Row p of a tensor belongs to the step whose root is new token p of the text.
    `ranks` and `right`: ranks and logits of the correct tokens. `best`: best logits. `log_z`: log-normalisers."""

    ranks: Column = ()  # [P, K] rank among each head's guesses (0: the best); MISSED beyond TOP or the text's end
    best: Column = ()  # [P, K, TOP] logits of the best guesses of each head
    log_z: Column = ()  # [P, K, G] log-sum-exp of the logits at each temperature
    right: Column = ()  # [P, K] logit of the correct token; NaN if there is none

    @property
    def tokens(self) -> int:
        """Number of recorded positions in all texts together."""
        return sum(len(ranks) for ranks in self.ranks)

    @property
    def steps(self) -> int:
        """Number of positions where a decoding step can start: all heads have a next token to guess there."""
        return sum(max(len(ranks) - ranks.shape[1], 0) for ranks in self.ranks)

    def part(self, texts: Sequence[int]) -> Recording:
        """Return the part of the recording that belongs to the texts with these indices."""
        return Recording(*([column[text] for text in texts] if column else [] for column in self))

    def fit_temperatures(self) -> tuple[float, ...]:
        """Fit one temperature per head, at which the correct tokens are most probable (Guo et al. 2017)."""
        right, log_z = torch.cat(self.right), torch.cat(self.log_z)  # [P, K], [P, K, G]
        loss = (log_z - right[:, :, None] / torch.tensor(TEMPERATURES)).nanmean(0)  # [K, G]
        return tuple(TEMPERATURES[index] for index in loss.argmin(-1).tolist())

    def accepted(self, tree: Layout, text: int) -> Tensor:
        """Compute how many drafted tokens a step with `tree` accepts at each position, [P]. `text`: a text's index."""
        if not isinstance(tree, DynamicTree):
            return accepted(tree.candidates, self.ranks[text])
        depth, scale = tree.max_depth, tree.temperatures[: tree.max_depth]
        log_z = self.log_z[text][:, range(depth), [TEMPERATURES.index(t) for t in scale]]
        guesses = self.best[text][:, :depth, : tree.candidates.max_rank + 1]
        taken = tree.most_probable(tree.path_log_probs(guesses / torch.tensor(scale)[:, None] - log_z[:, :, None]))
        return accepted(tree.candidates, self.ranks[text], taken)


@torch.no_grad()
def record(backbone: Backbone, heads: MedusaHeads, texts: Iterable[Text]) -> Recording:
    """Record the heads' guesses at all positions of some texts, with one forward of the backbone per text."""
    rows = []
    for prompt, new in texts:
        ids = torch.tensor([[*prompt, *new]], device=backbone.device)
        states = backbone.hidden_states(ids[:, :-1], use_cache=False)
        before = torch.arange(len(prompt) - 1, states.shape[1], device=states.device)  # the position before each token
        rows.append(_recorded(heads, backbone, heads.inputs(states, ids, backbone.embed, place=before), new))
    return Recording(*zip(*rows, strict=True))


def _recorded(heads: MedusaHeads, backbone: Backbone, inputs: HeadInputs, new: list[int]) -> list[Tensor]:
    """Compute the tensors of a `Recording` for one text, from the heads' `inputs` before each of its new tokens `new`.

    Each token is the root of a step, in which head k (from 0) guesses the token k + 1 positions after the root."""
    num_heads, ahead = heads.config.num_heads, torch.tensor(new, device=inputs.hidden.device)
    targets = torch.stack([ahead.roll(-k) for k in range(1, num_heads + 1)])  # [K, P]; wrapped tokens are masked below
    features, parts, lm_head = heads.features(inputs), [], lm_head_for(heads, backbone)
    # The logits [K, P, V] of a long text would not fit into memory, so they are computed in parts.
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
    return [ranks, best, log_z, right]


def starts(lengths: Tensor, num_heads: int) -> list[int]:
    """List the positions where decoding steps start if a text is decoded. Steps that might pass its end are left out.

    `lengths` [P]: number of drafted tokens that a step accepts at each position of the text."""
    numbers, at, found = lengths.tolist(), 0, []
    while at < len(numbers) - num_heads:
        found.append(at)
        at += 1 + numbers[at]
    return found


def predicted_tau(tree: Layout, recording: Recording) -> float:
    """Predict tau, the mean number of tokens per step, root included, if the recorded texts are decoded with `tree`."""
    steps = tokens = 0
    for text, ranks in enumerate(recording.ranks):
        lengths = recording.accepted(tree, text)
        at = starts(lengths, ranks.shape[1])
        steps, tokens = steps + len(at), tokens + len(at) + int(lengths[at].sum())
    return tokens / max(steps, 1)


def predicted_tau_held_out(nodes: int, recording: Recording) -> float:
    """Predict tau (mean tokens per step) of a grown tree of `nodes` nodes on new texts, by two-fold cross-validation.

    On the texts that a tree was grown from, tau would be too high, above all for few texts and many nodes."""
    halves = [recording.part(range(first, len(recording.ranks), 2)) for first in range(2)]
    if not all(half.steps for half in halves):
        return predicted_tau(grow(recording, nodes), recording)
    steps = sum(on.tokens / predicted_tau(grow(of, nodes), on) for of, on in (halves, halves[::-1]))
    return recording.tokens / steps


def highest_tau(nodes: int, recording: Recording) -> float:
    """Compute an upper bound of tau for all trees of `nodes` nodes that draft the most probable guesses of each head.

    A tree with a guess of rank r (0: the best) also has the r better guesses after the same path. So a path of ranks
    r1, r2, ... needs (r1 + 1) + (r2 + 1) + ... nodes besides the root. The bound takes the fewest steps that these
    paths allow, wherever the steps start. It needs no decoding, also for heads whose guesses depend on the path."""
    steps = tokens = 0
    for ranks in recording.ranks:
        count, num_heads = ranks.shape
        needed = (ranks.clamp_max(nodes) + 1).cumsum(1)  # [P, K]; ranks that are `MISSED` are large
        ends = (torch.arange(count) + 1 + (needed < nodes).sum(1)).tolist()
        at = read = furthest = 0
        while at < count - num_heads:  # as in `starts`, no step starts at the last tokens
            furthest = max(furthest, *ends[read : at + 1])
            read, at, steps = at + 1, furthest, steps + 1
        tokens += at
    return tokens / max(steps, 1)


def grow(recording: Recording, nodes: int) -> Tree:
    """Grow the tree of `nodes` nodes, root included, with the highest predicted tau on the recorded texts.

    The value of a node is the number of positions where all tokens on its path are correct. A path is never correct
    more often than its beginning, so the paths with the highest values form a tree. Positions count only if a step
    starts there, which depends on the tree. So counting and growing alternate until a tree recurs, and the best tree is
    returned. The first count uses all positions. The result has fewer nodes if too few paths are correct."""
    best, best_tau, seen, tree = Tree.chain(0), 0.0, set(), None
    for _ in range(MAX_ROUNDS):
        counts = path_counts(recording, tree)
        paths = sorted(counts, key=lambda path: (-counts[path], len(path), path))[: nodes - 1]
        tree = Tree.from_paths(paths)
        if (found := predicted_tau(tree, recording)) > best_tau:
            best, best_tau = tree, found
        if (key := frozenset(paths)) in seen:
            break
        seen.add(key)
    return best


def path_counts(recording: Recording, tree: Tree | None) -> Counter[RankPath]:
    """Count for each path, given by the ranks of its guesses, the positions where all its guesses are correct.

    With a `tree`, only positions where its decoding steps start count. Paths that are never correct are left out."""
    counts: Counter[RankPath] = Counter()
    for ranks in recording.ranks:
        rows = ranks if tree is None else ranks[starts(accepted(tree, ranks), ranks.shape[1])]
        for line in rows.tolist():
            right = line[: line.index(MISSED)] if MISSED in line else line
            counts.update(tuple(right[:depth]) for depth in range(1, len(right) + 1))
    return counts
