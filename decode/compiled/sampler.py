"""Acceptance inside compiled steps: fixed shapes, transformers' logits processors, one uniform number per token.

Shapes: B rows of the batch, N draft nodes of at most C children, D the depth of the tree, V vocabulary, X positions."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from decode.accept import Acceptance, accept_greedy, ended_at, typical
from decode.draft import Draft
from decode.loop import Acceptor
from decode.ops.draws import cumulative, invert_each
from decode.ops.fast_topk import most_probable
from decode.target import WARPERS, Target, processed
from medusa.errors import NotCompilableError, OptionError


class FixedSampler:
    """Applies the acceptance rule and the sampling options of a session inside a compiled step."""

    def __init__(self, target: Target, acceptor: Acceptor) -> None:
        self.acceptor, self.truncation, self.do_sample = acceptor, target.truncation, target.do_sample
        self.processors: LogitsProcessorList = target.processors[0]

    @staticmethod
    def key(target: Target, acceptor: Acceptor) -> tuple[object, ...]:
        """The options of acceptance and sampling, as part of the key under which a compiled step is kept.

        Raise a `RequestError` if a logits processor reads the text, rows differ in options, or scores or sampled drafts
        are requested."""
        others = [type(p).__name__ for row in target.processors for p in row if not isinstance(p, WARPERS)]
        if others:
            way_out = "use only temperature, top-k, top-p, min-p and the like, or leave it out"
            raise OptionError("compile", f"cannot be combined with {others[0]}, which reads the text; {way_out}")
        kinds = [[(type(p), _values(p)) for p in row] for row in target.processors]
        if any(kind != kinds[0] for kind in kinds):
            raise OptionError("compile", "needs the same sampling options in all rows of a batch")
        if target.kept_scores is not None or target.kept_logits is not None:
            raise NotCompilableError("a compiled step gives no output_scores or output_logits")
        if acceptor.draft == "sample":
            raise OptionError("compile", "cannot be combined with draft sample; use draft topk")
        return (*acceptor, target.truncation, target.do_sample, kinds[0])

    def accept(self, draft: Draft, logits: Tensor, u: Tensor, depth_limit: Tensor) -> Acceptance:
        """Decide which nodes to accept down to `depth_limit` [B], from the backbone's logits [B, N, V] after each node.

        `u` [B, D + 1] are uniform random numbers for sampling."""
        if not self.do_sample and not self.processors:
            return accept_greedy(draft, most_probable(logits), depth_limit)
        if self.acceptor.rule == "typical":
            return self._typical(draft, logits, depth_limit)
        return self._walk(draft, logits, u, depth_limit)

    def _scores(self, logits: Tensor) -> Tensor:
        """Apply the session's logits processors, none of which reads token ids, to logits [X, V] of X positions."""
        ids = torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)
        return processed(self.processors, ids, logits.float(), self.truncation)

    def _walk(self, draft: Draft, logits: Tensor, u: Tensor, depth_limit: Tensor) -> Acceptance:
        """Decide token by token down the tree, as `decode.accept.accept_walk`, but always in D + 1 steps."""
        topology, rows = draft.topology, torch.arange(len(draft.ids), device=draft.ids.device)
        table = topology.find_children(topology.find_place())
        end, root, walking = torch.zeros_like(rows), torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
        for depth in range(topology.max_depth + 1):
            scores = self._scores(logits[rows, end])
            token = invert_each(cumulative(scores.softmax(-1)), u[:, depth]) if self.do_sample else scores.argmax(-1)
            root = torch.where(walking, token, root)
            if depth < topology.max_depth:
                children = topology.at(table, rows, end)  # [B, C]
                held = (draft.ids.gather(1, children.clamp_min(0)) == token[:, None]) & (children >= 0)
                child = torch.where(held, children, -1).amax(-1)
                walking = walking & (child >= 0) & (depth_limit > depth)
                end = torch.where(walking, child, end)
        return ended_at(draft, end, root)

    def _typical(self, draft: Draft, logits: Tensor, depth_limit: Tensor) -> Acceptance:
        """Accept the longest path of typical tokens, as `decode.accept.accept_longest`, but test all nodes at once."""
        topology, ids = draft.topology, draft.ids
        rows, nodes = ids.shape
        p = self._scores(logits.flatten(0, 1)).softmax(-1).unflatten(0, (rows, nodes))
        parent = topology.parent.expand(rows, -1)
        passes = typical(p, self.acceptor.epsilon, self.acceptor.delta)
        of_token = (parent * p.shape[-1] + ids).view(rows, -1)  # each node's token, after its parent
        fits = passes.flatten(1).gather(1, of_token)
        log_p = p.flatten(1).gather(1, of_token).log()
        fits[:, 0], log_p[:, 0] = True, 0.0
        ancestors = topology.ancestors.expand(rows, -1, -1)
        accepted = (fits[:, None] | ~ancestors).all(-1) & (topology.depth <= depth_limit[:, None])
        path_log_p = torch.where(ancestors, log_p[:, None], 0.0).sum(-1)
        depth = torch.where(accepted, topology.depth, -1)
        longest = depth == depth.amax(-1, keepdim=True)
        end = torch.where(longest, path_log_p, -torch.inf).argmax(-1)
        return ended_at(draft, end, p[torch.arange(rows, device=ids.device), end].argmax(-1))


def _values(processor: object) -> dict[str, object]:
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in vars(processor).items()}
