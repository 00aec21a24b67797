"""`medusa distill`: every question is answered once, in the backbone's words, with any interruptions.

What a server answers is tested in test_distill_server.py."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from chat_families import family_tokenizer
from decode.settings import Settings
from medusa.__main__ import main
from medusa.commands import distill as module
from medusa.commands.distill.checks import why_cut
from medusa.commands.distill.journal import Journal
from medusa.commands.options import Models, Output, Prompts
from medusa.files import read_json, write_json
from medusa.options import LoadOptions
from medusa.records.replies import remembered
from medusa.records.sources import read_records
from tests.commands.place import (
    GENERATION,
    PROMPTS,
    Place,
    assistant,
    by_key,
    ids_of,
    letters,
    lines_of,
    until_eos,
    user,
    with_template,
    write_rows,
)
from tests.helpers import VOCAB, plain
from tests.train.processes import forked_command

NEW = 6


# --- turns -----------------------------------------------------------------------------------------------------------

CONVERSATIONS: list[Any] = [
    {"turns": ["abc", "fed"], "category": "writing"},
    {"messages": [{"role": "system", "content": "x"}, user("abc"), assistant("not mine"), user("g"), assistant("no")]},
    {"prompt": "abc"},
]


def test_answers_are_written_with_their_ids_and_the_reason_of_their_end(distill: Any, place: Place) -> None:
    rows = [{"prompt": text} for text in PROMPTS]
    done = distill("--batch-size", "2", *GENERATION, prompts=rows, backbone=place.backbone)
    assert done.status == 0
    for line, prompt, new in zip(sorted(done.lines, key=itemgetter("index")), PROMPTS, until_eos(place), strict=True):
        assert (line["input_ids"], line["prompt_tokens"]) == (ids_of(prompt) + new, len(prompt))
        assert line["answer"] == letters(new, place)
        assert line["finish_reason"] == ("eos" if new[-1] == place.eos else "length")


def test_questions_follow_the_backbones_answers(distill: Any, place: Place) -> None:
    done = distill("--ignore-eos", "--batch-size", "2", prompts=CONVERSATIONS)
    assert done.status == 0, done.err
    lines = by_key(done.lines)
    assert lines.keys() == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)}
    model = AutoModelForCausalLM.from_pretrained(place.backbone)
    for first, second, start, question in ((0, 0, "abc", "fed"), (1, 1, "xabc", "g")):
        line, later = lines[first, 0], lines[second, 1]
        expected = plain(model, ids_of(start), max_new_tokens=NEW, eos_token_id=None)
        assert line["input_ids"] == ids_of(start) + expected
        asked = ids_of(start + line["answer"] + question)
        assert later["input_ids"][: later["prompt_tokens"]] == asked
        assert later["input_ids"][len(asked) :] == plain(model, asked, max_new_tokens=NEW, eos_token_id=None)
    assert lines[0, 1]["category"] == "writing"
    assert done.figures["texts"] == 5
    assert done.figures["finish_reasons"] == {"length": 5}
    assert done.figures["new_tokens"] == 5 * NEW


def test_all_questions_of_turns_follow_the_system_message_of_their_row(distill: Any) -> None:
    done = distill("--ignore-eos", prompts=[{"turns": ["abc", "g"], "system": "x"}])
    lines = by_key(done.lines)
    asked = [line["input_ids"][: line["prompt_tokens"]] for line in (lines[0, 0], lines[0, 1])]
    assert asked == [ids_of("xabc"), ids_of("xabc" + lines[0, 0]["answer"] + "g")]


def test_a_base_model_gets_only_the_first_question_with_a_notice(distill: Any, place: Place) -> None:
    done = distill(prompts=[CONVERSATIONS[0]], backbone=place.backbone)
    assert [line["input_ids"][:3] for line in done.lines] == [ids_of("abc")]
    assert "only the first question" in done.err
    assert "no chat template" in done.err


def test_a_conversation_with_tools_is_answered_at_its_end(distill: Any) -> None:
    messages = [user("a"), {"role": "assistant", "content": "b", "tool_calls": []}, {"role": "tool", "content": "c"}]
    done = distill(prompts=[{"messages": [*messages, assistant("d")]}])
    assert [line["input_ids"][: line["prompt_tokens"]] for line in done.lines] == [ids_of("abc")]


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
    assert [line["input_ids"][: line["prompt_tokens"]] for line in done.lines] == [ids_of("ab"), ids_of("hg")]


def test_self_talk_starts_from_bos(distill: Any, refused: Any, place: Place, tmp_path: Path) -> None:
    done = distill("--self-talk", "3", "--temperature", "1", "--ignore-eos", backbone=place.backbone)
    assert "were cut at" not in done.err, "as --ignore-eos asks for"
    assert done.status == 0
    assert [line["prompt_tokens"] for line in done.lines] == [1, 1, 1]
    assert len({line["input_ids"][0] for line in done.lines}) == 1
    assert len({line["answer"] for line in done.lines}) == 3, "every text is a draw of its own"
    argv = ("--self-talk", "2", "--output", tmp_path / "bare.jsonl")
    assert "at temperature 0 all texts are equal" in refused("distill", "--backbone", place.backbone, *argv)
    assert "BOS" in refused("distill", "--backbone", place.bare, *argv, "--temperature", "1")
    (tmp_path / "seeds.txt").write_text("abcd\n", encoding="utf-8")
    seeds = ("--self-talk-seeds", tmp_path / "seeds.txt")
    assert "2 continues 1 seeds several times" in refused("distill", "--backbone", place.backbone, *argv, *seeds)


def test_an_input_is_not_replaced(refused: Any, place: Place, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    prompts = write_rows(folder / "p.jsonl", [{"prompt": "abc"}])
    argv = ("distill", "--backbone", place.backbone, "--overwrite")
    assert "would replace --prompts" in refused(*argv, "--prompts", prompts, "--output", prompts)
    assert "lies in --prompts" in refused(*argv, "--prompts", folder, "--output", folder / "own.jsonl")
    generate = ("generate", "--backbone", place.backbone, "--plain", "--prompts", prompts)
    assert "--json" in refused(*generate, "--json", prompts)
    assert "must end in .jsonl" in refused(*argv, "--prompts", prompts, "--output", tmp_path / "own.txt")
    assert Path(prompts).read_text() == '{"prompt": "abc"}\n'


def test_self_talk_cycles_through_the_beginnings_in_a_file(distill: Any, tmp_path: Path) -> None:
    (tmp_path / "seeds.txt").write_text("abcd\nhgfe\n", encoding="utf-8")
    argv = ("--self-talk", "3", "--self-talk-seeds", tmp_path / "seeds.txt", "--prefix-tokens", "3")
    done = distill(*argv, "--temperature", "1", "--ignore-eos")
    assert [line["input_ids"][:3] for line in done.lines] == [ids_of("abc"), ids_of("hgf"), ids_of("abc")]
    assert {line["prompt_tokens"] for line in done.lines} == {3}
    assert done.lines[0]["answer"] != done.lines[2]["answer"], "a draw of its own"


# --- questions -------------------------------------------------------------------------------------------------------


@pytest.fixture
def asking(place: Place, tmp_path: Path) -> str:
    """The backbone with a chat template that writes "ab" before a question and "c" after it."""
    return with_template(place.backbone, "{% for m in messages %}ab{{ m.content }}c{% endfor %}", tmp_path / "asking")


def test_a_chat_model_writes_questions_which_are_prompts(distill: Any, asking: str, tmp_path: Path) -> None:
    argv = ("--questions", "8", "--temperature", "1", "--max-new-tokens", "64")
    done = distill(*argv, backbone=asking)
    assert done.status == 0, done.err
    assert sorted(line["index"] for line in done.lines) == list(range(8))
    questions = [line["prompt"] for line in done.lines]
    assert len(set(questions)) == 8, "every question is a draw of its own"
    assert all(question and "c" not in question for question in questions), "the text after a question ends it"
    assert done.figures["new_tokens"] == sum(line["tokens"] for line in done.lines) >= sum(map(len, questions))
    records = list(read_records(str(tmp_path / "own.jsonl")))
    assert [record.question for record in records] == questions
    assert all(record.is_prompt for record in records)
    kept = lines_of(tmp_path / "own.jsonl")
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept[:3]), encoding="utf-8")
    again = distill(*argv, backbone=asking)
    assert by_key(again.lines) == by_key(kept), "a continued run writes what the first would have"


def test_questions_that_do_not_end_are_tried_again_and_then_listed(distill: Any, asking: str, tmp_path: Path) -> None:
    done = distill("--questions", "6", "--temperature", "1", "--max-new-tokens", "3", backbone=asking)
    ended = {line["index"] for line in done.lines}
    failed = lines_of(tmp_path / "own.failed.jsonl")
    assert done.status == 1
    assert ended.isdisjoint(row["index"] for row in failed)
    assert len(ended) + len(failed) == 6
    assert all("4 questions were empty or did not end" in row["error"] for row in failed)


def test_a_stop_string_ends_a_question_too(distill: Any, asking: str) -> None:
    stops = [word for letter in "defghijk" for word in ("--stop", letter)]
    done = distill("--questions", "6", "--temperature", "1", "--max-new-tokens", "64", *stops, backbone=asking)
    assert done.status == 0, done.err
    assert not set("cdefghijk") & set("".join(line["prompt"] for line in done.lines))


# --- heads -----------------------------------------------------------------------------------------------------------


def test_heads_do_not_change_distilled_text_and_turns_can_be_limited(distill: Any, place: Place) -> None:
    few = ("--max-turns", "1")
    plainly = distill(*few, prompts=CONVERSATIONS)
    assert by_key(plainly.lines).keys() == {(0, 0), (1, 0), (2, 0)}
    argv = (*few, "--heads", place.heads, "--tree", "topk:2,2")
    assert distill(*argv, prompts=CONVERSATIONS, output="other.jsonl").lines == plainly.lines
    sampled = distill(*argv, "--temperature", "1", prompts=CONVERSATIONS, output="sampled.jsonl")
    assert (sampled.status, len(sampled.lines)) == (0, 3)


# --- short answers ---------------------------------------------------------------------------------------------------


def ending_with(backbone: str, tokens: list[int], folder: Path) -> str:
    """Copy a backbone; its texts end with any of these tokens."""
    shutil.copytree(backbone, folder)
    config = read_json(folder / "generation_config.json")
    write_json(folder / "generation_config.json", config | {"eos_token_id": tokens})
    return str(folder)


@pytest.fixture(scope="module")
def terse(talking: str) -> str:
    """A backbone with a chat template that ends every text with its first token."""
    return ending_with(talking, list(range(VOCAB)), Path(talking).with_name("terse"))


@pytest.mark.parametrize(
    ("words", "key", "told"),
    [
        (("--raw",), "prompt", "has a chat template, and the prompts were given as plain text; leave --raw out"),
        ((), "text", "has a chat template, and these texts do not go through it; rename the field to `prompt`"),
        ((), "prompt", "ends its answers at once (EOS); check that the chat template is this model's"),
    ],
)
def test_short_answers_end_the_run_with_the_reason(
    distill: Any, terse: str, tmp_path: Path, words: tuple[str, ...], key: str, told: str
) -> None:
    rows = [{key: "bcd"}] * 40
    done = distill(*words, prompts=rows, backbone=terse)
    assert (done.status, done.lines) == (1, [])
    line = done.err.splitlines()[-1]
    assert line.startswith("medusa distill: failed: 32 of the first 32 answers are empty or one token long")
    assert told in line
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"], "nothing that heads could learn from"
    assert distill("--ignore-eos", prompts=rows, backbone=terse).status == 0, "no --overwrite is needed to try again"


def test_the_reason_for_self_talk_and_for_a_backbone_without_a_template(
    distill: Any, terse: str, place: Place, tmp_path: Path
) -> None:
    done = distill("--self-talk", 40, "--temperature", "1", backbone=terse)
    assert done.status == 1
    assert "give questions with --prompts FILE instead of --self-talk, or add --ignore-eos" in done.err
    base = ending_with(place.backbone, list(range(VOCAB)), tmp_path / "base")
    done = distill(prompts=[{"prompt": "bcd"}] * 3, backbone=base)
    assert (done.status, done.lines) == (1, [])
    assert "3 of the 3 answers are empty or one token long" in done.err
    assert "put its chat_template.jinja next to the tokenizer, else add --ignore-eos" in done.err


def test_half_of_the_answers_may_be_short_and_those_after_the_first_32_are_not_judged(
    distill: Any, place: Place, tmp_path: Path
) -> None:
    first, other, _ = place.texts
    assert first[0] not in other[:2]
    backbone = ending_with(place.backbone, [first[0]], tmp_path / "half")
    prompts = [{"prompt": text} for text in PROMPTS[:2] * 16 + PROMPTS[:1] * 8]
    done = distill(prompts=prompts, backbone=backbone)
    assert (done.status, len(done.lines)) == (0, 40), done.err
    later = [line for line in done.lines if line["index"] >= 32]
    assert [len(line["input_ids"]) - line["prompt_tokens"] for line in later] == [1] * 8


def test_answers_cut_by_the_length_are_not_short(distill: Any) -> None:
    assert distill("--self-talk", "4", "--temperature", "1", "--ignore-eos", "--max-new-tokens", "1").status == 0


def test_answers_that_were_cut_are_warned_of(tmp_path: Path) -> None:
    """Thoughts that never end above all, with the option of the template that turns them off."""
    tokenizer, path = family_tokenizer("Qwen3"), tmp_path / "own.jsonl"

    def written(*answers: str) -> str | None:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)[
            "input_ids"
        ]
        ids = [prompt + tokenizer(answer)["input_ids"] for answer in answers]
        rows = [{"input_ids": row, "prompt_tokens": len(prompt), "answer": "x"} for row in ids]
        return why_cut(write_rows(path, rows), {"length": len(answers), "eos": 2}, 64, tokenizer)

    told = "3 of 5 answers were cut at 64 tokens"
    assert written("yes", "no") is None, "no more than half"
    assert (
        written("yes", "no", "yes")
        == f"{told}, so heads hardly learn their ends; give a larger --max-new-tokens than 64"
    )
    way_out = "give a larger --max-new-tokens than 64, or --template-option enable_thinking=false"
    assert (
        written("<think>\nWell", "<think>\nSo</think>yes", "<think>")
        == f"{told}, 2 of them within a thought; {way_out}"
    )


def test_history_keeps_special_tokens_except_the_end_of_the_turn() -> None:
    tokenizer = family_tokenizer("Qwen2.5")
    ids = tokenizer("<|im_start|>yes<|im_end|>")["input_ids"]
    assert remembered(ids, [], tokenizer, ended=True) == {"role": "assistant", "content": "<|im_start|>yes"}
    assert remembered(ids, [], tokenizer, ended=False)["content"] == "<|im_start|>yes<|im_end|>"
    assert remembered(ids, [], tokenizer, ended=True, stop=("es",))["content"] == "<|im_start|>y"
    channels = family_tokenizer("gpt-oss")
    text = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>"
    message = remembered(channels(text)["input_ids"], channels("<|start|>assistant")["input_ids"], channels, ended=True)
    assert message == {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}, "its template takes no marks"


# --- from Python -----------------------------------------------------------------------------------------------------


def test_distill_is_a_function_that_returns_figures(
    talking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("bcd\nefg\nh\n", encoding="utf-8")
    options = module.DistillOptions(
        models=Models(backbone=talking),
        prompts=Prompts(prompts=str(tmp_path / "p.txt")),
        load=LoadOptions(device="cpu"),
        settings=Settings(max_new_tokens=NEW),
        output=Output(quiet=True),
        out=str(tmp_path / "own.jsonl"),
    )
    first, again = module.distill(options), module.distill(options)
    lines = lines_of(first.path)
    assert first.texts == len(lines) == sum(first.finish_reasons.values()) == 3
    assert first.new_tokens == sum(len(line["input_ids"]) - line["prompt_tokens"] for line in lines)
    assert first.seconds > 0
    assert (again.texts, again.new_tokens, again.failed) == (3, 0, 0)
    assert capsys.readouterr() == ("", "")


# --- interruptions ---------------------------------------------------------------------------------------------------

MANY = [{"turns": [letter * 2, "b", "c"]} for letter in "abcdef"]


def stopped(command: list[str], number: int, output: Path, told: Path, lines: int = 4) -> tuple[int, str]:
    """Run the command slowly in a process of its own, and send it a signal once the file has this many lines.

    Returns the exit status and standard error."""
    once = Journal.append

    def append(*args: Any) -> None:
        once(*args)
        time.sleep(0.02)

    with pytest.MonkeyPatch.context() as patch, told.open("w") as errors:
        patch.setattr(Journal, "append", append)
        process = forked_command(command, errors.fileno(), errors.fileno())
    limit = time.monotonic() + 120
    while not (output.exists() and output.read_bytes().count(b"\n") >= lines):
        assert time.monotonic() < limit
        assert os.waitpid(process, os.WNOHANG)[0] == 0, told.read_text()
        time.sleep(0.002)
    os.kill(process, number)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), told.read_text()


@pytest.mark.parametrize("temperature", [pytest.param("0", marks=pytest.mark.full), "1"])
def test_a_killed_distillation_resumes_without_loss_or_repetition(
    distill: Any, talking: str, tmp_path: Path, temperature: str
) -> None:
    argv = ("--temperature", temperature, "--batch-size", "3", "--quiet")
    whole = distill(*argv, prompts=MANY)
    output = tmp_path / "killed.jsonl"
    command = ["distill", "--backbone", talking, "--prompts", str(tmp_path / "prompts.jsonl")]
    command += ["--max-new-tokens", str(NEW), "--output", str(output), *argv]
    rng = random.Random(int(temperature))
    for limit in sorted(rng.sample(range(1, 15), 2)):
        assert stopped(command, signal.SIGKILL, output, tmp_path / "told", limit)[0] == -signal.SIGKILL
        assert output.read_bytes().count(b"\n") < 3 * len(MANY), "in the middle, not at the end"
        with output.open("ab") as file:  # as if the last line had been cut off as well
            file.write(b'{"index": 5, "turn": 0, "inp')
    done = distill(*argv, prompts=MANY, output="killed.jsonl")
    assert done.status == 0, done.err
    assert by_key(done.lines) == by_key(whole.lines)
    assert done.figures["finish_reasons"] == whole.figures["finish_reasons"], "of all texts, not of the last run's"


@pytest.mark.parametrize("temperature", [pytest.param("0", marks=pytest.mark.full), "1"])
def test_answers_do_not_depend_on_the_number_of_texts_at_a_time(distill: Any, temperature: str) -> None:
    runs = [
        distill("--temperature", temperature, *width, prompts=MANY, output=f"{number}.jsonl")
        for number, width in enumerate([(), ("--batch-size", "1"), ("--batch-size", "5")])
    ]
    assert by_key(runs[0].lines) == by_key(runs[1].lines) == by_key(runs[2].lines)
    assert distill("--temperature", temperature, "--batch-size", "2", prompts=MANY, output="0.jsonl").status == 0


def test_a_finished_distillation_changes_only_if_asked(distill: Any, medusa: Any, tmp_path: Path) -> None:
    """Only a newline ends a line of it, other settings and wrong requests are refused."""
    whole, output = distill(prompts=MANY).lines, tmp_path / "own.jsonl"
    whole[0]["answer"] = "a\u2028b\x85c"
    output.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in whole), encoding="utf-8")
    done = distill(prompts=MANY)
    assert (done.status, done.lines) == (0, whole), done.err
    for words, prompts in (
        (("--temperature", "0.5"), MANY),
        (("--seed", "3"), MANY),
        (("--ignore-eos",), MANY),
        (("--quantization", "int8"), MANY),
        ((), MANY[::-1]),  # under the same name
    ):
        done = distill(*words, prompts=prompts)
        assert (done.status, done.lines) == (2, whole)
        assert "other settings" in done.err
        assert "--overwrite" in done.err
    settings = read_json(tmp_path / "own.settings.json")
    write_json(tmp_path / "own.settings.json", settings | {"prompts": "../elsewhere/prompts.jsonl"})
    done = distill(prompts=MANY)
    assert (done.status, done.lines) == (0, whole), "the same prompts, from a file of another path"
    argv = ("--self-talk", "2", "--output", output, "--overwrite")
    assert medusa("distill", "--backbone", tmp_path / "absent", *argv).status == 2
    assert lines_of(output) == whole
    done = distill("--ignore-eos", "--overwrite", prompts=MANY)
    assert (done.status, done.lines[0]["finish_reason"]) == (0, "length")


def test_a_model_with_other_weights_does_not_continue_texts(distill: Any, talking: str, tmp_path: Path) -> None:
    """A model that was trained further under its old name."""
    backbone = tmp_path / "backbone"
    shutil.copytree(talking, backbone)
    whole = distill("--max-prompts", "3", prompts=MANY, backbone=str(backbone))
    assert distill("--max-prompts", "3", prompts=MANY, backbone=str(backbone)).status == 0
    model = AutoModelForCausalLM.from_pretrained(backbone)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)
    model.save_pretrained(backbone)
    done = distill("--max-prompts", "3", prompts=MANY, backbone=str(backbone))
    assert (done.status, done.lines) == (2, whole.lines)
    assert "was written by other weights than those of" in done.err
    settings = read_json(tmp_path / "own.settings.json")
    del settings["weights"]  # as earlier versions wrote them
    write_json(tmp_path / "own.settings.json", settings)
    assert distill("--max-prompts", "3", prompts=MANY, backbone=str(backbone)).status == 0


def test_an_unexpected_line_is_named(distill: Any, tmp_path: Path) -> None:
    whole = distill(prompts=MANY)
    with (tmp_path / "own.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "a"}\n')
    done = distill(prompts=MANY)
    assert done.status == 2
    assert "own.jsonl:19 was not written by medusa distill" in done.err
    assert done.lines[:-1] == whole.lines


@pytest.fixture
def command(talking: str, tmp_path: Path) -> list[str]:
    """A distillation of 24 prompts, in batches of two."""
    (tmp_path / "p.txt").write_text("".join(f"{letter * 2}\n" for letter in "bcdefghijklm" * 2), encoding="utf-8")
    argv = ["distill", "--backbone", talking, "--prompts", str(tmp_path / "p.txt"), "--ignore-eos"]
    argv += ["--max-new-tokens", "4", "--batch-size", "2", "--threads", "1", "--overwrite"]
    return [*argv, "--output", str(tmp_path / "own.jsonl")]


def test_a_signal_keeps_finished_answers_and_the_same_command_continues(command: list[str], tmp_path: Path) -> None:
    output = tmp_path / "own.jsonl"
    ended, err = stopped(command, signal.SIGTERM, output, tmp_path / "told")
    assert ended == 143, err
    kept = lines_of(output)
    assert 4 <= len(kept) < 24
    told = f"interrupted; {len(kept)} of 24 texts are kept in {output}; continue with: "
    assert told in err, "a line that can be typed"
    assert "Traceback" not in err
    _, *without = shlex.split(err.strip().splitlines()[-1].partition(told)[2])
    assert main(without) == 0
    lines = lines_of(output)
    assert lines[: len(kept)] == kept, "no answer is written again"
    assert sorted(line["index"] for line in lines) == list(range(24))
    assert main([*command, "--quiet"]) == 0
    whole = lines_of(output)
    by_index = itemgetter("index")
    assert sorted(lines, key=by_index) == sorted(whole, key=by_index)


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
