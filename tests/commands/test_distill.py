"""`medusa distill`: every question is answered once, by a backbone or a server, with any interruptions."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from chat_families import byte_tokenizer
from medusa.__main__ import main
from medusa.records.record import Record
from medusa.records.sources import read_records
from tests.commands.fake_server import FakeServer, Reply, serving
from tests.commands.test_cli import Place
from tests.helpers import LETTERS, plain
from tests.train.templates import CHATML
from train.data.reader import to_examples

NEW = 6
# Without anything around the words, so that what was asked can be read off the ids; and turns that run together.
BARE_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# reads enable_thinking #}"


class Done(NamedTuple):
    status: int
    err: str
    lines: list[dict[str, Any]]
    figures: dict[str, Any]


@pytest.fixture(scope="module")
def talking(place: Place) -> str:
    """The same backbone with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(place.backbone)
    tokenizer.chat_template = BARE_TEMPLATE
    folder = Path(place.backbone).parent / "talking"
    AutoModelForCausalLM.from_pretrained(place.backbone).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.fixture
def distill(talking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run `medusa distill` in this process, with prompts from a file."""

    def run(*argv: Any, prompts: list[Any] | None = None, output: str = "own.jsonl", backbone: str = talking) -> Done:
        given: tuple[Any, ...] = ()
        if prompts is not None:
            path = tmp_path / "prompts.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
            given = ("--prompts", path)
        figures = tmp_path / "figures.json"
        figures.unlink(missing_ok=True)
        argv = ("--backbone", backbone, *given, "--output", tmp_path / output, "--json", figures, *argv)
        capsys.readouterr()
        status = main([str(word) for word in ("distill", "--max-new-tokens", NEW, *argv)])
        told = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
        return Done(status, capsys.readouterr().err, lines_of(tmp_path / output), told)

    return run


def by_key(lines: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    found = {(line["index"], line["turn"]): line for line in lines}
    assert len(found) == len(lines), "no text twice"
    return found


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# --- turns -----------------------------------------------------------------------------------------------------------

CONVERSATIONS: list[Any] = [
    {"turns": ["abc", "fed"], "category": "writing"},
    {"messages": [{"role": "system", "content": "x"}, user("abc"), assistant("not mine"), user("g"), assistant("no")]},
    {"prompt": "abc"},
]


def test_questions_follow_the_backbones_answers(distill: Any, place: Place) -> None:
    done = distill("--ignore-eos", "--batch-size", "2", prompts=CONVERSATIONS)
    assert done.status == 0, done.err
    lines = by_key(done.lines)
    assert lines.keys() == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)}
    model = AutoModelForCausalLM.from_pretrained(place.backbone)
    for first, second, start, question in ((0, 0, "abc", "fed"), (1, 1, "xabc", "g")):
        line, later = lines[first, 0], lines[second, 1]
        expected = plain(model, ids(start), max_new_tokens=NEW, eos_token_id=None)
        assert line["input_ids"] == ids(start) + expected
        asked = ids(start + line["answer"] + question)
        assert later["input_ids"][: later["prompt_tokens"]] == asked
        assert later["input_ids"][len(asked) :] == plain(model, asked, max_new_tokens=NEW, eos_token_id=None)
    assert lines[0, 1]["category"] == "writing"
    assert done.figures["texts"] == 5
    assert done.figures["finish_reasons"] == {"length": 5}
    assert done.figures["new_tokens"] == 5 * NEW


def test_a_base_model_gets_only_the_first_question_with_a_notice(distill: Any, place: Place) -> None:
    done = distill(prompts=[CONVERSATIONS[0]], backbone=place.backbone)
    assert [line["input_ids"][:3] for line in done.lines] == [ids("abc")]
    assert "only the first question" in done.err
    assert "no chat template" in done.err


def test_a_conversation_with_tools_is_answered_at_its_end(distill: Any) -> None:
    messages = [user("a"), {"role": "assistant", "content": "b", "tool_calls": []}, {"role": "tool", "content": "c"}]
    done = distill(prompts=[{"messages": [*messages, assistant("d")]}])
    assert [line["input_ids"][: line["prompt_tokens"]] for line in done.lines] == [ids("abc")]


def test_a_conversation_that_outgrows_the_context_is_kept_as_failed(distill: Any, tmp_path: Path) -> None:
    rows = [{"turns": ["abc", "d" * 123]}, {"turns": ["abc", "d"]}]
    done = distill("--ignore-eos", prompts=rows)
    assert done.status == 1
    assert "1 of 4 texts could not be generated; " in done.err
    assert by_key(done.lines).keys() == {(0, 0), (1, 0), (1, 1)}
    (failed,) = lines_of(tmp_path / "own.failed.jsonl")
    assert (failed["index"], failed["turn"], failed["where"]) == (0, 1, f"{tmp_path / 'prompts.jsonl'}:1")
    assert "context ends at 128" in failed["error"]
    assert done.figures["failed"] == 1
    assert len(list(read_records(str(tmp_path / "own.jsonl")))) == 3, "and the data can be used"
    assert distill("--ignore-eos", prompts=rows).lines == done.lines, "tried again, and nothing twice"
    assert len(lines_of(tmp_path / "own.failed.jsonl")) == 1


def test_unusable_prompts_are_rejected_with_their_line_before_the_run(distill: Any) -> None:
    done = distill(prompts=[{"prompt": "a"}, {"prompt": "b" * 129}])
    assert (done.status, done.lines) == (2, [])
    assert "prompts.jsonl:2: the prompt has 129 tokens" in done.err


# --- how texts begin -------------------------------------------------------------------------------------------------


def test_only_the_beginning_of_a_text_is_used_as_a_prompt(distill: Any) -> None:
    done = distill("--prefix-tokens", "2", prompts=[{"text": "abcdefgh"}, {"turns": ["hgf", "x"]}])
    assert [line["input_ids"][: line["prompt_tokens"]] for line in done.lines] == [ids("ab"), ids("hg")]


def test_self_talk_cycles_through_the_beginnings_in_a_file(distill: Any, tmp_path: Path) -> None:
    (tmp_path / "seeds.txt").write_text("abcd\nhgfe\n", encoding="utf-8")
    argv = ("--self-talk", "3", "--self-talk-seeds", tmp_path / "seeds.txt", "--prefix-tokens", "3")
    done = distill(*argv, "--temperature", "1", "--ignore-eos")
    assert [line["input_ids"][:3] for line in done.lines] == [ids("abc"), ids("hgf"), ids("abc")]
    assert {line["prompt_tokens"] for line in done.lines} == {3}
    assert done.lines[0]["answer"] != done.lines[2]["answer"], "a draw of its own"


# --- heads -----------------------------------------------------------------------------------------------------------


def test_heads_do_not_change_distilled_text_and_turns_can_be_limited(distill: Any, place: Place) -> None:
    few = ("--max-turns", "1")
    plainly = distill(*few, prompts=CONVERSATIONS)
    assert by_key(plainly.lines).keys() == {(0, 0), (1, 0), (2, 0)}
    argv = (*few, "--heads", place.heads, "--tree", "topk:2,2")
    assert distill(*argv, prompts=CONVERSATIONS, output="other.jsonl").lines == plainly.lines
    sampled = distill(*argv, "--temperature", "1", prompts=CONVERSATIONS, output="sampled.jsonl")
    assert (sampled.status, len(sampled.lines)) == (0, 3)


# --- interruptions ---------------------------------------------------------------------------------------------------

MANY = [{"turns": [letter * 2, "b", "c"]} for letter in "abcdefgh"]


def slowly(argv: list[str]) -> None:
    """Run `medusa distill` with a pause after every line, so that it can be killed."""
    from medusa.commands.distill.journal import Journal

    once = Journal.append

    def append(*args: Any) -> None:
        once(*args)
        time.sleep(0.02)

    Journal.append = append  # type: ignore[method-assign]  # this process is nobody else's
    main(argv)


def killed_after(lines: int, argv: list[str], output: Path) -> bool:
    """Run `medusa distill` in a new process, and kill it once the file has this many lines."""
    process = multiprocessing.get_context("fork").Process(target=slowly, args=(argv,))
    process.start()
    assert process.pid is not None
    while process.is_alive() and not (output.exists() and output.read_bytes().count(b"\n") >= lines):
        time.sleep(0.002)
    if alive := process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    return alive


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_killed_distillation_resumes_without_loss_or_repetition(
    distill: Any, talking: str, tmp_path: Path, temperature: str
) -> None:
    argv = ("--temperature", temperature, "--batch-size", "3", "--quiet")
    whole = distill(*argv, prompts=MANY)
    output = tmp_path / "killed.jsonl"
    command = ["distill", "--backbone", talking, "--prompts", str(tmp_path / "prompts.jsonl")]
    command += ["--max-new-tokens", str(NEW), "--output", str(output), *argv]
    rng = random.Random(int(temperature))
    for limit in sorted(rng.sample(range(1, 20), 2)):
        assert killed_after(limit, command, output)
        assert output.read_bytes().count(b"\n") < 3 * len(MANY), "in the middle, not at the end"
        with output.open("ab") as file:  # as if the last line had been cut off as well
            file.write(b'{"index": 5, "turn": 0, "inp')
    done = distill(*argv, prompts=MANY, output="killed.jsonl")
    assert done.status == 0, done.err
    assert by_key(done.lines) == by_key(whole.lines)
    assert done.figures["finish_reasons"] == whole.figures["finish_reasons"], "of all texts, not of the last run's"


def test_only_greedy_distillation_resumes_with_another_batch_size(distill: Any, place: Place) -> None:
    for temperature, status in (("0", 0), ("1", 2)):
        output = f"{temperature}.jsonl"
        distill("--temperature", temperature, "--batch-size", "2", prompts=MANY, output=output)
        done = distill("--temperature", temperature, "--batch-size", "5", prompts=MANY, output=output)
        assert done.status == status


def test_other_prompts_under_the_same_name_are_other_settings(distill: Any) -> None:
    distill(prompts=MANY)
    done = distill(prompts=MANY[::-1])
    assert done.status == 2
    assert "other settings" in done.err


def test_an_unexpected_line_is_named(distill: Any, tmp_path: Path) -> None:
    whole = distill(prompts=MANY)
    with (tmp_path / "own.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "a"}\n')
    done = distill(prompts=MANY)
    assert done.status == 2
    assert "own.jsonl:25 was not written by medusa distill" in done.err
    assert done.lines[:-1] == whole.lines


# --- the disk --------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_rejected_at_the_start(distill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa.commands.distill.checks.free_bytes", lambda path: 200)
    done = distill(prompts=MANY)
    assert (done.status, done.lines) == (2, [])
    assert "kB at least, and its disk has 200 bytes left" in done.err
    monkeypatch.setattr("medusa.commands.distill.checks.free_bytes", lambda path: 3000)
    done = distill(prompts=MANY)
    assert done.status == 0
    assert "may take" in done.err


# --- a server --------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as running:
        yield running


@pytest.fixture
def by_server(distill: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were loaded"))
    monkeypatch.setattr("medusa.commands.distill.client.LONGEST_WAIT", 0.0)
    return lambda *argv, **kwargs: distill("--server", server.url, *argv, **kwargs)


def test_a_server_continues_texts_as_ids(by_server: Any, server: FakeServer, talking: str) -> None:
    done = by_server(prompts=[{"text": "abc", "category": "x"}, {"text": "abcdefgh"}])
    assert done.status == 0, done.err
    lines = by_key(done.lines)
    eos = AutoTokenizer.from_pretrained(talking).eos_token_id
    assert lines[0, 0] == {
        "index": 0,
        "turn": 0,
        "input_ids": [*ids("abccba"), eos],
        "prompt_tokens": 3,
        "answer": "cba",
        "finish_reason": "eos",
        "category": "x",
    }
    cut = lines[1, 0]
    assert (cut["input_ids"], cut["finish_reason"]) == (ids("abcdefghhgfedc"), "length"), "cut off: no end is taught"
    sent = {tuple(body.items()) for body in ({k: str(v) for k, v in body.items()} for _, body, _ in server.asked)}
    assert (("model", "the-model"), ("prompt", str(ids("abc"))), ("max_tokens", "6"), ("temperature", "0.0")) in sent


def test_a_server_answers_conversations_turn_by_turn(by_server: Any, server: FakeServer) -> None:
    done = by_server("--concurrency", "3", prompts=CONVERSATIONS[:2])
    lines = by_key(done.lines)
    assert lines[1, 1]["messages"] == [
        {"role": "system", "content": "x"},
        user("abc"),
        assistant("cba"),
        user("g"),
        assistant("g"),
    ]
    assert (lines[1, 1]["teach"], lines[1, 1]["finish_reason"]) == ("last", "eos")
    assert lines[0, 1]["category"] == "writing"
    assert {path for path, _, _ in server.asked} == {"/v1/chat/completions"}


def test_a_server_gets_the_options_of_the_template_and_the_data_keep_them(by_server: Any, server: FakeServer) -> None:
    row = {"prompt": "abc", "chat_template_kwargs": {"lang": "de"}}
    done = by_server("--template-option", "enable_thinking=false", prompts=[row, {"prompt": "abd"}])
    assert done.status == 0, done.err
    asked = [body.get("chat_template_kwargs") for _, body, _ in server.asked]
    lines = by_key(done.lines)
    assert sorted(asked, key=len) == [{"enable_thinking": False}, {"enable_thinking": False, "lang": "de"}]
    assert lines[0, 0]["chat_template_kwargs"] == {"enable_thinking": False, "lang": "de"}
    assert lines[1, 0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_history_holds_the_thought_and_the_calls_of_earlier_answers(by_server: Any, server: FakeServer) -> None:
    """The server's template decides what it reads of them."""
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": "yes", "reasoning": "hm", "tool_calls": [called]}

    def reply(number: int, body: dict[str, Any]) -> Reply | bool:
        if len(body["messages"]) > 1:
            return False
        return 200, {}, json.dumps({"choices": [{"message": said, "finish_reason": "tool_calls"}]})

    server.trouble = reply
    done = by_server(prompts=[{"turns": ["abc", "abd"]}])
    assert done.status == 0, done.err
    history = next(body["messages"] for _, body, _ in server.asked if len(body["messages"]) > 1)
    assert history[1]["tool_calls"][0]["function"] == called["function"], "with arguments as JSON text"
    assert {history[1]["reasoning"], history[1]["reasoning_content"]} == {"hm"}


def test_server_answers_are_taught_once_with_their_end(by_server: Any, tmp_path: Path) -> None:
    by_server(prompts=[{"turns": ["abc", "abcdefgh"]}])
    records = {len(record.messages or ()): record for record in read_records(str(tmp_path / "own.jsonl"))}
    tokenizer = byte_tokenizer(CHATML)

    def taught(record: Record) -> str:
        (example,), _ = to_examples(record, tokenizer)
        pairs = zip(example.input_ids, example.loss_mask, strict=True)
        return str(tokenizer.decode([token for token, mark in pairs if mark]))

    assert taught(records[2]) == "cba<|im_end|>"
    assert taught(records[4]) == "hgfedc", "the second answer alone, and without an end: it was cut off"


def test_sampling_sends_a_separate_seed_for_each_text(by_server: Any, server: FakeServer) -> None:
    argv = ("--temperature", "0.7", "--top-p", "0.9", "--top-k", "5", "--stop", "zz", "--seed", "3")
    by_server(*argv, prompts=[{"prompt": "abc"}, {"prompt": "abc"}])
    bodies = [body for _, body, _ in server.asked]
    assert len({body["seed"] for body in bodies}) == 2
    for body in bodies:
        wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": ["zz"]}
        assert wanted.items() <= body.items()
        assert "repetition_penalty" not in body


def test_rejected_requests_are_kept_as_failed_and_retried_on_resume(
    by_server: Any, server: FakeServer, tmp_path: Path
) -> None:
    server.trouble = lambda number, body: (400, {}, "too long") if len(body["prompt"]) == 5 else False
    rows = [{"text": "abc"}, {"text": "abcde"}, {"text": "ab"}]
    done = by_server(prompts=rows)
    assert done.status == 1
    assert by_key(done.lines).keys() == {(0, 0), (2, 0)}
    (failed,) = lines_of(tmp_path / "own.failed.jsonl")
    assert (failed["index"], failed["error"]) == (1, "HTTP 400: too long")
    server.trouble = lambda number, body: False
    before = len(server.asked)
    done = by_server(prompts=rows)
    assert done.status == 0, done.err
    assert by_key(done.lines).keys() == {(0, 0), (1, 0), (2, 0)}
    assert len(server.asked) == before + 1, "what is there is not asked for again"
    assert not (tmp_path / "own.failed.jsonl").exists()


def test_temporary_server_errors_lose_nothing(by_server: Any, server: FakeServer) -> None:
    rows = [{"turns": [LETTERS[n], LETTERS[n + 1]]} for n in range(20)]
    whole = by_server(prompts=rows)
    kinds: list[Reply] = [(503, {}, ""), (429, {}, ""), (200, {}, "{"), None]
    asked: Counter[str] = Counter()

    def trouble(number: int, body: dict[str, Any]) -> Reply | bool:
        """Every question fails up to four times, with every kind of error; the sixth attempt would be the last."""
        question = json.dumps(body)
        asked[question] += 1
        return kinds[number % 4] if asked[question] <= len(question) % 5 else False

    server.trouble = trouble
    done = by_server("--concurrency", "8", prompts=rows, output="other.jsonl")
    assert done.status == 0, done.err
    assert by_key(done.lines) == by_key(whole.lines)


def test_an_unreachable_server_ends_the_run_with_one_line(by_server: Any, server: FakeServer) -> None:
    rows = [{"prompt": letter} for letter in LETTERS[:50]]
    server.trouble = lambda number, body: (401, {}, "no key") if number > 5 else False
    done = by_server("--concurrency", "2", prompts=rows)
    assert done.status == 1
    assert re.search(r"1[67] texts in a row could not be generated", done.err), "16, or one more that was under way"
    assert "HTTP 401: no key" in done.err
    assert 1 <= len(done.lines) <= 5
    assert len(server.asked) < 30, "and the rest was not tried"
    server.trouble = lambda number, body: False
    assert by_key(by_server(prompts=rows).lines).keys() == {(n, 0) for n in range(50)}


def test_ctrl_c_while_requests_are_queued_ends_the_run(
    by_server: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long list of conversations takes seconds to queue."""
    submit = ThreadPoolExecutor.submit

    def interrupted(pool: Any, ask: Any, task: Any, journal: Any) -> Any:
        if task.index == 40:
            raise KeyboardInterrupt
        return submit(pool, ask, task, journal)

    def slow(number: int, body: dict[str, Any]) -> bool:
        time.sleep(0.02)
        return False

    server.trouble = slow
    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    done = by_server("--concurrency", "1", prompts=[{"text": letter * 2} for letter in LETTERS[:50]])
    assert done.status == 130
    assert len(server.asked) < 20, "queued conversations are not asked"


def test_failures_between_answers_do_not_end_the_run(by_server: Any, server: FakeServer) -> None:
    server.trouble = lambda number, body: (400, {}, "no") if body["prompt"][0] % 2 else False
    done = by_server("--concurrency", "1", prompts=[{"text": letter * 2} for letter in LETTERS[:50]])
    assert "25 of 50 texts could not be generated" in done.err
    assert by_key(done.lines).keys() == {(n, 0) for n in range(0, 50, 2)}


def test_self_talk_by_a_server(by_server: Any, server: FakeServer, talking: str) -> None:
    done = by_server("--self-talk", "2", "--temperature", "1")
    begin = AutoTokenizer.from_pretrained(talking).bos_token_id
    assert [line["input_ids"][0] for line in done.lines] == [begin, begin]
    assert [body["prompt"] for _, body, _ in server.asked] == [[begin], [begin]]
