"""The loop: prefill, then propose -> verify -> accept -> compact, a generator of steps; the front door on top.

    for step in steps(model, heads, input_ids, max_new_tokens=256): ...
    out = generate(model, heads, **inputs, max_new_tokens=256, streamer=streamer)
    out = model.generate(**inputs, custom_generate=medusa_generate, medusa_heads=heads)

Nothing is left on the model: cache, masks and text belong to the call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decode.accept import Acceptance, accept_greedy, accept_typical, accept_walk
from decode.cache import TreeCache
from decode.clock import Clock
from decode.draft import Draft, Drafter, Frontier
from decode.drafters.heads import HeadsDrafter
from decode.sampling import Target, most_probable
from decode.sequences import Sequences
from decode.verify import Verifier
from medusa.backbone import Backbone, Readout, require_tree_support
from medusa.errors import RequestError
from medusa.heads import MedusaHeads
from medusa.tree import Tree, load_tree

ACCEPTANCES = ("greedy", "typical", "rejection")


@dataclass
class Step:
    """What one step gave, per row of the request."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    """Tokens written, cut at EOS, stop or length; only rows that took part."""
    lengths: dict[int, int] = field(default_factory=dict)
    """1 + accepted, before the cut; a last root that needed no forward counts 1."""


class Acceptor(NamedTuple):
    """An acceptance rule with its constants (paper section 2.3.1)."""

    rule: str
    epsilon: float = 0.09
    delta: float = 0.3


class Request(NamedTuple):
    """What transformers' `generate` prepared: prompts without padding, processors, criteria and configuration."""

    prompts: list[list[int]]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    max_new_tokens: int


class Session:
    """One request being decoded: the backbone, the rows, and the rules; `run` is the loop."""

    def __init__(self, model: PreTrainedModel, request: Request, slack: int = 0) -> None:
        self.backbone = Backbone(model)
        config = request.config
        self.target = Target(
            request.processors, bool(config.do_sample), keep_scores=bool(config.output_scores or config.output_logits)
        )
        self.sequences = Sequences(
            request.prompts,
            request.max_new_tokens,
            request.criteria,
            self.backbone.context,
            self.backbone.device,
            slack,
        )
        longest = max(map(len, request.prompts))
        room = min(request.max_new_tokens, 1024)  # more is added as the text grows
        self.cache = TreeCache(model.config, len(request.prompts), capacity=longest + room + slack + 1)

    def prefill(self) -> Frontier:
        """Read the prompts, right-padded: a causal model never looks at what stands behind a token."""
        prompts, device = self.sequences.prompts, self.backbone.device
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        positions = torch.arange(max(lengths), device=device).expand(len(prompts), -1)
        last = torch.tensor(lengths, device=device) - 1
        hidden, logits = self.backbone.forward(ids, self.cache, last=last, position_ids=positions)
        self.cache.commit_prompt(lengths)
        return Frontier(self.target.next(range(len(prompts)), self.sequences, logits), hidden)

    @torch.inference_mode()
    def run(self, drafter: Drafter, verifier: Verifier, acceptor: Acceptor, clock: Clock) -> Iterator[Step]:
        """Decode until every row has ended; one `Step` per step, the prefill not counted."""
        sequences, cache = self.sequences, self.cache
        frontier = self.prefill()
        rows = list(range(len(sequences)))
        clock.start()
        while rows:
            step = Step()
            roots = dict(zip(rows, frontier.root.tolist(), strict=True))
            for row, root in roots.items():
                written = sequences.extend(row, [root])
                if written:
                    step.ids[row], step.lengths[row] = written, 1
            rows, frontier = self._unfinished(rows, frontier)
            if not rows:
                if step.ids:
                    yield step
                return
            clock.lap("other")
            draft = drafter.propose(frontier)
            clock.lap("propose")
            readout = verifier(draft)
            clock.lap("verify")
            accepted = self._accept(draft, readout, rows, acceptor)
            written_ids, lengths = _to_host(draft, accepted)
            clock.lap("accept")
            cache.commit(accepted.path, lengths)
            frontier = Frontier(accepted.next_root, _at_end(readout.hidden, accepted))
            clock.lap("compact")
            for row, ids, length in zip(rows, written_ids, lengths, strict=True):
                step.ids[row] += sequences.extend(row, ids[1:length])
                step.lengths[row] = length
            rows, frontier = self._unfinished(rows, frontier)
            clock.lap("other")
            yield step
            clock.start()

    def _unfinished(self, rows: list[int], frontier: Frontier) -> tuple[list[int], Frontier]:
        """Drop the rows that have ended from the batch, so that no forward is spent on them."""
        left = [index for index, row in enumerate(rows) if self.sequences.finish_reason[row] is None]
        if left and len(left) < len(rows):
            self.cache.select(left)
            index = torch.tensor(left, device=frontier.root.device)
            frontier = Frontier(frontier.root[index], frontier.hidden[index])
        return [rows[index] for index in left], frontier

    def _accept(self, draft: Draft, readout: Readout, rows: list[int], acceptor: Acceptor) -> Acceptance:
        logits, room = readout.logits, self._room(draft)
        if self.target.is_argmax and acceptor.rule != "typical":
            return accept_greedy(draft, most_probable(logits).to(draft.ids.device), room)

        def after(index: int, path: list[int]) -> tuple[int, Tensor, Tensor]:
            more = draft.ids[index, path[1:]] if len(path) > 1 else None  # the root is written already
            return rows[index], self.sequences.prefix(rows[index], more), logits[index, path[-1]]

        if acceptor.rule == "typical":

            def probabilities(index: int, path: list[int]) -> Tensor:
                _, prefix, row_logits = after(index, path)
                return self.target.probabilities(prefix, row_logits)

            return accept_typical(draft, probabilities, acceptor.epsilon, acceptor.delta, room)
        return accept_walk(draft, lambda index, path: self.target.draw(*after(index, path)), room)

    def _room(self, draft: Draft) -> Tensor | None:
        """How deep each row's nodes may lie before the context ends; `None` where no node reaches it."""
        context = self.backbone.context
        if context is None or self.cache.longest + draft.tree.max_depth < context:
            return None
        return context - 1 - torch.tensor(self.cache.lengths, device=draft.ids.device)


def _to_host(draft: Draft, accepted: Acceptance) -> tuple[list[list[int]], list[int]]:
    """The ids on each accepted path (the padding repeats the root) and its length: the step's one synchronisation."""
    ids = draft.ids.gather(1, accepted.path.clamp_min(0))
    packed = torch.cat([accepted.length[:, None], ids], dim=1).tolist()
    return [row[1:] for row in packed], [row[0] for row in packed]


def _at_end(hidden: Tensor, accepted: Acceptance) -> Tensor:
    """hidden [B, N, H] -> [B, H] at the node where each path ended: the only position where heads are read."""
    end = accepted.path.gather(1, accepted.length[:, None] - 1).to(hidden.device)  # [B, 1]
    return hidden.gather(1, end[:, :, None].expand(-1, -1, hidden.shape[-1]))[:, 0]


def resolve_tree(tree: Tree | str | Sequence[Sequence[int]] | None, heads: MedusaHeads) -> Tree:
    """The tree given (object, name, file or paths), else the one saved with the heads, else a default."""
    if isinstance(tree, Tree):
        return tree
    if isinstance(tree, str):
        return load_tree(tree, heads.config.num_heads)
    if tree is None:
        return Tree.from_paths(heads.config.tree) if heads.config.tree else default_tree(heads.config.num_heads)
    return Tree.from_paths(tree)


def default_tree(num_heads: int) -> Tree:
    """A tree for heads about which nothing was measured: the 63 published paths of mc_sim_7b_63, as deep as they go."""
    return load_tree("mc_sim_7b_63", num_heads).clip(num_heads)


def resolve_acceptance(rule: str | None, do_sample: bool, epsilon: float, delta: float) -> Acceptor:
    """The rule to use: by default the lossless one, greedy without sampling and rejection with it.

    Raises:
        RequestError: no such rule, constants out of range, or a rule that does not fit the sampling mode.
    """
    if rule not in (None, *ACCEPTANCES):
        raise RequestError(f"acceptance is {rule!r}; choose one of {', '.join(ACCEPTANCES)}")
    if rule == "greedy" and do_sample:
        raise RequestError("acceptance 'greedy' writes no samples; use temperature 0 (do_sample=False) or 'rejection'")
    if rule == "typical" and not do_sample:
        raise RequestError("acceptance 'typical' needs a temperature above 0 (do_sample=True); at 0 use 'greedy'")
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 <= value <= 1:
            raise RequestError(f"{name} is {value}; it must lie between 0 and 1")
    return Acceptor(rule or ("rejection" if do_sample else "greedy"), epsilon, delta)


def medusa_session(
    model: PreTrainedModel, heads: MedusaHeads, request: Request, tree: Any, acceptor: Acceptor, clock: Clock | None
) -> tuple[Session, Iterator[Step]]:
    """A session that decodes with heads, and its steps."""
    require_tree_support(model)
    backbone = Backbone(model)
    drafter = HeadsDrafter(heads, backbone, resolve_tree(tree, heads))
    session = Session(model, request, slack=drafter.tree.num_nodes)
    verifier = Verifier(backbone, session.cache, drafter.tree)
    return session, session.run(drafter, verifier, acceptor, clock or Clock())


def prepare(model: PreTrainedModel, input_ids: Any, **kwargs: Any) -> Request:
    """Let transformers' `generate` prepare a request (defaults, processors, criteria), without decoding it.

    Raises:
        RequestError: an option that cannot be had with trees, or an empty prompt.
    """
    return model.generate(input_ids, custom_generate=_request, **with_stop_strings(kwargs))  # type: ignore[operator]


def with_stop_strings(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`stop_strings` and `tokenizer` among `kwargs` as a stopping criterion: `generate` keeps them from callables."""
    tokenizer, stops = kwargs.pop("tokenizer", None), kwargs.pop("stop_strings", None)
    if stops:
        if tokenizer is None:
            raise RequestError("stop_strings need the tokenizer; pass tokenizer=...")
        criteria = kwargs.pop("stopping_criteria", None) or []
        kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stops)])
    return kwargs


def _request(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Request:
    """What `model.generate` hands to a decoding method, as a `Request`."""
    if generation_config.num_beams > 1:
        raise RequestError(f"num_beams is {generation_config.num_beams}; beam search cannot be combined with heads")
    if model_kwargs.get("inputs_embeds") is not None:
        raise RequestError("inputs_embeds are not supported; pass input_ids")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None):
            raise RequestError(f"{name} is not available from tree decoding; run the model on the finished text")
    if input_ids.shape[1] == 0:
        raise RequestError("the prompt is empty; give at least one token")
    mask = model_kwargs.get("attention_mask")
    rows = input_ids.tolist() if mask is None else [r[m.bool()].tolist() for r, m in zip(input_ids, mask, strict=True)]
    if not all(rows):
        raise RequestError("a prompt is empty; give at least one token")
    require_fitting(rows, Backbone(model))
    max_new_tokens = int(generation_config.max_length) - input_ids.shape[1]
    return Request(rows, logits_processor, stopping_criteria, generation_config, max_new_tokens)


def require_fitting(prompts: Sequence[Sequence[int]], backbone: Backbone) -> None:
    """Raises:
    RequestError: a prompt is longer than the backbone's context, or holds an id that it does not know."""
    context = backbone.context
    for prompt in prompts:
        if context is not None and len(prompt) > context:
            raise RequestError(f"the prompt has {len(prompt)} tokens, but the backbone's context ends at {context}")
        if not 0 <= min(prompt) <= max(prompt) < backbone.vocab_size:
            raise RequestError(
                f"the prompt holds the id {max(prompt)}, but the backbone's vocabulary has {backbone.vocab_size}"
                if max(prompt) >= backbone.vocab_size
                else f"the prompt holds the id {min(prompt)}; ids start at 0"
            )


def steps(
    model: PreTrainedModel,
    heads: MedusaHeads,
    input_ids: Tensor,
    *,
    tree: Tree | str | Sequence[Sequence[int]] | None = None,
    acceptance: str | None = None,
    epsilon: float = 0.09,
    delta: float = 0.3,
    clock: Clock | None = None,
    **kwargs: Any,
) -> Iterator[Step]:
    """Decode `input_ids` [B, T] (left-padded with an `attention_mask` where lengths differ), a generator of steps.

    `kwargs` are those of `model.generate`. See `generate` for the rest.
    """
    kwargs.setdefault("attention_mask", torch.ones_like(input_ids))  # no mask is ever derived from an id
    request = prepare(model, input_ids, **kwargs)
    acceptor = resolve_acceptance(acceptance, bool(request.config.do_sample), epsilon, delta)
    yield from medusa_session(model, heads, request, tree, acceptor, clock)[1]


def medusa_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    medusa_heads: MedusaHeads | None = None,
    medusa_tree: Tree | str | Sequence[Sequence[int]] | None = None,
    medusa_acceptance: str | None = None,
    medusa_epsilon: float = 0.09,
    medusa_delta: float = 0.3,
    medusa_streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """A decoding method for `model.generate(custom_generate=medusa_generate, medusa_heads=heads)`.

    transformers keeps `streamer`, `tokenizer` and `assistant_model` from such a callable: pass `medusa_streamer`, or
    use `decode.generate`, which takes them all.
    """
    if medusa_heads is None:
        raise RequestError("medusa_generate needs heads: model.generate(..., medusa_heads=heads)")
    request = _request(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)
    acceptor = resolve_acceptance(medusa_acceptance, bool(generation_config.do_sample), medusa_epsilon, medusa_delta)
    keeps = generation_config.output_scores or generation_config.output_logits
    if acceptor.rule == "typical" and keeps:
        raise RequestError("output_scores cannot be had with acceptance 'typical'; use 'rejection'")
    if generation_config.output_logits:
        raise RequestError("output_logits is not supported; output_scores gives the processed ones")
    if medusa_streamer is not None and len(input_ids) > 1:
        raise RequestError("a streamer takes one prompt at a time; use decode.steps for batches")
    session, iterator = medusa_session(model, medusa_heads, request, medusa_tree, acceptor, None)
    if medusa_streamer is not None:
        medusa_streamer.put(input_ids.cpu())
    for step in iterator:
        if medusa_streamer is not None:
            medusa_streamer.put(torch.tensor(step.ids[0]))
    if medusa_streamer is not None:
        medusa_streamer.end()
    return _output(session, input_ids, generation_config)


def _output(session: Session, input_ids: Tensor, config: GenerationConfig) -> Tensor | GenerateDecoderOnlyOutput:
    """What `model.generate` returns: prompts as given, new tokens padded on the right."""
    pad = config.pad_token_id if config.pad_token_id is not None else min(session.sequences.eos, default=0)
    pad = pad[0] if isinstance(pad, (list, tuple)) else pad
    new_ids = session.sequences.new_ids
    width = max(map(len, new_ids))
    padded = torch.tensor([ids + [pad] * (width - len(ids)) for ids in new_ids], dtype=torch.long)
    sequences = torch.cat([input_ids, padded.to(input_ids.device).reshape(len(new_ids), width)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    kept = session.target.kept
    scores = None
    if kept is not None and config.output_scores:  # rows that ended earlier repeat their last scores under the padding
        scores = tuple(
            torch.cat([kept[row][min(at, len(ids) - 1)].clone() for row, ids in enumerate(new_ids)])
            for at in range(width)
        )
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores)  # type: ignore[arg-type]


def generate(
    model: PreTrainedModel,
    heads: MedusaHeads,
    inputs: Tensor | None = None,
    *,
    tree: Tree | str | Sequence[Sequence[int]] | None = None,
    acceptance: str | None = None,
    epsilon: float = 0.09,
    delta: float = 0.3,
    streamer: Any = None,
    **kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """`model.generate`, faster: takes what it takes, returns what it returns.

    Args:
        model: any decoder-only model of transformers that can hold a tree.
        heads: Medusa heads made for it.
        inputs: prompt ids [B, T]; or `input_ids=` and `attention_mask=` as a tokenizer gives them.
        tree: a `Tree`, its name, file or paths; by default the one saved with the heads.
        acceptance: `greedy` or `rejection` (lossless, the defaults without and with sampling) or `typical` (lossy).
        epsilon, delta: constants of typical acceptance (paper section 2.3.1).
        streamer, and all others (tokenizer, stop_strings, ...): as in `model.generate`.

    Raises:
        RequestError: heads of another shape, a tree deeper than the heads, a model that cannot hold a tree, or an
            option that trees cannot honour.
    """
    method = functools.partial(
        medusa_generate,
        medusa_heads=heads,
        medusa_tree=tree,
        medusa_acceptance=acceptance,
        medusa_epsilon=epsilon,
        medusa_delta=delta,
        medusa_streamer=streamer,
    )
    return model.generate(inputs, custom_generate=method, **with_stop_strings(kwargs))  # type: ignore[operator]
