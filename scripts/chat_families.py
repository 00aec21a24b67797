"""What the chat templates of current model families do, written down in our own words for tests and for docs/data.md.

Long texts of system messages are shortened. What matters here is exact: the marks around messages, what each template
adds, trims or drops, which options it reads, and how it ends the generation prompt."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "<|end|>"]

CALL_JSON = "'{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}'"
LAST_QUESTION = (
    "{% set asked = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set asked.last = loop.index0 %}{% endif %}{% endfor %}"
)
# The thought of a message and the rest of its content, as Qwen3 and others read them.
SPLIT_THOUGHT = (
    "{% set said = m.content if m.content is string else '' %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}{% elif '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
CHATML_TOOLS = "{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
TOOL_AS_USER = (
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
ASSISTANT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

TEMPLATES: dict[str, str] = {}

TEMPLATES["SmolLM2"] = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + ASSISTANT
)

TEMPLATES["Qwen2.5"] = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% else %}{% set system = 'You are Qwen.' %}{% endif %}{{ '<|im_start|>system\n' + system }}"
    "{% if tools %}{{ '\n# Tools\n<tools>' }}" + CHATML_TOOLS + "{{ '\n</tools>' }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) "
    "or (m.role == 'assistant' and not m.tool_calls) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{{ '\n<tool_call>\n' + " + CALL_JSON + " + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}" + TOOL_AS_USER + "{% endif %}{% endfor %}" + ASSISTANT
)

# Thoughts of answers before the last question are dropped; the last answer always has a thought, if only an empty one.
TEMPLATES["Qwen3"] = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}" + CHATML_TOOLS + "{{ '\n</tools><|im_end|>\n' }}"
    "{% endif %}" + LAST_QUESTION + "{% for m in messages %}{% if m.role == 'assistant' %}" + SPLIT_THOUGHT + ""
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > asked.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') }}{% else %}{{ said }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% if not loop.first or said %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n' + " + CALL_JSON + " + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}" + TOOL_AS_USER + ""
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)

# The generation prompt opens the thought, or closes an empty one; calls of tools are written as XML.
TEMPLATES["Qwen3.5"] = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}" + CHATML_TOOLS + "{{ '\n</tools><|im_end|>\n' }}"
    "{% endif %}" + LAST_QUESTION + "{% for m in messages %}{% if m.role == 'assistant' %}" + SPLIT_THOUGHT + ""
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > asked.last %}"
    "{{ '<think>\n' + thought | trim + '\n</think>\n\n' }}{% endif %}{{ said | trim }}"
    "{% for call in m.tool_calls or [] %}{% if not loop.first or said %}{{ '\n\n' }}{% endif %}"
    "{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}{% for name, value in call.function.arguments.items() %}"
    "{{ '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}" + TOOL_AS_USER + ""
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)

TEMPLATES["Llama 3.1"] = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n' + system }}"
    "{% if tools %}{{ '\nEnvironment: ipython' }}" + CHATML_TOOLS + "{% endif %}{{ '<|eot_id|>' }}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}"
    "{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

GEMMA_TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}{{ part.text | trim }}"
    "{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEMPLATES["Gemma 2"] = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set first = '' %}" + GEMMA_TURNS
)
# The system message becomes the beginning of the first question.
TEMPLATES["Gemma 3"] = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}" + GEMMA_TURNS
)

# Thoughts are channels; without thinking, the generation prompt holds an empty one, and history has none.
TEMPLATES["Gemma 4"] = (
    "{{ bos_token }}{% if enable_thinking or messages[0].role == 'system' or tools %}{{ '<|turn>system\n' }}"
    "{% if enable_thinking %}{{ '<|think|>\n' }}{% endif %}{% if messages[0].role == 'system' %}"
    "{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}"
    "{% for tool in tools or [] %}{{ '<|tool>' + tool.function.name + '<tool|>' }}{% endfor %}{{ '<turn|>\n' }}{% endif %}"
    + LAST_QUESTION
    + "{% set turn = namespace(open=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|tool_response>' + m.content + '<tool_response|>' }}{% else %}"
    "{% if not turn.open %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}{% endif %}"
    "{% if m.reasoning_content and m.tool_calls and loop.index0 > asked.last %}"
    "{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '<|tool_call>call:' + call.function.name + '{' }}"
    "{% for name, value in call.function.arguments.items() %}{{ name + ':' + (value | tojson) }}{% endfor %}"
    "{{ '}<tool_call|>' }}{% endfor %}{% set said = m.content | trim %}"
    "{% if m.role == 'assistant' and '<channel|>' in said %}{% set said = said.split('<channel|>')[-1] %}{% endif %}"
    "{{ said }}{% if m.tool_calls %}{% set turn.open = true %}{% else %}{% set turn.open = false %}{{ '<turn|>\n' }}{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and not turn.open %}{{ '<|turn>model\n' }}"
    "{% if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}{% endif %}"
)

TEMPLATES["Mistral v0.3"] = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    + LAST_QUESTION
    + "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == asked.last %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + (system + '\n\n' if system and loop.last else '') + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{{ " + CALL_JSON + " + (', ' if not loop.last else '') }}{% endfor %}{{ ']' + eos_token }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + m.content + '}[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
TEMPLATES["Mistral Small 3"] = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{{ m.content }}{% for call in m.tool_calls %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}{% endfor %}{{ eos_token }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)

# Thoughts stay only in the last answer; a message may not hold marks of channels.
TEMPLATES["gpt-oss"] = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{% if messages[0].role in ['system', 'developer'] or tools %}{{ '<|start|>developer<|message|># Instructions\n\n' }}"
    "{% if messages[0].role in ['system', 'developer'] %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "{% for tool in tools or [] %}{{ '\ntype ' + tool.function.name }}{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('You have passed a message containing <|channel|> tags') }}{% endif %}"
    "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}"
    "{% elif m.content or m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}{{ '<|start|>assistant to=functions.' + call.name }}"
    "{{ '<|channel|>commentary json<|message|>' + (call.arguments | tojson) + '<|call|>' }}"
    "{% elif loop.last and not add_generation_prompt %}{% if m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.add to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

# The generation prompt opens the thought, and every answer loses its thought.
TEMPLATES["DeepSeek R1"] = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<｜tool▁outputs▁begin｜>' + m.content + '<｜tool▁outputs▁end｜>' }}"
    "{% elif m.tool_calls %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{% for call in m.tool_calls %}"
    "{{ call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}{% endfor %}"
    "{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
    "{% else %}{% set said = m.content %}{% if '</think>' in said %}{% set said = said.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + said + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
# Answers without a thought follow `</think>`.
TEMPLATES["DeepSeek V3.1"] = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% else %}{{ '' if messages[loop.index0 - 1].role == 'tool' else '<｜Assistant｜></think>' }}"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}"
    "{{ call.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}"
    "{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}"
)

TEMPLATES["Phi-4"] = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
# A conversation ends in one more token.
TEMPLATES["Phi-4-mini"] = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
TEMPLATES["Granite 3.3"] = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = 'You are Granite.' %}{% endif %}"
    "{% if thinking %}{% set system = system + ' Think between <think></think>.' %}{% endif %}"
    "{{ '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}"
    "{% if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' + (tools | tojson) + '<|end_of_text|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' }}"
    "{% if m.tool_calls %}{{ '<|tool_call|>[' }}{% for call in m.tool_calls %}{{ "
    + CALL_JSON
    + " }}{% endfor %}{{ ']' }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
# Without thinking, answers of history and the generation prompt have an empty thought.
TEMPLATES["SmolLM3"] = (
    "{% set thinks = enable_thinking if enable_thinking is defined else true %}"
    "{% set mode = '/think' if thinks else '/no_think' %}{{ '<|im_start|>system\n## Metadata\n' + mode + '\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "{% if tools %}" + CHATML_TOOLS + "{% endif %}{{ '<|im_end|>\n' }}"
    "{% for m in messages %}{% set said = m.content if m.content is string else '' %}"
    "{% if m.role == 'user' %}{{ '<|im_start|>user\n' + said + '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user\n' + said + '<|im_end|>\n' }}"
    "{% elif thinks %}{{ '<|im_start|>assistant\n' + said.lstrip('\n') + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n' + said.lstrip('\n') + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not thinks %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}"
)
# No token ends a turn: the model ends its answer with the mark of the next role.
TEMPLATES["GLM-4.5"] = (
    "{{ '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\n# Tools' }}" + CHATML_TOOLS + "{% endif %}" + LAST_QUESTION + ""
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '/nothink' }}{% endif %}"
    "{% elif m.role == 'assistant' %}" + SPLIT_THOUGHT + "{{ '<|assistant|>' }}"
    "{% if loop.index0 > asked.last and thought %}{{ '\n<think>' + thought.strip() + '</think>' }}"
    "{% else %}{{ '\n<think></think>' }}{% endif %}{% if said.strip() %}{{ '\n' + said.strip() }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '\n' }}"
    "{% for name, value in call.function.arguments.items() %}{{ '<arg_key>' + name + '</arg_key>\n<arg_value>' }}"
    "{{ (value if value is string else value | tojson) + '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ '<|system|>\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n<think></think>' }}{% endif %}{% endif %}"
)
TEMPLATES["Kimi K2"] = (
    "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}"
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>' }}{% endif %}"
    "{% set name = m.name or m.role %}"
    "{{ ('<|im_user|>' if m.role == 'user' else '<|im_assistant|>' if m.role == 'assistant' else '<|im_system|>') }}"
    "{{ name + '<|im_middle|>' }}{% if m.role == 'tool' %}{{ '## Return of ' + (m.tool_call_id or 'it') + '\n' }}{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for call in m.tool_calls %}"
    "{{ '<|tool_call_begin|>' + call.function.name + '<|tool_call_argument_begin|>' }}"
    "{{ (call.function.arguments | tojson) + '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
TEMPLATES["OLMo 2"] = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token if loop.last else eos_token + '\n' }}{% else %}{{ '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
TEMPLATES["Command R"] = (
    "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
    "{{ {'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}.get(m.role, '<|SYSTEM_TOKEN|>') }}"
    "{{ m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
TEMPLATES["Vicuna"] = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% set messages = messages[1:] %}"
    "{% else %}{{ 'A chat between a curious user and an assistant. ' }}{% endif %}"
    "{% for m in messages %}{{ 'USER: ' + m.content + ' ' if m.role == 'user' else 'ASSISTANT: ' + m.content + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# Templates of models that also read images take a content in parts, and write nothing of a text.
TEMPLATES["Idefics 3"] = (
    "{{ '<|im_start|>' }}{% for m in messages %}{{ (m.role | capitalize) + ':' }}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ '<image>' }}{% elif part.type == 'text' %}{{ ' ' + part.text }}{% endif %}{% endfor %}"
    "{{ '<end_of_utterance>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

SPECIAL_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|im_middle|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"),
    *(
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|turn>",
        "<turn|>",
    ),
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|end|>"),
    *(
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|return|>",
        "<|call|>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[ARGS]",
    ),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"),
    *("<|observation|>", "<|system|>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
]

THOUGHT, ANSWER = "It is three.", "Three."
CALL: dict[str, Any] = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
QUESTION = {"role": "user", "content": "1+2?"}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "answer": {"messages": [QUESTION, {"role": "assistant", "content": ANSWER}]},
    "two turns": {
        "messages": [
            {"role": "system", "content": "Be kind."},
            QUESTION,
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes."},
        ]
    },
    "reasoning": {"messages": [QUESTION, {"role": "assistant", "content": ANSWER, "reasoning": THOUGHT}]},
    "thought in content": {
        "messages": [QUESTION, {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}]
    },
    "tool": {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "abcdefghi", "name": "add"},
            {"role": "assistant", "content": ANSWER},
        ],
        "tools": TOOLS,
    },
    "cut": {"messages": [QUESTION, {"role": "assistant", "content": "Thr"}], "finish_reason": "length"},
}
"""Six conversations as records, which are read for each template."""


def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and all special tokens, with the chat template of a family."""
    tokenizer = byte_tokenizer(TEMPLATES[family])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS}, replace_extra_special_tokens=False)
    return tokenizer


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and special tokens, so that no token crosses a boundary of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return wrapped(inner, template)


def wrapped(inner: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer
