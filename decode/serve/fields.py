"""Parameters of other servers' requests: which of them pass, and with which values.

Clients often send all parameters that they know, with the values that change nothing."""

from __future__ import annotations

OFF: list[tuple[tuple[object, ...], str]] = [
    (
        ("", [], {}),
        "allowed_token_ids audio bad_words chat_template chat_template_kwargs documents functions grammar json_schema "
        "logit_bias logits_processors lora mm_processor_kwargs regex stop_token_ids suffix tools web_search_options",
    ),
    (
        (0,),
        "dry_multiplier dynatemp_range frequency_penalty min_tokens mirostat n_indent n_probs presence_penalty "
        "prompt_logprobs top_logprobs xtc_probability",
    ),
    ((0, -1), "n_keep t_max_predict_ms top_n_sigma"),
    ((-1,), "truncate_prompt_tokens"),
    ((1,), "best_of length_penalty tfs_z typ_p typical_p"),
    (
        (False,),
        "continue_final_message echo include_stop_str_in_output logprobs no_stop_trim "
        "return_tokens_as_token_ids use_beam_search",
    ),
    ((True,), "add_generation_prompt include_reasoning skip_special_tokens spaces_between_special_tokens"),
    ((True, False), "add_special_tokens separate_reasoning"),
    (("auto", "none"), "function_call tool_choice"),
    ((["text"],), "modalities"),
]
UNSUPPORTED = {name: values for values, names in OFF for name in names.split()}
"""Parameters that this server does not support, with the values that leave them off; such a value is accepted.

They are OpenAI's and those of vLLM, SGLang and llama.cpp. An endpoint may support one that the other does not."""
WITHOUT_EFFECT = """
    metadata parallel_tool_calls prediction prompt_cache_key prompt_cache_retention safety_identifier service_tier store
    user verbosity cache_salt priority request_id keep_alive cache_prompt dry_allowed_length dry_base dry_penalty_last_n
    dry_sequence_breakers dynatemp_exponent id_slot min_keep mirostat_eta mirostat_tau penalize_nl reasoning_format
    repeat_last_n return_progress samplers slot_id timings_per_token xtc_threshold
"""
IGNORED = frozenset(WITHOUT_EFFECT.split())
"""Parameters that are accepted with any value, because they do not change the text of this server.

A prediction only makes a text faster, and constants of llama.cpp's samplers have no effect while a sampler is off."""
ALIASES = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Names of llama.cpp for parameters of this server."""
UNLIMITED = {"seed": -1, "max_tokens": -1, "max_completion_tokens": -1}
"""Values of other servers that mean the default, like null."""
