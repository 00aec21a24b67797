"""Packed rows, and which tokens of a conversation are taught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.records import Record
from tests.helpers import VOCAB, random_ids, tiny_model
from train.data import DataConfig, Example, PackedDataset, load_dataset, positions_of, to_example


def example(*ids: int, taught: str | None = None) -> Example:
    return Example(list(ids), [mark == "x" for mark in taught or "x" * len(ids)])


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# --- packing ---------------------------------------------------------------------------------------------------------


def test_documents_lie_end_to_end_and_the_last_row_is_padded() -> None:
    packed = PackedDataset([example(1, 2, 3), example(4, 5, 6, 7, taught="..xx")], sequence_length=5)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
    assert packed.document_ids.tolist() == [[0, 0, 0, 1, 1], [1, 1, -1, -1, -1]]
    assert packed.loss_mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert (packed.counts.documents, packed.counts.tokens, packed.counts.taught) == (2, 7, 5)


def test_a_full_last_row_needs_no_padding() -> None:
    assert len(PackedDataset([example(1, 2), example(3, 4)], sequence_length=4)) == 1


def test_positions_start_anew_with_every_document_and_every_row() -> None:
    assert positions_of(torch.tensor([0, 0, 0, 1, 1, 2, -1, -1])).tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    packed = PackedDataset([example(*range(1, 8))], sequence_length=4)
    assert [row["position_ids"].tolist() for row in packed] == [[0, 1, 2, 3], [0, 1, 2, 0]]


def test_a_row_holds_what_the_trained_module_takes() -> None:
    row = PackedDataset([example(1, 2, 3)], sequence_length=4)[0]
    assert {name: tensor.dtype for name, tensor in row.items()} == {
        "input_ids": torch.int64,
        "position_ids": torch.int64,
        "document_ids": torch.int64,
        "loss_mask": torch.bool,
    }


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(attention: str) -> None:
    """Hidden states in a packed row are those of each document alone, which heads will meet when decoding."""
    model = tiny_model("llama")
    model.set_attn_implementation(attention)
    backbone = Backbone(model)
    documents = [random_ids(length, seed=length) for length in (7, 1, 9, 4)]
    packed = PackedDataset([example(*ids) for ids in documents], sequence_length=24)
    rows = [packed[0], packed[0]]  # two rows a batch, as in training
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        hidden = backbone.hidden_states(**batch, use_cache=False)
        start = 0
        for ids in documents:
            alone = backbone.hidden_states(torch.tensor([ids]), use_cache=False)[0]
            # Hidden states are of order 1 after the norm; masked sums in float32 differ by some 1e-6.
            for row in hidden:
                torch.testing.assert_close(row[start : start + len(ids)], alone, atol=1e-5, rtol=0)
            start += len(ids)


def test_rows_are_no_longer_than_the_context(tmp_path: Path) -> None:
    config = DataConfig(jsonl(tmp_path / "d.jsonl", {"input_ids": random_ids(40)}), sequence_length=512)
    assert load_dataset(config, None, VOCAB, context=16).input_ids.shape == (3, 16)
    assert load_dataset(config, None, VOCAB, context=None).input_ids.shape == (1, 512)


# --- what is read and what is dropped --------------------------------------------------------------------------------


def test_what_was_dropped_is_counted_with_the_reason(tmp_path: Path) -> None:
    shared = random_ids(12, seed=1)
    test_set = jsonl(tmp_path / "test.jsonl", {"input_ids": [1, 2, *shared]})
    data = jsonl(
        tmp_path / "d.jsonl",
        {"input_ids": random_ids(20, seed=2)},
        {"input_ids": [5, *shared, 5]},
        {"input_ids": [5, *shared[:7], 5]},  # shares 7 tokens, not 8
        {"input_ids": [1, 2, 3], "prompt_tokens": 2},
    )
    packed = load_dataset(DataConfig(data, exclude=test_set, exclude_window=8), None, VOCAB, 64)
    assert packed.counts.documents == 2
    assert packed.counts.dropped == {"shared with the excluded text": 1, "with nothing to teach": 1}
    assert "dropped: 1 shared with the excluded text, 1 with nothing to teach" in str(packed.counts)


def test_no_more_examples_are_read_than_asked_for(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", *({"input_ids": [n, n, n]} for n in range(5)))
    assert load_dataset(DataConfig(data, max_examples=2), None, VOCAB, 64).counts.documents == 2


def test_only_the_answer_of_distilled_text_is_taught() -> None:
    assert to_example(Record("here", input_ids=[7, 8, 9, 10], prompt_tokens=2), None).loss_mask == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    "row", [{"messages": [{"role": "user", "content": "hi"}]}, {"input_ids": [1, 2], "prompt_tokens": 2}]
)
def test_nothing_to_teach_is_said_with_the_counts(tmp_path: Path, row: dict[str, Any]) -> None:
    data = jsonl(tmp_path / "d.jsonl", row)
    with pytest.raises(RequestError, match=r"nothing to train on in .*1 with nothing to teach"):
        load_dataset(DataConfig(data), byte_tokenizer(CHATML), 512, 64)


def test_ids_beyond_the_vocabulary_are_refused_by_line(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"input_ids": [1, 2, 3]}, {"input_ids": [1, VOCAB, 3]})
    with pytest.raises(RequestError, match=r"d\.jsonl:2.*61"):
        load_dataset(DataConfig(data), None, VOCAB, 64)


@pytest.mark.parametrize("row", [{"text": "hello"}, {"messages": [{"role": "user", "content": "hi"}]}])
def test_text_without_a_tokenizer_is_refused_by_line(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"d\.jsonl:1.*input_ids"):
        load_dataset(DataConfig(jsonl(tmp_path / "d.jsonl", row)), None, VOCAB, 64)


def test_documents_of_a_text_file_are_separated_by_the_backbones_own_tokens(tmp_path: Path) -> None:
    """The separator is no text: in its place stand the end of one document and the beginning of the next."""
    (tmp_path / "d.txt").write_text("one\n<|endoftext|>\ntwo\nlines\n<|endoftext|>\n", encoding="utf-8")
    tokenizer = byte_tokenizer()
    packed = load_dataset(DataConfig(str(tmp_path / "d.txt"), sequence_length=32), tokenizer, 512, 64)
    ids = packed.input_ids[0, : packed.counts.tokens].tolist()
    assert tokenizer.decode(ids) == "<s>one</s><s>two\nlines</s>"
    assert packed.counts.documents == 2
    assert packed.counts.taught == len(ids)


def test_bos_eos_and_padding_may_be_one_id(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("a\n---\nb\n", encoding="utf-8")
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.pad_token = "</s>"
    packed = load_dataset(DataConfig(str(tmp_path / "d.txt"), "train", "---", sequence_length=8), tokenizer, 512, 64)
    assert tokenizer.decode(packed.input_ids[0, :6].tolist()) == "</s>a</s></s>b</s>"
    assert packed.loss_mask.int().tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]


# --- conversations ---------------------------------------------------------------------------------------------------

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>"]

CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QWEN25 = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
LLAMA3 = """\
{% for m in messages %}{{ (bos_token if loop.first else '') + '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' \
+ m.content | trim + '<|eot_id|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
MISTRAL = """\
{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate user/assistant') }}{% endif %}\
{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + eos_token }}{% endfor %}"""
ZEPHYR = """\
{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
GEMMA = """\
{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' \
+ m.content | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
VICUNA = """\
{% for m in messages %}{{ 'USER: ' + m.content + ' ' if m.role == 'user' else 'ASSISTANT: ' + m.content + eos_token }}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
QWEN3 = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}\
{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Every byte is a token, so nothing merges across what the template writes; special tokens besides."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    tokenizer.chat_template = template
    return tokenizer


def marked(template: str, *turns: tuple[str, str]) -> str:
    """The conversation as the template writes it, with what is taught between « and »."""
    tokenizer = byte_tokenizer(template)
    messages = [{"role": role, "content": content} for role, content in turns]
    example = to_example(Record("here", messages=messages), tokenizer)
    assert example.input_ids == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    out, taught, run = "", False, []
    for token, mark in [*zip(example.input_ids, example.loss_mask, strict=True), (None, False)]:
        if mark != taught or token is None:
            text = tokenizer.decode(run)
            out += f"«{text}»" if taught else text
            taught, run = mark, []
        run.append(token)
    return out


# The same words in every turn: a mask found by searching the text would land on the first of them (original D10).
REPEATED = (("user", "yes"), ("assistant", "yes"), ("user", "yes"), ("assistant", "yes"))
EXPECTED = {
    "chatml": (
        CHATML,
        "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>\n»"
        "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>\n»",
    ),
    "qwen-2.5": (
        QWEN25,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n"
        "«yes<|im_end|>\n»<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>\n»",
    ),
    "llama-3": (
        LLAMA3,
        "<s><|start_header_id|>user<|end_header_id|>\n\nyes<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "«yes<|eot_id|>»<|start_header_id|>user<|end_header_id|>\n\nyes<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«yes<|eot_id|>»",
    ),
    "mistral": (MISTRAL, "<s>[INST] yes [/INST]« yes</s>»[INST] yes [/INST]« yes</s>»"),
    "zephyr": (ZEPHYR, "<|user|>\nyes</s>\n<|assistant|>\n«yes</s>\n»<|user|>\nyes</s>\n<|assistant|>\n«yes</s>\n»"),
    "gemma": (
        GEMMA,
        "<s><start_of_turn>user\nyes<end_of_turn>\n<start_of_turn>model\n«yes<end_of_turn>\n»"
        "<start_of_turn>user\nyes<end_of_turn>\n<start_of_turn>model\n«yes<end_of_turn>\n»",
    ),
    "vicuna": (VICUNA, "USER: yes ASSISTANT:« yes</s>»USER: yes ASSISTANT:« yes</s>»"),
    "thinking, dropped from earlier turns (Qwen-3)": (
        QWEN3,
        "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>\n»"
        "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\nyes<|im_end|>\n»",
    ),
}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_what_the_assistant_says_is_taught_and_nothing_else(name: str) -> None:
    template, expected = EXPECTED[name]
    assert marked(template, *REPEATED) == expected


def test_the_users_and_the_systems_words_are_not_taught() -> None:
    turns = (("system", "Be brief."), ("user", "hello"), ("assistant", "bye"), ("user", "wait"))
    assert marked(CHATML, *turns) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n«bye<|im_end|>\n»<|im_start|>user\nwait<|im_end|>\n"
    )


def test_two_turns_of_the_assistant_in_a_row_are_both_taught() -> None:
    assert marked(VICUNA, ("user", "a"), ("assistant", "b"), ("assistant", "c")) == (
        "USER: a ASSISTANT:« b</s>»ASSISTANT:« c</s>»"
    )


def test_content_that_the_template_trims_is_still_found() -> None:
    assert marked(GEMMA, ("user", "a"), ("assistant", "  é \n")).endswith("<start_of_turn>model\n«é<end_of_turn>\n»")


def test_a_conversation_that_the_template_refuses_is_named_by_line(tmp_path: Path) -> None:
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = jsonl(tmp_path / "d.jsonl", {"messages": good}, {"messages": [good[0], good[0]]})
    with pytest.raises(RequestError, match=r"d\.jsonl:2.*roles must alternate"):
        load_dataset(DataConfig(data), byte_tokenizer(MISTRAL), 512, 64)


def test_a_conversation_without_a_chat_template_is_named_by_line(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"conversations": [{"from": "human", "value": "hi"}]})
    with pytest.raises(RequestError, match=r"d\.jsonl:1.*chat template"):
        load_dataset(DataConfig(data), byte_tokenizer(), 512, 64)


def test_questions_can_be_kept_out_of_a_base_models_data(tmp_path: Path) -> None:
    """MT-bench's questions are conversations; a base model has no chat template, and they are text all the same."""
    questions = jsonl(tmp_path / "question.jsonl", {"question_id": 81, "turns": ["write about a trip to Hawaii"]})
    data = jsonl(tmp_path / "d.jsonl", {"text": "Please write about a trip to Hawaii."}, {"text": "something else"})
    packed = load_dataset(DataConfig(data, exclude=questions, exclude_window=16), byte_tokenizer(), 512, 64)
    assert packed.counts.dropped == {"shared with the excluded text": 1}
