"""Prompts and training text in every documented format, and errors that name file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import parquet

from medusa.errors import RequestError
from medusa.records.record import Record, prompt_ids
from medusa.records.sources import DOCUMENT_SEPARATOR, read_records

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return str(path)


def read(path: Path, content: str | bytes, **kwargs: Any) -> list[Record]:
    return list(read_records(write(path, content), **kwargs))


def only(path: Path, row: Any) -> Record:
    (record,) = read(path, json.dumps(row))
    return record


@pytest.fixture
def line(tmp_path: Path) -> Path:
    return tmp_path / "some.jsonl"


# --- forms of a line -------------------------------------------------------------------------------------------------


SYSTEM = {"role": "system", "content": "s"}
SHAREGPT = [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prompt": "a"}, {"text": "a", "is_prompt": True, "input_ids": None, "messages": None, "category": None}),
    ({"text": "a", "category": 7}, {"text": "a", "is_prompt": False, "category": "7"}),
    ({"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "x"}, {"text": "def f():"}),
    ({"question": "1 + 1?", "answer": "2"}, {"text": "1 + 1?", "is_prompt": True, "answer": "2"}),  # GSM8K
    ({"input_ids": [5, 0, 7]}, {"input_ids": [5, 0, 7], "prompt_tokens": 0}),
    ({"input_ids": [5, 0, 7], "prompt_tokens": 2, "answer": "x"}, {"prompt_tokens": 2}),
    ({"input_ids": [1, 2], "prompt_tokens": None}, {"prompt_tokens": 0}),  # as in a Parquet file
    (
        {"messages": [USER, ASSISTANT], "teach": "last", "finish_reason": "length"},  # of medusa distill
        {"messages": [USER, ASSISTANT], "first_taught": 1, "unfinished": True},
    ),
    ({"conversations": SHAREGPT}, {"messages": [SYSTEM, USER, ASSISTANT], "first_taught": 0, "unfinished": False}),
    ({"conversations": [{"from": "observation", "value": "x"}]}, {"messages": [{"role": "tool", "content": "x"}]}),
    (
        {"question_id": 81, "category": "writing", "turns": ["hi", "and then?"]},  # MT-bench
        {"messages": [USER], "is_prompt": True, "category": "writing", "turns": ["hi", "and then?"]},
    ),
]


@pytest.mark.parametrize(("row", "expected"), FORMS, ids=[", ".join(row) for row, _ in FORMS])
def test_forms_of_a_line(line: Path, row: dict[str, Any], expected: dict[str, Any]) -> None:
    record = only(line, row)
    assert {name: getattr(record, name) for name in expected} == expected
    assert record.where == f"{line}:1"


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_calls_are_read_as_objects_or_json_text(line: Path, as_text: bool) -> None:
    """OpenAI stores arguments as JSON text, some data sets whole tools; chat templates need objects."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = CALL | {"function": {"name": "add", "arguments": '{"a": 1}'}} if as_text else CALL
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    record = only(line, {"messages": [USER, message], "tools": json.dumps(tools) if as_text else tools})
    assert record.tools == tools
    assert record.messages == [USER, message | {"content": "", "tool_calls": [CALL]}]
    assert only(line, {"messages": [USER], "tools": []}).tools is None


# --- forms of a file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_a_byte_order_mark_is_removed(tmp_path: Path, name: str) -> None:
    content = {"a.jsonl": '{"prompt": "a"}', "a.json": '[{"prompt": "a"}]', "a.txt": "a"}[name]
    assert [record.text for record in read(tmp_path / name, b"\xef\xbb\xbf" + content.encode())] == ["a"]


@pytest.mark.parametrize(("end", "second"), [(b"\r\n", 2), (b"\n\n  \n", 4)])
def test_windows_line_ends_and_blank_lines_which_are_counted(line: Path, end: bytes, second: int) -> None:
    records = read(line, b'{"text": "a"}' + end + b'{"text": "b"}' + end)
    assert [(record.text, record.where) for record in records] == [("a", f"{line}:1"), ("b", f"{line}:{second}")]


@pytest.mark.parametrize("letter", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_json_line(line: Path, letter: str) -> None:
    """JSON strings may contain Unicode's other line separators, and `medusa distill` writes them unescaped."""
    records = read(line, json.dumps({"text": f"a{letter}b"}, ensure_ascii=False) + '\n{"text": "c"}\n')
    assert [record.text for record in records] == [f"a{letter}b", "c"]


def test_a_json_file_is_an_array_of_records(tmp_path: Path) -> None:
    records = read(tmp_path / "a.json", '[{"prompt": "a"},\n {"input_ids": [1]}]')
    assert [record.where for record in records] == [f"{tmp_path / 'a.json'}, record {n}" for n in (1, 2)]
    assert (records[0].text, records[1].input_ids) == ("a", [1])


def test_a_text_file_of_prompts_holds_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    records = read(path, "first\n\nsecond\n")
    assert [(r.text, r.where, r.is_prompt) for r in records] == [
        ("first", f"{path}:1", True),
        ("second", f"{path}:3", True),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_text_file_of_documents_is_split_at_the_separator(tmp_path: Path, end: str) -> None:
    lines = ["one", "two", DOCUMENT_SEPARATOR, "three", DOCUMENT_SEPARATOR + " ", "", DOCUMENT_SEPARATOR, ""]
    records = read(tmp_path / "a.txt", end.join(lines).encode(), separator=DOCUMENT_SEPARATOR)
    assert [record.text for record in records] == ["one\ntwo", "three"]
    assert [record.where for record in records] == [f"{tmp_path / 'a.txt'}:{number}" for number in (1, 4)]
    assert not any(record.is_prompt for record in records)
    assert not any(DOCUMENT_SEPARATOR in (record.text or "") for record in records)


def test_any_line_can_separate_documents(tmp_path: Path) -> None:
    records = read(tmp_path / "a.txt", "a.b\n***\nc *** d\n", separator="***")
    assert [record.text for record in records] == ["a.b", "c *** d"], "a line of its own, and no regular expression"


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    nothing = dict.fromkeys(("prompt", "input_ids", "messages", "category"))
    rows = [{"prompt": "a", "category": "x"}, {"input_ids": [1, 2]}, {"messages": [USER, ASSISTANT]}]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([nothing | row for row in rows]), path)
    records = list(read_records(str(path)))
    assert (records[0].text, records[0].category) == ("a", "x")
    assert records[1].input_ids == [1, 2]
    assert records[2].messages == [USER, ASSISTANT]
    assert [record.where for record in records] == [f"{path}, row {n}" for n in (1, 2, 3)]


def test_a_folder_is_read_in_file_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "b.JSONL", '{"text": "b"}')
    write(tmp_path / "a.json", '[{"text": "a"}]')
    write(tmp_path / "sub" / "c.txt", "c")
    write(tmp_path / "notes.md", "not data")
    assert [record.text for record in read_records(str(tmp_path))] == ["a", "b", "c"]
    write(tmp_path / "sub" / "d.csv", "d")
    with pytest.raises(RequestError, match=r"d\.csv cannot be read; files end in"):
        list(read_records(str(tmp_path)))


def test_a_folder_of_distill_is_read_as_data(tmp_path: Path) -> None:
    """Settings and failures in the folder of `own.jsonl` are not records."""
    write(tmp_path / "own.failed.jsonl", '{"index": 1, "error": "too long"}\n')
    write(tmp_path / "own.jsonl", '{"input_ids": [1, 2, 3], "prompt_tokens": 1}\n')
    write(tmp_path / "own.settings.json", '{"max_new_tokens": 2}')
    assert [record.input_ids for record in read_records(str(tmp_path))] == [[1, 2, 3]]


@pytest.mark.usefixtures("online")
def test_a_hub_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def load(path: str, **kwargs: Any) -> Iterator[dict[str, Any]]:
        asked.update(kwargs, path=path)
        return iter([{"prompt": "a"}, {"prompt": "b"}])

    monkeypatch.setattr("datasets.load_dataset", load)
    assert next(read_records("org/questions", split="test")).where == "org/questions, row 1"
    assert asked == {"path": "org/questions", "split": "test", "streaming": True}
    next(read_records("org/questions", subset="main"))
    assert asked["name"] == "main"


def test_a_folder_of_save_to_disk_is_read(tmp_path: Path) -> None:
    Dataset.from_list([{"prompt": "a", "category": "x"}, {"prompt": "b", "category": "y"}]).save_to_disk(tmp_path / "d")
    records = list(read_records(str(tmp_path / "d")))
    assert [(r.text, r.is_prompt, r.category) for r in records] == [("a", True, "x"), ("b", True, "y")]
    assert [record.where for record in records] == [f"{tmp_path / 'd'}, row 1", f"{tmp_path / 'd'}, row 2"]


def test_a_folder_of_save_to_disk_with_splits(tmp_path: Path) -> None:
    rows = {"train": [{"messages": [USER, ASSISTANT]}], "test": [{"messages": [USER]}]}
    DatasetDict({name: Dataset.from_list(content) for name, content in rows.items()}).save_to_disk(tmp_path / "d")
    assert [record.messages for record in read_records(str(tmp_path / "d"))] == [[USER, ASSISTANT]]
    assert [record.messages for record in read_records(str(tmp_path / "d"), split="test")] == [[USER]]
    with pytest.raises(RequestError, match="has no split 'dev'; its splits are train, test"):
        list(read_records(str(tmp_path / "d"), split="dev"))


def test_wrong_folders_of_save_to_disk_are_refused(tmp_path: Path) -> None:
    Dataset.from_list([{"story": "a"}]).save_to_disk(tmp_path / "wrong")
    with pytest.raises(RequestError, match="wrong, row 1: none of prompt"):
        list(read_records(str(tmp_path / "wrong")))
    Dataset.from_dict({"prompt": []}).save_to_disk(tmp_path / "empty")
    with pytest.raises(RequestError, match="empty is an empty or damaged dataset of save_to_disk"):
        list(read_records(str(tmp_path / "empty")))
    (tmp_path / "wrong" / "state.json").write_text("{")
    with pytest.raises(RequestError, match="wrong is an empty or damaged dataset"):
        list(read_records(str(tmp_path / "wrong")))


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"story": "a"}, "none of prompt"),
        ({}, "none of prompt"),
        ({"problem": "a", "answer": "b"}, "rename problem to prompt"),
        ({"dialogue": [USER]}, "rename dialogue to messages"),
        ({"ids": [1, 2]}, "rename ids to input_ids"),
        ({"dialog": ["a", "b"]}, "rename dialog to data if it holds question and answer in turn"),
        ({"problem": "a", "tags": ["b"]}, "rename problem to prompt"),
        ({"chosen": "a", "rejected": "b"}, "rename the key of the question to prompt"),
        ({"data": "a"}, "it must be a list of texts, question and answer in turn"),
        ({"prompt": None}, "prompt is null; it must be a text, or a list of messages"),
        ({"question": ["a"]}, 'question is ["a"]; it must be a text, or a list of messages'),
        ({"turns": []}, "turns must be a list of texts, and not empty"),
        ([1, 2], "a JSON object, not list"),
        ("text", 'a JSON object, not str; write it as {"prompt": '),
        ({"prompt": 5}, "prompt"),
        ({"input_ids": "1 2"}, "input_ids"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [1, 2], "prompt_tokens": "two"}, "prompt_tokens"),
        ({"input_ids": [1, 2], "prompt_tokens": -1}, "prompt_tokens"),
        ({"input_ids": [1, 2], "prompt_tokens": False}, "prompt_tokens"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"conversations": [{"from": "alien", "value": "hi"}]}, "human"),
        ({"conversations": [{"from": ["human"], "value": "hi"}]}, "human"),
        ({"conversations": [{"from": "human"}]}, "value"),
        ({"conversations": 5}, "conversations"),
        ({"turns": 5}, "turns"),
        ({"messages": [USER], "tools": "[{"}, "tools: not JSON"),
        ({"messages": [USER], "tools": "[1]"}, "list of JSON schemas"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls"),
        ({"messages": [{"role": "user"}]}, "message 1: a message of the user needs content"),
    ],
)
def test_a_malformed_record_is_named_by_line(line: Path, row: Any, said: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read(line, '{"text": "fine"}\n' + json.dumps(row) + "\n")
    assert str(refusal.value).startswith(f"{line}:2: ")
    assert said in str(refusal.value)


NOT_UTF8 = "\nabcé".encode("latin-1")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', r":3: not JSON"),
        ("a.json", b'[\n{"text": "a"},\n{"text" "b"}\n]', r":3: not JSON"),
        ("a.json", b'{"text": "a"}\n{"text": "b"}\n', r":2: not JSON .*named \.jsonl"),
        ("a.json", b'{"text": "a"}', " must hold a JSON array"),
        *((name, NOT_UTF8, r":2: not UTF-8 \(byte 4 .* 0xe9\); .*iconv") for name in ("a.jsonl", "a.json", "a.txt")),
        *((name, empty, " is empty") for name, empty in (("a.jsonl", b""), ("a.txt", b"\n \n"), ("a.json", b"[]"))),
        *(("a.parquet", content, " is damaged or no Parquet file") for content in (b"", b"PAR1 and no more")),
        ("a.csv", b"x", r": files end in \.jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_line(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(name) + said):
        read(tmp_path / name, content)


def test_files_are_read_lazily(line: Path) -> None:
    """Files can be larger than memory, so lines are read one at a time."""
    path = write(line, '{"text": "a"}\n{"text": "b"}\n{broken')
    records = read_records(path)
    assert [next(records).text, next(records).text] == ["a", "b"]
    with pytest.raises(RequestError, match=r"some\.jsonl:3: not JSON"):
        next(records)


def test_a_folder_without_data_is_refused_with_the_known_kinds(tmp_path: Path) -> None:
    write(tmp_path / "notes.md", "x")
    with pytest.raises(RequestError, match=r"holds no data; files end in \.jsonl"):
        list(read_records(str(tmp_path)))


@pytest.mark.parametrize("name", ["absent.jsonl", "absent", "no/such/folder/absent.txt"])
def test_a_missing_file_is_refused_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: pytest.fail("the Hub was asked"))
    with pytest.raises(RequestError, match="absent"):
        list(read_records(str(tmp_path / name)))


@pytest.mark.usefixtures("online")
def test_a_dataset_that_the_hub_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(RequestError, match=r"org/absent: neither a file nor a dataset on the Hub .*no network"):
        list(read_records("org/absent"))


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_prompt_ids_of_a_text(tokenizer: Any) -> None:
    assert prompt_ids(Record("here", text="abc"), tokenizer) == [0, 1, 2]
    assert prompt_ids(Record("here", input_ids=[9, 8]), None) == [9, 8]
    assert prompt_ids(Record("here", input_ids=[9, 8, 7], prompt_tokens=2), None) == [9, 8]
    assert tokenizer.decode(prompt_ids(Record("here", messages=[USER], is_prompt=True), tokenizer)) == "hi"
    with pytest.raises(RequestError, match=r"f\.jsonl:3: .*no tokenizer"):
        prompt_ids(Record("f.jsonl:3", text="a"), None)


def test_a_conversation_is_continued_at_the_next_assistant_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a' }}{% endif %}"
    )
    for messages in ([USER], [USER, ASSISTANT]):
        assert tokenizer.decode(prompt_ids(Record("here", messages=messages), tokenizer)) == "uhia"
    longer = [USER, ASSISTANT, {"role": "user", "content": "so"}]
    assert tokenizer.decode(prompt_ids(Record("here", messages=longer), tokenizer)) == "uhiahellousoa"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (Record("f.jsonl:3", text=""), "empty"),
        (Record("f.jsonl:3", input_ids=[]), "empty"),
        (Record("f.jsonl:3", text="", is_prompt=True), "empty"),
        (Record("f.jsonl:3", messages=[USER, ASSISTANT]), "chat template"),
    ],
)
def test_unusable_prompts_are_named_by_line(tokenizer: Any, record: Record, said: str) -> None:
    with pytest.raises(RequestError, match=rf"f\.jsonl:3: .*{said}"):
        prompt_ids(record, tokenizer)


def test_a_conversation_that_the_template_cannot_continue_is_named_by_line(tokenizer: Any) -> None:
    for template, messages, said in (
        ("a", [], "the conversation has no question"),
        ("a", [ASSISTANT], "the conversation has no question"),
        ("{{ raise_exception('only two roles') }}", [USER], ".*only two roles"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(RequestError, match=rf"f\.jsonl:3: {said}"):
            prompt_ids(Record("f.jsonl:3", messages=messages), tokenizer)
