"""Prompts go through the tokenizer's chat template or are plain text, and every command says which of the two."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa.__main__ import main
from medusa.errors import RequestError
from medusa.files import read_json, write_json
from medusa.heads.independent import MedusaHeads
from tests.commands.place import Outcome, Place, with_template, write_rows
from tests.helpers import LETTERS

# The roles are letters, so that the form of a prompt can be read off its token ids.
# With the option `thinks` turned off, an answer begins with `an`.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a' if thinks is not defined or thinks else 'an' }}{% endif %}"
)
OFF = ("--template-option", "thinks=false")
THROUGH, PLAIN = "prompts: through the chat template of ", "prompts: as plain text"


class Models(NamedTuple):
    """Folders of a backbone with a chat template, of the same backbone without, and of heads for both."""

    chat: str
    base: str
    heads: str


class Said(NamedTuple):
    status: int
    err: str
    content: dict[str, Any]

    @property
    def prompts(self) -> list[str]:
        """The prompts that were decoded, as letters."""
        return ["".join(LETTERS[token] for token in result["input_ids"]) for result in self.content["results"]]

    @property
    def notes(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("prompts: ")]


@pytest.fixture(scope="module")
def models(place: Place) -> Models:
    chat = with_template(place.backbone, TEMPLATE, Path(place.backbone).with_name("chat"))
    return Models(chat, place.backbone, place.heads)


def heads_that_record(models: Models, raw: object, folder: Path) -> str:
    """A copy of the heads whose config records the form of the prompts in their training data."""
    shutil.copytree(models.heads, folder)
    write_json(folder / "config.json", read_json(folder / "config.json") | {"raw_prompts": raw})
    return str(folder)


@pytest.fixture
def run(medusa: Callable[..., Outcome], tmp_path: Path) -> Callable[..., Said]:
    def run(*words: Any) -> Said:
        results = tmp_path / "results.json"
        results.unlink(missing_ok=True)
        done = medusa(*words, "--json", results, "--threads", "1")
        return Said(done.status, done.err, read_json(results) if results.exists() else {})

    return run


@pytest.fixture
def generate(run: Callable[..., Said], models: Models, tmp_path: Path) -> Callable[..., Said]:
    """Run `medusa generate` on rows of a JSONL file, on all of them together."""

    def generate(*words: Any, rows: list[Any], backbone: str = models.chat) -> Said:
        path = write_rows(tmp_path / "prompts.jsonl", rows)
        words += () if "--heads" in words else ("--plain",)
        how = ("--max-new-tokens", "2", "--batch-size", "8")
        return run("generate", "--backbone", backbone, "--prompts", path, *how, *words)

    return generate


ROWS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": "bcd"}, "ubcda", "bcd"),
    ({"question": "bcd"}, "ubcda", "bcd"),
    ({"turns": ["bcd", "e"]}, "ubcda", "bcd"),
    ({"text": "bcd"}, "bcd", "bcd"),
    ({"input_ids": [1, 2, 3]}, "bcd", "bcd"),
    ({"messages": [{"role": "user", "content": "bcd"}]}, "ubcda", "ubcda"),
    ({"conversations": [{"from": "human", "value": "bcd"}]}, "ubcda", "ubcda"),
]


def test_prompts_use_the_chat_template_and_raw_turns_it_off(generate: Any) -> None:
    rows, templated, raw = zip(*ROWS, strict=True)
    assert generate(rows=rows).prompts == list(templated)
    assert generate("--no-raw", rows=rows).prompts == list(templated)
    assert generate("--raw", rows=rows).prompts == list(raw)


def test_lines_of_a_text_file_and_prompt_are_prompts(run: Any, models: Models, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("bcd\nefg\n", encoding="utf-8")
    argv = ("generate", "--backbone", models.chat, "--plain", "--max-new-tokens", "2", "--prompt", "h")
    assert run(*argv, "--prompts", tmp_path / "a.txt").prompts == ["uha", "ubcda", "uefga"]
    assert run(*argv, "--prompts", tmp_path / "a.txt", "--raw").prompts == ["h", "bcd", "efg"]


def test_a_command_says_once_which_form_prompts_have(generate: Any, models: Models) -> None:
    prompt, text, talk = (ROWS[n][0] for n in (0, 3, 5))
    assert generate(rows=[prompt, prompt]).notes == [f"{THROUGH}{models.chat} (--raw turns it off)"]
    assert generate(rows=[talk]).notes == [f"{THROUGH}{models.chat}"]
    assert generate(rows=[text]).notes == [
        "prompts: as they are, because `text` and `input_ids` do not go through the chat template"
    ]
    assert generate("--raw", rows=[prompt]).notes == [f"{PLAIN}, without the chat template of {models.chat} (--raw)"]
    assert generate("--raw", rows=[prompt, talk]).notes[0].endswith("; conversations use the template")
    assert generate("--quiet", rows=[prompt]).notes == []


def test_a_backbone_without_a_template_gets_plain_text(generate: Any, models: Models) -> None:
    rows = [row for row, _, _ in ROWS[:5]]
    done = generate(rows=rows, backbone=models.base)
    assert (done.prompts, done.notes) == (["bcd"] * 5, [])
    assert generate("--raw", rows=rows, backbone=models.base).notes == [
        f"{PLAIN} (--raw; {models.base} has no chat template)"
    ]
    wrong = generate("--no-raw", rows=rows, backbone=models.base)
    assert wrong.status == 2
    assert "--no-raw needs a chat template" in wrong.err


def test_the_form_that_heads_record_is_the_default(generate: Any, models: Models, tmp_path: Path) -> None:
    raw, templated, silent = (
        ("--heads", heads_that_record(models, form, tmp_path / str(form)), "--tree", "chain")
        for form in (True, False, None)
    )
    rows = [ROWS[0][0]]
    done = generate(*raw, rows=rows)
    assert done.prompts == ["bcd"]
    assert done.notes == [f"{PLAIN}, like the heads' training data (--no-raw uses the chat template of {models.chat})"]
    assert generate(*raw, "--no-raw", rows=rows).prompts == ["ubcda"]
    done = generate(*templated, rows=rows)
    assert done.prompts == ["ubcda"]
    assert done.notes == [f"{THROUGH}{models.chat}, like the heads' training data (--raw turns it off)"]
    assert generate(*templated, "--raw", rows=rows).prompts == ["bcd"]
    assert generate(*silent, rows=rows).prompts == ["ubcda"]
    assert generate(*templated, rows=rows, backbone=models.base).prompts == ["bcd"]


COMMANDS: dict[str, tuple[Any, ...]] = {
    "benchmark": ("--rounds", "1", "--max-new-tokens", "4", "--tree", "chain"),
    "calibrate": ("--rounds", "1", "--max-new-tokens", "16", "--ignore-eos"),
    "verify": ("--draws", "200", "--max-new-tokens", "4", "--tree", "chain"),
    "evaluate": ("--max-new-tokens", "4"),
    "distill": ("--max-new-tokens", "4", "--ignore-eos"),
}


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.full] * (name in ("calibrate", "verify"))) for name in COMMANDS],
)
def test_every_command_says_which_form_prompts_have(
    run: Any, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """And a benchmark is not compared with one of another form."""
    monkeypatch.setattr("decode.bench.calibration.stored.MIN_STEPS", 8)  # a calibration of two short prompts
    (tmp_path / "p.jsonl").write_text('{"prompt": "bcd"}\n{"prompt": "efg"}\n', encoding="utf-8")
    argv = (command, "--backbone", models.chat, "--heads", models.heads, *COMMANDS[command])
    argv += ("--data" if command == "evaluate" else "--prompts", tmp_path / "p.jsonl")
    argv += ("--output", tmp_path / "own.jsonl") if command == "distill" else ()
    done = run(*argv, *OFF)
    assert done.notes == [f"{THROUGH}{models.chat} with thinks=False (--raw turns it off)"]
    if command == "benchmark":
        write_json(tmp_path / "old.json", done.content)
        other = run(*argv, "--raw", "--compare", tmp_path / "old.json")
        assert other.status == 2
        assert "--max-prompts and --raw" in other.err


def test_evaluate_continues_a_conversation_after_its_first_question(
    run: Any, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from decode.texts import TextGenerator

    asked, write = list[list[int]](), TextGenerator.__call__
    monkeypatch.setattr(
        TextGenerator, "__call__", lambda self, prompts: (asked.extend(prompts), write(self, prompts))[1]
    )
    talk = [("system", "z"), ("user", "bcd"), ("assistant", "x" * 40), ("user", "efg"), ("assistant", "y")]
    rows = [{"messages": [{"role": role, "content": said} for role, said in talk]}, {"text": "b" * 40}]
    write_rows(tmp_path / "d.jsonl", rows)
    argv = ("evaluate", "--backbone", models.chat, "--heads", models.heads, "--max-new-tokens", "8")
    done = run(*argv, "--data", tmp_path / "d.jsonl")
    assert done.status == 0, done.err
    assert ["".join(LETTERS[token] for token in prompt) for prompt in asked] == ["szubcda", "b" * 16]


# --- what was used when distilling is the default afterwards ----------------------------------------------------------


def trained_on(data: Path, models: Models, *more: str) -> str:
    """Train heads for one step on data, and return their folder."""
    recipe, heads = data.parent / "recipe.yaml", data.parent / f"heads-{len(more)}"
    write_json(recipe, {"backbone": models.chat, "data": {"path": str(data), "sequence_length": 16}, "device": "cpu"})
    about = ("heads.num=2", "training.max_steps=1", "training.per_device_train_batch_size=2", f"output_dir={heads}")
    assert main(["train", str(recipe), *about, "--quiet", *more]) == 0
    return str(heads)


def test_the_form_of_raw_prompts_is_saved_with_the_heads(
    generate: Any, run: Any, models: Models, tmp_path: Path
) -> None:
    """That of templated ones: below, with their options."""
    (tmp_path / "p.txt").write_text("bcd\nefg\n", encoding="utf-8")
    own = tmp_path / "own.jsonl"
    argv = ("--backbone", models.chat, "--max-new-tokens", "16", "--ignore-eos")
    assert run("distill", *argv, "--prompts", tmp_path / "p.txt", "--output", own, "--raw").status == 0
    assert [json.loads(line)["raw_prompt"] for line in own.read_text().splitlines()] == [True, True]
    assert read_json(tmp_path / "own.settings.json")["raw"] is True
    heads = trained_on(own, models)
    assert MedusaHeads.from_pretrained(heads).config.raw_prompts is True
    assert generate("--heads", heads, "--tree", "chain", rows=[ROWS[0][0]]).prompts == ["bcd"]


def test_recorded_features_keep_the_form_of_prompts_and_the_options(
    generate: Any, models: Models, tmp_path: Path
) -> None:
    """A recording takes no prompts of another form, but texts, which have none."""
    for how, kept, told in (
        (("--raw",), ("raw_prompts", True), "the prompts are templated, and those in"),
        (OFF, ("template_options", {"thinks": False}), "the options of the chat template are none, and those in"),
    ):
        folder = tmp_path / kept[0] / "recorded"
        argv = ("--max-new-tokens", "12", "--ignore-eos", "--record", folder)
        assert generate(*argv, *how, rows=[ROWS[0][0]]).status == 0
        config = read_json(Path(trained_on(folder, models)) / "config.json")
        assert config[kept[0]] == kept[1]
        other = generate(*argv, rows=[ROWS[0][0]])
        assert other.status == 2
        assert told in other.err
    assert generate(*argv, "--record", tmp_path / "raw_prompts" / "recorded", rows=[ROWS[3][0]]).status == 0


def test_texts_record_no_form(run: Any, models: Models, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "bcd"}\n', encoding="utf-8")
    own = tmp_path / "own.jsonl"
    argv = ("distill", "--backbone", models.chat, "--max-new-tokens", "16", "--ignore-eos", "--output", own)
    assert run(*argv, "--prompts", tmp_path / "p.jsonl").status == 0
    assert "raw_prompt" not in own.read_text()
    assert read_json(Path(trained_on(own, models)) / "config.json")["raw_prompts"] is None
    seeds = ("--self-talk", "1", "--self-talk-seeds", tmp_path / "p.jsonl", "--overwrite")
    assert run(*argv, *seeds).status == 0
    assert "raw_prompt" not in own.read_text()


def test_an_invalid_record_is_refused(models: Models, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="raw_prompts is 'yes'; it must be true"):
        MedusaHeads.from_pretrained(heads_that_record(models, "yes", tmp_path / "heads"))


def test_a_chat_uses_the_template_unless_raw(
    run: Any, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form that heads record is no default here, but a note tells of it."""
    heads = heads_that_record(models, True, tmp_path / "raw")
    argv = ("chat", "--backbone", models.chat, "--heads", heads, "--tree", "chain", "--max-new-tokens", "2")
    monkeypatch.setattr(sys, "stdin", io.StringIO("bcd\n"))
    done = run(*argv)
    assert done.prompts == ["ubcda"]
    assert done.notes == [f"{THROUGH}{models.chat} (--raw turns it off)"]
    assert done.err.count("these heads were trained on answers to plain-text prompts") == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("bcd\n"))
    done = run(*argv, "--raw")
    assert done.prompts == ["bcd"]
    assert done.notes == [f"{PLAIN}, without the chat template of {models.chat} (--raw)"]
    assert "these heads were trained" not in done.err
    wrong = run(*argv, "--raw", "--system", "z")
    assert wrong.status == 2
    assert "--system needs the chat template, and --raw turns it off" in wrong.err


# --- options of the chat template ------------------------------------------------------------------------------------


def test_an_option_of_the_template_changes_prompts_and_a_record_has_its_own(generate: Any) -> None:
    rows = [ROWS[0][0], ROWS[3][0], ROWS[0][0] | {"chat_template_kwargs": {"thinks": True}}, ROWS[5][0]]
    assert generate(*OFF, rows=rows).prompts == ["ubcdan", "bcd", "ubcda", "ubcdan"]


def test_options_that_the_template_does_not_read_are_refused(generate: Any, models: Models) -> None:
    for words, backbone, told in (
        (("--template-option", "thinkss=false"), models.chat, "reads thinks; did you mean thinks?"),
        (OFF, models.base, "needs a chat template"),
        ((*OFF, "--raw"), models.chat, "--raw turns it off; leave one out"),
        (("--template-option", "thinks"), models.chat, "give NAME=VALUE, as in enable_thinking=false"),
    ):
        wrong = generate(*words, rows=[ROWS[0][0]], backbone=backbone)
        assert wrong.status == 2
        assert told in wrong.err


def test_options_of_the_training_data_are_saved_with_the_heads(
    generate: Any, run: Any, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_text("bcd\nefg\n", encoding="utf-8")
    own, features = tmp_path / "own.jsonl", tmp_path / "features"
    argv = ("distill", "--backbone", models.chat, "--max-new-tokens", "16", "--ignore-eos", "--output", own)
    assert run(*argv, "--prompts", tmp_path / "p.txt", "--no-raw", *OFF).status == 0
    rows = [json.loads(line) for line in own.read_text().splitlines()]
    assert [row["chat_template_kwargs"] for row in rows] == [{"thinks": False}] * 2
    assert [row["raw_prompt"] for row in rows] == [False, False]
    ways = [("data.streaming=true",), ("cache_features=true", f"features_dir={features}")]
    for more in (*ways, (f"data.path={features}", "data.sequence_length=8", "heads.num=3"), ()):
        heads = trained_on(own, models, *more)
        config = read_json(Path(heads) / "config.json")
        assert (config["template_options"], config["raw_prompts"]) == ({"thinks": False}, False), more
    done = generate("--heads", heads, "--tree", "chain", rows=[ROWS[0][0]])
    assert done.prompts == ["ubcdan"]
    like = ", like the heads' training data (--raw turns it off)"
    assert done.notes == [f"{THROUGH}{models.chat} with thinks=False{like}"]
    on = ("--template-option", "thinks=true")
    assert generate("--heads", heads, "--tree", "chain", *on, rows=[ROWS[0][0]]).prompts == ["ubcda"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("bcd\n"))
    chat = ("chat", "--backbone", models.chat, "--heads", heads, "--tree", "chain", "--max-new-tokens", "2")
    assert run(*chat).prompts == ["ubcdan"]


def test_a_recipe_sets_options_for_conversations(models: Models, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "bcd"}, {"role": "assistant", "content": "efghefgh"}]}] * 2
    data = write_rows(tmp_path / "d.jsonl", rows)
    for words in (("data.template_options.thinks=true",), ("--template-option", "thinks=true")):
        heads = trained_on(data, models, *words)
        assert read_json(Path(heads) / "config.json")["template_options"] == {"thinks": True}
    recipe = str(tmp_path / "recipe.yaml")
    assert main(["train", recipe, "--overwrite", "--template-option", "thinkss=true"]) == 2


def test_a_prompt_that_a_template_has_rendered_is_answered_with_a_hint(
    run: Any, models: Models, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.chat)
    tokenizer.add_special_tokens({"additional_special_tokens": ["b"]})
    tokenizer.chat_template = TEMPLATE.replace("m.role[0]", "'b' + m.role[0]")
    folder = tmp_path / "marked"
    AutoModelForCausalLM.from_pretrained(models.chat).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    argv = ("generate", "--backbone", folder, "--plain", "--max-new-tokens", "2")
    hint = "hint: --prompt 1 holds b, which the chat template writes itself; give it as messages"
    assert hint in run(*argv, "--prompt", "bucd").err
    assert "hint" not in run(*argv, "--prompt", "ucd").err
    assert "hint" not in run(*argv, "--raw", "--prompt", "bucd").err
