"""The axes of the matrix test: drafters, options of generation, and ways in, with the cells that are refused.

A cell is one drafter with one set of options by one way in. `tests/test_matrix.py` compares its text with that of
`model.generate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, LogitsProcessor, PreTrainedModel, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from fuzz_models import LastTokens, Shift
from medusa.errors import RequestError
from tests.helpers import BLOCK_FORMS, LETTERS, MTP_FORM, VOCAB, random_ids

NEW = 6
PROMPTS = [random_ids(8, seed=31), random_ids(3, seed=2)]
"""Two prompts of different length. The text after the first one repeats pairs of tokens, for drafters that copy."""
PADS = 2
"""Padding on the left in the cells of the option `attention_mask`."""
EOS = 46
"""The end token of the models' own configuration; texts of these tests do not reach it by themselves."""
SEED = 5


# --- drafters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafting:
    """A drafter: its name and options as `--drafter` takes them, its heads and tree, and how guesses are drawn."""

    spec: str = "heads"
    kind: str | None = None  # of the heads
    tree: str | None = None
    drawn: bool = False  # `draft="sample"`: the text is then a sample with only one token to choose from
    heads: dict[str, Any] = field(default_factory=dict)  # settings of the heads

    @property
    def base(self) -> str:
        return self.spec.partition(":")[0]

    @property
    def kinds(self) -> set[str]:
        """What table rows may call this drafter."""
        shape = "dynamic" if (self.tree or "").startswith("dynamic") else "static"
        return {self.base, shape, "drawn" if self.drawn else "best"}


TREE = "topk:3,2,1"
OWN = {"spec": "mtp:3", "tree": TREE}
DRAFTERS: dict[str, Drafting] = {
    "medusa": Drafting(kind="medusa", tree=TREE),
    "cascade": Drafting(kind="cascade", tree=TREE),
    "hydra": Drafting(kind="hydra", tree=TREE, heads={"prefix_layers": 1}),
    "recurrent": Drafting(kind="recurrent", tree=TREE),
    "markov": Drafting(kind="markov", tree=TREE),
    "eagle": Drafting(kind="eagle", tree=TREE, heads={"block": "gated", "feature_layers": [1, 0]}),
    "layer of mtp": Drafting(kind="mtp", tree=TREE, heads=MTP_FORM),
    "dflash": Drafting(kind="dflash", tree=TREE, heads=BLOCK_FORMS["dflash"]),
    "dflash, drawn": Drafting(kind="dflash", tree=TREE, drawn=True, heads=BLOCK_FORMS["dflash, pairwise"]),
    "medusa, dynamic": Drafting(kind="medusa", tree="dynamic:7"),
    "markov, dynamic": Drafting(kind="markov", tree="dynamic:7"),
    "recurrent, dynamic": Drafting(kind="recurrent", tree="dynamic:7"),
    "medusa, drawn": Drafting(kind="medusa", tree=TREE, drawn=True),
    "markov, drawn": Drafting(kind="markov", tree=TREE, drawn=True),
    "hydra, drawn": Drafting(kind="hydra", tree=TREE, drawn=True),
    "blockwise": Drafting("blockwise", kind="medusa"),
    "blockwise, drawn": Drafting("blockwise", kind="markov", drawn=True),
    "mtp": Drafting(**OWN),
    "mtp, dynamic": Drafting(**OWN | {"tree": "dynamic:7"}),
    "mtp, drawn": Drafting(**OWN, drawn=True),
    "model": Drafting("model:{draft},tokens=3"),
    "model, drawn": Drafting("model:{draft},widths=2x1", drawn=True),
    "ngram": Drafting("ngram:n=2,tokens=4"),
    "rest": Drafting("rest:{store},min_n=1"),
    "lookahead": Drafting("lookahead:window=3,n=3,guesses=3"),
    "mix": Drafting("mix:nodes=9,heads+ngram:n=2,tokens=3", kind="medusa", tree="topk:2,1"),
    "mix, shared": Drafting(
        "mix:nodes=7,least=0.3,heads+ngram:n=3,tokens=4,matches=2", kind="markov", tree="dynamic:7"
    ),
}
ONE_CHOICE = {"do_sample": True, "top_k": 1, "temperature": 0.7}
"""Samples with only one token to choose from."""


# --- options ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """Arguments of `model.generate` (`theirs`), and arguments that only this package takes (`ours`)."""

    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    group: str = ""  # options of one group are also given together
    only: tuple[str, ...] = ()  # the ways that offer it; empty: all ways


class Collector(BaseStreamer):
    """Keeps what a streamer receives: the prompt, and then the new tokens."""

    def __init__(self) -> None:
        self.received: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.received.append(value.flatten().tolist())

    def end(self) -> None:
        self.new_ids = [token for ids in self.received[1:] for token in ids]


def other_thirds(row: int, ids: Tensor) -> list[int]:
    """Allow tokens that differ from the last one modulo three (`prefix_allowed_tokens_fn`)."""
    return [token for token in range(VOCAB) if token % 3 != int(ids[-1]) % 3]


WAYS = ("generate", "config", "steps", "custom", "batch", "custom batch", "command", "server")
PYTHON = WAYS[:6]
CALLS = tuple(way for way in PYTHON if way != "config")  # for what no GenerationConfig holds
ALONE = ("generate", "steps", "custom")  # for what is made for one prompt
NO_PADDED_BATCH = tuple(way for way in WAYS if way != "custom batch")


def sampled(**settings: Any) -> Option:
    """Make an option of sampling. transformers draws a batch from one generator, so no padded batch is compared."""
    return Option({"do_sample": True, "temperature": 1.0, "top_k": 0} | settings, {}, "sampling", NO_PADDED_BATCH)


def processor(group: str, **settings: Any) -> Option:
    return Option(settings, {}, group)


ENDS = list(range(0, VOCAB, 4))
SETTINGS_OF_OTHERS = {"early_stopping": True, "length_penalty": 2.0, "num_assistant_tokens": 3, "low_memory": True}
SETTINGS_OF_OTHERS |= {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.3}
SETTINGS_OF_OTHERS |= {"assistant_lookbehind": 5, "target_lookbehind": 5, "max_matching_ngram_size": 2}
SETTINGS_OF_OTHERS |= {"diversity_penalty": 0.5, "assistant_ensemble_weight": 0.5, "num_beam_groups": 2}
SETTINGS_OF_OTHERS |= {"bos_token_id": 3, "decoder_start_token_id": 3}

PROCESSORS = {
    "bad_words_ids": processor("processors", bad_words_ids=[[3], [9, 36]]),
    "begin_suppress_tokens": processor("processors", begin_suppress_tokens=list(range(40))),
    "encoder_repetition_penalty": processor("processors", encoder_repetition_penalty=3.0),
    "no_repeat_ngram_size": processor("processors", no_repeat_ngram_size=1),
    "remove_invalid_values": processor("processors", remove_invalid_values=True),
    "renormalize_logits": processor("processors", renormalize_logits=True),
    "sequence_bias": processor("processors", sequence_bias=[[[3], 5.0], [[9, 36], -3.0]]),
    "encoder_no_repeat_ngram_size": processor("processors", encoder_no_repeat_ngram_size=1),
    "forced_bos_token_id": processor("processors", forced_bos_token_id=5),
    "repetition_penalty": processor("processors", repetition_penalty=3.0),
    "suppress_tokens": processor("processors", suppress_tokens=list(range(0, VOCAB, 3))),
    "logits_processor": Option({"logits_processor": [Shift(3)]}, {}, "processors", CALLS),
    "watermarking_config": Option({"watermarking_config": WatermarkingConfig(bias=4.0)}, {}, "processors", PYTHON),
    "exponential_decay_length_penalty": processor("length", exponential_decay_length_penalty=(2, 2.5)),
    "min_new_tokens": processor("ends", min_new_tokens=4, eos_token_id=ENDS),
    "prefix_allowed_tokens_fn": Option({"prefix_allowed_tokens_fn": other_thirds}, {}, "processors", CALLS),
    "forced_eos_token_id": processor("ends", forced_eos_token_id=5),
    "guidance_scale": processor("ends", guidance_scale=1.5),
    "min_length": processor("ends", min_length=12, eos_token_id=ENDS),
}
REFUSED_BY_NAME = {
    # Other methods of decoding, and what tree decoding cannot give
    "num_beams": Option({"num_beams": 2}),
    "constraints": Option({"constraints": [1]}, only=PYTHON),
    "force_words_ids": Option({"force_words_ids": [[3]]}),
    "penalty_alpha": Option({"penalty_alpha": 0.5, "top_k": 4}, only=PYTHON),
    "dola_layers": Option({"dola_layers": "low"}),
    "prompt_lookup_num_tokens": Option({"prompt_lookup_num_tokens": 3}),
    "assistant_early_exit": Option({"assistant_early_exit": 1}),
    "use_mtp": Option({"use_mtp": True}),
    "output_attentions": Option({"return_dict_in_generate": True, "output_attentions": True}),
    "output_hidden_states": Option({"return_dict_in_generate": True, "output_hidden_states": True}),
    "assistant_model": Option({"assistant_model": "draft"}, only=CALLS),
    "custom_generate": Option({"custom_generate": "org/name"}, only=("generate", "steps", "batch")),
    "position_ids": Option({"position_ids": torch.arange(8)[None] * 3}, only=ALONE),
    "past_key_values": Option({"past_key_values": "filled"}, only=ALONE),
    "inputs_embeds": Option({"inputs_embeds": "embedded"}, only=ALONE),
}
OPTIONS: dict[str, Option] = {
    **PROCESSORS,
    **REFUSED_BY_NAME,
    "token_healing": Option({"token_healing": True}),
    # Ends
    "eos_token_id": Option({"eos_token_id": ENDS}, {}, "ends"),
    "stopping_criteria": Option({"stopping_criteria": [LastTokens(4)]}, {}, "ends", CALLS),
    "max_new_tokens": Option({"max_new_tokens": 5}, {}, "ends"),
    "pad_token_id": Option({"pad_token_id": 4, "eos_token_id": ENDS}, {}, "ends"),
    "max_length": Option({"max_length": 12, "max_new_tokens": None}, {}, "length", PYTHON),
    "max_time": Option({"max_time": 1e-9}, {}, "one token"),
    "stop_strings": Option({"stop_strings": ["a", "e", "i", "o", "u", "Ba"]}, {}, "stop"),
    "ignore_eos": Option({"eos_token_id": None}, {}, "stop"),
    # Sampling
    "do_sample": sampled(),
    "temperature": sampled(temperature=0.5),
    "top_k": sampled(top_k=3),
    "min_p": sampled(min_p=0.2),
    "acceptance=rejection": Option(sampled().theirs, {"acceptance": "rejection"}, "sampling", NO_PADDED_BATCH),
    "seeds": Option(sampled().theirs, {"seeds": [SEED]}, "sampling", ("generate", "config", "steps")),
    "top_p": sampled(top_p=0.5),
    "typical_p": sampled(typical_p=0.5),
    "epsilon_cutoff": sampled(epsilon_cutoff=0.02),
    "eta_cutoff": sampled(eta_cutoff=0.02),
    "top_h": sampled(top_h=0.5),
    "num_return_sequences": Option(ONE_CHOICE | {"num_return_sequences": 2}, {}, "typical"),
    "acceptance=typical": Option(ONE_CHOICE, {"acceptance": "typical", "epsilon": 0.2, "delta": 0.4}, "typical"),
    "acceptance=typical-sampled": Option(ONE_CHOICE, {"acceptance": "typical-sampled"}, "one choice"),
    "acceptance=greedy": Option({}, {"acceptance": "greedy"}, "results"),
    "acceptance=topk": Option({}, {"acceptance": "topk:1"}, "processors"),
    "acceptance=distance": Option({}, {"acceptance": "distance:0"}, "length"),
    # Results and caches, which do not change the text
    "return_dict_in_generate": Option({"return_dict_in_generate": True}, {}, "results"),
    "output_scores": Option({"return_dict_in_generate": True, "output_scores": True}, {}, "results"),
    "output_logits": Option({"return_dict_in_generate": True, "output_logits": True}, {}, "results"),
    "use_cache": Option({"use_cache": False}, {}, "length"),
    "cache_implementation": Option({"cache_implementation": "static", "disable_compile": True}, {}, "results"),
    "cache settings": Option({"cache_config": {}, "max_cache_len": 64, "prefill_chunk_size": 3}, {}, "results"),
    "compile_config": Option({"compile_config": CompileConfig(), "disable_compile": True}, {}, "results", PYTHON),
    "settings of other methods": Option(SETTINGS_OF_OTHERS, {}, "results"),
    "synced_gpus": Option({"synced_gpus": False}, {}, "results", CALLS),
    # Arguments for one prompt
    "attention_mask": Option({"attention_mask": "padded"}, {}, "steps", ALONE),
    "negative_prompt_ids": Option(
        {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[1, 2]])}, {}, "stop", ALONE
    ),
    "streamer": Option({}, {"streamer": Collector}, "stop", CALLS),
    # This package's own
    "draft": Option({}, {"draft": "topk"}, "contrast"),
    "stop_drafting": Option({}, {"stop_drafting": 0.05}, "pruned"),
    "compile": Option({}, {"compile": True}, "compiled"),
    "cuda_graphs": Option({}, {"compile": True, "cuda_graphs": "off"}, "compiled"),
    "tree": Option({}, {"tree": "chain"}, "compiled"),
    "amateur": Option({}, {"amateur": True}, "contrast", NO_PADDED_BATCH),
    "lossy guidance": Option({"guidance_scale": 1.5}, {"acceptance": "topk:2"}),
    "grammar": Option(
        {}, {"grammar": "start: /[b-m]+/"}, "grammar", ("generate", "config", "steps", "batch", "command", "server")
    ),
    "ignore_generation_config": Option(
        {"suppress_tokens": list(range(0, VOCAB, 3))}, {"ignore_generation_config": True}, "", ("command", "server")
    ),
    "timer": Option({}, {"timer": None}, "steps", ("steps",)),
    "keep_drafts": Option({}, {"keep_drafts": True}, "steps", ("steps",)),
}
GROUPS = tuple(
    tuple(name for name, option in OPTIONS.items() if option.group == group)
    for group in dict.fromkeys(option.group for option in OPTIONS.values() if option.group)
)
NOT_OF_COMMANDS = {"max_time", "epsilon_cutoff", "eta_cutoff", "typical_p", "top_h", "token_healing", *REFUSED_BY_NAME}
"""What commands and the server leave out of a checkpoint's settings; they say so in a line."""
NOT_HERE = {
    # Notes, and what transformers sets for itself
    *(
        "transformers_version",
        "_from_model_config",
        "_commit_hash",
        "is_assistant",
        "speculation_type",
        "continuous_batching_config",
    ),
    # The other axes: prompts, models, drafters and their places
    *("self", "model", "heads", "drafter", "input_ids", "inputs", "generation_config", "kwargs", "prompt"),
    "numerics",  # for half precision (tests/decode/test_stable.py)
    *("negative_prompt_attention_mask",),  # for padded negative prompts, of which there is one here
    # How the server counts and answers (tests/decode/serve)
    *("max_tokens", "max_completion_tokens", "stop", "seed", "n", "stream", "stream_options", "logprobs", "echo"),
    "return_token_ids",
    *("response_format", "add_special_tokens"),
}


# --- refusals --------------------------------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """Cells that are refused: an option with some drafters by some ways, and a word of the error."""

    option: str
    word: str
    drafters: tuple[str, ...] = ()  # some of `Drafting.kinds`; empty: all
    ways: tuple[str, ...] = ()  # empty: all
    error: type[Exception] = RequestError  # of transformers, if it refuses the call before it calls this package

    def holds(self, drafting: Drafting, option: str, way: str) -> bool:
        is_drafter = not self.drafters or not drafting.kinds.isdisjoint(self.drafters)
        return option == self.option and is_drafter and (not self.ways or way in self.ways)


CUSTOM, BATCHES = ("custom", "custom batch"), ("batch", "custom batch")
ON_HOST = ("model", "ngram", "rest", "lookahead", "mix", "mix, shared")
REFUSED = (
    *(Refusal(name, name, ways=PYTHON) for name in (*REFUSED_BY_NAME, "cache_implementation")),
    *(Refusal(name, "was made for the padded batch", ways=("custom batch",)) for name in PROCESSORS),
    Refusal("token_healing", "token_healing", ways=tuple(way for way in PYTHON if way not in CUSTOM)),
    Refusal("token_healing", "tokenizer", ways=CUSTOM, error=ValueError),
    Refusal("stop_strings", "tokenizer", ways=CUSTOM, error=ValueError),
    Refusal("lossy guidance", "guidance_scale", ("best",), NO_PADDED_BATCH),
    Refusal("lossy guidance", "topk", ("drawn",), NO_PADDED_BATCH),
    Refusal("lossy guidance", "was made for the padded batch", ways=("custom batch",)),
    Refusal("streamer", "streamer", ways=("steps", *BATCHES)),
    Refusal("stop_drafting", "drafting", ("static",)),
    Refusal("tree", "tree", ("model", "ngram", "rest", "lookahead", "blockwise")),
    Refusal("compile", "compile", (*ON_HOST, "drawn")),
    Refusal("cuda_graphs", "compile", (*ON_HOST, "drawn")),
    Refusal("acceptance=greedy", "greedy", ("drawn",)),
    Refusal("acceptance=topk", "topk", ("drawn",)),
    Refusal("acceptance=distance", "distance", ("drawn",)),
    Refusal("acceptance=typical", "draft", ("drawn",)),
)


class Contrast(LogitsProcessor):
    """Contrastive decoding, written plainly: log p(model) - log p(amateur) of tokens above a tenth of the best."""

    def __init__(self, amateur: PreTrainedModel) -> None:
        self.amateur = amateur

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        ours, theirs = (logits.log_softmax(-1) for logits in (scores, self.amateur(input_ids).logits[:, -1]))
        return (ours - theirs).masked_fill(ours.exp() < 0.1 * ours.exp().amax(-1, keepdim=True), -torch.inf)


def after_grammar(written: list[int]) -> list[int]:
    """The tokens that may follow by the grammar of these tests: letters from b to m, and then the end."""
    return [LETTERS.index(letter) for letter in "bcdefghijklm"] + [EOS] * bool(written)


def filled_cache(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(torch.tensor([PROMPTS[0][:4]]), past_key_values=cache)
    return cache
