"""Requests: what a user asks for, prepared by transformers' own `generate`, and checked before decoding starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from decode.generation_config import require_plain, told, way_out
from decode.sequences import Request
from decode.strategies.grammar import Grammar
from decode.target import WARPERS
from medusa.backbone import PLAIN, Backbone, by_value, require_tree_support
from medusa.errors import RequestError
from medusa.loading import TextLimits, text_limits
from medusa.tree_support import TOKEN_TYPES, longrope_boundary, without_text_types

ADAPTERS_OF_A_CALL = "adapter_names cannot be combined with heads; call model.set_adapter instead"
EXPECTED_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
EXPECTED_INPUTS |= {"cache_params"}  # how Mamba calls its cache
"""Model inputs that `generate` itself adds to the ids. Others would change the text, and tree decoding refuses them."""


NEGATIVE = ("negative_prompt_ids", "negative_prompt_attention_mask")  # of guidance_scale, with a row for each prompt
OF_A_BATCH = {
    PrefixConstrainedLogitsProcessor: "pass prefix_allowed_tokens_fn instead",
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "pass guidance_scale and negative_prompt_ids instead",
}
"""Logits processors of transformers that hold something for each row of a batch."""
LASTING = {EosTokenCriteria, MaxLengthCriteria}
"""Stopping criteria that serve later texts as well; others may note a time or a text."""
_KEPT: WeakKeyDictionary[PreTrainedModel, tuple[object, Request]] = WeakKeyDictionary()
"""The last request of each model that serves any prompt, after what it was made of."""


def prepare(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int] | None = None,
    grammar: Grammar | None = None,
    **kwargs: Any,
) -> list[Request]:
    """Turn the arguments of `model.generate` into requests: `num_return_sequences` of them for each prompt.

    Each is prepared alone, without padding, so that penalties and minimal lengths count from its own prompt.
    Where nothing depends on the prompt, the first request serves all others, also those of later calls with the same
    options. `kwargs` are those of `model.generate`; for `seeds` see `with_generators`. All texts follow `grammar`, if
    it is given. Raise a `RequestError` if tree decoding does not support an option, or a prompt is empty or too
    long."""
    require_tree_support(model)
    if not len(prompts):
        raise RequestError("there are no prompts; give at least one")
    made_of = None if grammar is not None else _made_of(model, kwargs)
    kept = _KEPT.get(model)
    if made_of is not None and kept is not None and kept[0] == made_of:
        require_fitting(prompts, text_limits(model.config))
        copies = in_effect(model, kwargs, "num_return_sequences") or 1
        requests = [kept[1]._replace(prompt=list(prompt)) for prompt in prompts for _ in range(copies)]
    else:
        requests = _prepared(model, prompts, grammar, kwargs)
        if made_of is not None and _serves_all(requests[0]) and {*map(type, requests[0].criteria)} <= LASTING:
            _KEPT[model] = made_of, requests[0]
    require_longrope_alone(model, requests)
    return with_generators(model, requests, seeds)


def _made_of(model: PreTrainedModel, kwargs: dict[str, Any]) -> object:
    """All that a request is made of but the prompt, by value; `None` if it holds objects, which may change.

    Only stop strings need the tokenizer."""
    kwargs = {name: value for name, value in kwargs.items() if name != "tokenizer"}
    if in_effect(model, kwargs, "stop_strings"):
        return None
    found = kwargs, vars(model.generation_config)
    generate = type(cast(Any, getattr(model, "_orig_mod", model))).generate
    return (generate, model.device, by_value(found)) if _is_plain(found) else None


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        value = [*value.values()]
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else type(value) in PLAIN


def _prepared(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], grammar: Grammar | None, kwargs: dict[str, Any]
) -> list[Request]:
    if kwargs.get("streamer") is not None:
        raise RequestError("decode.steps yields the tokens and takes no streamer; pass the streamer to decode.generate")
    for name in ("assistant_model", "custom_generate"):
        if kwargs.get(name) is not None:
            raise RequestError(f"{name} cannot be combined with heads; leave it out")
    if kwargs.get("adapter_names") is not None:
        raise RequestError(ADAPTERS_OF_A_CALL)
    require_plain(partial(in_effect, model, kwargs), model.generation_config)  # before transformers prepares the caches
    kwargs = with_stop_strings(model, without_text_types(model, kwargs))
    inputs = {*inspect.signature(model.forward).parameters, *TOKEN_TYPES} - {"inputs_embeds"}
    _require_text({name: value for name, value in kwargs.items() if name in inputs})
    allowed = kwargs.pop("prefix_allowed_tokens_fn", None)
    copies = in_effect(model, kwargs, "num_return_sequences") or 1
    kwargs.pop("num_return_sequences", None)
    if copies > 1 and not in_effect(model, kwargs, "do_sample"):
        greedy = f"num_return_sequences is {copies}, and greedy decoding writes one text"
        raise RequestError(f"{greedy}; add do_sample=True, or leave it out")
    for processor in kwargs.get("logits_processor") or ():
        if type(processor) in OF_A_BATCH and len(prompts) * copies > 1:
            alone = f"{type(processor).__name__} was made for the batch, and each text is decoded alone"
            raise RequestError(f"{alone}; {OF_A_BATCH[type(processor)]}")
    negative = {name: value for name in NEGATIVE if isinstance(value := kwargs.get(name), Tensor)}
    for name, value in negative.items():
        if len(value) not in (1, len(prompts)):
            raise RequestError(f"{name} has {len(value)} rows; give one for each of the {len(prompts)} prompts")
    requests: list[Request] = []
    backbone = Backbone(model)
    own_length = any(type(criterion) is MaxLengthCriteria for criterion in kwargs.get("stopping_criteria") or ())
    for row, prompt in enumerate(prompt for prompt in prompts for _ in range(copies)):
        require_fitting([prompt], backbone)
        if requests and not own_length and _serves_all(requests[0]):
            requests.append(requests[0]._replace(prompt=list(prompt)))
            continue
        own: dict[str, Any] = {n: v[row // copies, None] for n, v in negative.items() if len(v) > 1}
        if allowed is not None:
            own["prefix_allowed_tokens_fn"] = lambda _, ids, row=row: allowed(row, ids)
        if grammar is not None:
            _require_same_ends(grammar, in_effect(model, kwargs, "eos_token_id"))
            others = kwargs.get("logits_processor") or []
            own["logits_processor"] = LogitsProcessorList([*others, grammar.processor(prompt)])
        requests += _prepare_row(backbone, prompt, kwargs | own)
    return requests


def _require_same_ends(grammar: Grammar, eos: int | list[int] | None) -> None:
    """Raise a `RequestError` if a text of the grammar cannot end with an EOS of the call."""
    if not {*grammar.ends} & {*(eos if isinstance(eos, list) else [eos])}:
        ends = " or ".join(map(str, grammar.ends))
        raise RequestError(f"a text of the grammar ends with {ends}, and eos_token_id is {eos}; leave it out")


def in_effect(model: PreTrainedModel, kwargs: Mapping[str, Any], name: str) -> Any:
    """The value of a field of the generation config in a call of `model.generate` with `kwargs`; `None`: a default."""
    if name in kwargs:
        return kwargs[name]
    given = getattr(kwargs.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if given is None else given


def with_generators(
    model: PreTrainedModel, requests: list[Request], seeds: Sequence[int] | None = None
) -> list[Request]:
    """Give every row (request) its own random number generator, so that its sample does not depend on other rows.

    `seeds` holds one seed per row. Without seeds, a single row draws from PyTorch's global generator, as in
    `model.generate`, and the rows of a batch are seeded from that generator. Raise a `RequestError` if the number of
    seeds is not the number of rows, or a seed is out of range."""
    if seeds is not None:
        _require_seeds(seeds, len(requests))
    if not requests[0].do_sample or (seeds is None and len(requests) == 1):
        return requests
    if seeds is None:
        seeds = torch.randint(2**63 - 1, (len(requests),)).tolist()
    device = Backbone(model).device
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    return [request._replace(generator=own) for request, own in zip(requests, generators, strict=True)]


def _require_seeds(seeds: Sequence[int], rows: int) -> None:
    if not isinstance(seeds, Sequence):
        raise RequestError(f"seeds is {_shown(seeds)}; give a list with one seed per row")
    if len(seeds) != rows:
        raise RequestError(f"{len(seeds)} seeds were given for {rows} rows; give one per row, copies included")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise RequestError(f"seeds holds {seed!r}; a seed is a whole number from 0 to 2**63 - 1")


def _serves_all(request: Request) -> bool:
    """Whether a request holds for any prompt: its processors look only at scores, and it counts new tokens.

    Its `config.max_length` and `MaxLengthCriteria` are those of its own prompt, and decoding reads neither.
    transformers takes a millisecond for each row, as much as several steps of a small model."""
    return request.config.max_new_tokens is not None and all(type(p) in WARPERS for p in request.processors)


def _max_length(config: GenerationConfig, criteria: StoppingCriteriaList) -> int:
    """The number of tokens at which a text ends, its prompt and padding included; a user's criterion comes first."""
    limits = (c.max_length for c in criteria if type(c) is MaxLengthCriteria)
    return ceil(min(limits, default=config.max_length))  # transformers takes 4.0, too


def _prepare_row(backbone: Backbone, prompt: Sequence[int], kwargs: dict[str, Any]) -> list[Request]:
    ids = torch.tensor([list(prompt)], device=backbone.device)
    # The mask is never derived from an id, and the caller makes the copies of a row.
    inputs: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "num_return_sequences": 1}
    model: Any = getattr(backbone.model, "_orig_mod", backbone.model)  # of a model wrapped by `torch.compile`
    # A checkpoint with code of its own may replace the model's attribute `generate`.
    return type(model).generate(model, ids, custom_generate=requests_of, **inputs, **kwargs)


def requests_of(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> list[Request]:
    """Make one `Request` per row from the arguments that `model.generate` passes to a decoding method.

    Raise a `RequestError` as `prepare` does, or if processors may read the padding of a batch."""
    require_tree_support(model)
    require_batch(input_ids)
    require_mask(model_kwargs.get("attention_mask"), input_ids)
    model_kwargs = without_text_types(model, model_kwargs)
    require_plain(lambda name: getattr(generation_config, name, None), model.generation_config)
    _require_supported(generation_config, input_ids, model_kwargs)
    rows = unpadded(input_ids, model_kwargs.get("attention_mask"))
    require_fitting(rows, text_limits(model.config))
    foreign = [p for p in logits_processor if type(p) not in WARPERS]
    if foreign and (len(rows) > 1 or len(rows[0]) < input_ids.shape[1]):
        raise RequestError(
            f"{type(foreign[0]).__name__} was made for the padded batch; use decode.generate, which prepares each row"
        )
    width, max_length = input_ids.shape[1], _max_length(generation_config, stopping_criteria)
    max_new_tokens = max_length - width
    if max_length != generation_config.max_length:  # a user's criterion is asked after a token
        max_new_tokens = max(max_new_tokens, 1)
    found = [Request(row, logits_processor, stopping_criteria, generation_config, max_new_tokens) for row in rows]
    require_longrope_alone(model, found)
    return found


def require_model(model: object) -> None:
    """Raise a `RequestError` unless `model` is a loaded model."""
    if not isinstance(model, nn.Module):
        way = 'load one, as with AutoModelForCausalLM.from_pretrained("org/model")'
        raise RequestError(f"model is {_shown(model)}, not a model; {way}")


def require_batch(ids: object, name: str = "input_ids") -> Tensor:
    """Return `ids`, the argument `name`, if they are token ids [B, T]; raise a `RequestError` for anything else."""
    if not isinstance(ids, Tensor) and hasattr(ids, "keys"):  # what a tokenizer returns
        raise RequestError(f"{name} is a {type(ids).__name__}; pass its tensors: **inputs, or {name}=inputs.input_ids")
    if isinstance(ids, Tensor) and ids.dim() == 2 and ids.dtype in (torch.int64, torch.int32):
        return ids
    way = "encode it with the tokenizer" if isinstance(ids, str) else "torch.tensor([ids]) makes one of one prompt"
    raise RequestError(f"{name} is {_shown(ids)}; give a LongTensor of shape (batch, length); {way}")


def require_mask(mask: object, ids: Tensor, name: str = "attention_mask") -> None:
    """Raise a `RequestError` unless `mask` has the shape of the token ids [B, T] and no row is padded on the right."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise RequestError(f"{name} is {_shown(mask)}; give a tensor of the shape of input_ids, {tuple(ids.shape)}")
    kept = mask.bool()
    _refuse_right_padding(kept.any(1) & ~kept[:, -1:].any(1), f"{name} hides the end of row")


def require_no_pads(ids: Tensor, pad: object, text: Sequence[object]) -> None:
    """Raise a `RequestError` if a batch [B, T] without a mask seems to be padded with the id `pad`.

    transformers makes a mask of padding on the left, unless the id is an EOS. `text`: EOS and BOS ids, which texts may
    begin with. The longest row has no padding, so rows that all end with the id are not padded on the right."""
    if ids.shape[1] == 0 or not isinstance(pad, int):
        return
    begins = ids[:, 0] == pad
    if begins.any() and pad not in text:
        row = int(begins.nonzero()[0])
        raise RequestError(f"the pad token {pad} begins row {row}, and there is no attention_mask; pass it")
    last = ids[:, -1] == pad
    if not last.all():
        found, more = f"there is no attention_mask, and the pad token {pad} ends row", ", and pass the attention_mask"
        _refuse_right_padding(last, found, more)


def _refuse_right_padding(rows: Tensor, found: str, more: str = "") -> None:
    """Raise a `RequestError` if one of the `rows` [B] is true; `found` tells what is wrong in the row."""
    if rows.any():
        way = f'pad on the left (tokenizer.padding_side = "left"){more}'
        raise RequestError(f"the prompts are padded on the right: {found} {int(rows.nonzero()[0])}; {way}")


def _shown(value: Any) -> str:
    """Describe a value in a few words: a tensor by shape and dtype, other values as Python shows them, cut."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def unpadded(input_ids: Tensor, attention_mask: Tensor | None = None) -> list[list[int]]:
    """Remove the padding from each row of a batch [B, T] by the attention mask; no mask means no padding."""
    if attention_mask is None:
        return input_ids.tolist()
    return [row[keep.bool()].tolist() for row, keep in zip(input_ids, attention_mask, strict=True)]


def _require_supported(config: GenerationConfig, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise RequestError(f"{mode.value.replace('_', ' ')} cannot be combined with heads; leave it out")
    if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise RequestError(
            "the prompt is empty; give at least one token, as input_ids (inputs_embeds are not supported)"
        )
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise RequestError("past_key_values hold text already; give all of it as input_ids")
    _require_usual_positions(model_kwargs.get("position_ids"), model_kwargs.get("attention_mask"), input_ids)
    if getattr(cache, "_is_user_defined", False) and (type(cache) is not DynamicCache or cache.offloading):
        raise RequestError(
            f"past_key_values is a {type(cache).__name__}; decoding has a cache of its own; leave it out"
        )
    _require_text(model_kwargs)


def _require_text(inputs: Mapping[str, Any]) -> None:
    """Raise a `RequestError` if one of the model's `inputs` is not one that `generate` makes of text itself.

    It may have any type: transformers 5.23 gives encoded images as a dict, which is empty without images."""
    for name, value in inputs.items():
        holds = isinstance(value, Tensor) or (isinstance(value, (list, tuple, Mapping)) and len(value) > 0)
        if name not in EXPECTED_INPUTS and holds:
            raise RequestError(f"the model input {name} is not supported by tree decoding; only text can be continued")


def _require_usual_positions(positions: Tensor | None, mask: Tensor | None, ids: Tensor) -> None:
    """Raise a `RequestError` unless `positions` [..., B or 1, T] number the tokens of each row of `ids` [B, T]."""
    if positions is None:
        return
    kept = torch.ones_like(ids) if mask is None else mask.long()
    fits = positions.shape[-1] == ids.shape[1] and positions.shape[-2] in (1, len(ids))
    if not fits or bool(((positions != kept.cumsum(-1) - 1) & kept.bool()).any()):
        raise RequestError(
            "position_ids are not those of a text without gaps, and heads need such a text; leave it out"
        )


def require_longrope_alone(model: PreTrainedModel, requests: Sequence[Request]) -> None:
    """Raise a `RequestError` if one of several texts may get so long that longrope rotates all of them differently."""
    if len(requests) == 1:
        return
    boundary, longest = longrope_boundary(model), max(len(r.prompt) + r.max_new_tokens for r in requests)
    if boundary is not None and longest > boundary:
        raise RequestError(
            f"longrope rotates all rows differently once one passes {boundary} tokens; decode one prompt at a time"
        )


def with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Replace `stop_strings` and `tokenizer` by a stopping criterion, as custom decoding methods get no tokenizer.

    Raise a `RequestError` if there are stop strings but no tokenizer."""
    tokenizer, stops = kwargs.pop("tokenizer", None), in_effect(model, kwargs, "stop_strings")
    if stops:
        if tokenizer is None:
            found = "stop_strings", stops, model.generation_config
            raise RequestError(f"{told(*found)}, which needs the tokenizer; pass tokenizer=..., or {way_out(*found)}")
        criteria = kwargs.pop("stopping_criteria", None) or []
        kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stops)])
        kwargs["stop_strings"] = None  # also those of the model's own config
    return kwargs


def require_fitting(prompts: Sequence[Sequence[int]], backbone: Backbone | TextLimits, model: str = "backbone") -> None:
    """Raise a `RequestError` if a prompt is empty, exceeds the context or has an unknown id; errors name `model`."""
    context = backbone.context
    for prompt in prompts:
        if not prompt:
            raise RequestError("a prompt is empty; give at least one token")
        if context is not None and len(prompt) > context:
            raise RequestError(f"the prompt has {len(prompt)} tokens, but the {model}'s context ends at {context}")
        if min(prompt) < 0:
            raise RequestError(f"the prompt holds the id {min(prompt)}; ids start at 0")
        if max(prompt) >= backbone.vocab_size:
            raise RequestError(
                f"the prompt holds the id {max(prompt)}, but the {model}'s vocabulary has {backbone.vocab_size}"
            )
