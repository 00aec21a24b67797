"""Features on disk train the same heads as online training. They can be resumed and planned, and are checked."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.fingerprint import fingerprint
from medusa.heads.independent import MedusaHeads
from tests.helpers import HIDDEN, at_once, random_ids, tiny_model
from tests.train.recipes import recipes, run
from train.data.datasets import PackedDataset
from train.data.packing import Example
from train.features.cache import FeatureCache, FeaturePlan
from train.features.files import MANIFEST, Features, is_features, shards, write_shard
from train.features.recorder import Recorder
from train.recipe import parse_recipe
from train.run import plan_features
from train.states import PROBE

LENGTH, ROWS = 20, 10
ROW_BYTES = LENGTH * (4 * HIDDEN + 4 + 4 + 1)


@pytest.fixture
def model() -> Any:
    return tiny_model("llama").requires_grad_(False)


@pytest.fixture
def rows() -> PackedDataset:
    """Ten rows of twenty tokens: documents of 13 tokens, the last row padded."""
    texts = [random_ids(13, seed=seed) for seed in range(15)]
    return PackedDataset([Example(ids, [p > 2 for p in range(13)]) for ids in texts], LENGTH)


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A run of `medusa train` on a tiny backbone; keywords override the recipe."""
    rows = [{"input_ids": random_ids(40, seed=seed)} for seed in range(8)]
    content = recipes(tmp_path, rows, 40, num_train_epochs=3, logging_steps=1, save_strategy="no", seed=1)

    def run_with(
        output: str = "out", with_: Any = None, training: Any = None, plan: bool = False, **overrides: Any
    ) -> dict[str, Any]:
        given = content(output, **training or {}) | overrides
        if plan:
            return plan_features(parse_recipe(given, "test"), quiet=True).to_dict()
        return run(given, **with_ or {}).to_dict()

    return run_with


def cache_of(folder: Path, rows: PackedDataset, model: Any, **kwargs: Any) -> FeatureCache:
    return FeatureCache(folder, rows, Backbone(model), fingerprint(model), **kwargs)


def written(folder: Path, rows: PackedDataset, model: Any, **kwargs: Any) -> FeatureCache:
    cache = cache_of(folder, rows, model, **kwargs)
    cache.require_belonging()
    assert sum(cache.write(4)) == len(rows)
    return cache


# --- what is stored ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_per_shard", [3, 100])
def test_rows_are_read_with_the_backbones_hidden_states(
    rows: PackedDataset, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_shard: int
) -> None:
    monkeypatch.setattr("train.features.files.SHARD_BYTES", rows_per_shard * ROW_BYTES)
    features = written(tmp_path, rows, model).read()
    assert len(shards(tmp_path)) == -(-ROWS // rows_per_shard)
    assert len(features) == len(rows) == ROWS
    backbone = Backbone(model)
    for index in range(ROWS):
        row, stored = rows[index], features[index]
        hidden = stored.pop("hidden")
        assert stored.keys() == row.keys()
        assert all(torch.equal(stored[name], row[name]) and stored[name].dtype == row[name].dtype for name in row)
        online = backbone.hidden_states(
            row["input_ids"][None], position_ids=row["position_ids"][None], use_cache=False
        )[0]
        # The same forward in a batch of another size: float32 sums of some hundred terms of order 1 in another order.
        torch.testing.assert_close(hidden, online, atol=1e-5, rtol=1e-5)
    with pytest.raises(IndexError):
        features[ROWS]
    assert features.counts == rows.counts


def test_shorter_dtypes_halve_the_disk(rows: PackedDataset, model: Any, tmp_path: Path) -> None:
    exact = written(tmp_path / "exact", rows, model).read()
    for dtype, error in (("float16", 2**-11), ("bfloat16", 2**-8)):  # half a unit in the last place
        cache = written(tmp_path / dtype, rows, model, dtype=dtype)
        assert cache.row_bytes == LENGTH * (2 * HIDDEN + 9)
        hidden = cache.read()[0]["hidden"]
        assert str(hidden.dtype) == f"torch.{dtype}"
        torch.testing.assert_close(hidden.float(), exact[0]["hidden"], rtol=error, atol=1e-6)


def test_states_that_a_dtype_cannot_hold_are_refused(rows: PackedDataset, tmp_path: Path) -> None:
    large = tiny_model("llama")
    with torch.no_grad():
        large.model.norm.weight[0] = 1e6
    with pytest.raises(RequestError, match=r"features_dtype float16 cannot hold this backbone's states"):
        written(tmp_path, rows, large, dtype="float16")
    assert not list(tmp_path.glob("*.safetensors"))


def test_features_are_passed_to_worker_processes(rows: PackedDataset, model: Any, tmp_path: Path) -> None:
    features = written(tmp_path, rows, model).read()
    first = features[0]["hidden"]
    assert torch.equal(pickle.loads(pickle.dumps(features))[0]["hidden"], first)


def test_a_recorded_folder_is_read_in_rows(tmp_path: Path) -> None:
    """Shards may differ in size: any text with its hidden states can be added as a shard."""
    for number, length in enumerate((50, 7)):
        write_shard(
            tmp_path / f"{number:05}.safetensors",
            torch.arange(length * HIDDEN, dtype=torch.float32).reshape(length, HIDDEN),
            input_ids=torch.arange(length, dtype=torch.int32),
            document_ids=torch.zeros(length, dtype=torch.int32),
            loss_mask=torch.ones(length, dtype=torch.bool),
        )
    features = Features(tmp_path, LENGTH)
    assert [int(features[index]["input_ids"][0]) for index in range(len(features))] == [0, 20, 40, 0]
    last = features[3]
    assert last["document_ids"].tolist() == [0] * 7 + [-1] * 13
    assert last["position_ids"].tolist()[:8] == [0, 1, 2, 3, 4, 5, 6, 0]
    assert last["loss_mask"].sum() == 7
    assert last["hidden"].shape == (LENGTH, HIDDEN)
    assert (features.counts.documents, features.counts.tokens, features.counts.taught) == (2, 57, 57)


# --- the same heads ---------------------------------------------------------------------------------------------------


SEVERAL = {"kind": "eagle", "block": "gated", "feature_layers": [0, 1]}


@pytest.mark.parametrize(
    ("objective", "kind"),
    [("text", {}), ("distill", SEVERAL), pytest.param("tv", {"kind": "dflash"}, marks=pytest.mark.full)],
    ids=str,
)
def test_training_from_features_equals_online_training(
    recipe: Any, tmp_path: Path, objective: str, kind: dict[str, Any]
) -> None:
    heads = {"num": 2} | kind
    online = recipe("online", training={"objective": objective}, heads=heads)
    cached = recipe("cached", training={"objective": objective}, heads=heads, cache_features=True)
    assert is_features(tmp_path / "cached" / "features")
    assert cached["head1_loss"] == pytest.approx(online["head1_loss"], abs=2e-4)
    ours, theirs = (
        MedusaHeads.from_pretrained(tmp_path / "cached").state_dict(),
        MedusaHeads.from_pretrained(tmp_path / "online").state_dict(),
    )
    # Hidden states differ in the last bits (batches of other rows), and six steps of AdamW at 6e-3 turn that into at
    # most a few 1e-4; the wrong hidden states would part the heads by the whole learning, some 5e-2.
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=5e-4, rtol=0)
    if objective == "text":
        start = recipe("start", training={"objective": objective, "learning_rate": 1e-60}, heads=heads)
        assert start["head1_loss"] > online["head1_loss"] + 0.05, "six steps teach something"


def test_the_backbone_runs_once_and_not_in_training(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    forward = Backbone.hidden_states

    def counted(self: Backbone, ids: Tensor, **kwargs: Any) -> Tensor:
        if ids.shape[1] > 2 * PROBE:  # not the test whether documents are kept apart
            calls.append(len(ids))
        return forward(self, ids, **kwargs)

    monkeypatch.setattr(Backbone, "hidden_states", counted)
    recipe(cache_features=True, training={"max_steps": 3})
    planned = 2 * 4  # a probe of two batches of four rows
    assert sum(calls) == 8 + planned
    calls.clear()
    recipe(cache_features=True, with_={"overwrite": True}, training={"max_steps": 3})
    assert sum(calls) == planned, "what is there is read, not written again"


# --- interrupted, foreign, damaged ------------------------------------------------------------------------------------


def test_an_interrupted_writer_resumes(
    rows: PackedDataset, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.features.files.SHARD_BYTES", 3 * ROW_BYTES)
    whole = written(tmp_path / "whole", rows, model)
    cache = cache_of(tmp_path / "cut", rows, model)
    for _, _ in zip(range(5), cache.write(1), strict=False):  # five rows: one shard and two thirds
        pass
    assert [path.name for path in shards(tmp_path / "cut")] == ["00000.safetensors"]
    with pytest.raises(RequestError, match="holds 3 of 10 rows"):
        cache.read()
    again = cache_of(tmp_path / "cut", rows, model)
    again.require_belonging()
    assert again.missing_rows == sum(again.write(3)) == 7
    for ours, theirs in zip(shards(tmp_path / "cut"), shards(whole.folder), strict=True):
        torch.testing.assert_close(load_file(ours)["hidden"], load_file(theirs)["hidden"], atol=1e-5, rtol=1e-5)


def test_processes_share_the_shards(
    rows: PackedDataset, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.features.files.SHARD_BYTES", 3 * ROW_BYTES)
    cache = cache_of(tmp_path, rows, model)
    assert sum(cache.write(3, process=0, processes=2)) == 6
    assert sum(cache.write(3, process=1, processes=2)) == 4
    assert len(cache.read()) == ROWS


@pytest.mark.parametrize("other", ["backbone", "dtype", "data", "mask", "length"])
def test_mismatched_features_are_rejected_and_replaced_only_on_request(
    rows: PackedDataset, model: Any, tmp_path: Path, other: str
) -> None:
    written(tmp_path, rows, model)
    dtype = "float16" if other == "dtype" else None
    if other == "backbone":
        model = tiny_model("llama", seed=1)
    elif other == "data":
        rows.input_ids[3, 4] += 1
    elif other == "mask":
        rows.loss_mask[0] = ~rows.loss_mask[0]
    elif other == "length":
        rows = PackedDataset([Example(random_ids(13), [True] * 13)], 10)
    cache = cache_of(tmp_path, rows, model, dtype=dtype)
    found = "dtype float32, not float16" if other == "dtype" else "(an)?other .*"
    with pytest.raises(RequestError, match=rf"the features in .* are of {found}; .*features_dir.*--overwrite"):
        cache.require_belonging()
    cache.require_belonging(replace=True)
    assert sum(cache.write(4)) == len(rows)


def test_a_damaged_shard_is_named(rows: PackedDataset, model: Any, tmp_path: Path) -> None:
    cache = written(tmp_path, rows, model)
    path = tmp_path / "00000.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RequestError, match=r"00000\.safetensors is no shard of features"):
        cache.require_belonging()
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(RequestError, match=r"00000\.safetensors is no shard of features"):
        cache.require_belonging()


def test_an_unrelated_folder_is_not_changed(rows: PackedDataset, model: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    cache = cache_of(tmp_path, rows, model)
    with pytest.raises(RequestError, match="holds files that are not"):
        cache.require_belonging(replace=True)
    assert (tmp_path / "thesis.txt").is_file()


# --- recorded in use --------------------------------------------------------------------------------------------------


def record(folder: Path, model: Any, texts: list[list[int]], prompt_tokens: int = 3) -> Recorder:
    recorder = Recorder(folder, fingerprint(model, "tiny"), HIDDEN, torch.float32)
    for ids in texts:
        hidden = Backbone(model).hidden_states(torch.tensor([ids]), use_cache=False)[0]
        recorder.add(ids, hidden[:-1], prompt_tokens)  # a decoder has not read the last token that it wrote
    return recorder


def test_recordings_are_training_data(recipe: Any, model: Any, tmp_path: Path) -> None:
    """Heads trained on two recordings, read in rows, equal heads trained on the texts."""
    texts = [random_ids(40, seed=seed) for seed in range(8)]
    for part in (texts[:5], texts[5:]):
        record(tmp_path / "recorded", model, part, prompt_tokens=0).flush()
    assert [path.name for path in shards(tmp_path / "recorded")] == ["00000.safetensors", "00001.safetensors"]
    recipe("online")
    recipe("recorded-run", data={"path": str(tmp_path / "recorded"), "sequence_length": 40})
    ours, theirs = (
        MedusaHeads.from_pretrained(tmp_path / "recorded-run").state_dict(),
        MedusaHeads.from_pretrained(tmp_path / "online").state_dict(),
    )
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=5e-4, rtol=0)  # as with features of a cache


def test_prompts_are_recorded_and_not_taught(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.features.files.SHARD_BYTES", 20 * 4 * HIDDEN)
    recorder = record(tmp_path, model, [random_ids(13, seed=seed) for seed in range(3)])
    assert len(shards(tmp_path)) == 1, "the second text filled a shard"
    recorder.flush()
    recorder.flush()
    first, second = (load_file(path) for path in shards(tmp_path))
    assert first["document_ids"].tolist() == [0] * 13 + [1] * 13
    assert second["loss_mask"].tolist() == [False] * 3 + [True] * 10
    assert not second["hidden"][-1].any()


def test_two_recorders_of_one_folder_lose_no_text(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write a shard at the same time, as two processes may; the second one gets another number."""

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.2)
        write_shard(*args, **kwargs)

    monkeypatch.setattr("train.features.recorder.write_shard", slow)
    texts = [random_ids(9, seed=seed) for seed in range(2)]
    recorders = [record(tmp_path, model, [text]) for text in texts]
    at_once(lambda number: recorders[number].flush(), 2)
    found = [load_file(path)["input_ids"].tolist() for path in shards(tmp_path)]
    assert sorted(found) == sorted(texts)


def test_recordings_do_not_mix(recipe: Any, rows: PackedDataset, model: Any, tmp_path: Path) -> None:
    record(tmp_path / "a", model, [random_ids(9)]).flush()
    other = tiny_model("llama", seed=1)
    with pytest.raises(RequestError, match="features of another backbone or dtype"):
        record(tmp_path / "a", other, [random_ids(9)])
    written(tmp_path / "cache", rows, model)
    with pytest.raises(RequestError, match="or a cache"):
        record(tmp_path / "cache", model, [random_ids(9)])
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RequestError, match="holds files that are not"):
        record(tmp_path, model, [random_ids(9)])
    record(tmp_path / "b", other, [random_ids(9)]).flush()
    with pytest.raises(RequestError, match="are of another backbone, tiny"):
        recipe(data=str(tmp_path / "b"))
    with pytest.raises(RequestError, match="holds features; leave cache_features out"):
        recipe(data=str(tmp_path / "a"), cache_features=True)
    with pytest.raises(RequestError, match=r"holds features; leave data\.exclude out"):
        recipe(data={"path": str(tmp_path / "a"), "exclude": "x"})
    record(tmp_path / "untaught", model, [random_ids(9)], prompt_tokens=9).flush()
    with pytest.raises(RequestError, match="nothing to train on"):
        recipe(data=str(tmp_path / "untaught"))


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_the_plan_counts_bytes_and_savings() -> None:
    plan = FeaturePlan(1000, 5_000_000, 8_000_000, backbone_seconds=0.8, heads_seconds=0.2, epochs=4)
    assert plan.saved_per_epoch == pytest.approx(0.8)
    assert plan.saved == pytest.approx(0.6), "the backbone runs once in four epochs: 0.8 * 3 / 4"
    assert str(plan) == (
        "features: 1,000 tokens, 5 MB to write, 8 MB free; they save 80% of every epoch after the first, 60% of this "
        "run (4 epochs)"
    )
    plan.require_space(Path("x"))
    assert FeaturePlan(1, 1, 1, 1, 1, epochs=0.5).saved == 0
    with pytest.raises(RequestError, match=r"would take 9 MB in x, where 8 MB are free; .*float16"):
        FeaturePlan(1000, 9_000_000, 8_000_000, 0.8, 0.2, 4).require_space(Path("x"))


def test_a_plan_is_reported_before_anything_is_written(
    recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    plan = recipe(plan=True)
    assert plan["layers"] == 1
    assert plan["missing_bytes"] == 8 * 40 * (4 * HIDDEN + 9)
    assert plan["tokens"] == 8 * 40
    assert plan["epochs"] == 3
    assert 0 < plan["saved_per_epoch"] < 1
    assert "features: 320 tokens, 43.8 kB to write" in capsys.readouterr().err
    assert not (tmp_path / "out" / "features").exists()
    recipe(cache_features=True, training={"max_steps": 1})
    assert recipe(plan=True)["missing_bytes"] == 0
    assert recipe(plan=True, training={"max_steps": 1})["epochs"] == 0.5
    assert (tmp_path / "out" / "medusa_lm_head.safetensors").is_file(), "a plan touches nothing"


def test_a_disk_that_is_too_small_is_rejected_before_writing(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.features.cache.free_bytes", lambda path: 1000)
    with pytest.raises(RequestError, match="features would take"):
        recipe(cache_features=True)
    assert not (tmp_path / "out" / "features" / MANIFEST).exists()


def test_three_layers_take_four_times_the_space(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The LM head's input is stored too, because labels are made from it."""
    heads = {"num": 2, "kind": "eagle", "block": "gated", "feature_layers": "usual"}
    plan = recipe(plan=True, heads=heads)
    assert plan["layers"] == 4
    assert plan["missing_bytes"] == 8 * 40 * (4 * 4 * HIDDEN + 9)
    assert "tokens x 4 layers" in capsys.readouterr().err


def test_features_of_other_layers_are_refused(recipe: Any, tmp_path: Path) -> None:
    recipe("several", heads={"num": 2} | SEVERAL, cache_features=True, training={"max_steps": 1})
    folder = tmp_path / "several" / "features"
    assert json.loads((folder / MANIFEST).read_text())["layers"] == [0, 1, 2]
    data = {"path": str(folder), "sequence_length": 40}
    assert "loss" in recipe("same", heads={"num": 2} | SEVERAL, data=data, training={"max_steps": 1})
    other = {"num": 2} | SEVERAL | {"feature_layers": [1, 0]}
    with pytest.raises(RequestError, match=r"are of the layers \[0, 1, 2\], and training needs \[1, 0, 2\]"):
        recipe("other", heads=other, data=data)
    with pytest.raises(RequestError, match="training needs only the last one"):
        recipe("one", data=data)
    with pytest.raises(RequestError, match="are of other layers; give another features_dir"):
        recipe("again", heads=other, cache_features=True, features_dir=str(folder))
