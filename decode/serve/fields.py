"""Parameters of other servers' requests: which of them pass, and with which values.

Clients often send all parameters that they know, with the values that change nothing."""

from __future__ import annotations

EMPTY: tuple[object, ...] = ("", [], {})
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # OpenAI
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": EMPTY,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": EMPTY,
    "tools": EMPTY,
    "tool_choice": ("auto", "none"),
    "functions": EMPTY,
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": EMPTY,
    "web_search_options": EMPTY,
    # vLLM and SGLang
    "add_generation_prompt": (True,),
    "add_special_tokens": (True, False),
    "allowed_token_ids": EMPTY,
    "bad_words": EMPTY,
    "chat_template": EMPTY,
    "chat_template_kwargs": EMPTY,
    "continue_final_message": (False,),
    "documents": EMPTY,
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": EMPTY,
    "min_tokens": (0,),
    "mm_processor_kwargs": EMPTY,
    "no_stop_trim": (False,),
    "prompt_logprobs": (0,),
    "regex": EMPTY,
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True, False),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": EMPTY,
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    # llama.cpp
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": EMPTY,
    "json_schema": EMPTY,
    "lora": EMPTY,
    "mirostat": (0,),
    "n_indent": (0,),
    "n_keep": (0, -1),
    "n_probs": (0,),
    "t_max_predict_ms": (0, -1),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "typ_p": (1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
"""Parameters that this server does not support, with the values that leave them off; such a value is accepted."""
IGNORED = {
    # OpenAI
    "metadata",
    "parallel_tool_calls",
    "prediction",  # a guess at the text, which only makes it faster
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
    # vLLM
    "cache_salt",
    "priority",
    "request_id",
    # llama.cpp; constants of samplers are without effect while the sampler is off
    "cache_prompt",
    "dry_allowed_length",
    "dry_base",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "id_slot",
    "min_keep",
    "mirostat_eta",
    "mirostat_tau",
    "penalize_nl",
    "reasoning_format",
    "repeat_last_n",
    "return_progress",
    "samplers",
    "slot_id",
    "timings_per_token",
    "xtc_threshold",
    # Ollama
    "keep_alive",
}
"""Parameters that are accepted with any value, because they do not change the text of this server."""
ALIASES = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Names of llama.cpp for parameters of this server."""
UNLIMITED = {"seed": -1, "max_tokens": -1, "max_completion_tokens": -1}
"""Values of other servers that mean the default, like null."""
