"""Whole runs and their data and disk: streams, counts, and a disk that fills up."""

from __future__ import annotations

import errno
import json
import multiprocessing
import resource
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny_models
from chat_families import byte_tokenizer
from medusa.__main__ import main
from medusa.errors import RequestError, RunError
from medusa.files import locked
from medusa.fingerprint import fingerprint
from medusa.heads.independent import MedusaHeads
from tests.gguf_files import write_gguf
from tests.helpers import random_ids, tiny_model
from tests.train.recipes import assert_close, recipes, same
from tests.train.recipes import run as run_recipe
from tests.train.templates import CHATML
from train.build import has_other_writer
from train.checkpoints import whole_checkpoints
from train.recipe import parse_recipe
from train.run import plan_features, train

WEIGHTS = "medusa_lm_head.safetensors"
LAYERS = {"kind": "eagle", "block": "gated", "feature_layers": "usual"}


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """A recipe on disk: two heads, rows of 16 tokens, a checkpoint at each second step."""
    rows = [{"input_ids": random_ids(9 + n % 5, seed=n)} for n in range(12)] + [{"input_ids": [1]}]
    content = recipes(tmp_path, rows, 16, max_steps=4, save_steps=2, per_device_train_batch_size=2, use_cpu=True)

    def write(output: str = "out", data_with: dict[str, Any] | None = None, **training: Any) -> Path:
        given, path = content(output, **training), tmp_path / f"{output}.json"
        given["data"] |= data_with or {}
        path.write_text(json.dumps(given), encoding="utf-8")
        return path

    return write


def run(path: Path, **kwargs: Any) -> dict[str, Any]:
    return run_recipe(json.loads(path.read_text(encoding="utf-8")), **kwargs).to_dict()


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.build.load_backbone", lambda *args, **kwargs: pytest.fail("a backbone was loaded"))


# --- the folder of a run ---------------------------------------------------------------------------------------------


def test_two_runs_do_not_write_into_one_folder(recipe: Any, tmp_path: Path) -> None:
    path = recipe()
    with locked(tmp_path / "out"), pytest.raises(RequestError, match=r"another process is writing .*out; wait"):
        run(path)
    assert not [*(tmp_path / "out").iterdir()]
    assert run(path)["steps"] == 4


def test_features_have_a_folder_of_their_own(recipe: Any, tmp_path: Path) -> None:
    content = json.loads(recipe().read_text(encoding="utf-8")) | {"cache_features": True}
    with pytest.raises(RequestError, match="features_dir is output_dir"):
        run_recipe(content | {"features_dir": str(tmp_path / "sub" / ".." / "out")})


def test_text_of_other_weights_gives_a_warning(recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings that `medusa distill` keeps beside its texts name some of the model's weights."""
    content = json.loads(recipe(max_steps=1).read_text(encoding="utf-8"))
    own = fingerprint(AutoModelForCausalLM.from_pretrained(content["backbone"]))["weights"]
    for weights, warned in ((own, False), ([value + 0.1 for value in own], True), (None, False)):
        noted = {} if weights is None else {"weights": weights}
        (tmp_path / "data.settings.json").write_text(json.dumps(noted), encoding="utf-8")
        train(parse_recipe(content, "test"), overwrite=True)
        assert ("data.jsonl was written by other weights" in capsys.readouterr().err) == warned
    noted = {"weights": [value * 1.001 for value in own], "quantization": "int8"}  # whose weights differ by themselves
    (tmp_path / "data.settings.json").write_text(json.dumps(noted), encoding="utf-8")
    assert not has_other_writer(content["data"]["path"], AutoModelForCausalLM.from_pretrained(content["backbone"]))
    assert not has_other_writer(".", AutoModelForCausalLM.from_pretrained(content["backbone"])), "a folder has no note"


# --- streams and counts ----------------------------------------------------------------------------------------------


def test_a_resumed_stream_continues_in_the_same_row(recipe: Any, tmp_path: Path) -> None:
    """This includes later epochs: ten steps of two rows read the nine rows more than twice."""
    stream = {"streaming": True, "shuffle_buffer": 4}
    run(recipe("whole", stream, max_steps=10, save_steps=5, save_total_limit=None))
    shutil.copytree(tmp_path / "whole" / "checkpoint-5", tmp_path / "resumed" / "checkpoint-5")
    resumed = run(recipe("resumed", stream, max_steps=10, save_steps=5), resume=True)
    assert resumed["steps"] == 10
    assert same(tmp_path / "whole", tmp_path / "resumed")
    run(recipe("otherwise", stream | {"shuffle_buffer": 1}, max_steps=10, save_steps=5))
    assert not same(tmp_path / "whole", tmp_path / "otherwise"), "or the order of the rows would not matter at all"


def test_an_unshuffled_stream_trains_like_unshuffled_packed_rows(recipe: Any, tmp_path: Path) -> None:
    run(recipe("streamed", {"streaming": True, "shuffle_buffer": 1}, max_steps=3))
    run(recipe("packed", max_steps=3, train_sampling_strategy="sequential"))
    assert same(tmp_path / "streamed", tmp_path / "packed")


@pytest.mark.parametrize("streaming", [False, True])
def test_counts_are_printed_and_go_into_the_provenance(
    recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], streaming: bool
) -> None:
    assert main(["train", str(recipe(data_with={"streaming": streaming}))]) == 0
    told = capsys.readouterr().err
    assert "12 documents" in told
    assert "dropped: 1 with nothing to teach (first: " in told
    data = json.loads((tmp_path / "out" / "provenance.json").read_text(encoding="utf-8"))["data"]
    assert (data["documents"], data["rows"], data["dropped"]) == (12, 9, {"with nothing to teach": 1})
    assert data["first"] == {"with nothing to teach": f"{tmp_path / 'data.jsonl'}:13"}


def test_heads_of_a_projecting_backbone_continue_and_decode(recipe: Any, tmp_path: Path) -> None:
    """OPT projects its hidden states, so its LM head reads fewer numbers than the config's hidden_size."""
    opt, prompts = tmp_path / "opt", tmp_path / "p.jsonl"
    tiny_model("opt").save_pretrained(opt)
    prompts.write_text(json.dumps({"input_ids": random_ids(5)}) + "\n")
    for output, start in (("first", None), ("second", "first")):
        content = json.loads(recipe(output, max_steps=1).read_text())
        content |= {"backbone": str(opt), "heads": {"num": 2, "start": start and str(tmp_path / start)}}
        run_recipe(content)
    words = ["--backbone", str(opt), "--heads", str(tmp_path / "second"), "--prompts", str(prompts), "--tree", "chain"]
    assert main(["generate", *words, "--max-new-tokens", "3", "--quiet"]) == 0


@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("gguf", marks=pytest.mark.full)])
def test_heads_of_a_model_with_an_encoder_or_from_a_gguf_file(recipe: Any, tmp_path: Path, kind: str) -> None:
    """Heads learn the same from the model and from stored features; the next command finds the model that they record.

    An adapter changes the text decoder only, and is merged into a model of the same kind. Features do not depend on the
    file that a model came from."""
    prompts, place = tmp_path / "p.jsonl", tmp_path / "model"
    prompts.write_text(json.dumps({"input_ids": random_ids(5)}) + "\n")
    if kind == "gguf":
        pytest.importorskip("gguf", reason="needs the gguf package, of the dev extra")
        place = place.with_suffix(".gguf")
        write_gguf(place, tiny_models.tiny_model("qwen2"))
    else:
        tiny_model(kind).save_pretrained(place)
    runs = {"live": {}, "stored": {"cache_features": True}, "both": {"adapter": {"merge": True, "modules": ["v_proj"]}}}
    if kind == "gguf":
        del runs["stored"]
    for output, more in runs.items():
        content = json.loads(recipe(output, max_steps=2).read_text()) | {"backbone": str(place)} | more
        run_recipe(content)
    # Two steps move weights by 6e-3. Features come from batches of other sizes, which some CPUs round otherwise.
    if "stored" in runs:
        assert_close(tmp_path / "live", tmp_path / "stored", 1e-5)
    changed = load_file(tmp_path / "both" / "adapter" / "adapter_model.safetensors")
    assert changed
    assert not any("visual" in name for name in changed)
    for heads in ("live", "both/merged/heads"):
        words = [str(tmp_path / heads), "--prompts", str(prompts), "--tree", "chain", "--max-new-tokens", "3"]
        assert main(["generate", *words, "--quiet"]) == 0


def test_a_stream_may_end_with_the_time(recipe: Any) -> None:
    assert run(recipe(data_with={"streaming": True}, max_steps=-1, max_minutes=0.001))["steps"] > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"data": {"path": "data.jsonl", "streaming": True}, "training": {}},
            "give training.max_steps or",
        ),
        ({"training": {"early_stopping_patience": 3}}, "needs evaluations; add eval_data to the recipe"),
        ({"adapter": {"quality_data": "absent.jsonl"}}, r"absent\.jsonl"),
        ({"adapter": {}, "heads": {"vocabulary": 32}}, "teacher_tilt needs heads that guess among all tokens"),
        ({"adapter": {"lm_head": True}, "heads": {"lm_head": "shared"}}, "needs one LM head per head"),
        ({"adapter": {}, "heads": LAYERS}, "adapter cannot be trained with heads that read several layers"),
        ({"adapter": {}, "heads": {"kind": "dflash"}}, "layers; leave kind dflash out, or adapter"),
        ({"heads": {"start": "absent/heads"}}, "absent/heads"),
        ({"training": {"report_to": "wandb"}}, r"training\.report_to is 'wandb', which is not installed; install it"),
        ({"training": {"report_to": "wanb"}}, r"training\.report_to is 'wanb'; choose one of .*did you mean wandb"),
        ({"training": {"lr_scheduler_type": "cosine_with_min_lr"}}, r"training\.lr_scheduler_type .*min_lr"),
        ({"training": {"optim": "lomo"}}, r"training\.optim is 'lomo': "),
        ({"training": {"dataloader_persistent_workers": True}}, r"training\.dataloader_num_workers is 0: .*persistent"),
        ({"training": {"accelerator_config": "no.json"}}, r"training: .*no\.json"),
        (
            {"eval_data": "data.jsonl", "training": {"metric_for_best_model": "accuracy"}},
            r"training\.metric_for_best_model is 'accuracy'; choose one of eval_loss, eval_tau, eval_head1_loss",
        ),
        (
            {"adapter": {"modules": ["q_prj"]}},
            r"adapter\.modules is 'q_prj', .*choose one of all-linear, .*did you mean q_proj",
        ),
        ({"heads": {"start": "demo"}}, r"heads\.start: demo has hidden_size \d+, not \d+"),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_requests_are_refused_before_weights_are_loaded(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    content = json.loads(recipe().read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=said):
        run_recipe(content | changes)


@pytest.mark.usefixtures("no_weights")
def test_a_stream_is_not_planned(recipe: Any) -> None:
    content = json.loads(recipe(data_with={"streaming": True}).read_text(encoding="utf-8"))
    with pytest.raises(RequestError, match="holds features or is a stream; there is nothing to plan"):
        plan_features(parse_recipe(content, "test"))


# --- a look at the data ----------------------------------------------------------------------------------------------


CONVERSATION = {"messages": [{"role": "user", "content": "hi [bold]"}, {"role": "assistant", "content": "hello\nyou"}]}


@pytest.fixture
def talking(tmp_path: Path) -> dict[str, Any]:
    """A recipe for a backbone whose tokenizer has a chat template, and a conversation."""
    tiny_model("llama").save_pretrained(tmp_path / "talking")
    config = json.loads((tmp_path / "talking" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "talking" / "config.json").write_text(json.dumps(config | {"vocab_size": 300}), encoding="utf-8")
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "talking")
    rows = [CONVERSATION, {"messages": CONVERSATION["messages"][:1]}, {"text": "x"}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"backbone": str(tmp_path / "talking"), "data": str(tmp_path / "c.jsonl")}


@pytest.mark.usefixtures("no_weights")
def test_inspect_shows_taught_tokens_without_training(
    recipe: Any, talking: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [f"{key}={value}" for key, value in talking.items()]
    argv = ["train", str(recipe()), *changes, "--inspect", "1", "--ids", "--json", str(tmp_path / "i.json")]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "<|im_start|>user\nhi [bold]<|im_end|>\n<|im_start|>assistant\n⟦hello\nyou<|im_end|>⟧\n" in out
    assert f"1  {tmp_path / 'c.jsonl'}:1  " in out
    assert "taught 'h'" in out
    assert f"dropped: 1 without an assistant turn (first: {tmp_path / 'c.jsonl'}:2)" in out
    told = json.loads((tmp_path / "i.json").read_text(encoding="utf-8"))
    assert len(told["examples"]) == 1
    assert told["counts"]["documents"] == 2, "counted are all, shown is one"
    assert sum(told["examples"][0]["taught"]) == len("hello\nyou") + 1
    assert not (tmp_path / "out").exists()


def test_taught_tokens_are_coloured_on_a_terminal(talking: dict[str, Any]) -> None:
    from rich.console import Console

    from train.data.preview import preview, show

    found = preview(parse_recipe(talking | {"output_dir": "none"}, "test"), 1)
    console = Console(force_terminal=True, color_system="standard", record=True, width=200)
    with console.capture() as captured:
        show(found, console)
    assert "assistant\n\x1b[1;32mhello\x1b[0m\n\x1b[1;32myou<|im_end|>\x1b[0m\n" in captured.get()
    assert "⟦" not in captured.get()


@pytest.mark.usefixtures("no_weights")
def test_inspect_reads_only_the_shown_part_of_a_stream(
    recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(data_with={"streaming": True})
    (tmp_path / "data.jsonl").write_text('{"input_ids": [1, 2, 3, 4]}\n{"input_ids": [5, 6, 7]}\n{broken\n')
    assert main(["train", str(path), "--inspect", "2"]) == 0
    out = capsys.readouterr().out
    assert "⟦1 2 3 4 ⟧" in out, "a backbone without tokenizer shows ids"
    assert "the first 2 examples of a stream: 2 documents" in out


# --- the disk --------------------------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def test_a_disk_that_is_too_small_is_rejected_before_training(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def usage(path: Path) -> Usage:
        asked.append(path)
        return Usage(10**6, 0, 10**4)

    monkeypatch.setattr("shutil.disk_usage", usage)
    monkeypatch.setattr("train.build.MedusaTrainer", lambda *args, **kwargs: pytest.fail("training began"))
    path = recipe()
    with pytest.raises(RequestError, match=r"heads of .* MB and 4 checkpoints of .* MB, but .* 10 kB left; .*limit"):
        run(path)
    assert asked[0].parent.is_dir(), "the folder itself is removed again"
    with pytest.raises(RequestError, match="and 3 checkpoints"):
        run(recipe(save_total_limit=1))
    with pytest.raises(RequestError, match=r"and 2 checkpoints .*training\.save_minutes=0"):
        run(recipe(save_strategy="no"))
    with pytest.raises(RequestError, match="and 0 checkpoints"):
        run(recipe(save_strategy="no", save_minutes=0))
    with pytest.raises(RequestError, match=r"and 2 checkpoints .*training\.save_only_model"):
        run(recipe(save_total_limit=1, save_minutes=0))


def test_the_estimated_size_equals_the_size_of_a_run(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate counts all saved tensors, without the small files."""
    needed: list[int] = []
    monkeypatch.setattr("train.checkpoints.free_bytes", lambda path: 10**12)
    monkeypatch.setattr("train.checkpoints.readable", lambda size: str(size))
    run(recipe(save_total_limit=2))
    monkeypatch.setattr("train.checkpoints.free_bytes", lambda path: -(10**12))
    with pytest.raises(RequestError) as refusal:
        run(recipe("other"))
    needed = [int(word) for word in str(refusal.value).replace(",", " ").split() if word.isdigit()]
    heads, _, checkpoint = needed[:3]
    out = tmp_path / "out"
    assert heads <= (out / WEIGHTS).stat().st_size < heads + 4000
    whole = sum((out / "checkpoint-4" / name).stat().st_size for name in (WEIGHTS, "optimizer.pt"))
    assert checkpoint <= whole < checkpoint + 16000


def test_a_full_disk_ends_in_one_line_and_loses_no_checkpoint(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(recipe("whole"))
    capsys.readouterr()  # transformers' progress bars
    save = torch.save

    def full(content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith("checkpoint-4/optimizer.pt"):
            raise OSError(errno.ENOSPC, "No space left on device", "somewhere")
        save(content, path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        assert main(["train", str(recipe()), "--quiet"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("medusa train: failed: the disk of ")
    assert "checkpoint-2 is whole: make room and continue from it with --resume" in told
    assert told.count("\n") == 1
    assert [found.name for found in whole_checkpoints(tmp_path / "out")] == ["checkpoint-2"]
    assert main(["train", str(recipe()), "--quiet", "--resume"]) == 0
    assert same(tmp_path / "whole", tmp_path / "out"), "as if nothing had happened"


def with_little_room(path: Path, limit: int, status: Any) -> None:
    import io
    import sys

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.stderr = io.StringIO()
    status["code"] = main(["train", str(path), "--quiet"])
    status["told"] = sys.stderr.getvalue()


@pytest.mark.parametrize("limit", [3_000, 1_500_000])
def test_failed_writes_end_in_one_line(recipe: Any, tmp_path: Path, limit: int) -> None:
    """The operating system itself limits the file size, for safetensors (first limit) or torch (second)."""
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        status = manager.dict()
        process = context.Process(target=with_little_room, args=(recipe(), limit, status))
        process.start()
        process.join(60)
        assert status["code"] == 1
        assert status["told"].startswith("medusa train: failed: the disk of ")
        assert "nothing was saved yet" in status["told"]
        assert status["told"].count("\n") == 1
    assert not whole_checkpoints(tmp_path / "out")
    assert not (tmp_path / "out" / WEIGHTS).exists()
    assert not list((tmp_path / "out").glob("**/.*")), "no temporary file is left behind"


def test_other_errors_are_not_reported_as_a_full_disk(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(MedusaHeads, "save_pretrained", broken)
    with pytest.raises(OSError, match="Input/output error") as error:
        run(recipe())
    assert not isinstance(error.value, RunError)
