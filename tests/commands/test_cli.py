"""The `medusa` command as a user types it, with a tiny backbone on disk and a tokenizer of letters."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import decode
from decode.bench.benchmark import STAGES
from decode.bench.calibration import calibrate
from decode.bench.methods import Job
from decode.compiled import region
from decode.drafters.mix import Mix
from decode.drafters.retrieval.datastore import Datastore
from decode.drafters.retrieval.suffix_array import DEPTH
from decode.drafters.tries import TextDrafterFactory
from decode.texts import Result
from medusa.__main__ import main
from medusa.backbone import Backbone
from medusa.commands import generate as generate_command
from medusa.commands.speed import warn_if_useless
from medusa.fingerprint import fingerprint
from medusa.heads.independent import MedusaHeads
from medusa.loading import load_backbone
from tests.commands.place import GENERATION, NEW, PROMPTS, Outcome, Place, letters, until_eos, write_rows
from tests.helpers import LETTERS, VOCAB, random_heads, run_as_written, tiny_model
from train.features.files import shards


@pytest.fixture
def generate(medusa: Any, place: Place, tmp_path: Path) -> Callable[..., Any]:
    """`medusa generate` with --json, of three prompts at a time; gives its results."""

    def run(*argv: Any, prompts: tuple[str, ...] = ("--prompts", place.prompts), heads: bool = True) -> Any:
        path, chosen = tmp_path / "generated.json", place.models if heads else place.models[:2]
        done = medusa("generate", *chosen, *prompts, *GENERATION, "--batch-size", "3", "--json", path, *argv)
        assert done.status == 0, done.err
        return json.loads(path.read_text(encoding="utf-8"))

    return run


# --- generate --------------------------------------------------------------------------------------------------------


def test_generate_json_has_exactly_the_documented_fields(generate: Any, place: Place) -> None:
    content = generate()
    assert content.keys() == {"settings", "results"}
    assert [result["new_ids"] for result in content["results"]] == until_eos(place)
    for result, prompt in zip(content["results"], PROMPTS, strict=True):
        names = {"input_ids", "new_ids", "text", "steps", "step_lengths", "finish_reason", "seconds"}
        assert result.keys() == names
        assert result["input_ids"] == [LETTERS.index(letter) for letter in prompt]
        assert sum(result["step_lengths"]) == len(result["new_ids"])
        assert result["steps"] == len(result["step_lengths"])
        assert result["finish_reason"] == ("eos" if place.eos in result["new_ids"] else "length")
        assert result["text"] == letters(result["new_ids"], place), "no special token in it"
        assert result["seconds"] > 0
    assert content["results"][0]["finish_reason"] == "eos"
    assert content["settings"]["acceptance"] == "greedy"


@pytest.fixture
def cudnn_attention() -> Iterator[None]:
    """Allow attention by cuDNN, as PyTorch does by default; the switch belongs to the whole process."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(allowed)


@pytest.mark.usefixtures("cudnn_attention")
def test_commands_switch_attention_by_cudnn_off(generate: Any, medusa: Any, recipe: Callable[..., Path]) -> None:
    generate("--plain", "--max-prompts", "1")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert medusa("train", recipe(), "--inspect", "1").status == 0
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.usefixtures("cudnn_attention")
def test_the_library_leaves_attention_by_cudnn_alone() -> None:
    model = tiny_model("llama")
    decode.generate(model, random_heads(model), torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    "argv",
    [
        ("--batch-size", "2", "--attention", "eager"),
        ("--batch-size", "1", "--tree", "topk:3,2", "--threads", "1", "--dtype", "float64", "--quiet"),
    ],
    ids=" ".join,
)
def test_execution_options_do_not_change_the_text(generate: Any, place: Place, argv: tuple[str, ...]) -> None:
    assert [result["new_ids"] for result in generate(*argv)["results"]] == until_eos(place)


def test_plain_needs_no_heads_and_eos_can_be_ignored(generate: Any, place: Place) -> None:
    results = generate("--plain", "--ignore-eos", heads=False)["results"]
    assert [result["new_ids"] for result in results] == place.texts
    assert all(set(result["step_lengths"]) == {1} for result in results)
    assert {result["finish_reason"] for result in results} == {"length"}
    results = generate("--plain", prompts=("--prompt", PROMPTS[2], "--prompt", PROMPTS[0]), heads=False)["results"]
    assert [result["new_ids"] for result in results] == [until_eos(place)[2], until_eos(place)[0]]


def test_the_text_ends_before_the_stop_string_that_comes_first(generate: Any, place: Place) -> None:
    text = letters(place.texts[1], place)
    first, second = text[3:5], text[6:8]
    result = generate("--stop", second, "--stop", first, "--ignore-eos", "--batch-size", "3")["results"][1]
    end = min(text.index(first), text.index(second))
    assert result["text"] == text[:end]
    assert result["finish_reason"] == "stop"
    assert len(result["new_ids"]) > end, "the ids hold the stop string"


def test_a_prompt_may_fill_the_context_and_the_user_learns_why_the_text_ends(
    medusa: Any, place: Place, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    for length, left in ((127, 1), (120, 8)):
        argv = ("--prompt", "b" * length, *GENERATION, "--ignore-eos", "--json", out)
        done = medusa("generate", *place.models, *argv)
        (result,) = json.loads(out.read_text(encoding="utf-8"))["results"]
        assert (len(result["new_ids"]), result["finish_reason"]) == (left, "length")
        assert done.err.count(f"the context of 128 tokens ends the text after {left} new tokens\n") == 1


# --- generate --record -----------------------------------------------------------------------------------------------


@pytest.fixture
def used(place: Place, generate: Any, tmp_path: Path) -> Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]:
    """`medusa generate --record`; gives its results and the newest shard of its recording."""

    def run(*argv: str, **kwargs: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        results = generate("--record", tmp_path / "used", *argv, **kwargs)["results"]
        return results, load_file(shards(tmp_path / "used")[-1])

    return run


@pytest.mark.parametrize(
    ("argv", "heads"),
    [(("--batch-size", "3"), True), (("--plain",), False), (("--temperature", "0.7"), True)],
    ids=["a batch", "plain", "sampled"],
)
def test_recorded_hidden_states_equal_a_fresh_forward(
    used: Any, place: Place, argv: tuple[str, ...], heads: bool
) -> None:
    results, shard = used(*argv, heads=heads)
    texts = [result["input_ids"] + result["new_ids"] for result in results]
    assert shard["input_ids"].tolist() == [token for text in texts for token in text]
    assert shard["document_ids"].tolist() == [number for number, text in enumerate(texts) for _ in text]
    lengths = [(len(result["input_ids"]), len(text)) for result, text in zip(results, texts, strict=True)]
    taught = [position >= prompt for prompt, length in lengths for position in range(length)]
    assert shard["loss_mask"].tolist() == taught
    backbone = Backbone(load_backbone(place.backbone).model)
    for text, kept in zip(texts, shard["hidden"].split([len(text) for text in texts]), strict=True):
        fresh = backbone.hidden_states(torch.tensor([text]), use_cache=False)[0]
        # The last token may not have been read. The tolerance is rounding, as in tests/decode/test_results.py.
        torch.testing.assert_close(kept[:-1], fresh[:-1], atol=1e-5, rtol=1e-5)


def test_heads_are_trained_further_on_recordings(
    used: Any, medusa: Any, recipe: Callable[..., Path], place: Place, tmp_path: Path
) -> None:
    used()
    used("--temperature", "1")
    assert len(shards(tmp_path / "used")) == 2, "a second sitting adds to the first"
    go_on = recipe(data={"path": str(tmp_path / "used"), "sequence_length": 16}, heads={"num": 3, "start": place.heads})
    done = medusa("train", go_on, "training.learning_rate=1e-4")
    assert done.status == 0, done.err
    assert "data: 6 documents" in done.err
    before, after = MedusaHeads.from_pretrained(place.heads), MedusaHeads.from_pretrained(tmp_path / "trained")
    assert after.config.num_heads == 3
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        assert 0 < (old - new).abs().max() < 1e-3, "three small steps from where the given ones are"


def test_a_recording_prints_its_contents_unless_quiet(medusa: Any, place: Place, tmp_path: Path) -> None:
    ids = write_rows(tmp_path / "ids.jsonl", [{"input_ids": [1, 2, 3]}])
    words = ("generate", "--backbone", place.bare, "--plain", "--prompts", ids, *GENERATION)
    done = medusa(*words, "--record", tmp_path / "used")
    size = (3 + NEW) * (4 * 32 + 9)
    assert f"recorded in {tmp_path / 'used'}: 1 texts, {3 + NEW} tokens, {size / 1000:.3g} kB" in done.err
    assert not medusa(*words, "--record", tmp_path / "used", "--quiet").err


def test_an_interruption_keeps_what_was_finished(
    medusa: Any, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = generate_command.batches

    def interrupted(*args: Any) -> Any:
        yield next(iter(batches(*args)))
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "batches", interrupted)
    assert medusa("generate", *place.asked, "--record", tmp_path / "used", "--json", tmp_path / "j").status == 130
    assert len(json.loads((tmp_path / "j").read_text())["results"]) == 1
    (shard,) = shards(tmp_path / "used")
    assert load_file(shard)["input_ids"].tolist()[: len(PROMPTS[0])] == [LETTERS.index(c) for c in PROMPTS[0]]
    assert set(load_file(shard)["document_ids"].tolist()) == {0}


def test_typical_acceptance_is_opt_in(generate: Any) -> None:
    assert generate("--temperature", "0.7")["settings"]["acceptance"] == "rejection"
    argv = ("--temperature", "0.7", "--acceptance", "typical", "--epsilon", "0.2", "--delta", "0.4")
    settings = generate(*argv)["settings"]
    assert (settings["acceptance"], settings["epsilon"], settings["delta"]) == ("typical", 0.2, 0.4)


def test_texts_go_to_standard_output_and_the_rest_to_standard_error(medusa: Any, place: Place) -> None:
    done = medusa("generate", *place.asked, "--batch-size", "2")
    assert done.out.splitlines() == [letters(ids, place) for ids in until_eos(place)]
    assert "a step" in done.err
    assert medusa("generate", *place.asked, "--quiet") == (0, "", "")


def test_ids_go_in_and_out_of_a_backbone_without_tokenizer(medusa: Any, place: Place, tmp_path: Path) -> None:
    ids = write_rows(tmp_path / "ids.jsonl", [{"input_ids": [0, 1, 2]}])
    done = medusa("generate", "--backbone", place.bare, "--heads", place.heads, "--prompts", ids, *GENERATION)
    assert (done.status, done.out.strip()) == (0, str(place.texts[0]))


def test_heads_of_another_backbone_of_the_same_shape_give_a_warning(medusa: Any, place: Place, tmp_path: Path) -> None:
    heads = random_heads(tiny_model("llama"))
    heads.config.backbone = fingerprint(tiny_model("llama", seed=7), "org/other")
    heads.save_pretrained(tmp_path / "heads")
    argv = ("--backbone", place.backbone, "--heads", tmp_path / "heads", "--prompt", "abc", *GENERATION)
    done = medusa("generate", *argv, "--tree", "chain")
    assert done.status == 0
    assert "warning" in done.err
    assert "org/other" in done.err


# --- a LoRA adapter as a backbone ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def adapter(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a LoRA adapter that changes the backbone's texts; it contains no tokenizer."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(place.backbone), lora).save_pretrained(folder)
    return folder


def test_an_adapters_folder_is_a_backbone(
    medusa: Any, recipe: Callable[..., Path], place: Place, adapter: Path, tmp_path: Path
) -> None:
    """Commands decode with it, and heads can be trained on it."""
    model = peft.AutoPeftModelForCausalLM.from_pretrained(str(adapter)).eval()
    prompt = torch.tensor([[0, 1, 2]])
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    expected = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **how)[0, 3:].tolist()
    assert expected != place.texts[0], "or the adapter would change nothing"
    out = tmp_path / "out.json"
    argv = ("--heads", place.heads, "--prompt", "abc", "--ignore-eos", *GENERATION, "--json", out)
    done = medusa("generate", "--backbone", adapter, *argv)
    assert done.status == 0, done.err
    assert json.loads(out.read_text())["results"][0]["new_ids"] == expected
    assert medusa("train", recipe(backbone=str(adapter)), "--quiet") == (0, "", "")
    assert MedusaHeads.from_pretrained(tmp_path / "trained").config.base_model_name_or_path == str(adapter)


# --- info, train, evaluate -------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(place: Place, tmp_path: Path) -> Callable[..., Path]:
    """A training YAML; its data are the backbone's texts."""
    texts = [prompt + letters(text, place) for prompt, text in zip(PROMPTS, place.texts, strict=True)]
    data = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])

    def write(**changes: Any) -> Path:
        content = {
            "backbone": place.backbone,
            "data": {"path": str(data), "sequence_length": 16},
            "output_dir": str(tmp_path / "trained"),
            "heads": {"num": 2},
            "training": {"max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True},
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(content | changes), encoding="utf-8")  # JSON is YAML
        return path

    return write


def test_info_describes_heads(medusa: Any, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = medusa("info", place.heads, "--json", tmp_path / "info.json")
    about = json.loads((tmp_path / "info.json").read_text())
    assert done.status == 0
    assert done.err == ""
    told = {"kind": "medusa", "heads": 3, "hidden size": 32, "vocabulary": 61, "LM head": "own"}
    assert told.items() <= about.items()
    assert about["config"]["medusa_num_heads"] == 3
    for word in ("heads", "hidden size", "vocabulary", "tree", "backbone"):
        assert word in done.out
    assert medusa("info", place.heads, "--quiet") == (0, "", "")
    monkeypatch.setenv("COLUMNS", "60")
    narrow = medusa("info", place.heads).out
    complete_in_60_columns(narrow)
    assert sorted("".join(narrow.split())) == sorted("".join(done.out.split()))


def test_trained_heads_work_with_every_command(
    medusa: Any, place: Place, recipe: Callable[..., Path], tmp_path: Path
) -> None:
    done = medusa("train", recipe(), "heads.num=3", "training.learning_rate=1e-3", "--json", tmp_path / "fit.json")
    assert done.status == 0, done.err
    assert json.loads((tmp_path / "fit.json").read_text())["steps"] == 3
    assert "step      3  loss" in done.err
    assert "top-1" in done.err
    assert done.out == "", "standard output is for results"
    assert MedusaHeads.from_pretrained(tmp_path / "trained").config.num_heads == 3
    told = medusa("info", tmp_path / "trained")
    assert "command" in told.out, "provenance is shown"
    assert re.search(r"data +\d+ texts, \d+ tokens, \d+ of them taught", told.out)
    assert re.search(r"result +3 steps, .* minutes, loss", told.out)
    assert "{" not in told.out
    assert "calibrated at the first use" in told.out
    done = medusa("generate", *place.asked, "--heads", tmp_path / "trained", "--tree", "chain")
    assert done.out.splitlines() == [letters(ids, place) for ids in until_eos(place)]


def complete_in_60_columns(out: str, *words: str, path: Path | None = None) -> None:
    """The table that a command printed is narrow and whole; a line with a path may be longer."""
    assert max(len(line) for line in out.splitlines() if not (path and str(path) in line)) <= 60
    assert "\u2026" not in out, "a column was cut off"
    assert all(word in out for word in words)


def test_evaluate_json_has_exactly_the_documented_fields(
    medusa: Any, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    argv = (*place.models, "--data", place.prompts, *GENERATION)
    done = medusa("evaluate", *argv, "--json", tmp_path / "evaluated.json")
    assert done.status == 0, done.err
    content = json.loads((tmp_path / "evaluated.json").read_text())
    assert content.keys() == {"heads", "tokens"}
    assert [head["head"] for head in content["heads"]] == [1, 2, 3]
    for head in content["heads"]:
        assert head.keys() == {"head", "top", "conditional_top1"}
        assert head["top"].keys() == {"1", "5", "10"}
        assert head["top"]["1"] <= head["top"]["5"] <= head["top"]["10"]
    # A position counts where all three heads' labels lie within the text: the last three tokens are no starts.
    assert content["tokens"] == sum(max(len(ids) - 3 - 0, 0) for ids in until_eos(place))
    assert "right guesses" not in done.err
    complete_in_60_columns(done.out, "right guesses", "top 10", "top 1 if earlier are right")


def test_evaluate_on_no_positions_is_an_error(medusa: Any, place: Place, tmp_path: Path) -> None:
    full = write_rows(tmp_path / "full.jsonl", [{"prompt": "b" * 126}])
    for argv, status, told in (
        ((place.prompts, "--max-new-tokens", "3"), 2, "--max-new-tokens is 3, and 3 heads need at least 4"),
        ((full,), 1, "no positions to evaluate in 1 texts"),
    ):
        done = medusa("evaluate", *place.models, "--json", tmp_path / "out.json", "--data", *argv)
        assert done.status == status
        assert told in done.err.splitlines()[-1]
    assert not (tmp_path / "out.json").exists()


def test_evaluate_separates_documents_of_a_text_file(medusa: Any, place: Place, tmp_path: Path) -> None:
    """`--data` is training text: the separator between documents is not part of the text."""
    one, two = "hgfedcba" * 3, "abcdefgh" * 3
    (tmp_path / "with.txt").write_text(f"{one}\n<|endoftext|>\n{two}\n<|endoftext|>", encoding="utf-8")
    figures = []
    for data in (tmp_path / "with.txt", write_rows(tmp_path / "without.jsonl", [{"text": one}, {"text": two}])):
        argv = (*place.models, "--data", data, *GENERATION)
        assert medusa("evaluate", *argv, "--json", tmp_path / "out.json").status == 0
        figures.append(json.loads((tmp_path / "out.json").read_text()))
    assert figures[0] == figures[1]


# --- calibrate -------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_place(place: Place, tmp_path: Path) -> Place:
    """Heads in a separate folder, without a saved tree."""
    heads = MedusaHeads.from_pretrained(place.heads)
    heads.config.tree = None
    heads.save_pretrained(tmp_path / "heads")
    return place._replace(heads=str(tmp_path / "heads"))


@pytest.fixture
def eight(tmp_path: Path) -> Path:
    """A file with eight short prompts."""
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(LETTERS[at : at + 4] for at in range(8)), encoding="utf-8")
    return path


@pytest.mark.usefixtures("short_calibrations", "no_pictures")
def test_auto_uses_the_calibrated_tree(
    medusa: Any, own_place: Place, eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plot = tmp_path / "c.json", tmp_path / "c.png"
    small = (*own_place.models, "--prompts", eight, "--rounds", "1", "--ignore-eos", "--json", out)
    done = medusa("calibrate", *small, "--max-new-tokens", "12", "--plot", plot)
    assert done.status == 0, done.err
    assert "kept for --tree auto" in done.out
    told = json.loads(out.read_text(encoding="utf-8"))
    assert told["kept_in"] == str(Path(own_place.heads) / "calibration.json")
    assert told["points"][0]["nodes"] == 1
    assert plot.exists()

    monkeypatch.setattr(calibrate, "calibrate", lambda *args, **kwargs: pytest.fail("calibrated again"))
    done = medusa("generate", *own_place.models, "--prompt", "abc", "--tree", "auto", "--max-new-tokens", "8")
    assert done.status == 0, done.err
    chosen = told["points"][told["chosen"]]  # the fastest, which another load of the machine may change
    assert f"tree: {'dynamic, ' if chosen.get('dynamic') else ''}{chosen['nodes']} nodes" in done.err

    done = medusa("benchmark", *small, "--max-new-tokens", "4", "--tree", "auto")
    assert done.status == 0, done.err
    measured = json.loads(out.read_text(encoding="utf-8"))
    assert measured["methods"]["medusa"]["predicted"] == {"tau": chosen["tau"], "texts": told["texts"]}
    assert told["texts"]["source"] == "prompts.txt", "without its folder"
    assert told["texts"]["prompts_sha256"] == measured["settings"]["prompts_sha256"]
    assert told["texts"]["tokens"] == 12 * told["texts"]["texts"]


@pytest.mark.usefixtures("short_calibrations")
def test_compiled_steps_have_their_own_calibration(
    medusa: Any, own_place: Place, eight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`calibrate --compile` times compiled steps only; `auto` prefers its result, and says when there is none."""
    run_as_written(monkeypatch)
    compiled, steps = list[int](), region.Region.__call__

    def counted(self: region.Region) -> Any:
        compiled.append(1)
        return steps(self)

    monkeypatch.setattr(region.Region, "__call__", counted)
    of_timing, timed = list[int](), calibrate.time_steps

    def timing(*args: Any) -> list[float]:
        before = len(compiled)
        seconds = timed(*args)
        of_timing.append(len(compiled) - before)
        return [0.01 * (1 + (tree.num_nodes != wanted)) for tree, _ in zip(args[3], seconds, strict=True)]

    monkeypatch.setattr(calibrate, "time_steps", timing)
    models = own_place.models
    small = ("--prompts", eight, "--max-new-tokens", "12", "--rounds", "1", "--ignore-eos")
    generate = ("generate", *models, "--prompt", "abc", "--tree", "auto", "--max-new-tokens", "4")
    wanted = 1
    assert medusa("calibrate", *models, *small).status == 0
    assert of_timing == [0, 0], "eager steps were timed"
    done = medusa(*generate, "--compile")
    assert "no calibration with compiled steps" in done.err
    assert f"medusa calibrate {own_place.heads} --compile" in done.err
    assert "tree: 1 nodes" in done.err
    wanted = 4
    del compiled[:]
    assert medusa("calibrate", *models, *small, "--compile").status == 0
    assert of_timing[2] == len(compiled) - 1 > 0, "they were timed, and used for nothing else but a trial before"
    done = medusa(*generate, "--compile")
    assert "no calibration" not in done.err
    assert re.search(r"tree: (dynamic, )?4 nodes", done.err)
    assert "tree: 1 nodes" in medusa(*generate).err


@pytest.mark.usefixtures("short_calibrations")
@pytest.mark.parametrize("fastest", ["mix", pytest.param("ngram", marks=pytest.mark.full)])
def test_auto_drafts_with_ngrams_where_they_are_fastest(
    medusa: Any, own_place: Place, eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fastest: str
) -> None:
    """The choice is used unless the user names a drafter, or compiles steps."""
    run_as_written(monkeypatch)

    def timing(*args: Any) -> list[float]:
        wanted = Mix if fastest == "mix" else TextDrafterFactory
        return [1e-6 if isinstance(way, wanted) else 0.01 for way in args[3]]

    monkeypatch.setattr(calibrate, "time_steps", timing)
    out, short = tmp_path / "out.json", ("--max-new-tokens", "4", "--json", tmp_path / "out.json")
    many = ("--prompts", eight, "--max-new-tokens", "12", "--rounds", "1", "--ignore-eos")
    done = medusa("calibrate", *own_place.models, *many)
    assert done.status == 0, done.err
    assert f"chosen: --drafter {fastest}" in done.out
    auto = (*own_place.models, "--prompt", "abc", "--tree", "auto", *short)

    def drafter(*words: Any) -> str:
        done = medusa(*words)
        assert done.status == 0, done.err
        return str(json.loads(out.read_text(encoding="utf-8"))["settings"]["drafter"])

    assert drafter("generate", *auto).startswith(fastest)
    assert drafter("generate", *auto, "--drafter", "heads") == "heads"
    assert drafter("generate", *auto, "--compile") == "heads"
    assert drafter("benchmark", *auto, "--rounds", "1").startswith(fastest)
    assert json.loads(out.read_text(encoding="utf-8"))["methods"]["medusa"]["predicted"]["tau"] >= 1


@pytest.mark.usefixtures("short_calibrations")
def test_auto_calibrates_once_on_text_from_the_backbone(
    medusa: Any, own_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For heads without a saved tree, `auto` is the default; the run's prompts are not used."""
    seen: list[Any] = []
    real = calibrate.calibrate

    def spy(model: Any, heads: Any, texts: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(texts)
        return real(model, heads, texts, *args, **kwargs | {"rounds": 1})

    monkeypatch.setattr(calibrate, "calibrate", spy)
    for _ in range(2):
        done = medusa("generate", *own_place.asked, "--max-new-tokens", "4")
        assert done.status == 0, done.err
    assert len(seen) == 1, "the second run reads what the first one kept"
    prompts = [[LETTERS.index(letter) for letter in prompt] for prompt in PROMPTS]
    assert not any(text[0] == prompt for text in seen[0] for prompt in prompts)


@pytest.mark.usefixtures("short_calibrations")
def test_a_dynamic_tree_without_a_calibration_gets_temperatures_only(
    medusa: Any, own_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A calibration of a real model takes minutes, in which it times many other trees."""
    monkeypatch.setattr(calibrate, "calibrate", lambda *args, **kwargs: pytest.fail("calibrated"))
    out = tmp_path / "out.json"
    asked = (*own_place.models, "--prompt", "abc", "--tree", "dynamic:5", "--max-new-tokens", "4", "--json", out)
    done = medusa("generate", *asked)
    assert done.status == 0, done.err
    assert f"medusa calibrate {own_place.heads} keeps them" in done.err
    tree = json.loads(out.read_text(encoding="utf-8"))["settings"]["tree"]
    assert tree["dynamic"] == 5
    assert set(tree["temperatures"]) != {1.0}, "fitted"
    assert not (Path(own_place.heads) / "calibration.json").exists()


def test_a_calibration_from_few_steps_is_refused_and_not_kept(
    medusa: Any, own_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = (*own_place.models, "--prompts", own_place.prompts)
    monkeypatch.setattr("decode.bench.calibration.recording.plain_method", lambda *args: pytest.fail("generated"))
    done = medusa("calibrate", *models, "--max-new-tokens", "100")
    assert done.status == 2
    assert "3 prompts with --max-new-tokens 100 give at most 300; give more prompts" in done.err
    monkeypatch.undo()
    for place in ("stored.MIN_STEPS", "calibrate.MIN_STEPS"):
        monkeypatch.setattr(f"decode.bench.calibration.{place}", 60)  # the texts end too early
    done = medusa("calibrate", *models, "--max-new-tokens", "20", "--json", tmp_path / "c.json")
    assert done.status == 1, done.out
    assert done.err.splitlines()[-1].startswith("medusa calibrate: failed: a calibration needs at least 60 steps, and")
    assert not (tmp_path / "c.json").exists()
    assert not (Path(own_place.heads) / "calibration.json").exists()


def test_auto_uses_the_default_tree_if_the_texts_are_too_short(
    medusa: Any, own_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, few in (("OWN_TEXTS", 2), ("OPENING_TOKENS", 4), ("OWN_TOKENS", 12)):
        monkeypatch.setattr(f"decode.bench.calibration.recording.{name}", few)
    for tree, nodes in (("auto", "7 nodes"), ("dynamic:5", "5 nodes")):
        done = medusa("generate", *own_place.models, "--prompt", "abc", "--max-new-tokens", "8", "--tree", tree)
        assert done.status == 0, done.err
        assert f"tree: {nodes}, not calibrated, because the backbone's own texts are too short" in done.err
    assert not (Path(own_place.heads) / "calibration.json").exists()


@pytest.mark.parametrize(
    ("tokens", "tau", "nodes", "texts", "warns"),
    [
        (80, 1.1, 8, 1, True),
        (64, 1.1, 8, 1, False),
        (900, 1.2, 8, 1, False),
        (80, 1.0, 1, 1, False),
        (200, 1.0, 8, 100, False),  # the texts ended early
        (2000, 1.0, 8, 100, True),
    ],
)
def test_heads_that_do_not_fit_are_reported(
    capsys: pytest.CaptureFixture[str], tokens: int, tau: float, nodes: int, texts: int, warns: bool
) -> None:
    warn_if_useless(tokens, tau, nodes, texts)
    assert ("do not fit" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("backbone", "argv", "message"),
    [
        ("backbone", ("generate", "--prompt", "abc", "--record", "heads"), "holds files that are not features"),
        ("bare", ("generate", "--prompts", "ids.jsonl", "--stop", "x"), "--stop needs one"),
        ("bare", ("benchmark", "--prompts", "ids.jsonl", "--stop", "x"), "--stop needs one"),
        ("backbone", ("chat", "--system", "Be kind."), "--system needs a chat template"),
        ("bare", ("chat",), "a chat needs one"),
    ],
)
def test_bad_requests_are_refused_before_a_tree_is_calibrated(
    medusa: Any,
    own_place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backbone: str,
    argv: tuple[str, ...],
    message: str,
) -> None:
    """A calibration may take minutes."""
    monkeypatch.setattr(calibrate, "calibrate", lambda *args, **kwargs: pytest.fail("calibrated"))
    monkeypatch.chdir(tmp_path)
    write_rows(Path("ids.jsonl"), [{"input_ids": [1, 2, 3]}])
    done = medusa(*argv, "--backbone", getattr(own_place, backbone), "--heads", own_place.heads, "--tree", "auto")
    assert done.status == 2
    assert message in done.err


# --- verify ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def verify(medusa: Any, place: Place, tmp_path: Path) -> Callable[..., tuple[Outcome, str, Any]]:
    """`medusa verify`; gives its outcome, its report and its results. Most of the time goes into the report."""

    def run(*argv: str, reports: bool = True) -> tuple[Outcome, str, Any]:
        report, told = tmp_path / "report.html", tmp_path / "v.json"
        small = ("--draws", "500", "--sampled-prompts", "1", "--json", told)
        done = medusa("verify", *place.asked, *small, *(("--report", report) if reports else ()), *argv)
        content = json.loads(told.read_text(encoding="utf-8"), parse_constant=pytest.fail)
        return done, report.read_text(encoding="utf-8") if reports else "", content

    return run


@pytest.mark.usefixtures("no_pictures")
def test_verify_writes_the_documented_json_and_a_report(verify: Any, tmp_path: Path) -> None:
    done, page, content = verify("--batch-size", "2", "--sampled-prompts", "2")
    assert done.status == 0, done.err
    assert "passed" in done.out
    assert str(tmp_path / "report.html") in "".join(done.out.split())
    assert "\u2026" not in done.out, "a column was cut off"
    assert content.keys() == {"settings", "machine", "greedy", "sampling", "passed"}
    assert content["machine"]["torch"] == torch.__version__
    assert (content["settings"]["compile"], content["settings"]["quantization"]) == (False, None)
    assert content["passed"] is True
    assert (content["greedy"]["prompts"], content["greedy"]["equal"], content["greedy"]["divergences"]) == (3, 3, [])
    cases = content["sampling"]["cases"]
    assert content["sampling"]["draws"] == 500
    assert {case["prompt"] for case in cases} == {0, 1}
    judged = [case for case in cases if case["judged"]]
    rules = {("rejection", "topk"), ("rejection", "sample"), ("typical-sampled", "topk")}
    assert {(case["acceptance"], case["draft"]) for case in judged} == rules
    assert min(case["chi2_p_value"] for case in judged) > content["sampling"]["smallest_allowed_p_value"]
    assert page.count("<svg role=") == 2, "a picture for each prompt"
    assert "3 of 3 texts are equal" in page
    assert 'src="http' not in page
    assert "<script" not in page
    for case in cases:
        assert f"{case['total_variation']:.5f}" in page, "the page's figures are the JSON's"


@pytest.mark.usefixtures("no_pictures")
def test_verify_fails_where_the_samples_are_wrong(verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.accept.residual", lambda p, q: p)
    done, page, _ = verify("--draws", "10000", "--max-prompts", "1")
    assert done.status == 1
    assert "FAILED" in done.out
    assert "there is evidence against equality" in page


@pytest.mark.usefixtures("no_pictures")
def test_verify_reports_a_text_that_ends_early(verify: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = Job.drafted

    def cut(*args: Any, **kwargs: Any) -> Any:
        whole = drafted(*args, **kwargs)
        return lambda prompts: [Result(r.input_ids, r.new_ids[:3]) for r in whole(prompts)]

    monkeypatch.setattr(Job, "drafted", cut)
    monkeypatch.setenv("COLUMNS", "60")
    done, page, content = verify()
    assert done.status == 1
    complete_in_60_columns(done.out, "expected", "p-value", "verdict", path=tmp_path)
    assert "<td>the end</td>" in page
    assert [found["gap"] for found in content["greedy"]["divergences"]] == [None] * 3


@pytest.mark.full
def test_verify_in_full_tries_more_temperatures(verify: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done, _, content = verify("--full", "--draws", "50", "--max-prompts", "1", reports=False)
    assert done.status == 0, done.out
    complete_in_60_columns(done.out, "top-p", path=tmp_path)
    pairs = {(case["temperature"], case["top_p"]) for case in content["sampling"]["cases"]}
    assert pairs == {(t, p) for t in (0.5, 1.0, 1.5) for p in (1.0, 0.9)}


@pytest.mark.parametrize("draft", ["topk", "sample"])
def test_a_prompts_sample_depends_on_the_seed_and_not_on_the_batch(generate: Any, draft: str) -> None:
    sampling = ("--temperature", "1", "--top-k", "50", "--top-p", "0.99", "--seed", "5", "--draft", draft)
    sampling += ("--max-new-tokens", "6")
    alone = [result["new_ids"] for result in generate(*sampling, "--batch-size", "1")["results"]]
    assert [result["new_ids"] for result in generate(*sampling)["results"]] == alone
    assert [result["new_ids"] for result in generate(*sampling, "--seed", "6")["results"]] != alone


# --- benchmark -------------------------------------------------------------------------------------------------------


def benchmark(place: Place, *argv: Any) -> tuple[Any, ...]:
    return ("benchmark", *place.asked, "--rounds", "1", "--tree", "topk:2,2", *argv)


@pytest.fixture(scope="module")
def measured(place: Place, tmp_path_factory: pytest.TempPathFactory, no_pictures: None) -> Path:
    """A folder with the figures of a benchmark, its report, and what it printed."""
    folder = tmp_path_factory.mktemp("measured")
    words = benchmark(place, "--rounds", "2", "--report", folder / "report", "--json", folder / "a.json")
    with redirect_stdout(StringIO()) as printed:
        assert main([*map(str, words)]) == 0
    (folder / "out.txt").write_text(printed.getvalue())
    return folder


def test_a_benchmark_writes_the_documented_json_and_a_report(medusa: Any, place: Place, measured: Path) -> None:
    """The report may be a folder; a single page is tested with comparisons."""
    folder, file, printed = measured / "report", measured / "a.json", (measured / "out.txt").read_text()
    content = json.loads(file.read_text())
    assert content.keys() == {"machine", "settings", "methods", "headline"}
    assert content["headline"]["verdict"] == "not measured", "three prompts are too few"
    assert " ".join(content["headline"]["text"].split()) in " ".join(printed.split())
    assert content["methods"].keys() >= {"plain", "transformers", "medusa"}
    for name, figures in content["methods"].items():
        assert figures["equal_to_plain"] == 1.0
        assert figures["tokens_per_second"].keys() == {"median", "min", "max"}
        assert figures["new_tokens"] == sum(map(len, until_eos(place)))
        assert {"tau", "steps", "accepted_by_depth", "speedup", "speedup_vs_generate", "by_category"} <= figures.keys()
        assert figures["by_category"].keys() == {"x", "y"}
        if name != "transformers":  # whose steps nobody can look into
            assert figures["step_ms"].keys() == set(STAGES)
    assert content["methods"]["plain"]["speedup"] == 1.0
    assert content["methods"]["medusa"]["steps"] <= content["methods"]["plain"]["steps"]
    assert content["settings"]["rounds"] == 2
    assert "medusa" in printed
    assert "tokens/s" in printed
    assert {file.name for file in folder.iterdir()} >= {"report.html", "benchmark.json", "speedups.png", "tree.png"}
    assert "<svg role=" in (folder / "report.html").read_text()
    assert json.loads((folder / "benchmark.json").read_text()) == content
    figures = content["methods"]["medusa"]
    nodes = figures["accepted_by_node"]
    assert all(node["path"] in content["settings"]["tree"] for node in nodes)
    by_depth = [sum(node["share"] for node in nodes if len(node["path"]) == depth) for depth in (1, 2)]
    reached = [*figures["accepted_by_depth"], 0.0, 0.0][:2]
    assert all(abs(one - other) < 0.12 for one, other in zip(by_depth, reached, strict=True)), "but for last roots"
    again = medusa(*benchmark(place, "--report", folder))
    assert again.status == 2
    assert "--overwrite" in again.err
    compare = ("benchmark", "--compare", file, file, "--report", folder, "--overwrite")
    assert medusa(*compare, "--json", folder / "inside.json").status == 0
    assert {file.name for file in folder.iterdir()} == {"report.html", "benchmark.json", "changes.png", "inside.json"}


def test_a_benchmark_records_its_options(
    medusa: Any, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    file = tmp_path / "b.json"
    short = ("--max-prompts", "1", "--max-new-tokens", "6", "--json", file)
    done = medusa(*benchmark(place, "--temperatures", "1,0.5", "--lossy", "--against", "prompt-lookup", *short))
    assert done.status == 0, done.err
    content = json.loads(file.read_text())
    assert [row["temperature"] for row in content["temperatures"]] == [0.5, 1.0]
    rules = {row["acceptance"]: row for row in content["lossy"]}
    assert rules.keys() == {"plain", "rejection", "typical", "typical-sampled"}
    assert [name for name, row in rules.items() if not row["lossless"]] == ["typical", "typical-sampled"]
    assert rules["typical"]["log_likelihood"] > rules["plain"]["log_likelihood"], "it takes the most probable roots"
    lookup = content["methods"]["generate prompt-lookup"]
    assert (lookup["equal_to_plain"], lookup["steps"]) == (1.0, 0)
    complete_in_60_columns(done.out, "x generate", "same text", "typical (lossy)")
    settings = content["settings"]
    assert settings["command"].startswith(f"medusa benchmark --backbone {place.backbone} ")
    assert settings["prompts_sha256"]
    assert content["machine"]["memory"]["heads"] > 0


def test_figures_are_kept_if_the_report_fails(
    medusa: Any, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("decode.bench.report.page.benchmark_page", full)
    sampled = ("--batch-size", "2", "--temperature", "1", "--max-prompts", "2")
    done = medusa(*benchmark(place, *sampled, "--report", tmp_path / "report", "--json", tmp_path / "b.json"))
    assert done.status == 1
    assert "(sampled)" in done.out
    assert "medusa benchmark: failed: a disk is full, or takes no larger file ([Errno 28] No space" in done.err
    assert json.loads((tmp_path / "b.json").read_text())["methods"]["medusa"]["steps"] > 0


def test_benchmarks_are_compared(medusa: Any, place: Place, tmp_path: Path, measured: Path) -> None:
    first, second, both = measured / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    done = medusa(*benchmark(place, "--tree", "chain", "--compare", first, "--json", second))
    assert done.status == 0, done.err
    assert "ratio" in done.out
    assert "tree: 7 nodes -> 4 nodes" in done.out
    (comparison,) = json.loads(second.read_text())["comparisons"]
    assert comparison["same_machine"] is True
    assert {change["figure"] for change in comparison["changes"]} >= {"speedup", "speedup_vs_generate", "tau"}
    page = tmp_path / "compared.html"
    done = medusa("benchmark", "--compare", first, second, "--json", both, "--report", page)
    assert done.status == 0, done.err
    (again,) = json.loads(both.read_text())["comparisons"]
    assert again["changes"] == comparison["changes"]
    assert str(second) in page.read_text()


def test_incomparable_benchmarks_are_rejected_before_the_backbone_is_loaded(
    medusa: Any, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Path
) -> None:
    """Loading a large backbone, and choosing a tree for heads without one, may take minutes."""
    monkeypatch.setattr("medusa.loading.BackboneFiles.load", None)
    first = measured / "a.json"
    for argv, said in (
        (("benchmark", "--compare", first), "a comparison needs two"),
        (("benchmark", "--compare", first, tmp_path / "absent.json"), "absent.json"),
        (("benchmark", "--compare", first, place.prompts), "not JSON"),
        (benchmark(place, "--max-prompts", "2", "--tree", "auto", "--compare", first), "other prompts"),
        (("benchmark",), "--backbone is missing"),
    ):
        done = medusa(*argv)
        assert done.status == 2, argv
        assert said in done.err
        assert done.err.count("\n") == 1


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    """Checked in a new interpreter, as heavy imports would delay `--help` by seconds."""
    code = (
        "import sys, contextlib, medusa.__main__ as m\n"
        "for words in ('--help', '--version', 'generate --help', 'train --help'):\n"
        "    with contextlib.suppress(SystemExit): m.main(words.split())\n"
        "heavy = {'torch', 'transformers', 'datasets', 'rich', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# --- drafters other than heads ---------------------------------------------------------------------------------------


def test_generate_with_another_drafter(generate: Any, place: Place) -> None:
    """The text is the same without heads, and the output names the drafter."""
    content = generate("--drafter", "ngram:n=2,tokens=4", heads=False)
    assert [result["new_ids"] for result in content["results"]] == until_eos(place)
    told = {name: content["settings"][name] for name in ("heads", "drafter", "tree", "nodes")}
    assert told == {"heads": None, "drafter": "ngram:n=2,tokens=4", "tree": None, "nodes": 5}


@pytest.mark.usefixtures("no_pictures")
def test_verify_with_another_drafter(medusa: Any, place: Place, tmp_path: Path) -> None:
    report = tmp_path / "v.html"
    argv = ("--backbone", place.backbone, "--prompts", place.prompts, *GENERATION, "--drafter", "ngram:n=1")
    done = medusa("verify", *argv, "--draws", "500", "--sampled-prompts", "1", "--report", report)
    assert done.status == 0, done.out + done.err
    assert "with the drafter ngram:n=1 change" in report.read_text(encoding="utf-8")
    assert "sample" not in {line.split()[1] for line in done.out.splitlines() if line.startswith("rejection")}


@pytest.mark.usefixtures("no_pictures")
def test_benchmark_of_several_drafters(medusa: Any, place: Place, tmp_path: Path) -> None:
    """The first drafter is called `medusa`; the others keep their names."""
    path, report = tmp_path / "b.json", tmp_path / "b.html"
    drafters = ("--drafter", "ngram", "--drafter", "heads", "--drafter", "ngram:n=1,tokens=2")
    short = ("--rounds", "1", "--max-prompts", "1")
    done = medusa("benchmark", *place.asked, *drafters, *short, "--json", path, "--report", report)
    assert done.status == 0, done.err
    content = json.loads(path.read_text(encoding="utf-8"))
    assert list(content["methods"]) == ["plain", "transformers", "heads", "ngram:n=1,tokens=2", "medusa"]
    assert all(figures["equal_to_plain"] == 1 for figures in content["methods"].values())
    assert content["settings"]["drafter"] == "ngram"
    assert "ngram:n=1,tokens=2" in report.read_text(encoding="utf-8")


@pytest.fixture
def amateur(place: Place, tmp_path: Path) -> str:
    """A smaller model with the backbone's tokenizer."""
    tiny_model("llama", seed=7, num_hidden_layers=1).save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(place.backbone).save_pretrained(tmp_path / "small")
    return str(tmp_path / "small")


CONTRAST = ("--contrast-alpha", "0.05", "--contrast-beta", "2", "--amateur-temperature", "0.7")
CONTRASTED = {"alpha": 0.05, "beta": 2.0, "temperature": 0.7}


def test_contrastive_decoding(generate: Any, place: Place, amateur: str) -> None:
    """Texts with and without heads are equal."""
    asked = ("--amateur", amateur, *CONTRAST)
    plain_text = generate("--plain", *asked)
    assert plain_text["settings"]["amateur"] == {"model": amateur} | CONTRASTED
    texts = [result["new_ids"] for result in plain_text["results"]]
    assert texts != until_eos(place)
    with_heads = generate("--tree", "topk:4,2", "--batch-size", "3", *asked)
    assert [result["new_ids"] for result in with_heads["results"]] == texts


@pytest.mark.full
@pytest.mark.usefixtures("no_pictures")
def test_verify_and_benchmark_of_contrastive_decoding(medusa: Any, place: Place, tmp_path: Path, amateur: str) -> None:
    said = {"model": amateur} | CONTRASTED
    models = (*place.asked, "--amateur", amateur, *CONTRAST, "--max-prompts", "1", "--max-new-tokens", "6")
    report, path = tmp_path / "verify.html", tmp_path / "out.json"
    done = medusa("verify", *models, "--draws", "200", "--report", report, "--json", path)
    assert done.status == 0, done.err
    assert json.loads(path.read_text(encoding="utf-8"))["settings"]["amateur"] == said
    assert "All decoding is contrastive" in report.read_text(encoding="utf-8")
    done = medusa("benchmark", *models, "--rounds", "1", "--drafter", "ngram", "--drafter", "heads", "--json", path)
    assert done.status == 0, done.err
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["settings"]["amateur"] == said
    assert all(figures["equal_to_plain"] == 1 for figures in content["methods"].values())


def test_searches(generate: Any, medusa: Any, place: Place) -> None:
    """Best-first beam search writes what transformers' beam search writes; a beam of one is greedy."""
    for options in (("--num-beams", "3"), ("--num-beams", "3", "--length-penalty", "1", "--ignore-eos")):
        options = (*options, "--max-new-tokens", "8")
        beam = generate("--strategy", "beam", "--batch-size", "2", *options, heads=False)
        best = generate("--strategy", "best-first-beam", "--batch-size", "1", *options, heads=False)
        assert [r["new_ids"] for r in best["results"]] == [r["new_ids"] for r in beam["results"]]
        assert [r["finish_reason"] for r in best["results"]] == [r["finish_reason"] for r in beam["results"]]
        assert best["settings"]["num_beams"] == 3
        assert all(r["search"]["calls"] > 0 == r["search"]["dropped"] for r in best["results"])
    greedy = generate("--strategy", "best-first-beam", "--batch-size", "1", "--num-beams", "1", heads=False)
    assert [r["new_ids"] for r in greedy["results"]] == until_eos(place)
    models = ("--backbone", place.backbone, "--prompt", "abc", "--max-new-tokens", "2")
    assert "hypotheses scored" in medusa("generate", *models, "--strategy", "best-first-beam").err


# --- datastores ------------------------------------------------------------------------------------------------------


@pytest.fixture
def datastore(medusa: Any, place: Place, tmp_path: Path) -> Callable[..., tuple[Outcome, Path]]:
    """`medusa datastore build`, by default from text written by the backbone."""

    def run(*argv: Any, name: str = "store") -> tuple[Outcome, Path]:
        texts = zip(PROMPTS, place.texts, strict=True)
        rows = [{"input_ids": [*map(LETTERS.index, prompt), *text]} for prompt, text in texts]
        given = ("--data", write_rows(tmp_path / "own.jsonl", rows), *argv, "--output", tmp_path / name)
        return medusa("datastore", "build", "--backbone", place.backbone, *given), tmp_path / name

    return run


def test_a_datastore_of_text_from_the_backbone(datastore: Any, generate: Any, place: Place, tmp_path: Path) -> None:
    done, store = datastore("--json", tmp_path / "built.json")
    assert done.status == 0, done.err
    tokens = sum(len(prompt) + len(text) for prompt, text in zip(PROMPTS, place.texts, strict=True))
    assert f"store: 3 documents, {tokens} tokens" in done.err
    assert json.loads((tmp_path / "built.json").read_text(encoding="utf-8"))["tokens"] == tokens
    drafter = f"rest:{store},nodes=8,min_n=1"
    content = generate("--drafter", drafter, "--batch-size", "3", heads=False)
    assert [result["new_ids"] for result in content["results"]] == until_eos(place)
    assert content["settings"]["nodes"] == 8
    assert min(len(result["new_ids"]) / result["steps"] for result in content["results"]) > 1.5


def test_a_datastore_of_files(datastore: Any, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in the order of their names; files that are not UTF-8 are skipped and counted."""
    monkeypatch.setattr("medusa.commands.datastore.PIECE", 400)  # of which the first file is two
    sources = tmp_path / "sources"
    (sources / "b").mkdir(parents=True)
    long = ("abcdefg\n" * 100)[:-1]
    (sources / "b" / "one.py").write_text("defg", encoding="utf-8")
    (sources / "a.py").write_text(long, encoding="utf-8")
    (sources / "c.py").write_bytes(b"\xff\xfe")
    (sources / "d.md").write_text("zzz", encoding="utf-8")
    done, store = datastore("--data", sources, "--suffix", ".py")
    assert done.status == 0, done.err
    assert "1 of 3 files are not UTF-8" in done.err
    opened, end = Datastore(store), [place.eos, VOCAB]
    spelled = [max(LETTERS.find(letter), 0) for letter in long]  # a new line is an unknown word, and that is token 0
    assert opened.tokens.tolist() == [*spelled, *end, *map(LETTERS.index, "defg"), *end, *[VOCAB] * DEPTH]
    assert datastore("--data", sources, "--suffix", ".py", "--max-bytes", "5", name="less")[0].status == 0
    assert Datastore(tmp_path / "less").about["documents"] == 1


@pytest.mark.parametrize("command", ["benchmark", "evaluate"])
def test_copies_of_a_prompt_are_told(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text(3 * '{"prompt": "Once"}\n' + '{"prompt": "There was"}\n')
    words = {"benchmark": ["--prompts", "--tree", "chain:3", "--rounds", "1"], "evaluate": ["--data"]}[command]
    words = [command, "demo", words[0], str(tmp_path / "p.jsonl"), *words[1:], "--max-new-tokens", "8"]
    assert main([*words, "--threads", "1"]) == 0
    assert "warning: only 2 of 4 prompts differ" in capsys.readouterr().err
