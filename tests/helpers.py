"""Shared tiny random models, trees and drafters, and slow, simple reference versions."""

from __future__ import annotations

import functools
import importlib.util
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import tiny_models
from decode.bench.calibration.calibrate import time_steps
from decode.draft import Draft, Drafter, Frontier
from decode.generation import unpadded
from decode.loop import Step, Stepper, Timer, run
from decode.ops.attention import grouped
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.session import Session
from decode.settings import DecodingOptions
from decode.topology import Topology
from medusa import MedusaHeads, Tree
from medusa.heads import KINDS, class_of
from medusa.heads.eagle_layer import VARIANTS

COMMON, VOCAB, REFUSED, LETTERS = tiny_models.COMMON, tiny_models.VOCAB, tiny_models.REFUSED, tiny_models.LETTERS
HIDDEN: int = COMMON["hidden_size"]
FAMILIES: dict[str, str] = {
    # One for each way in which they differ; for tests that try them all.
    name.split(",")[0]: name
    for name in (
        "llama",
        "mistral, window",
        "qwen2, window",
        "gemma3_text",
        "gemma2",
        "llama4_text",
        "gpt2",
        "opt",
        "gpt_neox",
        "cohere",
        "deepseek_v3",
        "falcon, rope",
    )
}
WIDE: dict[str, Any] = {"hidden_size": 24, "width": 20, "layers": 2, "heads": 4, "key_value_heads": 2, "head_size": 8}
EAGLE_FORMS: dict[str, dict[str, Any]] = {
    # The layers of published EAGLE checkpoints, for models of two layers and the size of `tiny_model`.
    "eagle-1": {
        "block": "eagle1",
        "layer": WIDE | {"hidden_size": HIDDEN, "layers": 1, "eps": 1e-5, "rope": {}, "variants": ["fc_bias"]},
    },
    "eagle-3": {"block": "gated", "feature_layers": [1, 0]},
    "eagle-3, variants": {
        "block": "gated",
        "feature_layers": [0, 1, 2],
        "vocabulary": 45,
        "embeddings": "own",
        "lm_head": "one",
        "layer": WIDE
        | {
            "eps": 1e-5,
            "rope": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            "variants": list(VARIANTS),
        },
    },
}
EAGLE_FORMS = {name: {"kind": "eagle", "lm_head": "shared"} | settings for name, settings in EAGLE_FORMS.items()}
MTP_FORM: dict[str, Any] = {  # of a model whose layers are a Llama's; the backbone can be another one of its size
    "kind": "mtp",
    "block": "mtp",
    "lm_head": "shared",
    "mtp": COMMON | {"model_type": "llama", "num_mtp_layers": 1},
}
WINDOW_FORM = {"kind": "eagle", "window": 4}  # wide enough for the path of three heads
RESIDUAL = [kind for kind in KINDS if "mlp" in class_of(kind).block_types]  # of blocks that start as the identity
FORMS = {kind: {"kind": kind} for kind in KINDS} | EAGLE_FORMS | {"mtp": MTP_FORM}  # the settings of every kind
FORMS |= {"eagle, window": WINDOW_FORM}
BLOCK_FORM = {"kind": "dflash", "block": "gated", "lm_head": "shared", "feature_layers": [1, 0], "mask_token": 5}
BLOCK_FORMS: dict[str, dict[str, Any]] = {
    "dflash": {"edges": "none"},
    "dflash, markov": {"edges": "markov", "rank": 6, "windows": [9], "causal": [True], "confidence": True},
    "dflash, pairwise": {"edges": "pairwise", "rank": 6, "conv": [2, 4]},
}
BLOCK_FORMS = {name: BLOCK_FORM | settings for name, settings in BLOCK_FORMS.items()}
FORMS |= BLOCK_FORMS

FIRST_TRANSFORMERS = Version(transformers.__version__) < Version("5.18")
"""Whether this is transformers 5.17, the lower bound, which does a few things in another way than later versions."""


def weekly(*rows: Any) -> list[Any]:
    """Rows of a list of parameters that run with `--full` only: further examples of what other rows show."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.full) for row in rows]


def tiny_model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model, small enough for thousands of forwards; `family` as in FAMILIES or in docs/architectures.md."""
    return tiny_models.tiny_model(FAMILIES.get(family, family), seed, dtype, **overrides)


_PLAIN: WeakKeyDictionary[PreTrainedModel, dict[str, list[int]]] = WeakKeyDictionary()  # texts of shared models


@functools.cache
def shared_model(family: str = "llama", **settings: Any) -> Any:
    """Return the `tiny_model` with these settings, made once; tests must not change it, and `plain` keeps its texts."""
    model = tiny_model(family, **settings)
    _PLAIN[model] = {}
    return model


def parts_of(model: nn.Module) -> list[dict[str, int]]:
    """The attributes of each module of `model`, with the number of hooks, parameters or modules in each."""
    return [
        {name: len(value) if isinstance(value, dict) else 0 for name, value in vars(part).items()}
        for part in model.modules()
    ]


def install(folder: Path, name: str, points: dict[str, dict[str, str]], **files: str) -> None:
    """Write into `folder` what an installed package `name` leaves there: modules, and entry points by group.

    `files` are the sources of modules by name."""
    about = folder / f"{name}-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n", encoding="utf-8")
    lines = [line for group, of in points.items() for line in (f"[{group}]", *(f"{key} = {of[key]}" for key in of))]
    (about / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    for module, source in files.items():
        (folder / f"{module}.py").write_text(source, encoding="utf-8")


def random_ids(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


def random_heads(model: PreTrainedModel, num_heads: int = 3, seed: int = 0, **settings: Any) -> MedusaHeads:
    """Random heads, whose guesses differ from the backbone's; new heads are the identity."""
    torch.manual_seed(seed)
    return tiny_models.random_heads(model, num_heads, std=0.3, **settings)


def random_tree(nodes: int, seed: int = 0, max_rank: int = 5, max_depth: int = 5) -> Tree:
    """A tree of `nodes` nodes and the root, each under a random parent; ranks have gaps, as in calibrated trees."""
    rng = random.Random(seed)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) <= nodes:
        path = (*rng.choice(paths), rng.randint(0, max_rank))
        if path not in paths and len(path) <= max_depth:
            paths.append(path)
    rng.shuffle(paths)
    return Tree.from_paths([path for path in paths if path])


def rename_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: our forwards run sdpa under another name, with which Falcon adds masks as 0 and 1."""
    AttentionInterface.register("sdpa_renamed", sdpa_attention_forward)
    AttentionMaskInterface.register("sdpa_renamed", sdpa_mask)

    class Renamed(grouped):
        def __init__(self, config: PretrainedConfig, *others: object) -> None:
            super().__init__(config)
            self.config = config

        def __enter__(self) -> None:
            self.config._attn_implementation = "sdpa_renamed"

        def __exit__(self, *error: object) -> None:
            self.config._attn_implementation = "sdpa"

    monkeypatch.setattr("decode.reader.grouped", Renamed)


def left_padded(prompts: list[list[int]], pad: int = 0) -> dict[str, Tensor]:
    """Prompts of different length, padded on the left, with a mask, as transformers expects."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
    }


def plain(model: PreTrainedModel, prompt: list[int], seed: int | None = None, **kwargs: Any) -> list[int]:
    """The text of `model.generate` after one prompt, the reference for all tests; sampling uses `seed`.

    The texts of a `shared_model` are cached.
    """
    kwargs.setdefault("do_sample", False)
    key = f"{prompt} {seed} {sorted(kwargs.items())}"
    repeatable = seed is not None or not kwargs["do_sample"]
    kept = _PLAIN.get(model, {}) if repeatable and " at 0x" not in key else {}  # other objects get equal addresses
    if key not in kept:
        ids = torch.tensor([prompt])
        if seed is not None:
            torch.manual_seed(seed)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)  # type: ignore[operator]
        kept[key] = out[0, len(prompt) :].tolist()
    return list(kept[key])


def module_of(path: Path) -> ModuleType:
    """Import a script that is not in a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, f"{path} is not there"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ScriptedDrafter:
    """Drafts a scripted number of correct tokens of the known text, at random nodes of the tree.

    `script(step)` is the number of correct tokens. All other nodes are wrong: they differ from the text
    where their parent equals it, and siblings differ from each other, so a step's length is known in advance.
    """

    def __init__(self, tree: Tree, texts: list[list[int]], script: Any, vocab: int = VOCAB, seed: int = 0) -> None:
        self.tree, self.texts, self.script, self.vocab = tree, texts, script, vocab
        self.rng = random.Random(seed)
        self.steps = 0
        self.sequences: Any = None
        self.parent, self.depth = tree.parent.tolist(), tree.depth.tolist()

    def propose(self, frontier: Frontier) -> Draft:
        live = frontier.rows
        assert sorted(live) == [row for row, reason in enumerate(self.sequences.finish_reason) if reason is None]
        written = [self.sequences.new_ids[row] for row in live]
        assert frontier.root.tolist() == [ids[-1] for ids in written], "the root is the last token written"
        right = self.script(self.steps)
        self.steps += 1
        rows = [self._row(ids[-1], self.texts[row][len(ids) :], right) for row, ids in zip(live, written, strict=True)]
        return Draft(torch.tensor(rows), Topology.of(self.tree))

    def _row(self, root: int, text: list[int], right: int) -> list[int]:
        deep_enough = [node for node, depth in enumerate(self.depth) if depth >= right]
        line = [n for n in self.tree.paths[self.rng.choice(deep_enough)].tolist() if n >= 0][: right + 1]
        tokens = [root]
        for node in range(1, len(self.parent)):
            parent, depth = self.parent[node], self.depth[node]
            truth = text[depth - 1] if depth <= len(text) else None
            if node in line and truth is not None:
                tokens.append(truth)
                continue
            taken = {tokens[other] for other in range(1, node) if self.parent[other] == parent}
            tokens.append(self.rng.choice([t for t in range(self.vocab) if t not in taken and t != truth]))
        return tokens


def decode_with(
    model: PreTrainedModel,
    drafter: ScriptedDrafter,
    input_ids: Any,
    acceptance: str | None = None,
    amateur: Any = None,
    **kwargs: Any,
) -> tuple[Session, list[Step]]:
    """Run the loop with the given drafter; returns the finished session and its steps."""
    input_ids = torch.as_tensor(input_ids)
    requests = prepare(model, unpadded(input_ids, kwargs.pop("attention_mask", None)), **kwargs)
    session = Session(model, requests, slack=drafter.tree.num_nodes, readers=amateur)
    drafter.sequences = session.sequences
    rule = DecodingOptions(acceptance=acceptance).rule_for(requests[0].do_sample)
    return session, run_steps(session, drafter, rule)


def run_steps(session: Session, drafter: Drafter, rule: AcceptanceRule) -> list[Step]:
    """All steps of a session with this drafter."""
    return list(run(Stepper(session, drafter, rule), Timer()))


@torch.no_grad()
def path_logits(model: PreTrainedModel, prefix: list[int], ids: list[int], tree: Tree) -> Tensor:
    """Logits [N, V] after every node, by one forward per path without cache or mask (the slow, simple version)."""
    rows = []
    for line in tree.paths.tolist():
        text = prefix + [ids[node] for node in line if node >= 0]
        rows.append(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1])
    return torch.stack(rows)


def at_once(work: Callable[[int], Any], count: int = 1) -> list[Any]:
    """Call `work` with the numbers below `count`, in as many threads that begin together; gives the results."""
    ready = threading.Barrier(count)

    def begin(number: int) -> Any:
        ready.wait()
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(begin, range(count)))


def times_of_few_steps(*given: Any) -> list[float]:
    """`time_steps` in one round of four steps, for tests in which no figure is a measurement."""
    return time_steps(*given[:7], rounds=1, steps=4)


def run_as_written(patch: pytest.MonkeyPatch) -> None:
    """Let compiled steps run as they are written, without torch.compile."""
    patch.setattr("decode.compiled.region.compiled", lambda step, *how: step)
