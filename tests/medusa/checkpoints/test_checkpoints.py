"""medusa/checkpoints: heads survive saving and loading bit for bit, published files load, other files are rejected."""

from __future__ import annotations

import io
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa import MedusaConfig, MedusaHeads, RequestError
from medusa.checkpoints.stored import CONFIG, LEGACY_WEIGHTS, PROVENANCE, WEIGHTS
from medusa.heads import KINDS
from medusa.heads.inputs import HeadInputs
from medusa.records.sources import read_records
from medusa.tree import load_tree
from tests.helpers import random_heads, shared_model
from train.recipe import load_recipe

H, V = 6, 9


def some_heads(**settings: Any) -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig(**({"hidden_size": H, "vocab_size": V, "num_heads": 3} | settings)))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads


def original_tensors(heads: int = 5, layers: int = 1) -> dict[str, Tensor]:
    """A v0.1 file of FasterDecoding: nn.ModuleList of Sequential(ResBlock, ..., Linear without bias)."""
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(H, H)
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(H)
        tensors[f"{head}.{layers}.weight"] = torch.randn(V, H)
    return tensors


def write(folder: Path, tensors: dict[str, Tensor], config: Any = None) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    if config is not None:
        (folder / CONFIG).write_text(json.dumps(config))
    return folder


def refusal(folder: Path | str) -> str:
    """The error message, one line, for heads that cannot be loaded."""
    with pytest.raises(RequestError) as error:
        MedusaHeads.from_pretrained(folder)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("block", "expansion"), [("square", 1.0), ("mlp", 4.0), ("mlp", 0.3)])
def test_round_trip_is_bit_for_bit(
    tmp_path: Path, block: str, expansion: float, layers: int, lm_head: str, dtype: torch.dtype
) -> None:
    heads = some_heads(block=block, expansion=expansion, num_layers=layers, lm_head=lm_head).to(dtype)
    heads.config.tree = [[0], [0, 1]]
    heads.config.backbone = {"name": "x", "weights": [0.5]}
    heads.config.base_model_name_or_path = "org/base"
    heads.save_pretrained(tmp_path / "new" / "folder", provenance={"seed": 1})
    again = MedusaHeads.from_pretrained(tmp_path / "new" / "folder")
    assert set(again.state_dict()) == set(heads.state_dict())
    for name, tensor in heads.state_dict().items():
        assert again.state_dict()[name].dtype == dtype
        assert torch.equal(again.state_dict()[name], tensor), name
    expected, got = heads.config.to_dict(), again.config.to_dict()
    assert got.pop("expansion") * H == pytest.approx(heads.config.inner_size if block == "mlp" else H)
    expected.pop("expansion")
    assert got == expected
    assert json.loads((tmp_path / "new" / "folder" / PROVENANCE).read_text()) == {"seed": 1}
    assert not again.training


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_tensors_of_several_dtypes_become_one(tmp_path: Path, dtype: torch.dtype) -> None:
    heads = some_heads(num_layers=2)
    heads.bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    name = next(name for name in tensors if "bias" in name)
    save_file(tensors | {name: tensors[name].to(dtype)}, tmp_path / WEIGHTS)
    loaded = MedusaHeads.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {
        max(dtype, torch.float32, key=lambda d: d.itemsize)
    }
    hidden = torch.randn(2, H).to(loaded.dtype)
    torch.testing.assert_close(loaded(HeadInputs(hidden)), heads.to(loaded.dtype)(HeadInputs(hidden)))


def test_published_names_and_layout(tmp_path: Path) -> None:
    """Other programs read these files: names, the [out, in] layout and the JSON keys must not change."""
    heads = some_heads(num_heads=2, base_model_name_or_path="org/base")
    heads.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        f"{head}.{name}": shape
        for head in range(2)
        for name, shape in (("0.linear.weight", [H, H]), ("0.linear.bias", [H]), ("1.weight", [V, H]))
    }
    x = torch.randn(H)
    block = torch.nn.Linear(H, H)
    block.load_state_dict({"weight": tensors["1.0.linear.weight"], "bias": tensors["1.0.linear.bias"]})
    expected = tensors["1.1.weight"] @ (x + torch.nn.functional.silu(block(x)))
    # Six products of order 1 in another order; a transposed matrix would differ by order 1.
    torch.testing.assert_close(heads(HeadInputs(x))[1], expected, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 1)
    assert config["base_model_name_or_path"] == "org/base"
    assert "version" not in config
    assert not {"architectures", "model_type"} & set(config), "TGI takes these for another kind of file"
    some_heads(lm_head="shared").save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["version"] == "2"


@pytest.mark.parametrize("layers", [1, 2])
def test_original_pt_file_is_read_and_its_tensors_override_its_config(tmp_path: Path, layers: int) -> None:
    """Published configs give 2 heads for files that contain 5."""
    tensors = original_tensors(heads=5, layers=layers)
    torch.save(tensors, tmp_path / LEGACY_WEIGHTS)
    config = {"base_model_name_or_path": "lmsys/vicuna", "medusa_num_heads": 2, "medusa_num_layers": 1}
    (tmp_path / CONFIG).write_text(json.dumps(config | {"transformers_version": "4.31.0"}))
    heads = MedusaHeads.from_pretrained(tmp_path)
    assert (heads.config.num_heads, heads.config.num_layers) == (5, layers)
    assert (heads.config.hidden_size, heads.config.vocab_size, heads.config.lm_head) == (H, V, "own")
    assert heads.config.base_model_name_or_path == "lmsys/vicuna"
    for head in range(5):
        assert torch.equal(heads.blocks[0].weight[head].T, tensors[f"{head}.0.linear.weight"])
        assert torch.equal(heads.lm_heads[head].T, tensors[f"{head}.{layers}.weight"])


def test_blocks_shared_in_an_old_file_become_separate_blocks(tmp_path: Path) -> None:
    """`[ResBlock(h)] * 2` stored one block under two names; training must not move both."""
    tensors = original_tensors(heads=2, layers=2)
    for head in range(2):
        for part in ("weight", "bias"):
            tensors[f"{head}.1.linear.{part}"] = tensors[f"{head}.0.linear.{part}"]
    torch.save(tensors, tmp_path / LEGACY_WEIGHTS)
    heads = MedusaHeads.from_pretrained(tmp_path)
    assert torch.equal(heads.blocks[0].weight, heads.blocks[1].weight)
    assert heads.blocks[0].weight.data_ptr() != heads.blocks[1].weight.data_ptr()


def test_heads_without_a_config_are_read_from_their_tensors(tmp_path: Path) -> None:
    heads = MedusaHeads.from_pretrained(write(tmp_path, original_tensors(heads=3)), dtype=torch.float64)
    assert (heads.config.num_heads, heads.dtype) == (3, torch.float64)


UNKNOWN = ("lm_head.weight", "0.0.conv.weight", "0.5.weight", "x")
SHAPES: dict[str, list[tuple[int, ...]]] = {  # wrong ones
    "1.0.linear.weight": [(H, H + 1)],
    "1.0.linear.bias": [(H + 1,), (1, H)],
    "1.1.weight": [(V + 1, H)],
    "0.1.weight": [(V, H + 1), (V,), ()],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(({name: None}, name) for name in ("1.0.linear.bias", "1.0.linear.weight", "1.1.weight", "0.1.weight")),
        ({"0.0.linear.weight": None}, "first head's first block"),
        ({f"1.{name}": None for name in ("0.linear.weight", "0.linear.bias", "1.weight")}, ""),
        *(({name: torch.zeros(2, 2)}, name) for name in UNKNOWN),
        *(({name: torch.zeros(shape)}, name) for name, wrong in SHAPES.items() for shape in wrong),
        ({"0.0.linear.weight": torch.zeros(H)}, "first head's first block"),
        ({"0.0.linear.weight": torch.zeros(0, 0)}, "0.0.linear.weight"),
        ({"1.0.linear.weight": torch.zeros(H, H, dtype=torch.int8)}, "int8"),
        ({"0.900000000.linear.bias": torch.zeros(H)}, "block 900000000"),  # so many modules would take minutes
    ],
)
def test_tensors_that_are_no_heads_are_named(tmp_path: Path, change: dict[str, Tensor | None], said: str) -> None:
    heads = 3 if "1.0.linear.bias" in change and len(change) == 3 else 2
    tensors = {name: tensor for name, tensor in (original_tensors(heads) | change).items() if tensor is not None}
    message = refusal(write(tmp_path, tensors, {"vocab_size": V}))
    assert WEIGHTS in message
    assert said in message


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "3", "\xff", {"kind": "oak"}, {"tree": [[0, 0]]}, {"tree": 5}, {"backbone": [1]}]
)
def test_a_broken_config_is_refused(tmp_path: Path, content: Any) -> None:
    write(tmp_path, original_tensors(heads=1))
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / CONFIG).write_bytes(text.encode("latin-1"))
    assert CONFIG in refusal(tmp_path) or isinstance(content, dict)


@pytest.mark.parametrize("content", [[1], {"a": 1}, "text", torch.zeros(3), {1: torch.zeros(2, 2)}])
def test_a_pt_file_without_heads_is_rejected(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / LEGACY_WEIGHTS)
    assert LEGACY_WEIGHTS in refusal(tmp_path)


@pytest.mark.parametrize("vocab_size", ["many", 0, 2.5])
def test_an_invalid_vocab_size_of_shared_heads_is_rejected(tmp_path: Path, vocab_size: Any) -> None:
    tensors = {n: t for n, t in original_tensors(heads=1).items() if "linear" in n}
    assert "vocab_size" in refusal(write(tmp_path, tensors, {"vocab_size": vocab_size}))
    assert "no tensor" in refusal(write(tmp_path, {}))


@pytest.mark.parametrize("kind", ["medusa", "cascade", "eagle"])
def test_integers_of_the_right_shape_are_rejected(tmp_path: Path, kind: str) -> None:
    MedusaHeads.from_config(MedusaConfig(H, V, num_heads=3, kind=kind)).save_pretrained(tmp_path)
    name, tensor = next(iter(sorted(load_file(tmp_path / WEIGHTS).items())))
    save_file(load_file(tmp_path / WEIGHTS) | {name: tensor.to(torch.int8)}, tmp_path / WEIGHTS)
    message = refusal(tmp_path)
    assert name in message
    assert "int8" in message


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", [WEIGHTS, LEGACY_WEIGHTS])
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    """Files cut at any size or with bytes overwritten give heads or a one-line error, never another exception."""
    buffer = io.BytesIO()
    if name == WEIGHTS:
        save_file(original_tensors(heads=1), tmp_path / name)
        whole = (tmp_path / name).read_bytes()
    else:
        torch.save(original_tensors(heads=1), buffer)
        whole = buffer.getvalue()
    rng = random.Random(0)
    cases = [whole[:size] for size in {0, 1, 7, 8, 9, 50, *(rng.randrange(len(whole)) for _ in range(40))}]
    for _ in range(80):
        broken = bytearray(whole)
        for _ in range(rng.choice((1, 4, 40))):
            broken[rng.randrange(min(len(whole), 900))] = rng.randrange(256)
        cases.append(bytes(broken))
    cases += [b"x" * 100, b"version https://git-lfs.github.com/spec/v1\n", b"\x80\x02", b"PK\x03\x04", b"<html></html>"]
    messages = []
    for content in cases:
        (tmp_path / name).write_bytes(content)
        try:
            MedusaHeads.from_pretrained(tmp_path)
        except RequestError as error:
            messages.append(str(error))
    assert all(str(tmp_path / name) in message and "\n" not in message for message in messages)
    assert len(messages) > 40, "the damage did no damage: this test has no power"


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_with_code_are_refused_and_not_run(tmp_path: Path, zipped: bool) -> None:
    trap = tmp_path / "sprung"
    torch.save({"0.0.linear.weight": Trap(trap)}, tmp_path / LEGACY_WEIGHTS, _use_new_zipfile_serialization=zipped)
    assert LEGACY_WEIGHTS in refusal(tmp_path)
    assert not trap.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_many_heads_of_every_kind_are_read(tmp_path: Path, kind: str) -> None:
    """More heads than the file holds tensors, in the kinds that keep the tensors of all heads together."""
    config = MedusaConfig(H, V, 20, kind=kind, lm_head="shared")
    MedusaHeads.from_config(config).save_pretrained(tmp_path)
    assert MedusaHeads.from_pretrained(tmp_path).config.num_heads == 20


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("kind", ["cascade", "hydra", "recurrent"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"medusa_num_heads": 10**9}, "heads.num_heads is 1000000000; it must be a whole number from 1 to 1024"),
        ({"medusa_num_heads": 1000}, "names block 999 but holds 7 tensors; its heads are not complete"),
        ({"medusa_num_layers": 1000}, "names block 2999 but holds 7 tensors"),
        ({"prefix_layers": 10**6}, "heads.prefix_layers is 1000000; it must be a whole number from 0 to 1024"),
        ({"prefix_layers": 1000}, "names prefix_layer 999 but holds 7 tensors"),
        ({"hidden_size": 2**63}, "heads.hidden_size is 9223372036854775808"),
        ({"block": "mlp", "expansion": 1e300}, "heads.expansion is 1e"),
        ({"tree": [[2**63]]}, "holds a rank above"),
    ],
)
def test_a_config_of_more_than_the_file_holds_is_refused_before_modules_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, changed: dict[str, Any], said: str
) -> None:
    random_heads(shared_model(), 3, kind=kind).save_pretrained(tmp_path)
    content = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(content | changed))
    monkeypatch.setattr("medusa.checkpoints.checkpoint.empty", lambda config: pytest.fail("modules are made"))
    with pytest.raises(RequestError, match=said):
        MedusaHeads.from_pretrained(tmp_path)


def test_files_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own; torch.compile raises it for the whole process
    try:
        require_refused_depths(tmp_path)
    finally:
        sys.setrecursionlimit(limit)


def require_refused_depths(tmp_path: Path) -> None:
    random_heads(shared_model(), 3).save_pretrained(tmp_path)
    for place, depth in {
        CONFIG: 20_000,
        "a.json": 20_000,
        "a.jsonl": 20_000,
        "tree.json": 500,
        "a.yaml": 500,
    }.items():
        (tmp_path / place).write_text(f'{{"kind": "medusa", "paths": {nested(depth)}}}\n')
    for read in (
        lambda: MedusaHeads.from_pretrained(tmp_path),
        lambda: load_tree(str(tmp_path / "tree.json"), 3),
        lambda: load_recipe(tmp_path / "a.yaml", []),
        lambda: load_recipe("medusa1", [f"data={nested(500)}"]),
        lambda: list(read_records(tmp_path / "a.json")),
        lambda: list(read_records(tmp_path / "a.jsonl")),
    ):
        with pytest.raises(RequestError, match=r"not JSON|neither JSON nor YAML|not YAML"):
            read()


def test_a_missing_path_is_rejected(tmp_path: Path) -> None:
    assert "neither" in refusal(tmp_path)
    assert "no heads" in refusal(tmp_path / "absent")
    assert "no heads" in refusal("not a name")


def test_a_failed_save_keeps_the_old_heads_and_leaves_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = some_heads()
    old.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(tensors: dict, path: Path, **kwargs: Any) -> None:
        Path(path).write_bytes(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr("medusa.checkpoints.stored.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        some_heads(num_heads=2).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert torch.equal(MedusaHeads.from_pretrained(tmp_path).lm_heads, old.lm_heads)


def test_existing_heads_are_kept_without_overwrite(tmp_path: Path) -> None:
    some_heads().save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="exists already"):
        some_heads().save_pretrained(tmp_path, overwrite=False)
    some_heads(num_heads=1).save_pretrained(tmp_path)
    assert MedusaHeads.from_pretrained(tmp_path).config.num_heads == 1


def test_saved_files_follow_the_umask(tmp_path: Path) -> None:
    some_heads().save_pretrained(tmp_path)
    assert (tmp_path / WEIGHTS).stat().st_mode & 0o777 == (tmp_path / CONFIG).stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / WEIGHTS).stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("name", ["", None, 5, ["a"], {}, "README.md", "no-folder", "a/b/c"])
def test_a_name_that_can_be_no_heads_is_named(name: Any) -> None:
    with pytest.raises(RequestError, match=f"^no heads at {re.escape(str(name) or repr(name))}: give a folder"):
        MedusaHeads.from_pretrained(name)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"dtype": "float32"}, "dtype is 'float32'; give a torch.dtype"),
        ({"device": "abacus"}, "device is 'abacus', which PyTorch does not have here; give cpu"),
        ({"revisoin": "main"}, "no argument revisoin; did you mean revision?"),
    ],
)
def test_a_wrong_argument_is_named_before_loading(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr("medusa.checkpoints.folder.load", lambda *args, **hub: pytest.fail("heads were loaded"))
    with pytest.raises(RequestError, match=re.escape(told)):
        MedusaHeads.from_pretrained("demo", **arguments)
