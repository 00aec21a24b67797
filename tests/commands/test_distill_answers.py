"""Short answers end a distillation with the reason; Ctrl-C and SIGTERM lose no finished answer."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from chat_families import family_tokenizer
from decode.bench import methods
from decode.texts import Result
from medusa.__main__ import main
from medusa.commands.distill import DistillOptions, distill
from medusa.commands.distill.checks import why_cut
from medusa.commands.distill.journal import Journal
from medusa.commands.options import Models, Output, Prompts
from medusa.options import LoadOptions
from medusa.records.replies import remembered
from tests.commands.test_cli import Place
from tests.commands.test_prompting import TEMPLATE
from tests.train.processes import forked_command


class Done(NamedTuple):
    status: int
    err: str
    output: Path


@pytest.fixture(scope="module")
def chat(place: Place) -> str:
    """The same backbone with a chat template."""
    folder = Path(place.backbone).parent / "chat"
    AutoModelForCausalLM.from_pretrained(place.backbone).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(place.backbone)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


# --- short answers ----------------------------------------------------------------------------------------------------


class Terse:
    """A method that ends most texts at once: every `good`-th text has four tokens, the others one token and EOS."""

    def __init__(self, eos: int, good: int) -> None:
        self.eos, self.good, self.asked = eos, good, 0

    def __call__(self, prompts: list[list[int]]) -> list[Result]:
        return [self.result(prompt) for prompt in prompts]

    def result(self, prompt: list[int]) -> Result:
        self.asked += 1
        new = [1, 2, 3, 4] if self.good and self.asked % self.good == 0 else [1]
        return Result(prompt, [*new, self.eos], finish_reason="eos", seconds=0.1)


@pytest.fixture
def run(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `medusa distill` with a backbone that ends most texts at once."""

    def run(backbone: str, *words: Any, prompts: int = 0, good: int = 0, key: str = "prompt") -> Done:
        terse = Terse(place.eos, good)
        monkeypatch.setattr(methods, "transformers_method", lambda *args: terse)
        given: tuple[Any, ...] = ()
        if prompts:
            rows = [{key: "bcd"}] * prompts
            (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            given = ("--prompts", tmp_path / "p.jsonl")
        argv = ("distill", "--backbone", backbone, *given, "--output", tmp_path / "own.jsonl", *words)
        capsys.readouterr()
        status = main([str(word) for word in argv])
        return Done(status, capsys.readouterr().err, tmp_path / "own.jsonl")

    return run


@pytest.mark.parametrize(
    ("words", "key", "told"),
    [
        (("--raw",), "prompt", "has a chat template, and the prompts were given as plain text; leave --raw out"),
        ((), "text", "has a chat template, and these texts do not go through it; rename the field to `prompt`"),
        ((), "prompt", "ends its answers at once (EOS); check that the chat template is this model's"),
    ],
)
def test_short_answers_end_the_run_with_the_reason(
    run: Any, chat: str, words: tuple[str, ...], key: str, told: str
) -> None:
    done = run(chat, *words, prompts=40, key=key)
    assert done.status == 1
    line = done.err.splitlines()[-1]
    assert line.startswith("medusa distill: failed: 32 of the first 32 answers are empty or one token long")
    assert told in line
    assert [path.name for path in done.output.parent.iterdir()] == ["p.jsonl"], "nothing that heads could learn from"
    assert run(chat, prompts=40, good=1).status == 0, "no --overwrite is needed to try again"


def test_the_reason_for_a_backbone_without_a_template(run: Any, place: Place) -> None:
    done = run(place.backbone, prompts=3)
    assert done.status == 1
    assert "3 of the 3 answers are empty or one token long" in done.err
    assert "put its chat_template.jinja next to the tokenizer, else add --ignore-eos" in done.err


def test_self_talk_that_ends_at_once(run: Any, chat: str) -> None:
    done = run(chat, "--self-talk", 40)
    assert done.status == 1
    assert "give questions with --prompts FILE instead of --self-talk, or add --ignore-eos" in done.err
    assert not done.output.exists()


def test_some_short_answers_are_no_reason_to_stop(run: Any, chat: str) -> None:
    """Half of the answers may be short, and answers after the first 32 are not judged."""
    done = run(chat, prompts=40, good=2)
    assert done.status == 0, done.err
    assert done.output.read_bytes().count(b"\n") == 40


def test_answers_cut_by_the_length_are_not_short(chat: str, tmp_path: Path) -> None:
    argv = ("distill", "--backbone", chat, "--self-talk", "4", "--ignore-eos", "--max-new-tokens", "1", "--quiet")
    assert main([*argv, "--output", str(tmp_path / "own.jsonl")]) == 0


# --- from Python -----------------------------------------------------------------------------------------------------


def test_distill_is_a_function_that_returns_figures(
    chat: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("bcd\nefg\nh\n", encoding="utf-8")
    options = DistillOptions(
        models=Models(backbone=chat),
        prompts=Prompts(prompts=str(tmp_path / "p.txt")),
        load=LoadOptions(device="cpu"),
        output=Output(quiet=True),
        out=str(tmp_path / "own.jsonl"),
    )
    first, again = distill(options), distill(options)
    lines = [json.loads(line) for line in first.path.read_text().splitlines()]
    assert first.texts == len(lines) == sum(first.finish_reasons.values()) == 3
    assert first.new_tokens == sum(len(line["input_ids"]) - line["prompt_tokens"] for line in lines)
    assert first.seconds > 0
    assert (again.texts, again.new_tokens, again.failed) == (3, 0, 0)
    assert capsys.readouterr() == ("", "")


# --- interruptions ---------------------------------------------------------------------------------------------------


@pytest.fixture
def command(chat: str, tmp_path: Path) -> list[str]:
    """A distillation of 24 prompts, in batches of two."""
    (tmp_path / "p.txt").write_text("".join(f"{letter * 2}\n" for letter in "bcdefghijklm" * 2), encoding="utf-8")
    argv = ["distill", "--backbone", chat, "--prompts", str(tmp_path / "p.txt"), "--ignore-eos"]
    argv += ["--max-new-tokens", "4", "--batch-size", "2", "--threads", "1", "--overwrite"]
    return [*argv, "--output", str(tmp_path / "own.jsonl")]


def stopped(command: list[str], number: int, output: Path, told: Path, lines: int = 4) -> tuple[int, str]:
    """Run the command slowly in a process of its own, and send it a signal once the file has this many lines.

    Returns the exit status and standard error."""
    once = Journal.append

    def append(*args: Any) -> None:
        once(*args)
        time.sleep(0.05)

    with pytest.MonkeyPatch.context() as patch, told.open("w") as errors:
        patch.setattr(Journal, "append", append)
        process = forked_command(command, errors.fileno(), errors.fileno())
    limit = time.monotonic() + 120
    while not (output.exists() and output.read_bytes().count(b"\n") >= lines):
        assert time.monotonic() < limit
        assert os.waitpid(process, os.WNOHANG)[0] == 0, told.read_text()
        time.sleep(0.02)
    os.kill(process, number)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), told.read_text()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_keeps_finished_answers_and_the_same_command_continues(
    command: list[str], tmp_path: Path, number: int, status: int
) -> None:
    output = tmp_path / "own.jsonl"
    ended, err = stopped(command, number, output, tmp_path / "told")
    assert ended == status, err
    kept = [json.loads(line) for line in output.read_text().split("\n")[:-1]]
    assert 4 <= len(kept) < 24
    told = f"interrupted; {len(kept)} of 24 texts are kept in {output}; continue with: "
    assert told in err, "a line that can be typed"
    assert "Traceback" not in err
    _, *without = shlex.split(err.strip().splitlines()[-1].partition(told)[2])
    assert main(without) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines[: len(kept)] == kept, "no answer is written again"
    assert sorted(line["index"] for line in lines) == list(range(24))
    assert main([*command, "--quiet"]) == 0
    whole = [json.loads(line) for line in output.read_text().splitlines()]
    by_index = itemgetter("index")
    assert sorted(lines, key=by_index) == sorted(whole, key=by_index)


def test_answers_that_were_cut_are_warned_of(tmp_path: Path) -> None:
    """Thoughts that never end above all, with the option of the template that turns them off."""
    tokenizer, path = family_tokenizer("Qwen3"), tmp_path / "own.jsonl"

    def written(*answers: str) -> str | None:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)[
            "input_ids"
        ]
        ids = [prompt + tokenizer(answer)["input_ids"] for answer in answers]
        rows = [{"input_ids": row, "prompt_tokens": len(prompt), "answer": "x"} for row in ids]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return why_cut(path, {"length": len(answers), "eos": 2}, 64, tokenizer)

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
