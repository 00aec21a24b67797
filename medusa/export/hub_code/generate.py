"""Medusa decoding for transformers' `generate`, in one file that needs only torch and transformers.

    model.generate(**inputs, custom_generate="org/heads", trust_remote_code=True, max_new_tokens=256)

`org/heads` is a Hub id or a local folder. It contains `config.json`, `medusa_lm_head.safetensors` and this file, as
`custom_generate/generate.py`. The model is the one that the heads were trained for, loaded as usual.

How it works (Cai et al. 2024, https://arxiv.org/abs/2401.10774): the heads guess the tokens after the next one from the
last hidden state. Their best guesses form a tree. One forward of the model computes the logits of all nodes. In this
forward, each node attends to the text, its ancestors and itself. Then the model chooses token by token as usual, with
the same logits processors and stopping criteria. If a node of the tree is the chosen token, the logits after this token
are already known. So they need no further forward.

The output is exact. Greedy text is the model's greedy text, and a sample has the model's distribution. With one prompt
and a seed, the text equals that of `generate` without this file. In bfloat16 and float16, forwards over many tokens
round differently from forwards over one token. So near-ties can be decided differently.

The rows of a batch are decoded one after the other. Options in addition to those of `generate`:

    medusa_heads           a folder or a Hub id of heads; by default the value of `custom_generate`
    medusa_tree            paths of ranks such as [[0], [1], [0, 0]]; by default the tree in `config.json`
    medusa_step_lengths    a list to which the number of new tokens of each step is appended

Shapes: B prompts, N nodes of the tree with its root, K heads, H hidden size, V vocabulary size, T tokens of text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, StoppingCriteriaList, StopStringCriteria

from medusa.tree_support import without_text_types

from .decoding import Continuation, decode, require_tree_support
from .heads import CandidateTree, Heads, Options, heads_for, require

MODEL_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
HUB_OPTIONS = ("revision", "token", "cache_dir", "force_download", "local_files_only", "proxies")


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    streamer: BaseStreamer | None = None,
    medusa_heads: str | None = None,
    medusa_tree: Sequence[Sequence[int]] | None = None,
    medusa_step_lengths: list[int] | None = None,
    **kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate with Medusa heads; return the same as `model.generate`.

    The B prompts [B, T] are padded on the left to T tokens, with an `attention_mask` [B, T]. Raise ValueError if there
    are no heads, they belong to another model, the model cannot verify a tree, or an option does not work with heads.
    """
    where = medusa_heads or _named_in_generate()
    heads = heads_for(model, where, {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs})
    tree = CandidateTree(medusa_tree or heads.tree, model.device)
    require(tree.max_depth <= len(heads), f"the tree is {tree.max_depth} deep, and there are {len(heads)} heads")
    require_tree_support(model)

    prompts = inputs if inputs is not None else input_ids
    if prompts is None:
        raise ValueError("no prompt: pass input_ids (inputs_embeds cannot be continued with heads)")
    for name in ("assistant_model", "synced_gpus"):
        require(not kwargs.get(name), f"{name} cannot be combined with heads; leave it out")
    given = kwargs.get("generation_config") or model.generation_config
    kwargs = _with_stop_strings(model, given, without_text_types(model, kwargs))
    copies = kwargs.pop("num_return_sequences", None) or given.num_return_sequences or 1
    rows = [row for row in range(len(prompts)) for _ in range(copies)]
    require(streamer is None or len(rows) == 1, "a streamer takes one prompt at a time")
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and len(rows) > 1:
            raise ValueError(f"{name} belongs to a batch, and rows are decoded one by one; give one prompt at a time")

    decoder = RowDecoder(heads, tree, streamer, medusa_step_lengths)
    stock: Any = type(model)  # the class, because `model.generate` can be this file's `generate`
    new = []
    for row in rows:
        prompt = prompts[row : row + 1]
        if attention_mask is not None:  # without a mask no token is padding
            prompt = prompt[:, attention_mask[row].bool()]
        require(prompt.shape[1] > 0, "a prompt is empty; give at least one token")
        own = kwargs | {"attention_mask": torch.ones_like(prompt), "num_return_sequences": 1}
        if prefix_allowed_tokens_fn is not None:
            own["prefix_allowed_tokens_fn"] = lambda _, ids, of=prefix_allowed_tokens_fn, row=row: of(row, ids)
        new.append(stock.generate(model, prompt, custom_generate=decoder, **own))
    pad = getattr(decoder.config, "_pad_token_tensor", None)
    padded = torch.nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=0 if pad is None else int(pad))
    sequences = torch.cat([prompts[rows], padded.to(prompts.device)], dim=1)
    if decoder.config is None or not decoder.config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]


@dataclass
class RowDecoder:
    """A custom decoding loop that transformers' `generate` calls; it continues one prompt."""

    heads: Heads
    tree: CandidateTree
    streamer: BaseStreamer | None
    step_lengths: list[int] | None
    config: GenerationConfig | None = None
    """The generation config that `generate` prepared for the last prompt."""

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor:
        """Continue a prompt [1, T] of T tokens; return the ids of the new tokens."""
        self.config = generation_config
        _require_supported(generation_config, model_kwargs)
        text = Continuation(model, input_ids, logits_processor, stopping_criteria, generation_config)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        for step in decode(model, self.heads, self.tree, text):
            if self.streamer is not None:
                self.streamer.put(torch.tensor(step))
            if self.step_lengths is not None:
                self.step_lengths.append(len(step))
        if self.streamer is not None:
            self.streamer.end()
        return text.ids[0, input_ids.shape[1] :]


def _require_supported(config: GenerationConfig, model_kwargs: Options) -> None:
    """Raise ValueError if an option or model input cannot be combined with heads."""
    mode = config.get_generation_mode().value
    require(mode in ("greedy_search", "sample"), f"{mode.replace('_', ' ')} cannot be combined with heads")
    cache = config.cache_implementation
    require(cache in (None, "dynamic"), f"cache_implementation {cache!r} is not available with heads; leave it out")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        require(not getattr(config, name, None), f"{name} is not available with heads; leave it out")
    cache = model_kwargs.get("past_key_values")
    require(cache is None or cache.get_seq_length() == 0, "past_key_values hold text already; give it as input_ids")
    for name, value in model_kwargs.items():
        holds = isinstance(value, Tensor) or (isinstance(value, (list, tuple, Mapping)) and len(value) > 0)
        require(
            not holds or name in MODEL_INPUTS,
            f"the model input {name} is not supported with heads; only text can be continued",
        )


def _named_in_generate() -> str:
    """Return the value of `custom_generate` in the user's call of transformers' `generate`.

    The value names the heads' folder or Hub id. `generate` does not pass it on, and runs a copy of this file from a
    cache folder that does not contain the heads. So the value is read from the stack frame of `generate`."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_locals.get("custom_generate")
        if frame.f_globals.get("__name__") == "transformers.generation.utils" and isinstance(name, str):
            return name
        frame = frame.f_back
    raise ValueError("no heads are named; pass medusa_heads=, a folder or a Hub id")


def _with_stop_strings(model: PreTrainedModel, given: GenerationConfig, kwargs: Options) -> Options:
    """Return `kwargs` with `stop_strings` as a stopping criterion: `generate` passes no tokenizer to custom loops."""
    stops = given.stop_strings or model.generation_config.stop_strings
    stops, tokenizer = kwargs.pop("stop_strings", stops), kwargs.pop("tokenizer", None)
    if stops:
        require(tokenizer is not None, "stop_strings need the tokenizer; pass tokenizer=...")
        criteria = [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, stops)]
        kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
    return kwargs | {"stop_strings": None}  # also those of the model's own config
