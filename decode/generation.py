"""The front doors: `generate` for texts, `steps` for the loop, `medusa_generate` for use from inside transformers.

out = generate(model, heads, **inputs, max_new_tokens=256, streamer=streamer)
out = generate(model, drafter="ngram", **inputs, max_new_tokens=256)
for step in steps(model, heads, input_ids, max_new_tokens=256): ...
out = model.generate(**inputs, custom_generate=medusa_generate, medusa_heads=heads)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decode.compiled.regions import Compiled
from decode.draft import DrafterContext, DrafterFactory
from decode.drafters import DrafterLike, drafter_factory
from decode.drafters.trained_heads import TrainedHeads, heads_drafter
from decode.loop import Acceptor, Session, Step
from decode.reference import plain_session
from decode.request import (
    LOSSLESS,
    TreeLike,
    prepare,
    requests_of,
    require_amateur,
    require_compilable,
    require_one_shape,
    resolve_acceptance,
    with_generators,
)
from decode.sequences import Request
from decode.strategies.contrastive import Amateur, AmateurLike
from decode.timers import Timer
from decode.tree_check import require_tree_forward
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads


def medusa_session(
    model: PreTrainedModel,
    heads: MedusaHeads | None,
    requests: Sequence[Request],
    tree: TreeLike,
    acceptor: Acceptor,
    clock: Timer | None = None,
    keep_hidden: bool = False,
    compile: bool = False,
    drafter: DrafterLike = None,
    amateur: Amateur | None = None,
) -> tuple[Session, Iterator[Step]]:
    """A session that decodes with a drafter, the heads by default; with `keep_hidden` it keeps what the LM head read.

    `compile`: steps as one compiled region (`decode.compiled.regions`); `amateur`: whom the backbone is contrasted
    with.

    Raises:
        RequestError: heads of another shape, a tree that they cannot fill, a drafter that is none or lacks something,
            scores asked of a lossy rule, an amateur that does not fit, or what cannot be compiled."""
    source = drafter_factory(drafter, DrafterContext(model, heads, tree))
    config = requests[0].config
    if acceptor.passes is not None and (config.output_scores or config.output_logits):
        exact = "rejection" if config.do_sample else "greedy"
        raise RequestError(
            f"output_scores and output_logits cannot be had with acceptance {acceptor.name!r}; use {exact!r}"
        )
    require_compilable(compile, acceptor)
    require_drawable(source, acceptor)
    require_tree_forward(model)
    if source.num_nodes == 1 and acceptor.rule in LOSSLESS:
        # the same text, without the price of a tree
        return plain_session(model, requests, clock, keep_hidden, compile, amateur)
    if amateur is not None:
        require_amateur(amateur, model, requests, compile)
    session = Session(model, requests, source.num_nodes, acceptor.truncation, keep_hidden, source.heads, amateur)
    if compile:
        return session, _compiled(session, source, acceptor).run(clock or Timer())
    started = source.start(session, drawn=acceptor.draft == "sample")
    return session, session.run(started, session.verifier(), acceptor, clock or Timer())


def _compiled(session: Session, source: DrafterFactory, acceptor: Acceptor) -> Compiled:
    if not isinstance(source, TrainedHeads):
        raise RequestError(
            "only steps of heads can be compiled, as other drafters work on the host; leave one of them out"
        )
    heads, tree = source.heads, source.tree
    require_one_shape(True, tree.min_confidence)
    return Compiled(session, acceptor, tree, heads, lambda: heads_drafter(heads, session.backbone, tree))


def require_drawable(source: DrafterFactory, acceptor: Acceptor) -> None:
    """Raises:
    RequestError: the drafter has no distributions that guesses could be drawn from."""
    if acceptor.draft == "sample" and not source.can_draw:
        raise RequestError("this drafter's guesses are not drawn from distributions of its own; use draft topk")


def unpadded(input_ids: Tensor, attention_mask: Tensor | None = None) -> list[list[int]]:
    """Rows of a batch [B, T] without their padding; no mask means that there is none, whatever the ids are."""
    if attention_mask is None:
        return input_ids.tolist()
    return [row[keep.bool()].tolist() for row, keep in zip(input_ids, attention_mask, strict=True)]


def steps(
    model: PreTrainedModel,
    heads: MedusaHeads | None,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    tree: TreeLike = None,
    acceptance: str | None = None,
    epsilon: float = 0.09,
    delta: float = 0.3,
    draft: str | None = None,
    stop_drafting: float = 0.0,
    drafter: DrafterLike = None,
    amateur: AmateurLike = None,
    clock: Timer | None = None,
    compile: bool = False,
    **kwargs: Any,
) -> Iterator[Step]:
    """Decode `input_ids` [B, T] (padded with an `attention_mask` where lengths differ), a generator of steps.

    `kwargs` are those of `model.generate`. See `generate` for the rest.
    """
    requests = prepare(model, unpadded(input_ids, attention_mask), **kwargs)
    acceptor = resolve_acceptance(acceptance, requests[0].do_sample, epsilon, delta, draft, stop_drafting)
    source = drafter_factory(drafter, DrafterContext(model, heads, tree, stop_drafting=stop_drafting))
    beside = Amateur.of(amateur)
    session = medusa_session(
        model, heads, requests, None, acceptor, clock, compile=compile, drafter=source, amateur=beside
    )
    yield from session[1]


def generate(
    model: PreTrainedModel,
    heads: MedusaHeads | None = None,
    inputs: Tensor | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    tree: TreeLike = None,
    acceptance: str | None = None,
    epsilon: float = 0.09,
    delta: float = 0.3,
    draft: str | None = None,
    stop_drafting: float = 0.0,
    compile: bool = False,
    drafter: DrafterLike = None,
    amateur: AmateurLike = None,
    streamer: Any = None,
    **kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """`model.generate`, faster: takes what it takes, returns what it returns.

    Args:
        model: any decoder-only model of transformers that can hold a tree.
        heads: Medusa heads made for it; `None` with a drafter that needs none.
        inputs, input_ids, attention_mask: prompts [B, T], as a tokenizer gives them.
        tree: a `Tree`, its name, file or paths; by default the one saved with the heads.
        acceptance: `greedy` or `rejection` (lossless, the defaults without and with sampling), `typical` or
            `typical-sampled` (lossy); without sampling also `topk:K` and `distance:D` (lossy, `decode.accept`).
        epsilon, delta: constants of typical acceptance (paper section 2.3.1).
        draft: `topk` (the default: the heads' best guesses) or `sample` (draws from the heads' distributions).
        compile: run whole steps as one region of `torch.compile`, a CUDA graph on a GPU (`decode.compiled.regions`):
        the first
            step takes seconds to minutes, which calls with the same model, heads, tree and options have behind them.
        stop_drafting: with a dynamic tree, the confidence below which a node is not drafted, nor any under it; 0:
            always all nodes. Steps are then as large as the heads are sure, and the text is the same.
        drafter: who guesses ahead, `heads` by default: `NAME[:options]` (docs/drafters.md), a plan such as
            `NgramConfig(tokens=5)`, or a source, which keeps what it has loaded from call to call.
        amateur: a small model of the same vocabulary, for contrastive decoding (docs/strategies.md), or an `Amateur`
            with constants of its own (`decode.strategies.contrastive`); whoever drafts, the text then follows the
            contrast of both.
        seeds (in `kwargs`): one a row, copies by `num_return_sequences` counted; a row's text then depends on its
            prompt and seed alone. Without them one row draws from PyTorch's generator as `model.generate` does, and the
            rows of a batch are seeded from it.
        streamer, and all others (tokenizer, stop_strings, ...): as in `model.generate`.

    Raises:
        RequestError: heads of another shape, a tree deeper than the heads, a model that cannot hold a tree, an amateur
            that does not fit, or an option that trees cannot honour.
    """
    ids = inputs if inputs is not None else input_ids
    if ids is None:
        raise RequestError("no prompt: pass inputs or input_ids")
    requests = prepare(model, unpadded(ids, attention_mask), **kwargs)
    acceptor = resolve_acceptance(acceptance, requests[0].do_sample, epsilon, delta, draft, stop_drafting)
    source = drafter_factory(drafter, DrafterContext(model, heads, tree, stop_drafting=stop_drafting))
    session = _run(model, source, requests, acceptor, streamer, compile, Amateur.of(amateur))
    return _output(session, ids.repeat_interleave(len(requests) // len(ids), dim=0), requests[0].config)


def medusa_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    medusa_heads: MedusaHeads | None = None,
    medusa_tree: TreeLike = None,
    medusa_acceptance: str | None = None,
    medusa_epsilon: float = 0.09,
    medusa_delta: float = 0.3,
    medusa_draft: str | None = None,
    medusa_stop_drafting: float = 0.0,
    medusa_compile: bool = False,
    medusa_drafter: DrafterLike = None,
    medusa_amateur: AmateurLike = None,
    medusa_streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """A decoding method for `model.generate(custom_generate=medusa_generate, medusa_heads=heads)`.

    transformers keeps `streamer`, `tokenizer` and `assistant_model` from such a callable, and prepares processors for
    the padded batch: pass `medusa_streamer`, and use `decode.generate` for stop strings and for penalties in batches.
    """
    requests = requests_of(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)
    requests = with_generators(model, requests)
    acceptor = resolve_acceptance(
        medusa_acceptance, requests[0].do_sample, medusa_epsilon, medusa_delta, medusa_draft, medusa_stop_drafting
    )
    materials = DrafterContext(model, medusa_heads, medusa_tree, stop_drafting=medusa_stop_drafting)
    source, amateur = drafter_factory(medusa_drafter, materials), Amateur.of(medusa_amateur)
    session = _run(model, source, requests, acceptor, medusa_streamer, medusa_compile, amateur)
    return _output(session, input_ids, generation_config)


def _run(
    model: PreTrainedModel,
    source: DrafterFactory,
    requests: Sequence[Request],
    acceptor: Acceptor,
    streamer: Any,
    compile: bool,
    amateur: Amateur | None,
) -> Session:
    """Decode to the end, feeding `streamer` the prompt and then the tokens of every step."""
    if streamer is not None and len(requests) > 1:
        raise RequestError("a streamer takes one prompt at a time; use decode.steps for batches")
    session, iterator = medusa_session(
        model, None, requests, None, acceptor, compile=compile, drafter=source, amateur=amateur
    )
    if streamer is not None:
        streamer.put(torch.tensor([requests[0].prompt]))
    for step in iterator:
        if streamer is not None:
            streamer.put(torch.tensor(step.ids[0]))
    if streamer is not None:
        streamer.end()
    return session


def _output(session: Session, input_ids: Tensor, config: GenerationConfig) -> Tensor | GenerateDecoderOnlyOutput:
    """What `model.generate` returns: prompts as given, new tokens padded on the right."""
    pad = getattr(config, "_pad_token_tensor", None)  # what `generate` settled on, from pad or the first EOS
    new_ids = session.sequences.new_ids
    width = max(map(len, new_ids))
    padded = torch.full((len(new_ids), width), 0 if pad is None else int(pad), dtype=torch.long)
    for row, ids in enumerate(new_ids):
        padded[row, : len(ids)] = torch.tensor(ids, dtype=torch.long)
    sequences = torch.cat([input_ids, padded.to(input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    kept = {"scores": session.target.kept_scores, "logits": session.target.kept_logits}
    by_position = {
        name: None if of_rows is None else session.target.by_position(of_rows, new_ids, width)
        for name, of_rows in kept.items()
    }
    return GenerateDecoderOnlyOutput(sequences=sequences, **by_position)  # type: ignore[arg-type]
