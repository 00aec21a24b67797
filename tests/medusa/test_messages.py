"""One form of messages: whatever a client, a file or a server may hold reaches the chat template, or is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from chat_families import CALL, TEMPLATES, TOOLS, byte_tokenizer, family_tokenizer
from medusa.errors import RequestError
from medusa.records.messages import messages_of, without_nulls
from medusa.records.record import Record, parse_record, prompt_ids, text_ids
from medusa.records.sources import read_records
from medusa.records.template import is_endless, opened_thought, require_options, template_options, template_switches
from tests.train.templates import CHATML, merging_tokenizer
from train.data.reader import to_examples

ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
BOTH_CALLS = {"role": "assistant", "function_call": CALL["function"], "tool_calls": [CALL]}
# A template that writes all that a message holds.
EVERYTHING = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"


def rendered(messages: list[dict[str, Any]], template: str = EVERYTHING, **fields: Any) -> str:
    tokenizer = byte_tokenizer(template)
    return str(
        tokenizer.decode(prompt_ids(Record("here", messages=messages_of(messages, "here"), **fields), tokenizer))
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "a", "reasoning": "why"},
        {"role": "assistant", "content": "a", "reasoning_content": "why"},
        {"role": "assistant", "content": "a", "thinking": "why", "reasoning": None},
        {"role": "tool", "content": "a", "name": "why", "tool_call_id": "c1"},
        {"role": "user", "content": "a", "name": "why"},
        {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "why"}]},
        {"role": "assistant", "content": "", "function_call": {"name": "why", "arguments": '{"a": 1}'}},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "why", "arguments": {}}]},
        {"from": "function_call", "value": '{"name": "why", "arguments": {}}'},
        {"role": "user", "content": [{"type": "text", "text": "why"}, {"type": "input_text", "text": "not"}]},
        {"role": "user", "content": "a", "weight": "why"},
        {"role": "assistant", "value": "why"},
        {"from": "gpt", "content": "why"},
    ],
)
def test_nothing_that_a_message_holds_is_dropped(message: dict[str, Any]) -> None:
    assert "why" in rendered([message, ASK])


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "assistant", "content": None, "refusal": "No."}, "refusal"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "'input_audio'"),
        ({"role": "user", "content": "a", "images": ["x"]}, "images"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "audio"),
        ({"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "object"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "arguments: not JSON"),
        (BOTH_CALLS, "function_call and tool_calls"),
        ({"role": "user"}, "needs content"),
        ({"role": "assistant", "text": "a"}, "needs content or value; rename text to content"),
        ({"from": "narrator", "value": "a"}, "from 'narrator'"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_by_name(message: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=f"^here: message 2.*{named}"):
        messages_of([ASK, message], "here")


PLAIN = {"prompt": "hi", "completion": "hello"}
ROWS = [PLAIN, {"messages": [ASK, SAY]}, {"prompt": [ASK], "completion": [SAY]}, {"chosen": [ASK, SAY]}]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_the_system_message_of_a_row_begins_its_conversation(row: dict[str, Any], key: str) -> None:
    """OpenOrca and ShareGPT keep it in a column of its own."""
    tokenizer, system = byte_tokenizer(CHATML), {"role": "system", "content": "Be kind."}
    (example,), _ = to_examples(parse_record(row | {key: "Be kind."}, "here"), tokenizer)
    (expected,), _ = to_examples(Record("here", messages=[system, ASK, SAY]), tokenizer)
    assert example == expected
    assert parse_record(row | {key: ""}, "here") == parse_record(row, "here")
    if "messages" in row:
        own = {"messages": [system, ASK, SAY], key: "Be another."}
        assert parse_record(own, "here").messages == [system, ASK, SAY], "the conversation's own comes first"


@pytest.mark.parametrize("row", ROWS)
def test_a_row_with_images_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^here has images, and only text can be read; leave out images"):
        parse_record(row | {"images": ["x.png"]}, "here")
    assert parse_record(row | {"images": []}, "here") == parse_record(row, "here")


def test_functions_of_the_older_api_are_tools() -> None:
    functions, tools = [TOOLS[0]["function"]], parse_record({"messages": [ASK], "tools": TOOLS}, "here").tools
    for given in (functions, json.dumps(functions)):
        assert parse_record({"messages": [ASK], "functions": given}, "here").tools == tools


def test_authors_have_their_names_in_any_letters() -> None:
    found = messages_of([{"role": "USER", "content": "a"}, {"from": "Bot", "value": "b"}], "here")
    assert [message["role"] for message in found] == ["user", "assistant"]


def test_empty_values_of_other_programs_are_as_if_absent() -> None:
    """As the clients of OpenAI dump the messages of answers."""
    nulls = dict.fromkeys(("refusal", "audio", "function_call"))
    dumped = SAY | nulls | {"tool_calls": [], "images": [], "reasoning": ""}
    assert messages_of([ASK, dumped], "here") == [ASK, SAY]


@pytest.mark.parametrize("source", ["parquet", "folder"])
def test_nulls_of_arrow_are_as_if_absent(source: str, tmp_path: Path) -> None:
    """Arrow gives all rows the same keys, also in nested tools and arguments."""
    other = {
        "type": "function",
        "function": {"name": "sub", "parameters": {"type": "object", "properties": {"b": {"type": "x"}}}},
    }
    called = {"id": "1", "type": "function", "function": {"name": "sub", "arguments": {"b": 2}}}
    rows = [
        {
            "messages": [ASK | {"tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
            "tools": TOOLS,
        },
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [called]}], "tools": [other]},
    ]
    table = Dataset.from_list(rows)
    path = tmp_path / ("d.parquet" if source == "parquet" else "d")
    table.to_parquet(path) if source == "parquet" else table.save_to_disk(path)
    assert "null" in json.dumps(table.to_list()), "the test shows nothing otherwise"
    records = list(read_records(str(path)))
    wanted = [parse_record(row, "here") for row in rows]
    assert [(r.messages, r.tools) for r in records] == [(r.messages, r.tools) for r in wanted]


def test_nulls_that_a_schema_means_stay() -> None:
    schema = {"properties": {"a": {"default": None, "type": "string"}, "b": None}}
    assert without_nulls(schema, kept=("default",)) == {"properties": {"a": {"default": None, "type": "string"}}}
    calls = [{"function": {"name": "f", "arguments": '{"city": null}'}}]
    (message,) = messages_of([{"role": "assistant", "tool_calls": calls}], "here")
    assert message["tool_calls"][0]["function"]["arguments"] == {"city": None}


# --- layouts of records ----------------------------------------------------------------------------------------------

BOTH = [ASK, SAY]
LAYOUTS: list[dict[str, Any]] = [
    {"messages": BOTH},
    {"messages": json.dumps(BOTH)},
    {"conversations": BOTH},
    {"conversation": BOTH},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    {"conversations": [{"from": "user", "value": "hi"}, {"from": "model", "value": "hello"}]},
    {"messages": [ASK, {"role": "model", "content": "hello"}]},
    {"data": ["hi", "hello"], "id": "7"},
    {"prompt": "hi", "completion": "hello"},
    {"prompt": [ASK], "completion": [SAY]},
    {"prompt": [ASK], "completion": "hello"},
    {"question": "hi", "answer": "hello"},
    {"question": "hi", "response": "hello"},
    {"instruction": "hi", "input": "", "output": "hello", "text": "### Instruction: hi ### Response: hello"},
    {"prompt": "hi", "chosen": "hello", "rejected": "go away"},
    {"prompt": "hi", "chosen": BOTH, "rejected": [ASK, {"role": "assistant", "content": "go away"}]},
    {"chosen": BOTH, "rejected": BOTH},
    {"prompt": "", "instruction": "hi", "response": "", "output": "hello"},
    {"prompt": "hi", "answer": SAY},
    {"turns": BOTH},
]


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: "+".join(row))
def test_every_layout_is_a_question_with_its_answer(row: dict[str, Any]) -> None:
    """The answer is taught after the question; commands that decode read the question alone."""
    record, tokenizer = parse_record(row, "here"), byte_tokenizer(CHATML)
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt_ids(record, tokenizer)) == asked
    (example,), left_out = to_examples(record, tokenizer)
    assert not left_out
    taught = [token for token, counts in zip(example.input_ids, example.loss_mask, strict=True) if counts]
    assert (tokenizer.decode(example.input_ids), tokenizer.decode(taught)) == (
        asked + "hello<|im_end|>",
        "hello<|im_end|>",
    )


@pytest.mark.parametrize(
    "given",
    [{"input": "Hallo"}, {"context": "Hallo"}, {"input": "", "context": "Hallo"}],
    ids=["Alpaca", "Dolly", "both"],
)
def test_an_input_follows_its_instruction(given: dict[str, str]) -> None:
    record = parse_record({"instruction": "Translate.", "response": "Hello"} | given, "here")
    assert record.question == "Translate.\n\nHallo"


def test_without_a_template_an_answer_follows_its_prompt() -> None:
    tokenizer = merging_tokenizer(None)
    (example,), _ = to_examples(parse_record({"prompt": "hello", "completion": " bye"}, "here"), tokenizer)
    assert tokenizer.decode(example.input_ids) == "<s>hello bye</s>"
    assert example.loss_mask.index(True) == len(tokenizer("hello")["input_ids"])


def test_answers_that_are_no_texts_are_not_read() -> None:
    """As in sets of questions with a list of right answers, or with the number of a choice."""
    for answer in (["a", "b"], 2, {"text": "a"}):
        assert parse_record({"question": "hi", "answer": answer}, "here").answer is None


@pytest.mark.parametrize("text", ["hello", "<s>hello", "<s>hello</s>"])
def test_no_second_bos_or_eos(text: str) -> None:
    tokenizer = merging_tokenizer(None)
    assert tokenizer.decode(text_ids(text, tokenizer)) == "<s>" + text.removeprefix("<s>")
    (example,), _ = to_examples(parse_record({"text": text}, "here"), tokenizer)
    assert tokenizer.decode(example.input_ids) == "<s>hello</s>"


@pytest.mark.parametrize("text", ["hello", "hello</s>", "</s>"])
def test_an_eos_that_the_tokenizer_adds_does_not_end_a_prompt(text: str) -> None:
    tokenizer = merging_tokenizer(None)
    ends = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=ends)
    assert tokenizer(text)["input_ids"][-1] == tokenizer.eos_token_id, "the test shows nothing otherwise"
    assert tokenizer.decode(text_ids(text, tokenizer)) == "<s>" + text


# --- chat templates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(TEMPLATES))
def test_every_family_is_given_what_it_reads(family: str) -> None:
    """Texts, parts of texts, and calls with their arguments reach the prompt, in the form that the template reads."""
    tokenizer = family_tokenizer(family)
    for content in ("one\ntwo", [{"type": "text", "text": "one\n"}, {"type": "text", "text": "two"}]):
        text = str(
            tokenizer.decode(prompt_ids(parse_record({"prompt": [ASK | {"content": content}]}, "here"), tokenizer))
        )
        assert "one" in text
        assert "two" in text
        assert "'type'" not in text
    messages = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}, ASK]
    with suppress(RequestError):  # of templates without tools
        text = str(tokenizer.decode(prompt_ids(parse_record({"messages": messages}, "here"), tokenizer)))
        assert "'a'" not in text, "no model was trained on Python's spelling of an object"


def test_arguments_are_objects_or_text_as_the_template_reads_them() -> None:
    messages = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, ASK]
    for spelled in ("{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}"):
        template = (
            "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
            + spelled
            + "{% endfor %}{% endfor %}"
        )
        assert rendered(messages, template) == 'hi{"a": 1}hi'


def test_a_developer_is_the_system_unless_the_template_knows_him() -> None:
    messages = [{"role": "developer", "content": "x"}, ASK]
    assert rendered(messages, CHATML).startswith("<|im_start|>system\nx")
    assert rendered(messages, CHATML + "{# developer #}").startswith("<|im_start|>developer\nx")


def test_options_of_a_template_are_parsed_and_checked() -> None:
    given = ["enable_thinking=false", "effort=low", "n=3", "documents=[]", "b=True"]
    assert template_options(given) == {"enable_thinking": False, "effort": "low", "n": 3, "documents": [], "b": True}
    for wrong in ("enable_thinking", "=x", "a b=1", "tokenize=false"):
        with pytest.raises(RequestError, match=r"--template-option is .*; give NAME=VALUE"):
            template_options([wrong])
    tokenizer = family_tokenizer("Qwen3")
    require_options({"enable_thinking": False}, tokenizer, "org/model")
    with pytest.raises(RequestError, match=r"reads enable_thinking; did you mean enable_thinking\?"):
        require_options({"enable_thinkng": False}, tokenizer, "org/model")
    with pytest.raises(RequestError, match="org/base has none"):
        require_options({"enable_thinking": False}, byte_tokenizer(None), "org/base")
    assert template_switches(family_tokenizer("DeepSeek V3.1")) == ["thinking"]
    assert template_switches(family_tokenizer("gpt-oss")) == ["reasoning_effort"]
    assert template_switches(family_tokenizer("Vicuna")) == []


def test_a_thought_is_open_at_the_end_of_a_prompt_or_an_answer() -> None:
    assert opened_thought("a<think>\n") == ("<think>\n", "</think>")
    assert opened_thought("<think>\n\n</think>\n\n") is None
    assert is_endless("a<think>\n", "Well")
    assert not is_endless("a<think>\n", "Well</think>yes")
    assert is_endless("a", "<think>Well")
    assert not is_endless("a", "yes")


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_half_a_character_is_named(suffix: str, tmp_path: Path) -> None:
    """An emoji that was cut; pairs are whole characters."""
    file = tmp_path / f"p{suffix}"
    whole, half = r'{"prompt": "good \ud83d\ude00"}', r'{"prompt": "bad \ud83d end"}'
    file.write_text(f"{whole}\n{half}\n" if suffix == ".jsonl" else f"[{whole}, {half}]")
    with pytest.raises(RequestError, match=r"p.jsonl?.*\\ud83d is half of a character; repair the text"):
        list(read_records(str(file)))
    file.write_text(whole if suffix == ".jsonl" else f"[{whole}]")
    assert [record.question for record in read_records(str(file))] == ["good \U0001f600"]


def test_folders_named_like_data_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    (tmp_path / "a.txt").write_text("one\n")
    assert [record.question for record in read_records(str(tmp_path))] == ["one"]
