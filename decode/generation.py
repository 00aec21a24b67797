"""The functions that users call: `generate` for texts, `steps` for the loop, `medusa_generate` inside transformers.

out = generate(model, heads, **inputs, max_new_tokens=256, streamer=streamer)
out = generate(model, drafter="ngram", **inputs, max_new_tokens=256)
for step in steps(model, heads, input_ids, max_new_tokens=256): ...
out = model.generate(**inputs, custom_generate=medusa_generate, medusa_heads=heads)"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext, DrafterLike
from decode.drafters.layouts import TreeLike
from decode.loop import Step, Timer
from decode.request import (
    ADAPTERS_OF_A_CALL,
    in_effect,
    prepare,
    requests_of,
    require_batch,
    require_mask,
    require_model,
    require_no_pads,
    unpadded,
    with_generators,
)
from decode.sequences import Request
from decode.settings import DecodingOptions, listing_options
from decode.strategies.contrastive import Amateur, AmateurLike
from decode.texts import Decoding, stepper_for
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree_support import drop_call_hooks


@listing_options()
def steps(
    model: PreTrainedModel,
    heads: MedusaHeads | None,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    tree: TreeLike = None,
    drafter: DrafterLike = None,
    amateur: AmateurLike = None,
    timer: Timer | None = None,
    keep_drafts: bool = False,
    **kwargs: Any,
) -> Iterator[Step]:
    """Decode prompts [B, T] and yield a `Step` per decoding step; prompts padded on the left need an `attention_mask`.

    `keep_drafts`: each `Step` also holds its drafts with the accepted nodes (`Step.drafts`), which costs a copy to the
    host per step. `kwargs` are those of `model.generate`; for the other arguments see `generate`."""
    options = DecodingOptions.taken_from(kwargs)
    requests = prepare(model, _prompts(model, input_ids, attention_mask, kwargs), **kwargs)
    return iter(_start(DrafterContext(model, heads, tree), requests, options, drafter, amateur, timer, keep_drafts))


@listing_options()
def generate(
    model: PreTrainedModel,
    heads: MedusaHeads | None = None,
    inputs: Tensor | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    tree: TreeLike = None,
    drafter: DrafterLike = None,
    amateur: AmateurLike = None,
    streamer: BaseStreamer | None = None,
    **kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate text with heads or another drafter: `model.generate`, but faster, with the same arguments and results.

    Args:
        model: any decoder-only model of transformers that works with tree attention masks.
        heads: Medusa heads made for the model; `None` with a drafter that needs none.
        inputs, input_ids, attention_mask: prompts [B, T], as a tokenizer returns them that pads on the left.
        tree: a `Tree`, its name, file or paths; by default the tree saved with the heads.
        drafter: what proposes tokens, by default the heads: `NAME[:options]` (docs/drafters.md), a config such as
            `NgramConfig(tokens=5)`, or a `DrafterFactory`, which keeps what it has loaded from call to call.
        amateur: a small model with the same vocabulary, for contrastive decoding, or an `Amateur`, which also sets the
            contrast's constants (docs/drafters.md). The text then follows both models' contrast with any drafter.
        streamer: receives the prompt and then the tokens of every step, as in `model.generate`.
        seeds (in `kwargs`): one per row, copies by `num_return_sequences` included; a row's text then depends only on
            the row's prompt and seed. Without seeds, one row draws from PyTorch's generator as in `model.generate`, and
            the rows of a batch are seeded from that generator.
        grammar (in `kwargs`): a grammar that all texts follow (`decode.strategies.grammar`, docs/drafters.md).
        acceptance, draft, stop_drafting, epsilon, delta, compile, cuda_graphs, numerics (in `kwargs`): the fields of
            `decode.settings.DecodingOptions`.
        kwargs: all other arguments of `model.generate` (tokenizer, stop_strings, ...).

    Raises:
        RequestError: prompts that are no token ids or are padded on the right, heads of another shape, a tree deeper
            than the heads, a model without tree attention, an amateur that does not fit, or an option that tree
            decoding does not support."""
    options = DecodingOptions.taken_from(kwargs)
    if (inputs is None) == (input_ids is None):
        raise RequestError("pass the prompt either as inputs or as input_ids")
    ids = require_batch(inputs, "inputs") if inputs is not None else require_batch(input_ids)
    requests = prepare(model, _prompts(model, ids, attention_mask, kwargs), **kwargs)
    begun = _start(DrafterContext(model, heads, tree), requests, options, drafter, amateur)
    return _finished(begun, streamer, ids.repeat_interleave(len(requests) // len(ids), dim=0), requests[0].config)


@listing_options(prefix="medusa_")
def medusa_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    medusa_heads: MedusaHeads | None = None,
    medusa_tree: TreeLike = None,
    medusa_drafter: DrafterLike = None,
    medusa_amateur: AmateurLike = None,
    medusa_streamer: BaseStreamer | None = None,
    medusa_seeds: Sequence[int] | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """A decoding method for `model.generate(custom_generate=medusa_generate, medusa_heads=heads)`.

    An argument `medusa_NAME` is the argument NAME of `decode.generate`. transformers passes no `streamer`, `tokenizer`
    or `assistant_model` to a custom decoding method, and prepares processors for the padded batch. So pass
    `medusa_streamer`, and use `decode.generate` for stop strings, grammars, and penalties in batches. Raise a
    `RequestError` as `generate` does, and if `model.generate` got a `streamer` or an `assistant_model`."""
    _require_nothing_dropped()
    if drop_call_hooks(model):
        raise RequestError(ADAPTERS_OF_A_CALL)
    options = DecodingOptions.taken_from(model_kwargs, prefix="medusa_")
    requests = requests_of(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)
    requests, context = with_generators(model, requests, medusa_seeds), DrafterContext(model, medusa_heads, medusa_tree)
    begun = _start(context, requests, options, medusa_drafter, medusa_amateur)
    return _finished(begun, medusa_streamer, input_ids, generation_config)


def _require_nothing_dropped() -> None:
    """Raise a `RequestError` if `model.generate`, the caller's caller, got an argument that it does not pass on.

    transformers passes no `streamer` and no `assistant_model` to a custom decoding method, and says nothing. Only the
    local variables of its frame still hold them."""
    caller = sys._getframe(2)
    if caller.f_globals.get("__name__") != "transformers.generation.utils":
        return
    for name, way in (
        ("streamer", "pass medusa_streamer=, or use decode.generate, which takes a streamer"),
        ("assistant_model", 'leave it out, or use decode.generate with drafter="model:NAME"'),
    ):
        if caller.f_locals.get(name) is not None:
            raise RequestError(f"transformers passes no {name} to custom_generate; {way}")


def _prompts(
    model: PreTrainedModel, ids: Tensor, attention_mask: Tensor | None, kwargs: Mapping[str, Any]
) -> list[list[int]]:
    """Return the prompts of a call: the rows of `ids` [B, T] without their padding.

    Raise a `RequestError` if the model, the ids or the mask are something else, or are padded on the right."""
    require_model(model)
    require_batch(ids)
    require_mask(attention_mask, ids)
    if attention_mask is None:
        pad, bos, ends = (in_effect(model, kwargs, f"{name}_token_id") for name in ("pad", "bos", "eos"))
        require_no_pads(ids, pad, [bos, *(ends if isinstance(ends, list) else [ends])])
    return unpadded(ids, attention_mask)


def _start(
    context: DrafterContext,
    requests: Sequence[Request],
    options: DecodingOptions,
    drafter: DrafterLike,
    amateur: AmateurLike,
    timer: Timer | None = None,
    keep_drafts: bool = False,
) -> Decoding:
    rule = options.rule_for(requests[0].do_sample)
    factory = drafter_factory(drafter, context._replace(stop_drafting=options.stop_drafting))
    contrast = Amateur.of(amateur)
    stepper = stepper_for(
        context.model, factory, requests, rule, options.compiled, contrast, options.stable, keep_drafts=keep_drafts
    )
    return Decoding(stepper, timer)


def _finished(
    begun: Decoding, streamer: BaseStreamer | None, input_ids: Tensor, config: GenerationConfig
) -> Tensor | GenerateDecoderOnlyOutput:
    """Run all steps; returns what `model.generate` returns: the prompts as given, then new tokens, padded on the right.

    `streamer` receives the prompt, and then the tokens of every step."""
    sequences, target = begun.session.sequences, begun.session.target
    if streamer is not None and len(sequences) > 1:
        raise RequestError("a streamer takes one prompt at a time; use decode.steps for batches")
    if streamer is not None:
        streamer.put(torch.tensor([sequences.prompts[0]]))
        for step in begun:
            streamer.put(torch.tensor(step.ids[0]))
        streamer.end()
    else:
        begun.finish()
    pad = getattr(config, "_pad_token_tensor", None)  # what `generate` derived from the pad token or the first EOS
    new_ids = [torch.tensor(ids, dtype=torch.long) for ids in sequences.new_ids]
    padded = pad_sequence(new_ids, batch_first=True, padding_value=0 if pad is None else int(pad))
    ids = torch.cat([input_ids, padded.to(input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return ids
    by_position = {}
    for name, rows in (("scores", target.kept_scores), ("logits", target.kept_logits)):
        if rows is not None:  # a tensor [B, V] for each new token; short rows repeat their last one
            by_position[name] = tuple(
                torch.cat([row[min(at, len(own) - 1)].clone() for row, own in zip(rows, new_ids, strict=True)])
                for at in range(padded.shape[1])
            )
    return GenerateDecoderOnlyOutput(sequences=ids, **by_position)  # type: ignore[arg-type]
