"""Heads for a fine-tune: a LoRA folder as MODEL, and heads of its base model that continue on it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from medusa import MedusaHeads
from medusa.commands.fit import stages
from medusa.commands.fit.options import choose_heads
from medusa.commands.fit.plan import costs_of
from medusa.commands.fit.state import FitState
from medusa.errors import Interrupted, RequestError
from medusa.files import read_json
from medusa.fingerprint import fingerprint
from medusa.loading import Loaded, head_sizes
from tests.commands.place import Outcome, Place
from tests.commands.test_fit import OPENINGS, PROBE, options
from tests.helpers import LETTERS, random_heads, random_ids, tiny_model
from tests.train.recipes import run as train
from tests.train.recipes import same
from train.config import HeadsConfig
from train.heads import new_heads
from train.recipe import parse_recipe

FROZEN = {"learning_rate": 1e-60, "max_steps": 1, "logging_steps": 1}


@pytest.fixture(scope="session")
def lora(place: Place, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of an adapter for the backbone, with small random weights."""
    folder = tmp_path_factory.mktemp("lora")
    config = LoraConfig(r=16, lora_alpha=1, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(place.backbone), config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def base_heads(place: Place, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two `hydra` heads of the backbone, which is neither the default kind nor the default number."""
    folder = tmp_path_factory.mktemp("heads")
    model = AutoModelForCausalLM.from_pretrained(place.backbone)
    heads = random_heads(model, 2, kind="hydra")
    heads.config.backbone = fingerprint(model, place.backbone)
    heads.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def fit(lora: str, base_heads: str, tmp_path: Path, medusa: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Run a short `medusa fit` on the adapter, from the heads of its base model."""
    letters = random.Random(0)
    file = tmp_path / "questions.txt"
    file.write_text("\n".join("".join(letters.choices(LETTERS, k=6)) for _ in range(80)), encoding="utf-8")
    words = ["fit", lora, "--prompts", file, "--output", tmp_path / "out", "--start", base_heads, "--dtype", "float32"]
    words += ["--minutes", "0.004", "--max-new-tokens", "24", "--threads", "1"]
    return lambda *further: medusa(*words, *further)


@pytest.fixture
def recipe(lora: str, place: Place, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Recipes on the adapter, or on another backbone, with the heads and training arguments that are given."""
    rows = [{"input_ids": random_ids(16, seed=seed % 4)} for seed in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def content(output: str, heads: dict[str, Any], backbone: str = lora, **training: Any) -> dict[str, Any]:
        data = {"path": str(tmp_path / "data.jsonl"), "sequence_length": 16}
        made = {"backbone": backbone, "data": data, "output_dir": str(tmp_path / output), "device": "cpu"}
        return made | {"heads": heads, "training": training}

    return content


def test_continued_heads_begin_with_the_loss_of_the_heads_that_they_continue(
    recipe: Any, place: Place, tmp_path: Path
) -> None:
    base, start = tmp_path / "base", {"start": str(tmp_path / "base")}
    train(recipe("base", {"num": 2, "kind": "markov"}, place.backbone, max_steps=20))
    new = train(recipe("new", {"num": 2, "kind": "markov"}, **FROZEN))
    continued = train(recipe("continued", start, **FROZEN))
    assert same(base, tmp_path / "continued")
    assert continued.heads["head1_top1"] > 5 * new.heads["head1_top1"], "most of what was learnt holds"
    assert continued.loss < new.loss


def test_continued_heads_belong_to_the_fine_tune_and_record_their_start(
    recipe: Any, lora: str, base_heads: str, place: Place, tmp_path: Path, medusa: Callable[..., Outcome]
) -> None:
    train(recipe("continued", {"start": base_heads}, max_steps=1))
    provenance = read_json(tmp_path / "continued" / "provenance.json")
    assert provenance["started_from"]["heads"] == base_heads
    assert provenance["started_from"]["backbone"]["name"] == place.backbone
    weights = set(provenance["started_from"]["weights"])
    held = MedusaHeads.from_pretrained(base_heads).state_dict()
    assert weights <= {round(float(weight), 6) for tensor in held.values() for weight in tensor.flatten()}
    config = MedusaHeads.from_pretrained(tmp_path / "continued").config
    assert (config.base_model_name_or_path, config.backbone["name"]) == (lora, lora)
    for words, warns in (((tmp_path / "continued",), False), (("--backbone", lora, "--heads", base_heads), True)):
        done = medusa("generate", *words, "--prompt", "abc", "--tree", "chain", "--max-new-tokens", "4")
        assert done.status == 0
        assert ("but other weights" in done.err) == warns
    train(recipe("new", {"num": 1}, max_steps=1))
    assert read_json(tmp_path / "new" / "provenance.json")["started_from"] is None


@pytest.mark.full
@pytest.mark.usefixtures("short_fit")
def test_fit_continues_heads_on_an_adapter_and_an_interrupted_run_continues(
    fit: Callable[..., Outcome], lora: str, base_heads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = stages.install
    monkeypatch.setattr(stages, "install", lambda *places: (_ for _ in ()).throw(Interrupted(15)))
    interrupted = fit()
    assert interrupted.status == 143
    assert f"heads        hydra (--start continues {base_heads}, trained for " in interrupted.out
    monkeypatch.setattr(stages, "install", install)
    done = fit()
    assert done.status == 0, done.err
    assert done.out.count("finished before") == 3
    heads = MedusaHeads.from_pretrained(tmp_path / "out")
    assert (heads.config.kind, heads.config.num_heads) == ("hydra", 2)
    assert heads.config.base_model_name_or_path == lora
    assert read_json(tmp_path / "out" / "provenance.json")["started_from"]["heads"] == base_heads
    assert read_json(tmp_path / "out" / "benchmark.json")["methods"]["medusa"]["equal_to_plain"] == 1


@pytest.mark.usefixtures("no_loading")
def test_heads_that_cannot_continue_are_refused_before_the_model_is_loaded(
    refused: Callable[..., str], lora: str, base_heads: str, place: Place, tmp_path: Path
) -> None:
    random_heads(tiny_model("llama", hidden_size=16)).save_pretrained(tmp_path / "narrow")
    for words, told in (
        (("--start", base_heads, "--kind", "hydra"), "--start continues heads of one kind, .*; leave --kind out"),
        (("--start", base_heads, "--compare"), "leave --compare out"),
        (
            ("--start", tmp_path / "narrow"),
            "--start: .*narrow has hidden_size 16, not 32; choose other heads, or leave",
        ),
        (("--start", base_heads, "--for", "vllm"), "--start: .* has kind 'hydra', not 'eagle'; choose other heads"),
        (("--start", tmp_path / "absent"), "no heads at .*absent"),
    ):
        assert re.search(told, refused("fit", lora, "--prompts", OPENINGS, "--output", tmp_path / "out", *words))


def test_a_layer_for_servers_continues_only_where_the_model_has_the_layers_that_it_reads(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=6)
    served = {"kind": "eagle", "block": "gated", "feature_layers": "usual"}
    new_heads(model, HeadsConfig(**served), "tiny").save_pretrained(tmp_path)
    (choice,) = choose_heads(options(start=str(tmp_path), purpose="vllm"), head_sizes(model.config))
    assert choice.name == "eagle"
    new_heads(model, HeadsConfig(kind="dflash"), "tiny").save_pretrained(tmp_path / "block")
    (block,) = choose_heads(options(start=str(tmp_path / "block"), purpose="vllm"), head_sizes(model.config))
    assert block.name == "dflash"
    assert parse_recipe({"backbone": "b", "data": "d", "output_dir": "o", "heads": choice.heads}, "test")
    costs_of(choice, Loaded(model, None, "tiny"), PROBE)
    with pytest.raises(RequestError, match="layer"):
        costs_of(choice, Loaded(tiny_model("llama"), None, "shallow"), PROBE)


def test_a_run_does_not_delete_or_exchange_the_heads_that_it_continues(base_heads: str, tmp_path: Path) -> None:
    for start in ("out", "out/stages/markov"):
        (tmp_path / start).mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / "fit.json").write_text("{}")
        with pytest.raises(RequestError, match=r"--output .*out holds the heads of --start; choose another --output"):
            options(plan=False, start=str(tmp_path / start), out=str(tmp_path / "out"))
    request = options(start=base_heads).request("digest")
    FitState(tmp_path, request).finish("plan", {"a": 1})
    with pytest.raises(RequestError, match=r"holds a run with --start '.*', not None"):
        FitState(tmp_path, options().request("digest"))
