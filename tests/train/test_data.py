"""Packed rows, and the taught tokens of conversations."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from chat_families import byte_tokenizer
from medusa.backbone import Backbone
from medusa.errors import RequestError
from tests.helpers import VOCAB, random_ids, tiny_model
from tests.train.templates import CHATML
from train.config import DataConfig
from train.data.datasets import PackedDataset, StreamedDataset, load_dataset
from train.data.packing import Example, positions_of
from train.loss.targets import IGNORE, head_labels
from train.states import KEPT, KeptStates, keeps_documents_apart, packed_states, states_by_document, states_by_row


def example(*ids: int, taught: str | None = None) -> Example:
    return Example(list(ids), [mark == "x" for mark in taught or "x" * len(ids)])


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# --- packing ---------------------------------------------------------------------------------------------------------


def test_documents_are_concatenated_and_the_last_row_is_padded() -> None:
    packed = PackedDataset([example(1, 2, 3), example(4, 5, 6, 7, taught="..xx")], sequence_length=5)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
    assert packed.document_ids.tolist() == [[0, 0, 0, 1, 1], [1, 1, -1, -1, -1]]
    assert packed.loss_mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert (packed.counts.documents, packed.counts.tokens, packed.counts.taught) == (2, 7, 5)
    assert len(PackedDataset([example(1, 2), example(3, 4)], sequence_length=4)) == 1, "a full row needs no padding"


def test_documents_are_joined_once_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining at every document would copy an open row again and again."""
    joins, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda *args, **kwargs: joins.append(1) or cat(*args, **kwargs))
    rows = PackedDataset([Example([number], [True]) for number in range(40)], 10)
    assert rows.input_ids.flatten().tolist() == list(range(40))
    assert len(joins) <= 5


def test_positions_restart_with_every_document_and_every_row() -> None:
    assert positions_of(torch.tensor([0, 0, 0, 1, 1, 2, -1, -1])).tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    packed = PackedDataset([example(*range(1, 8))], sequence_length=4)
    assert [row["position_ids"].tolist() for row in packed] == [[0, 1, 2, 3], [0, 1, 2, 0]]


@pytest.mark.parametrize(
    ("name", "attention", "packs"),
    [
        ("llama", "sdpa", True),
        ("llama", "eager", True),
        ("opt", "sdpa", False),  # it makes its mask without our positions
        ("qwen2_vl", "sdpa", False),
        ("qwen3_next", "sdpa", False),  # its states flow from one document into the next
        ("mamba", "eager", False),
    ],
)
def test_packed_documents_do_not_see_each_other(name: str, attention: str, packs: bool) -> None:
    """Hidden states in a packed row equal those of each document alone, as in decoding."""
    model = tiny_model(name)
    model.set_attn_implementation(attention)
    backbone = Backbone(model)
    documents = [random_ids(length, seed=length) for length in (7, 1, 9, 4)]
    packed = PackedDataset([example(*ids) for ids in documents], sequence_length=24)
    rows = [packed[0], packed[0]]  # two rows a batch, as in training
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "position_ids")}
    assert keeps_documents_apart(backbone) == packs
    with torch.no_grad():
        alone = [backbone.hidden_states(torch.tensor([ids]), use_cache=False)[0] for ids in documents]
        for states in (packed_states, *([states_by_row] if packs else [])):
            hidden = states(backbone, **batch)
            for row in hidden[:, : sum(map(len, documents))]:
                # Hidden states are of order 1 after the norm; masked sums in float32 differ by some 1e-6.
                torch.testing.assert_close(row, torch.cat(alone), atol=1e-5, rtol=0)


def test_documents_that_are_read_alone_take_no_more_memory_than_their_rows() -> None:
    """They are read together, longest first, as far as they have with padding no more tokens than the packed rows."""
    backbone, sizes = Backbone(tiny_model("mamba")), list[int]()
    positions = torch.cat([torch.arange(length) for length in (1, 13, 1, 2, 1, 6)])[None]
    ids = torch.tensor([random_ids(positions.shape[1])])

    def note(module: Any, args: Any, kwargs: Any) -> None:
        sizes.append(kwargs["input_ids"].shape)

    handle = backbone.base.register_forward_pre_hook(note, with_kwargs=True)
    states_by_document(backbone, ids, positions)
    handle.remove()
    assert sizes == [(1, 13), (4, 6), (1, 1)]


@pytest.mark.parametrize("rows_kept", [0, 1, 3])
def test_states_of_a_frozen_backbone_are_kept_as_far_as_memory_goes(
    rows_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = Backbone(tiny_model("llama"))
    ids = torch.tensor([random_ids(12, seed=seed) for seed in range(3)])
    positions = torch.arange(12).expand(3, -1)
    row_bytes = 12 * backbone.state_size * 4
    monkeypatch.setattr("train.states.free_memory", lambda device: (rows_kept + 0.5) * row_bytes / KEPT)
    read, runs = KeptStates(backbone), list[int]()
    backbone.base.register_forward_pre_hook(lambda module, args: runs.append(1))
    with torch.no_grad():
        first, again = read(ids, positions), read(ids.flip(0), positions)
        each = len(runs)
        torch.testing.assert_close(first, packed_states(backbone, ids, positions), atol=1e-5, rtol=0)
    assert torch.equal(again, first.flip(0))
    assert each == 3 + (3 - rows_kept), "one forward for a row that is new, or was not kept"
    assert len(read.held) == rows_kept


def test_rows_are_no_longer_than_the_context(tmp_path: Path) -> None:
    config = DataConfig(path=jsonl(tmp_path / "d.jsonl", {"input_ids": random_ids(40)}), sequence_length=512)
    assert load_dataset(config, None, VOCAB, context=16).input_ids.shape == (3, 16)
    assert load_dataset(config, None, VOCAB, context=None).input_ids.shape == (1, 512)


# --- whole documents -------------------------------------------------------------------------------------------------


def test_whole_documents_take_the_first_row_with_room() -> None:
    packed = PackedDataset([example(1, 1, 1), example(2, 2, 2), example(3, 3), example(4)], 5, whole=True)
    assert packed.input_ids.tolist() == [[1, 1, 1, 3, 3], [2, 2, 2, 4, 0]]
    assert packed.document_ids.tolist() == [[0, 0, 0, 2, 2], [1, 1, 1, 3, -1]]
    assert packed.counts.rows == 2


def test_open_rows_are_limited_and_no_document_is_lost() -> None:
    lengths = [3 + 7 * n % 11 for n in range(200)]
    packed = PackedDataset([example(*[number + 1] * length) for number, length in enumerate(lengths)], 16, whole=True)
    for row in packed.document_ids:
        for document in row.unique().tolist():
            if document >= 0:
                assert int((row == document).sum()) == lengths[document], "whole, in one row"
    assert sorted(packed.document_ids[packed.document_ids >= 0].unique().tolist()) == list(range(200))
    assert packed.counts.rows == len(packed) < 1.2 * sum(lengths) / 16


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("policy", "ids", "cut", "dropped"),
    [
        ("split", [[1, 1, 1, 2, 2, 2], [2, 2, 2, 2, 2, 3], [3, 3, 4, 4, 4, 4], [4, 4, 4, 0, 0, 0]], 2, {}),
        ("truncate", [[1, 1, 1, 3, 3, 3], [2] * 6], 1, {"with nothing taught within a row": 1}),
        ("drop", [[1, 1, 1, 3, 3, 3]], 0, {"longer than a row": 2}),
    ],
)
def test_documents_longer_than_a_row(
    tmp_path: Path, policy: str, ids: list[list[int]], cut: int, dropped: dict[str, int], streaming: bool
) -> None:
    rows = [{"input_ids": [n] * length} for n, length in ((1, 3), (2, 8), (3, 3))]
    data = jsonl(tmp_path / "d.jsonl", *rows, {"input_ids": [4] * 7, "prompt_tokens": 6})
    config = DataConfig(
        path=data,
        sequence_length=6,
        long_documents=policy,
        max_examples=4,
        streaming=streaming,
        shuffle_buffer=1,
    )
    dataset = load_dataset(config, None, VOCAB, context=None)
    if isinstance(dataset, StreamedDataset):
        found = [row["input_ids"].tolist() for row in islice(dataset, len(ids) + 1)][:-1]  # the first pass to its end
    else:
        found = dataset.input_ids.tolist()
    assert found == ids
    assert (dataset.counts.cut, dict(dataset.counts.dropped)) == (cut, dropped)


@pytest.mark.parametrize("whole", [False, True])
def test_no_head_is_taught_across_documents_or_from_padding(whole: bool) -> None:
    """Every label of a head is the token at the head's distance in the same document."""
    documents = [random_ids(3 + 5 * n % 12, seed=n) for n in range(30)]
    marks = [[bool(i) for i in random_ids(len(ids), seed=n, vocab=2)] for n, ids in enumerate(documents)]
    packed = PackedDataset(map(Example, documents, marks), 16, whole)
    labels = head_labels(packed.input_ids.long(), packed.loss_mask, packed.document_ids, num_heads=4)
    seen = 0
    for head, row, at in (labels != IGNORE).nonzero().tolist():
        item = packed[row]
        number, place = int(item["document_ids"][at]), int(item["position_ids"][at])
        if not whole:  # a document may begin in an earlier row
            earlier = sum(int((packed.document_ids[r] == number).sum()) for r in range(row))
            place += earlier
        assert number >= 0
        assert documents[number][place] == int(item["input_ids"][at])
        assert documents[number][place + head + 2] == int(labels[head, row, at])
        assert marks[number][place + head + 2], "looked up where the label stands"
        seen += 1
    assert seen > 100


# --- streams ---------------------------------------------------------------------------------------------------------


def rows_of(dataset: Any, count: int) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in islice(dataset, count)]


@pytest.mark.parametrize("name", ["d.jsonl", "d.txt", "d.parquet", "org/set"])
@pytest.mark.usefixtures("online")
def test_a_stream_gives_the_rows_of_the_packed_data_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    texts = ["one", "two words", "and a third one"]
    if name == "org/set":
        monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: iter([{"text": text} for text in texts]))
        path = name
    elif name == "d.parquet":
        path = str(tmp_path / name)
        Dataset.from_list([{"text": text} for text in texts]).to_parquet(path)
    elif name == "d.txt":
        (tmp_path / name).write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
        path = str(tmp_path / name)
    else:
        path = jsonl(tmp_path / name, *({"text": text} for text in texts))
    packed = load_dataset(DataConfig(path=path, sequence_length=8), byte_tokenizer(), 512, 64)
    stream = load_dataset(
        DataConfig(path=path, sequence_length=8, streaming=True, shuffle_buffer=1), byte_tokenizer(), 512, 64
    )
    assert isinstance(packed, PackedDataset)
    once = packed.input_ids.tolist()
    assert rows_of(stream, 3 * len(once)) == 3 * once
    assert stream.counts == packed.counts, "of one pass"
    for row, other in zip(packed, stream, strict=False):
        assert all(torch.equal(row[key], other[key]) for key in row)


def test_a_streams_order_depends_only_on_the_seed(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", *({"input_ids": [n] * 4} for n in range(20)))

    def rows(seed: int, buffer: int = 8) -> list[list[int]]:
        config = DataConfig(path=data, sequence_length=4, streaming=True, shuffle_buffer=buffer)
        return rows_of(load_dataset(config, None, VOCAB, None, seed), 40)

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)
    in_order = rows(1, buffer=1)
    assert rows(1) != in_order
    assert sorted(rows(1)[:20]) == in_order[:20], "every row once a pass"
    assert rows(1)[:20] != rows(1)[20:], "and each pass in an order of its own"


def test_workers_share_a_stream(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", *({"input_ids": [n] * 4} for n in range(6)))
    stream = load_dataset(DataConfig(path=data, sequence_length=4, streaming=True, shuffle_buffer=1), None, VOCAB, None)
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert [int(row["input_ids"][0]) for row in islice(loader, 6)] == list(range(6))


# --- what is read and what is dropped --------------------------------------------------------------------------------


def test_dropped_examples_are_counted_by_reason(tmp_path: Path) -> None:
    shared = random_ids(12, seed=1)
    test_set = jsonl(tmp_path / "test.jsonl", {"input_ids": [1, 2, *shared]})
    data = jsonl(
        tmp_path / "d.jsonl",
        {"input_ids": random_ids(20, seed=2)},
        {"input_ids": [5, *shared, 5]},
        {"input_ids": [5, *shared[:7], 5]},  # shares 7 tokens, not 8
        {"input_ids": [1, 2, 3], "prompt_tokens": 3},
        {"input_ids": [1, 2]},
    )
    packed = load_dataset(DataConfig(path=data, exclude=test_set, exclude_window=8), None, VOCAB, 64)
    assert packed.counts.documents == 2
    assert packed.counts.dropped == {"shared with the excluded text": 1, "with nothing to teach": 2}
    told = f"dropped: 1 shared with the excluded text (first: {data}:2), 2 with nothing to teach (first: {data}:4)"
    assert told in str(packed.counts)


def test_only_the_requested_number_of_examples_is_read(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", *({"input_ids": [n, n, n]} for n in range(5)))
    assert load_dataset(DataConfig(path=data, max_examples=2), None, VOCAB, 64).counts.documents == 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "without an assistant turn"),
        ({"conversations": [{"from": "human", "value": "hi"}]}, "without an assistant turn"),
        ({"input_ids": [1, 2, 3], "prompt_tokens": 3}, "with nothing to teach"),
        ({"text": " "}, "empty"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_nothing_to_teach_is_an_error_with_reason_and_line(
    tmp_path: Path, row: dict[str, Any], reason: str, streaming: bool
) -> None:
    data = jsonl(tmp_path / "d.jsonl", row)
    with pytest.raises(RequestError, match=rf"nothing to train on.*: 1 {reason} \(first: .*d\.jsonl:1\)"):
        load_dataset(DataConfig(path=data, streaming=streaming), byte_tokenizer(CHATML), 512, 64)


@pytest.mark.parametrize(
    "row", [{"prompt": "hi"}, {"question": "hi", "answer": 2}, {"prompt": [{"role": "user", "content": "hi"}]}]
)
@pytest.mark.parametrize("template", [CHATML, ""])
def test_a_prompt_without_an_answer_is_refused_by_line(tmp_path: Path, row: dict[str, Any], template: str) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"text": "a document"}, row)
    with pytest.raises(RequestError, match=r"d\.jsonl:2: a prompt without an answer.*medusa distill"):
        load_dataset(DataConfig(path=data), byte_tokenizer(template), 512, 64)


def test_ids_beyond_the_vocabulary_are_refused_by_line(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"input_ids": [1, 2, 3]}, {"input_ids": [1, VOCAB, 3]})
    with pytest.raises(RequestError, match=r"d\.jsonl:2.*61"):
        load_dataset(DataConfig(path=data), None, VOCAB, 64)


@pytest.mark.parametrize("row", [{"text": "hello"}, {"messages": [{"role": "user", "content": "hi"}]}])
def test_text_without_a_tokenizer_is_refused_by_line(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"d\.jsonl:1.*input_ids"):
        load_dataset(DataConfig(path=jsonl(tmp_path / "d.jsonl", row)), None, VOCAB, 64)


def test_documents_of_a_text_file_are_separated_by_special_tokens(tmp_path: Path) -> None:
    """The separator is replaced by the end of one document and the beginning of the next."""
    (tmp_path / "d.txt").write_text("one\n<|endoftext|>\ntwo\nlines\n<|endoftext|>\n", encoding="utf-8")
    tokenizer = byte_tokenizer()
    packed = load_dataset(DataConfig(path=str(tmp_path / "d.txt"), sequence_length=32), tokenizer, 512, 64)
    ids = packed.input_ids[0, : packed.counts.tokens].tolist()
    assert tokenizer.decode(ids) == "<s>one</s><s>two\nlines</s>"
    assert packed.counts.documents == 2
    assert packed.counts.taught == len(ids)


def test_bos_eos_and_padding_may_be_one_id(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("a\n---\nb\n", encoding="utf-8")
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.pad_token = "</s>"
    packed = load_dataset(
        DataConfig(path=str(tmp_path / "d.txt"), document_separator="---", sequence_length=8), tokenizer, 512, 64
    )
    assert tokenizer.decode(packed.input_ids[0, :6].tolist()) == "</s>a</s></s>b</s>"
    assert packed.loss_mask.int().tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]


# --- what is kept out ------------------------------------------------------------------------------------------------


def test_questions_can_be_excluded_from_a_base_models_data(tmp_path: Path) -> None:
    """MT-bench's questions are conversations, but are treated as text for a base model without a chat template."""
    questions = jsonl(tmp_path / "question.jsonl", {"question_id": 81, "turns": ["write about a trip to Hawaii"]})
    data = jsonl(tmp_path / "d.jsonl", {"text": "Please write about a trip to Hawaii."}, {"text": "something else"})
    packed = load_dataset(DataConfig(path=data, exclude=questions, exclude_window=16), byte_tokenizer(), 512, 64)
    assert packed.counts.dropped == {"shared with the excluded text": 1}


def test_answers_of_every_layout_are_excluded(tmp_path: Path) -> None:
    """Such as held-out answers of `medusa distill`: decoding will write them."""
    answer, tokenizer = "the quick brown fox jumps over it", byte_tokenizer()
    rows: list[dict[str, Any]] = [
        {"question": "Why?", "answer": answer},
        {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}]},
        {"input_ids": tokenizer(f"Why? {answer}")["input_ids"], "prompt_tokens": 4},
        {"text": answer},
    ]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    data = jsonl(tmp_path / "d.jsonl", {"text": f"Tom saw {answer}"}, {"text": "something else"})
    for row in rows:
        excluded = jsonl(tmp_path / "e.jsonl", row)
        packed = load_dataset(DataConfig(path=data, exclude=excluded, exclude_window=16), tokenizer, 512, 64)
        assert packed.counts.dropped == {"shared with the excluded text": 1}, row


def test_a_shared_run_of_tokens_is_found_wherever_it_lies(tmp_path: Path) -> None:
    """At the start, in the middle and at the end of either text; a run that is one token shorter is none."""
    shared, other = random_ids(4, seed=1), [50, 51]
    for excluded in (shared, other + shared, shared + other):
        path = jsonl(tmp_path / "e.jsonl", {"input_ids": excluded})
        texts = [shared, other + shared, shared + other, [52, *shared, 53], [*shared[1:], 53, 54], [54, *shared[:-1]]]
        data = jsonl(tmp_path / "d.jsonl", *({"input_ids": text} for text in texts))
        packed = load_dataset(DataConfig(path=data, exclude=path, exclude_window=4), None, VOCAB, 64)
        assert packed.counts.dropped == {"shared with the excluded text": 4}
