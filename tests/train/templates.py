"""Chat templates of several model families, and tokenizers to apply them."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from chat_families import wrapped

CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

CHATML_WITHOUT_PROMPT = CHATML[: CHATML.index("{% if add_generation_prompt")]


MISTRAL = """\
{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}\
{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""

ZEPHYR = """\
{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}\
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim \
+ '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

VICUNA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% set messages = messages[1:] %}\
{% else %}{{ 'A chat between a curious user and an assistant. ' }}{% endif %}\
{% for m in messages %}{{ 'USER: ' + m.content + ' ' if m.role == 'user' else 'ASSISTANT: ' + m.content + eos_token }}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

PHI3 = """\
{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""


CHATML_TAGGED = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}\
{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}\
{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


CORPUS = [
    "You are Qwen. A chat between a curious user and an assistant. USER: yes ASSISTANT: yes",
    "system user assistant model tool hello bye yes no  def f():    return 1         pass",
    "Cutting Knowledge Date: December 2023 [INST] hello [/INST] bye café",
] * 4


def merging_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer like GPT-2's and Llama-3's: a token includes the space before it, its offsets do not; BOS first."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    inner.add_special_tokens(["<s>", "</s>"])
    begin = ("<s>", inner.token_to_id("<s>"))
    inner.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing("<s> $A", special_tokens=[begin])]
    )
    return wrapped(inner, template)


def sentencepiece_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer like Llama-2's and Mistral's: ▁ for a space, and one before the first word."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    letters = ["\n", "▁", *map(chr, range(0x21, 0x7F))]
    inner.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=letters, show_progress=False
        ),
    )
    begin = ("<s>", inner.token_to_id("<s>"))
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[begin])
    return wrapped(inner, template)


def older_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """The same with a space before every part of a text between special tokens, as Llama 2's tokenizer had at first."""
    made = sentencepiece_tokenizer(template)
    inner = made.backend_tokenizer
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    return made
