"""The context that all draws of an experiment start from, and the target's distributions there.

Shapes: V vocabulary, N nodes, T length of a text, F texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.accept import ended_at
from decode.draft import Draft
from decode.drafters.base import DrafterFactory
from decode.loop import Acceptor, TreeStepper
from decode.request import prepare
from decode.session import Session
from decode.settings import Settings
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.inputs import HeadInputs
from medusa.tree import Tree
from medusa.vocabulary import lm_head_for, over_all

PATIENCE = 4  # a drafter is used as it is after this many times the steps that it asks for
STAR = 256  # nodes of a forward that looks at many continuations of the root
AT_ONCE = 8  # texts of a plain forward


def require_room(prompts: Sequence[Sequence[int]], settings: Settings, model: PreTrainedModel) -> None:
    """Check that each prompt leaves room for a root and for one token after which the second is drawn.

    Raises:
        RequestError: a prompt is too long for the context of the backbone, or of the amateur."""
    models = {"backbone": model} | ({} if settings.amateur is None else {"amateur": settings.amateur.model})
    longest = max(map(len, prompts))
    for name, some in models.items():
        context = Backbone(some).context
        if context is not None and longest > context - 2:
            raise RequestError(
                f"a prompt to draw from has {longest} tokens, but may have {context - 2}: the {name}'s context ends at "
                f"{context}; shorten it, or put shorter ones first and choose with --sampled-prompts"
            )


class FixedContext:
    """A prompt and a fixed root: the backbone's most probable token after the prompt.

    A drafter that learns from steps (such as n-grams) first decodes some greedily, until it drafts.
    """

    def __init__(self, model: PreTrainedModel, prompt: list[int], settings: Settings, source: DrafterFactory) -> None:
        """`settings`: temperature, top-k and the like.

        Raises:
            RequestError: as `require_room`."""
        require_room([prompt], settings, model)
        requests = prepare(model, [prompt], seeds=[0], **settings.generate_kwargs())
        self.model, self.source, self.amateur = model, source, settings.amateur
        self.processors = requests[0].processors
        if self.amateur is not None:
            self.amateur.require_fitting(model, requests)
        slack = max(source.num_nodes, STAR)
        self.session = Session(model, requests, slack=slack, heads=source.heads, verifiers=self.amateur)
        self.drafter = source.start(self.session)
        self.stepper = TreeStepper(self.session, self.drafter, Acceptor("greedy"))
        self.frontier = self.stepper.frontier = self.session.prefill(most_probable_first=True)
        self.session.sequences.extend(0, self.frontier.root.tolist())
        self._warm_up(source.warm_up)
        self.root = int(self.frontier.root)
        self.text = self.session.sequences.tail(0, 0)

    def _warm_up(self, steps: int) -> None:
        """Take greedy steps without their drafts, at least `steps`, until the drafter drafts."""
        session, sequences = self.session, self.session.sequences
        room = (session.backbone.context or 1 << 30) - 2
        for step in range(steps * PATIENCE):
            draft = self.drafter.propose(self.frontier)
            ready = step >= steps and draft.topology.num_nodes > 1
            if ready or sequences.finish_reason[0] is not None or sequences.lengths[0] > room:
                return
            readout = session.verifier(draft)
            root = session.target.next([0], sequences, readout.logits[:, 0], most_probable_only=True)
            accepted = ended_at(draft, draft.ids.new_zeros(1), root.to(draft.ids.device))
            self.frontier = self.stepper.frontier = self.stepper.compact(draft, readout, accepted, [1])
            sequences.extend(0, self.frontier.root.tolist())

    def first_head(self) -> Tensor | None:
        """The distribution of the first head [V], if heads draft."""
        heads, backbone, frontier = self.source.heads, self.session.backbone, self.frontier
        if heads is None:
            return None
        hidden = frontier.hidden[:, None].to(heads.device, heads.dtype)
        root = backbone.embed(frontier.root[:, None, None]).to(hidden)
        logits = heads(HeadInputs(hidden, root, frontier.context_kv), lm_head_for(heads, backbone), 1)
        logits = over_all(heads, logits[:, :, 0], backbone.vocab_size)
        return self.session.target.draft_probabilities([0], logits.transpose(0, 1))[0, 0]

    def expected(self, texts: Sequence[list[int]]) -> Tensor:
        """The target's scores [F, V] after texts of one length, by plain forwards and transformers' processors."""
        ids = torch.tensor(texts, device=self.session.backbone.device)
        logits = torch.cat([self._plain_logits(part) for part in ids.split(AT_ONCE)])
        rows = range(len(ids))
        return torch.cat([self.processors(ids[i : i + 1], logits[i : i + 1].float()) for i in rows])  # type: ignore[arg-type]

    def _plain_logits(self, ids: Tensor) -> Tensor:
        """Logits [F, V] after texts [F, T], before the processors."""
        logits = self.model(input_ids=ids, use_cache=False).logits[:, -1]
        if self.amateur is None:
            return logits
        return self.amateur.contrast(logits, self.amateur.model(input_ids=ids, use_cache=False).logits[:, -1])

    def verified(self, paths: Sequence[list[int]]) -> Tensor:
        """The target's scores [F, V] after the root and F paths of at most one token, by tree forwards."""
        tokens = [path[0] for path in paths if path]
        found = []
        for start in range(0, max(len(tokens), 1), STAR - 1):
            part = tokens[start : start + STAR - 1]
            star = Tree.top_k([len(part)]) if part else Tree.chain(0)
            star = star.to(self.session.backbone.device)
            draft = Draft(torch.tensor([[self.root, *part]], device=star.depth.device), Topology.of(star))
            scores = self.scores_of_nodes(draft)
            found.append(scores[1:] if part else scores)
        return torch.cat(found)

    def scores_of_nodes(self, draft: Draft) -> Tensor:
        """The target's scores [N, V] after every node of a draft of one row. The cache drops the draft again."""
        session = self.session
        logits = session.verifier(draft).logits[0]
        session.verifier.commit(draft.ids.new_zeros(1, 1), [0])
        scores = []
        for node, path in enumerate(draft.topology.paths[0, :, 1:]):
            prefix = session.sequences.prefix(0, draft.ids[0, path[path >= 0]])
            scores.append(session.target.scores(0, prefix, logits[node]))
        return torch.cat(scores)
