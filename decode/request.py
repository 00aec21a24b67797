"""What a user asks for, prepared by transformers' own `generate` and checked: nothing here decodes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode

from decode.drafters.dynamic_tree import DynamicTree
from decode.drafters.small_model import require_same_vocabulary
from decode.loop import Acceptor
from decode.sampling import POSITION_FREE
from decode.sequences import Request
from decode.strategies.contrastive import Amateur
from decode.tree_check import require_tree_forward
from medusa.backbone import Backbone, require_tree_support
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import Layout, Tree
from medusa.tree_files import load_tree

LOSSLESS = ("greedy", "rejection")
LOSSY = ("typical", "typical-sampled")
"""Those above temperature 0."""
LOSSY_GREEDY = {"topk": ("K", 1), "distance": ("D", 0)}
"""Those of temperature 0, `NAME:NUMBER`: what stands for the number, and the least that it may be."""
ACCEPTANCES = (*LOSSLESS, *LOSSY, *(f"{name}:{number}" for name, (number, _) in LOSSY_GREEDY.items()))
DRAFTS = ("topk", "sample")
TreeLike = Layout | str | Sequence[Sequence[int]] | None
# What `generate` itself hands over besides ids; anything else would change the text, and is not passed on by us.
EXPECTED_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}


def prepare(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None = None, **kwargs: Any
) -> list[Request]:
    """One request per prompt (times `num_return_sequences`): defaults, processors and criteria as alone.

    Each row is prepared by itself, from its ids without padding: penalties, minimal lengths and the like count from
    the row's own prompt. `kwargs` are those of `model.generate`; for `seeds` see `with_generators`.

    Raises:
        RequestError: an option that cannot be had with trees, an empty prompt, or one that does not fit.
    """
    require_tree_support(model)
    if kwargs.get("streamer") is not None:
        raise RequestError("a streamer belongs to decode.generate; decode.steps hands out the tokens itself")
    if kwargs.get("assistant_model") is not None:
        raise RequestError("an assistant_model cannot be combined with heads; leave it out")
    kwargs = with_stop_strings(model, kwargs)
    allowed = kwargs.pop("prefix_allowed_tokens_fn", None)
    copies = kwargs.pop("num_return_sequences", None)
    if copies is None:
        config = kwargs.get("generation_config") or model.generation_config
        copies = getattr(config, "num_return_sequences", None) or 1
    requests: list[Request] = []
    for prompt in prompts:
        for _ in range(copies):
            row = len(requests)
            own = {} if allowed is None else {"prefix_allowed_tokens_fn": lambda _, ids, row=row: allowed(row, ids)}
            requests += _prepare_row(model, prompt, kwargs | own)
    _require_longrope_alone(model, requests)
    return with_generators(model, requests, seeds)


def with_generators(
    model: PreTrainedModel, requests: list[Request], seeds: Sequence[int] | None = None
) -> list[Request]:
    """Give every row a stream of random numbers of its own, so that its sample does not depend on the others.

    `seeds`: one a row. Without them one row alone draws from PyTorch's global generator, as `model.generate` does, and
    the rows of a batch are seeded from it.

    Raises:
        RequestError: not one seed a row.
    """
    if not requests[0].do_sample or (seeds is None and len(requests) == 1):
        return requests
    if seeds is None:
        seeds = torch.randint(2**63 - 1, (len(requests),)).tolist()
    if len(seeds) != len(requests):
        raise RequestError(f"{len(seeds)} seeds were given for {len(requests)} rows; give one a row, copies counted")
    for seed in seeds:
        if not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise RequestError(f"seeds holds {seed!r}; a seed is a whole number from 0 to 2**63 - 1")
    device = Backbone(model).device
    return [
        request._replace(generator=torch.Generator(device).manual_seed(seed))
        for request, seed in zip(requests, seeds, strict=True)
    ]


def _prepare_row(model: PreTrainedModel, prompt: Sequence[int], kwargs: dict[str, Any]) -> list[Request]:
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    require_fitting([prompt], Backbone(model))
    ids = torch.tensor([list(prompt)], device=Backbone(model).device)
    # No mask is ever derived from an id, and copies of a row are made by the caller.
    inputs: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "num_return_sequences": 1}
    return model.generate(ids, custom_generate=requests_of, **inputs, **kwargs)  # type: ignore[operator]


def requests_of(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> list[Request]:
    """What `model.generate` hands to a decoding method, as one `Request` per row.

    Raises:
        RequestError: as `prepare`; also a padded batch with processors that were made for its padded rows.
    """
    require_tree_support(model)
    _require_supported(generation_config, input_ids, model_kwargs)
    mask = model_kwargs.get("attention_mask")
    rows = input_ids.tolist() if mask is None else [r[m.bool()].tolist() for r, m in zip(input_ids, mask, strict=True)]
    if not all(rows):
        raise RequestError("a prompt is empty; give at least one token")
    require_fitting(rows, Backbone(model))
    foreign = [p for p in logits_processor if not isinstance(p, POSITION_FREE)]
    if foreign and (len(rows) > 1 or len(rows[0]) < input_ids.shape[1]):
        raise RequestError(
            f"{type(foreign[0]).__name__} was made for the padded batch; use decode.generate, which prepares each row"
        )
    max_new_tokens = int(generation_config.max_length) - input_ids.shape[1]
    return [Request(row, logits_processor, stopping_criteria, generation_config, max_new_tokens) for row in rows]


def _require_supported(config: GenerationConfig, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    if config.num_beams > 1:
        raise RequestError(f"num_beams is {config.num_beams}; beam search cannot be combined with heads")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        asked = [
            name for name in ("penalty_alpha", "dola_layers", "prompt_lookup_num_tokens") if getattr(config, name, None)
        ]
        raise RequestError(
            f"{mode.value.replace('_', ' ')} cannot be combined with heads; leave {' and '.join(asked) or 'it'} out"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise RequestError(f"{name} is not available from tree decoding; run the model on the finished text")
    if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise RequestError(
            "the prompt is empty; give at least one token, as input_ids (inputs_embeds are not supported)"
        )
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise RequestError("past_key_values hold text already; give all of it as input_ids")
    for name, value in model_kwargs.items():
        if isinstance(value, Tensor) and name not in EXPECTED_INPUTS:
            raise RequestError(f"the model input {name} is not supported by tree decoding; only text can be continued")


def _require_longrope_alone(model: PreTrainedModel, requests: Sequence[Request]) -> None:
    boundary = Backbone(model).rope_boundary
    if boundary is None or len(requests) == 1:
        return
    if max(len(request.prompt) + request.max_new_tokens for request in requests) > boundary:
        raise RequestError(
            f"longrope turns all rows otherwise once the longest passes {boundary} tokens; decode one prompt at a time"
        )


def with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`stop_strings` and `tokenizer` as a stopping criterion: `generate` keeps the tokenizer from callables."""
    kwargs = dict(kwargs)
    tokenizer, stops = kwargs.pop("tokenizer", None), kwargs.pop("stop_strings", None)
    config = kwargs.get("generation_config")
    if stops is None and config is not None and config.stop_strings:
        stops = config.stop_strings
        kwargs["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    if stops is None and model.generation_config.stop_strings:
        raise RequestError(
            "the model's generation_config holds stop_strings; pass stop_strings= and tokenizer= yourself"
        )
    if stops:
        if tokenizer is None:
            raise RequestError("stop_strings need the tokenizer; pass tokenizer=...")
        criteria = kwargs.pop("stopping_criteria", None) or []
        kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stops)])
    return kwargs


def require_fitting(prompts: Sequence[Sequence[int]], backbone: Backbone, who: str = "backbone") -> None:
    """Raises:
    RequestError: a prompt is longer than the backbone's context, or holds an id that it does not know."""
    context = backbone.context
    for prompt in prompts:
        if context is not None and len(prompt) > context:
            raise RequestError(f"the prompt has {len(prompt)} tokens, but the {who}'s context ends at {context}")
        if min(prompt) < 0:
            raise RequestError(f"the prompt holds the id {min(prompt)}; ids start at 0")
        if max(prompt) >= backbone.vocab_size:
            raise RequestError(
                f"the prompt holds the id {max(prompt)}, but the backbone's vocabulary has {backbone.vocab_size}"
            )


def require_amateur(
    amateur: Amateur, model: PreTrainedModel, requests: Sequence[Request], compile: bool = False
) -> None:
    """Raises:
    RequestError: an amateur of another vocabulary, that cannot hold a tree, or has no room for a prompt; or steps are
        to be compiled."""
    require_uncontrasted(compile, amateur.name)
    require_same_vocabulary(amateur.name, amateur.model.config, model.config, "amateur")
    require_tree_forward(amateur.model)
    require_fitting([request.prompt for request in requests], Backbone(amateur.model), "amateur")
    _require_longrope_alone(amateur.model, requests)


def require_uncontrasted(compile: bool, amateur: object) -> None:
    """Raises:
    RequestError: steps of two models are to be compiled."""
    if compile and amateur is not None:
        raise RequestError("contrastive decoding cannot be compiled: a step runs two models; leave out --compile")


def resolve_tree(tree: TreeLike, heads: MedusaHeads, stop_drafting: float = 0.0) -> Layout:
    """The tree given (object, name, file or paths), else the one saved with the heads, else a default.

    `stop_drafting`: the confidence below which a dynamic tree drafts nothing more; 0: it always drafts all its nodes.

    Raises:
        RequestError: it describes no tree, or none that could stop.
    """
    resolved = _resolved(tree, heads)
    if not stop_drafting:
        return resolved
    if not isinstance(resolved, DynamicTree):
        raise RequestError(
            "stop-drafting needs a tree that is chosen by the heads' confidences in every step; take tree dynamic:N"
        )
    return replace(resolved, min_confidence=stop_drafting)


def require_one_shape(compile: bool, stop_drafting: float) -> None:
    """Raises:
    RequestError: steps are to be compiled whole, and to change their shape."""
    if compile and stop_drafting:
        raise RequestError("--compile has steps of one shape only, and stop-drafting changes it; leave one out")


def _resolved(tree: TreeLike, heads: MedusaHeads) -> Layout:
    if isinstance(tree, Layout):
        return tree
    if tree == "auto":  # whoever can calibrate has looked for a tree before; this is what suits the device
        return default_tree(heads)
    if isinstance(tree, str) and tree.startswith("dynamic"):
        return _dynamic_tree(tree, heads)
    if isinstance(tree, str):
        return load_tree(tree, heads.config.num_heads)
    if tree is None:
        return Tree.from_paths(heads.config.tree) if heads.config.tree else default_tree(heads)
    if not isinstance(tree, (list, tuple)):
        raise RequestError(f"{tree!r} is no tree; give a name, a file or a list of paths such as [[0], [1], [0, 0]]")
    return Tree.from_paths(tree)


def _dynamic_tree(spec: str, heads: MedusaHeads) -> DynamicTree:
    name, _, number = spec.partition(":")
    if name != "dynamic" or not number.isdecimal():
        raise RequestError(f"{spec!r} is no tree; write dynamic: and a number of nodes, such as dynamic:16")
    return DynamicTree.over_heads(int(number), heads.config.num_heads)


def default_tree(heads: MedusaHeads) -> Tree:
    """A tree for heads about which nothing was measured: eight nodes on a CPU, the published 64 on a GPU.

    Where reading the weights once is most of a step, nodes are nearly free; a CPU computes them one by one.
    """
    on_cpu = heads.device.type == "cpu"
    return load_tree("eight" if on_cpu else "mc_sim_7b_63", heads.config.num_heads).clip(heads.config.num_heads)


def resolve_acceptance(
    rule: str | None,
    do_sample: bool,
    epsilon: float = 0.09,
    delta: float = 0.3,
    draft: str | None = None,
    stop_drafting: float = 0.0,
) -> Acceptor:
    """The rule to use: by default the lossless one, greedy without sampling and rejection with it.

    Raises:
        RequestError: no such rule or draft, constants out of range, what does not fit the sampling mode, or drafts that
            may not stop early.
    """
    asked = rule
    rule, limit = _rule_and_limit(rule)
    if rule not in (None, *LOSSLESS, *LOSSY, *LOSSY_GREEDY):
        *most, last = [name for name in ACCEPTANCES if is_lossy(name)]
        raise RequestError(
            f"acceptance is {asked!r}; choose one of {', '.join(ACCEPTANCES)} ({', '.join(most)} and {last}: lossy)"
        )
    if draft not in (None, *DRAFTS):
        raise RequestError(f"draft is {draft!r}; choose one of {', '.join(DRAFTS)}")
    rule = rule or ("rejection" if do_sample else "greedy")
    if rule == "greedy" and do_sample:
        raise RequestError("acceptance 'greedy' writes no samples; use temperature 0 (do_sample=False) or 'rejection'")
    if rule in LOSSY_GREEDY and do_sample:
        raise RequestError(f"acceptance {asked!r} draws nothing; use temperature 0 (do_sample=False) or 'rejection'")
    if rule in LOSSY and not do_sample:
        raise RequestError(f"acceptance {rule!r} needs a temperature above 0 (do_sample=True); at 0 use 'greedy'")
    if draft == "sample" and rule not in ("rejection", "typical-sampled"):
        raise RequestError(
            "draft 'sample' needs a temperature above 0 and acceptance 'rejection' or 'typical-sampled'; "
            f"with {rule!r} use draft 'topk'"
        )
    if draft == "sample" and not do_sample:
        raise RequestError("draft 'sample' needs a temperature above 0 (do_sample=True); at 0 use draft 'topk'")
    if stop_drafting and draft == "sample":
        raise RequestError("stop-drafting looks at what is drafted, and draws must not be looked at; use draft topk")
    if stop_drafting and (rule == "typical" or rule in LOSSY_GREEDY):
        instead = "typical-sampled" if do_sample else "greedy"
        raise RequestError(
            f"with stop-drafting, what acceptance {asked!r} takes would depend on the batch; use {instead}"
        )
    for name, value in (("epsilon", epsilon), ("delta", delta), ("stop-drafting", stop_drafting)):
        if not 0 <= value <= 1:
            raise RequestError(f"{name} is {value}; it must lie between 0 and 1")
    return Acceptor(rule, epsilon, delta, draft or "topk", limit)


def is_lossy(acceptance: str) -> bool:
    """Whether this rule, as a user writes it, may change the text."""
    return acceptance.partition(":")[0] in (*LOSSY, *LOSSY_GREEDY)


def _rule_and_limit(rule: str | None) -> tuple[str | None, int | None]:
    name, _, number = (rule or "").partition(":")
    if name not in LOSSY_GREEDY:
        return rule, None
    least = LOSSY_GREEDY[name][1]
    if not number.isdecimal() or int(number) < least:
        raise RequestError(f"acceptance {rule!r} needs a whole number of at least {least}, as in {name}:2")
    return name, int(number)


def require_compilable(compile: bool, acceptor: Acceptor) -> None:
    """Raises:
    RequestError: steps are to be compiled whole, by a rule that cannot be."""
    if compile and acceptor.rule in LOSSY_GREEDY:
        raise RequestError(f"acceptance {acceptor.name!r} cannot be compiled; leave out --compile")
