"""Training recipes and overrides: accepted values, and errors that name the wrong key."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from medusa.errors import RequestError
from train import recipe_file
from train.architecture import BackboneSizes, HeadShape, choose
from train.arguments import MedusaTrainingArguments, training_section
from train.config import HeadsConfig, TrainConfig
from train.recipe import load_recipe
from train.trainer_keys import KEYS, UNUSED

LEAST = {"backbone": "b", "data": "d.jsonl", "output_dir": "o"}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Write a YAML file (a mapping, or its text) and load it with overrides."""

    def run(content: Any, *overrides: str) -> TrainConfig:
        path = tmp_path / "recipe.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        return load_recipe(path, list(overrides))

    return run


def test_three_keys_are_enough(read: Any) -> None:
    config = read(LEAST)
    assert (config.backbone, config.data.path, config.output_dir) == ("b", "d.jsonl", "o")
    assert config.heads == HeadsConfig()
    assert config.training == {}


def test_every_key_can_be_overridden(read: Any) -> None:
    config = read(
        LEAST | {"heads": {"num": 4}},
        "backbone=other",
        "heads.num=2",
        "heads.block=square",
        "training.learning_rate=2.0e-4",
        "trust_remote_code=true",
    )
    assert (config.backbone, config.heads.num, config.heads.block) == ("other", 2, "square")
    assert config.training == {"learning_rate": 2e-4}
    assert config.trust_remote_code is True


def test_a_section_given_as_a_string_can_be_overridden_within(read: Any) -> None:
    config = read(LEAST, "data.sequence_length=32")
    assert (config.data.path, config.data.sequence_length) == ("d.jsonl", 32)


def test_a_string_for_a_section_sets_its_path_alone(read: Any) -> None:
    data = {"path": "d.jsonl", "sequence_length": 32, "exclude": "test.jsonl"}
    config = read(LEAST | {"data": data, "eval_data": dict(data)}, "data=own.jsonl", "eval_data=null")
    assert (config.data.path, config.data.sequence_length, config.data.exclude) == ("own.jsonl", 32, "test.jsonl")
    assert config.eval_data is None
    assert read(LEAST | {"data": data}, "data={path: own.jsonl}").data.sequence_length == 512


@pytest.mark.parametrize("twice", ["training: {seed: 5}\ntraining: {max_steps: 4}", "training:\n  seed: 5\n  seed: 5"])
def test_a_key_that_occurs_twice_is_refused(read: Any, twice: str) -> None:
    key = "training" if "max_steps" in twice else "seed"
    with pytest.raises(RequestError, match=rf"lines \d and \d both set {key}; leave one out"):
        read(yaml.safe_dump(LEAST) + twice)
    with pytest.raises(RequestError, match="is not YAML"):
        read(LEAST, "training={seed: 5, seed: 6}")
    merged = "base: &base {seed: 5}\ngroup:\n  m: &m\n    <<: *base\n    seed: 6\n"
    assert _merged(merged + "training: {<<: *base, seed: 6}") == {"seed": 6}, "a merge is no second key"
    assert _merged(merged + "training:\n  <<: *m\n") == {"seed": 6}


def _merged(text: str) -> Any:
    return recipe_file._read(text)["training"]


@pytest.mark.parametrize(
    "override", ["data.exclude_window=5", "data.shuffle_buffer=9", "features_dir=f", "features_dtype=float16"]
)
def test_keys_that_need_another_key_are_refused_without_it(read: Any, override: str) -> None:
    """They had no effect, and nothing said so."""
    key = override.partition("=")[0]
    with pytest.raises(RequestError, match=f"{key} is for .*; set that, too, or leave {key} out"):
        read(LEAST, override)


@pytest.mark.parametrize("override", ["heads={kind: markov, rank: null}", "heads={rank: null, window: null}"])
def test_null_keys_of_one_kind_of_heads_are_as_if_left_out(read: Any, override: str) -> None:
    heads = read(LEAST, override).heads
    assert (heads.own, heads.model_dump().keys()) == ({}, HeadsConfig().model_dump().keys())
    with pytest.raises(RequestError, match=r"unknown key heads\.rnk"):
        read(LEAST, "heads.rnk=null")


def test_an_empty_section_can_be_overridden_within(read: Any) -> None:
    empty = "backbone: b\ndata: d.jsonl\noutput_dir: o\nheads:\ntraining:\n"
    config = read(empty, "training.max_steps=7", "heads.num=2")
    assert (config.training, config.heads.num) == ({"max_steps": 7}, 2)


def test_a_value_may_hold_an_equals_sign(read: Any) -> None:
    assert read(LEAST, "data.path=a=b.jsonl").data.path == "a=b.jsonl"


@pytest.mark.parametrize("written", ["1e-3", "1.0e-3", "0.001"])
def test_a_learning_rate_is_a_number_in_every_notation(read: Any, written: str) -> None:
    in_file = read(f"backbone: b\ndata: d\noutput_dir: o\ntraining:\n  learning_rate: {written}\n")
    on_the_command_line = read(LEAST, f"training.learning_rate={written}")
    assert in_file.training["learning_rate"] == on_the_command_line.training["learning_rate"] == 1e-3


def test_no_is_read_as_a_strategy(read: Any) -> None:
    """YAML 1.1 reads `no` as false, and `save_strategy: no` is what people write."""
    assert read(LEAST, "training.save_strategy=no").training["save_strategy"] == "no"


def test_arguments_of_transformers_may_be_infinite(read: Any) -> None:
    assert read(LEAST, "training.max_grad_norm=.inf").training["max_grad_norm"] == math.inf
    with pytest.raises(RequestError, match=r"training\.hidden_noise is nan; it must be at least 0"):
        read(LEAST, "training.hidden_noise=.nan")
    for key in ("hidden_noise", "max_minutes", "learning_rate", "warmup_steps", "num_train_epochs"):
        with pytest.raises(RequestError, match=rf"training\.{key} is inf; it must be a finite number"):
            read(LEAST, f"training.{key}=.inf")
    for key, said in (
        ("learning_rate", "above 0"),
        ("max_grad_norm", "at least 0"),
        ("ddp_timeout", "a valid integer"),
    ):
        with pytest.raises(RequestError, match=rf"training\.{key} is nan; it must be {said}"):
            read(LEAST, f"training.{key}=nan")


def test_a_whole_number_may_be_written_with_an_exponent(read: Any) -> None:
    value = read(LEAST, "training.max_steps=1e3").training["max_steps"]
    assert (value, type(value)) == (1000, int)


@pytest.mark.parametrize(
    "override",
    [
        "heads.num=four",
        "heads.num=true",
        "heads.block=5",
        "heads=5",
        "data.sequence_length=long",
        "training=fast",
        "backbone=[1, 2]",
        "output_dir=2026-11-20",
        "trust_remote_code=perhaps",
        "training.learning_rate=fast",
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(read: Any, override: str) -> None:
    with pytest.raises(RequestError, match=override.partition("=")[0].rpartition(".")[2]):
        read(LEAST, override)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("heads.kind=oak", "medusa"),
        ("heads.block=round", "square, mlp"),
        ("heads.lm_head=rented", "own, shared"),
        ("heads.num=0", "at least 1"),
        ("heads.expansion=0", "expansion"),
        ("data.sequence_length=0", "sequence_length"),
        ("attention=flash", "choose one of sdpa, eager"),
        ("adapter.schedule=cosine", "choose one of constant, linear, sine"),
        ("adapter.heads_first=1.0", "at least 0 and below 1"),
        ("adapter.lambda_0=0", "above 0"),
        ("adapter.lambda_0=.nan", "a finite number"),
        ("adapter={teacher_tilt: 0.1, lm_loss: text}", "only lm_loss kl has a teacher"),
        ("adapter.modules=5", "a string .* or a valid list"),
        ("training.hidden_noise=-1", "at least 0"),
        (
            "heads.block=gated",
            "gated belongs to kind eagle or dflash, not medusa; choose one of square, mlp",
        ),
        ("heads.window=256", "heads.window belongs to kind eagle, not medusa; leave it out"),
        ("heads={kind: eagle, window: 0}", "at least 1"),
        ("heads={kind: dflash, edges: none, confidence: true}", "confidence needs heads.edges=markov, not none"),
        ("heads.vocabulary=5", "at least 32, or 0 for all tokens"),
        ("heads.feature_layers=usual", "heads.feature_layers belongs to kind eagle or dflash, not medusa"),
        ("heads={kind: eagle, block: gated, feature_layers: last}", r"or usual"),
    ],
)
def test_invalid_values_are_rejected_with_the_allowed_values(read: Any, override: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as refusal:
        read(LEAST, override)
    assert f"recipe.yaml: {override.partition('=')[0]}" in str(refusal.value) or override.startswith(("h", "adapter={"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cache_features=true", "a sharded backbone cannot write features; leave shard_backbone or cache_features out"),
        ("eval_data={path: e, streaming: true}", "an evaluation reads all of eval_data; leave eval_data.streaming out"),
    ],
)
def test_keys_that_exclude_each_other_are_refused(read: Any, override: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read(LEAST, "shard_backbone=true", override)


@pytest.mark.parametrize("name", list(LEAST))
def test_a_missing_key_is_named(read: Any, name: str) -> None:
    with pytest.raises(RequestError, match=name):
        read({key: value for key, value in LEAST.items() if key != name})


@pytest.mark.parametrize("override", ["heads.num", "=5", "backbone.name=5", "heads.num=[1"])
def test_invalid_overrides_are_rejected(read: Any, override: str) -> None:
    with pytest.raises(RequestError):
        read(LEAST, override)


@pytest.mark.parametrize("text", ["", "just words", "- a\n- list", "a: [1", "a: b: c"])
def test_a_file_without_a_mapping_is_rejected_with_its_name(read: Any, text: str) -> None:
    with pytest.raises(RequestError, match=r"recipe\.yaml"):
        read(text)


def test_given_head_settings_are_kept_and_the_rest_is_chosen() -> None:
    sizes = BackboneSizes(hidden_size=64, vocab_size=1000, parameters=10**6)
    assert choose(sizes, HeadsConfig()).block == "mlp"
    asked = choose(sizes, HeadsConfig(block="square", layers=3, lm_head="own"))
    assert asked == HeadShape("square", 3, 1.0, "own")
    asked = choose(sizes, HeadsConfig(block="mlp", layers=3, expansion=2.0, lm_head="shared"))
    assert asked == HeadShape("mlp", 3, 2.0, "shared")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learning_rate=0", "it must be above 0"),
        ("per_device_train_batch_size=0", "it must be at least 1"),
        ("max_steps=0", "it must be at least 1"),
        ("max_minutes=0", "it must be above 0"),
        ("save_minutes=-1", "it must be at least 0"),
        ("warmup_steps=-1", "it must be at least 0"),
        ("save_total_limit=0", "it must be at least 1"),
        ("seed=-1", "it must be at least 0 and at most 4294967295"),
        ("adam_beta1=1", "it must be at least 0 and below 1"),
        ("dataloader_multiprocessing_context=thread", "choose one of fork, spawn, forkserver"),
        ("lr_scheduler_type=cosin", "did you mean cosine?"),
        ("save_strategy=sometimes", "choose one of no, steps, epoch, best"),
        ("objective=foo", "choose one of text, argmax, distill, tv, lk, lk-hybrid, mass"),
        ("objective=lk_hybrid", "did you mean lk-hybrid?"),
    ],
)
def test_values_outside_the_limits_of_training_keys_are_refused(read: Any, override: str, said: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read(LEAST, f"training.{override}")
    assert f"training.{override.partition('=')[0]} is " in str(refusal.value)
    assert said in str(refusal.value)


def test_no_limit_of_steps_is_written_as_in_transformers(read: Any) -> None:
    assert read(LEAST, "training.max_steps=5", "training.max_steps=-1").training == {}


def test_the_limits_also_hold_in_python(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"training\.weight_decay is -1; it must be at least 0"):
        MedusaTrainingArguments(str(tmp_path), weight_decay=-1)
    assert MedusaTrainingArguments(str(tmp_path), save_strategy="no", max_steps=-1).save_strategy == "no"


@pytest.mark.parametrize(("name", "reason"), list(UNUSED.items()))
def test_keys_without_effect_are_refused_with_the_reason(read: Any, name: str, reason: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read(LEAST, f"training.{name}=true")
    assert f"recipe.yaml: training.{name} is not supported; {reason}" in str(refusal.value)


def test_every_field_of_transformers_is_described_or_refused() -> None:
    own = set(vars(MedusaTrainingArguments)["__annotations__"]) - set(KEYS)
    names = {field.name for field in fields(MedusaTrainingArguments)}
    assert set(KEYS) | set(UNUSED) | own >= names
    assert not set(KEYS) & set(UNUSED)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("bakbone=b", "unknown key bakbone; did you mean backbone?"),
        ("heads.number=5", "unknown key heads.number; did you mean heads.num?"),
        ("data.seqence_length=5", "unknown key data.seqence_length; did you mean data.sequence_length?"),
        ("objective=text", "unknown key objective; did you mean training.objective?"),
        ("learning_rat=1", "unknown key learning_rat; did you mean training.learning_rate?"),
        ("num=3", "unknown key num; did you mean heads.num?"),
        ("dropout=0.1", "unknown key dropout; did you mean adapter.dropout or training.dropout?"),
        ("training.kind=eagle", "unknown key training.kind; did you mean heads.kind?"),
        ("training.lerning_rate=1", "unknown key training.lerning_rate; did you mean training.learning_rate?"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one_and_its_path(read: Any, override: str, said: str) -> None:
    with pytest.raises(RequestError, match=r"recipe\.yaml: ") as refusal:
        read(LEAST, override)
    assert str(refusal.value).endswith(said)


def test_the_list_of_keys_is_complete(read: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        read(LEAST, "training.xyzzy=1")
    listed = str(refusal.value).partition("known: ")[2].split(", ")
    assert listed == list(training_section().model_fields)
    assert "save_minutes" in listed
    assert "push_to_hub" not in listed
