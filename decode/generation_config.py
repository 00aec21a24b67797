"""The fields of transformers' `GenerationConfig`: which of a checkpoint's own values decoding applies, and where.

A checkpoint sets them in generation_config.json. Each field is in one of the tables below (docs/decoding.md has the
rule). `decode.generate` takes all values as `model.generate` does, and refuses `METHODS`. Commands and the server apply
`TEXT` and `TOKENS`, have options of their own for `SAMPLING`, and set `PLAIN`, so that all methods decode alike."""

from __future__ import annotations

from collections.abc import Callable
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

from medusa.errors import RequestError

if TYPE_CHECKING:
    from transformers import GenerationConfig

TEXT: dict[str, object] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "min_new_tokens": 0,
    "min_length": 0,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
    "watermarking_config": None,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "stop_strings": None,
}
"""Fields that decide which tokens a text may have and where it ends, each with the value that changes nothing."""
COMPILED_TEXT = ("repetition_penalty", "stop_strings")
"""Those that compiled steps apply."""
TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
ASSISTED = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "max_matching_ngram_size",
)
"""Fields that only transformers' assisted generation reads, with which `medusa benchmark --against` compares."""
METHODS = {
    "num_beams": "beam search",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "use_mtp": "assisted generation",
    "prompt_lookup_num_tokens": "assisted generation",
    "assistant_early_exit": "assisted generation",
    "is_assistant": "assisted generation",
    "token_healing": "token healing",
    "cache_implementation": "another KV cache",
}
"""Fields that choose another way to decode than token by token with a plain KV cache, with the name of that way."""
PLAIN: dict[str, object] = {
    **dict.fromkeys(METHODS),
    "num_beams": 1,
    "num_return_sequences": 1,
    # the total length, and a limit that would make the text depend on the speed
    "max_length": None,
    "max_new_tokens": None,
    "max_time": None,
    # of other ways to decode
    "early_stopping": False,
    "length_penalty": 1.0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "low_memory": None,
    "assistant_ensemble_weight": None,
    "speculation_type": None,
    # speed and memory
    "use_cache": True,
    "cache_config": None,
    "max_cache_len": None,
    "prefill_chunk_size": None,
    "compile_config": None,
    "disable_compile": None,
    "continuous_batching_config": None,
    # the form of the result
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
}
"""Values with which `model.generate` decodes token by token, in its usual way, and returns token ids."""
ABOUT = ("transformers_version", "_from_model_config")
USUAL_CACHES = (None, "dynamic", "hybrid")  # transformers itself reads `hybrid` as the usual cache
USUAL_TOP_K = 50  # with which transformers samples if nothing else is said
FILE = "generation_config.json"


def plain_options() -> dict[str, Any]:
    """The arguments with which `model.generate` decodes greedily and plainly, whatever the checkpoint's options are.

    Only those that the installed transformers has. The fields in `TEXT` and `TOKENS` are left to the checkpoint."""
    from transformers import GenerationConfig

    known = vars(GenerationConfig())
    return {name: value for name, value in (PLAIN | dict.fromkeys(SAMPLING)).items() if name in known}


def text_options(config: GenerationConfig | None) -> dict[str, Any]:
    """The fields in `TEXT` that change a text, as `config` sets them."""
    values = {name: getattr(config, name, None) for name in TEXT}
    return {name: value for name, value in values.items() if value not in (None, TEXT[name], [], {}, "")}


def is_usual(name: str, value: object) -> bool:
    """Whether `value` of a field in `METHODS` means plain decoding."""
    return value in USUAL_CACHES if name == "cache_implementation" else value in (None, False, 0, PLAIN[name])


def require_plain(value_of: Callable[[str], object], own: GenerationConfig | None) -> None:
    """Raise a `RequestError` if a value asks for something else than plain decoding.

    `value_of` gives the value of a field, and `own` are the checkpoint's values."""
    for name, method in METHODS.items():
        if not is_usual(name, value := value_of(name)):
            reason = f"{method} cannot be combined with heads"
            if name == "cache_implementation":
                reason = "decoding has KV caches of its own (with compile=True, of fixed shape)"
            raise RequestError(f"{told(name, value, own)}; {reason}; {way_out(name, value, own)}")
    for name in ("output_attentions", "output_hidden_states"):
        if value := value_of(name):
            reason = "tree decoding does not give them, but a forward over the finished text does"
            raise RequestError(f"{told(name, value, own)}; {reason}; {way_out(name, value, own)}")


def told(name: str, value: object, own: GenerationConfig | None) -> str:
    """Return a clause for an error: the value of a field, and whether the checkpoint has the same."""
    is_own = getattr(own, name, None) == value
    return f"{FILE} of the model sets {name}={short(value)}" if is_own else f"{name} is {short(value)}"


def way_out(name: str, value: object, own: GenerationConfig | None) -> str:
    """Say how to turn a field off in Python: a value of the checkpoint is replaced, and an argument is left out."""
    off = (TEXT | PLAIN)[name]
    return f"pass {name}={off!r} to turn it off" if getattr(own, name, None) == value else f"leave {name} out"


def sampling_of(config: GenerationConfig | None) -> dict[str, float]:
    """The options of commands with which they sample as `model.generate` does with `config`; empty if it is greedy."""
    if not getattr(config, "do_sample", None):
        return {}
    usual = {"temperature": 1.0, "top_k": USUAL_TOP_K, "top_p": 1.0, "min_p": 0.0}
    return {name: usual[name] if (own := getattr(config, name, None)) is None else own for name in usual}


def unused(config: GenerationConfig | None, sampling: bool) -> dict[str, object]:
    """The checkpoint's options that change its texts in `model.generate`, but not those of commands.

    `sampling`: whether the way in which the checkpoint samples is one of them."""
    values = {name: getattr(config, name, None) for name in (*METHODS, "num_return_sequences", "max_time")}
    found = {name: value for name, value in values.items() if not is_usual(name, value)}
    if sampling:
        found = {name: value for name in SAMPLING if (value := getattr(config, name, None)) is not None} | found
    return found
