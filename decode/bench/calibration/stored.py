"""Calibrations of heads, and the JSON files that store one for each `situation` (machine, models and settings)."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from decode.bench.machine import machine
from decode.drafters import parse
from decode.drafters.base import DrafterContext, DrafterFactory
from decode.drafters.layouts import DynamicTree, Layout, shortlist_of, with_shortlist
from decode.settings import Settings
from medusa.errors import RunError
from medusa.files import Json, read_json, user_cache, write_json
from medusa.heads.independent import MedusaHeads
from medusa.loading import DTYPES
from medusa.options import dtype_name
from medusa.quantization import quantization_of
from medusa.tree import Tree, usual_shortlist

FILE = "calibration.json"
MIN_STEPS = 500  # a calibration replays at least so many steps; from fewer, the prediction of tau is too uncertain
OPTIONS = ("temperature", "draft", "top_k", "top_p", "min_p", "ignore_generation_config", "epsilon", "delta", "compile")
"""The settings that change how many tokens a step takes, or its time."""


class TooFewStepsError(RunError):
    """The texts of a calibration are too short, or too few: fewer than `MIN_STEPS` decoding steps start in them."""


@dataclass
class CalibrationPoint:
    """A tree that a calibration tried, with its predicted tau and the time of a decoding step in milliseconds."""

    nodes: int
    paths: list[list[int]]  # the paths of a static tree; empty for a dynamic tree
    tau: float
    step_ms: float
    dynamic: bool = False
    drafter: str = "heads"  # as in --drafter: the heads alone, n-grams alone, or a mix of both

    @property
    def kind(self) -> str:
        """What drafts, in words for tables."""
        if self.drafter != "heads":
            return "heads and n-grams" if self.drafter.startswith("mix") else "n-grams"
        return "plain" if self.nodes == 1 else "dynamic" if self.dynamic else "static"

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.tau / self.step_ms


@dataclass
class RecordedTexts:
    """The number, size and origin of the texts that a calibration was made from."""

    texts: int  # without those held out to measure tau
    tokens: int = 0  # number of tokens in the continuations
    prompt_tokens: int = 0
    source: str = "the backbone's own"  # or the name of the prompts' file or dataset, without folders
    steps: int = 0  # positions where a decoding step can start
    prompts_sha256: str | None = None  # of the token ids of all prompts, as in a benchmark; only with --prompts

    @property
    def described(self) -> str:
        """The origin and the size of the texts, in words."""
        return f"{self.texts} texts of {self.tokens} tokens ({self.source})"


@dataclass
class Calibration:
    """The result of calibrating heads: the trees that were tried, and the choice of the best tree."""

    points: list[CalibrationPoint]
    chosen: int  # index of the best tree in `points`
    temperatures: list[float]  # one per head, at which dynamic trees compute the probabilities of its guesses
    holds_for: dict[str, object]  # what the calibration is valid for (`situation`)
    texts: RecordedTexts
    shortlist: int | None = None  # the number of candidates of each head, for heads of kind `markov`
    chosen_tree: int | None = None  # index of the best tree for the heads alone; `None`: `chosen`

    @property
    def best(self) -> CalibrationPoint:
        return self.points[self.chosen]

    @property
    def of_heads(self) -> CalibrationPoint:
        """The best tree for the heads alone."""
        return self.points[self.chosen if self.chosen_tree is None else self.chosen_tree]

    @property
    def why_not_fastest(self) -> str:
        """Why the best tree is not the one with the most tokens per second; empty if it is."""
        most = max(point.tokens_per_second for point in self.points) / self.best.tokens_per_second
        if most == 1:
            return ""
        if self.best.nodes == 1:
            return f"Another tree seems {most - 1:.1%} faster, which is within the error of timing."
        return (
            f"Another tree seems {most - 1:.1%} faster; the chosen one was timed again, with fewer or more candidates."
        )

    @property
    def tree(self) -> Layout:
        """The best tree for the heads alone, in the form that drafters accept: static or dynamic."""
        return self.tree_of(self.of_heads)

    def source(self, model: PreTrainedModel, heads: MedusaHeads) -> DrafterFactory:
        """Make the fastest drafter: the heads on their best tree, n-grams, or both."""
        config = parse(self.best.drafter)
        tree = self.tree_of(self.best) if config.takes_tree else None
        return config.factory(DrafterContext(model, heads, tree))

    def tree_of(self, point: CalibrationPoint) -> Layout:
        """The tree of a point; n-grams alone have none, and get the root alone."""
        tree: Layout = Tree.from_paths(point.paths)
        if point.dynamic:
            tree = DynamicTree.over_heads(point.nodes, len(self.temperatures), tuple(self.temperatures))
        return with_shortlist(tree, self.shortlist_for(point.nodes))

    def fit(self, tree: DynamicTree) -> Layout:
        """Give a dynamic tree the temperatures and the number of candidates that were found."""
        return with_shortlist(replace(tree, temperatures=tuple(self.temperatures)), self.shortlist_for(tree.num_nodes))

    def shortlist_for(self, nodes: int) -> int | None:
        """The number of candidates for a tree of `nodes` nodes: what was found for the best tree, if it is no smaller.

        Larger trees lose more by few candidates: the included heads 3 % of tau at 64 nodes. So they have no fewer than
        by default."""
        if self.shortlist is None or nodes <= self.of_heads.nodes:
            return self.shortlist
        return max(self.shortlist, usual_shortlist(nodes))

    def predicted_tau(self, tree: Layout | None, drafter: str = "heads") -> float | None:
        """The predicted tau of a `drafter` with `tree`, if it has one; `None` if the calibration did not try them."""
        points = [point for point in self.points if point.drafter == drafter]
        if tree is None:
            return points[0].tau if points else None
        wanted = tree.to_json(), shortlist_of(tree)
        tried = ((point.tau, self.tree_of(point)) for point in points)
        return next((tau for tau, one in tried if (one.to_json(), shortlist_of(one)) == wanted), None)


def situation(model: PreTrainedModel, heads: MedusaHeads, settings: Settings, batch_size: int) -> dict[str, object]:
    """Describe what a calibration is valid for: machine, models, dtype, batch size, sampling options and `compile`."""
    here = machine()
    return {
        **{name: getattr(here, name) for name in ("processor", "gpu", "threads", "torch", "transformers")},
        "backbone": type(model).__name__ + f" {model.config.get_text_config(decoder=True).hidden_size}",
        "dtype": dtype_name(model.dtype),
        "attention": getattr(model.config, "_attn_implementation", None),
        "quantization": quantization_of(model),
        "amateur": None if settings.amateur is None else settings.amateur.to_dict(),
        "batch_size": batch_size,
        "acceptance": settings.rule.name,
        "repetition_penalty": settings.of_checkpoint(model.generation_config).repetition_penalty,
        **{name: getattr(settings, name) for name in OPTIONS},
        **({"numerics": settings.numerics} if settings.stable else {}),  # which earlier versions did not name
        "heads": heads_fingerprint(heads),
    }


def heads_fingerprint(heads: MedusaHeads) -> str:
    """Return a hash of up to 16 values of each parameter of the heads, and of the number of heads that share a layer.

    A layer that comes with the model has the same parameters for any number of heads, and a tree fits one number."""
    flat = [parameter.detach().flatten() for parameter in heads.parameters()]
    some = torch.cat([values[:: max(1, len(values) // 16)][:16].float().cpu() for values in flat])
    number = str(heads.config.num_heads) if heads.comes_with_model else ""
    return hashlib.sha256(some.numpy().tobytes() + number.encode()).hexdigest()[:16]


def files_for(heads_folder: Path | None) -> list[Path]:
    """List the files that may store calibrations of heads: in the heads' folder, if given, and the user's cache."""
    cache = user_cache() / FILE
    return [cache] if heads_folder is None else [heads_folder / FILE, cache]


def stored(places: Sequence[Path], wanted: dict[str, object]) -> Calibration | None:
    """Load the first calibration in the files `places` whose `situation` equals `wanted`; `None` if there is none."""
    found = next((entry for entry in _entries(places) if entry["holds_for"] == wanted), None)
    return None if found is None else TypeAdapter(Calibration).validate_python(found)


def stored_fit(tree: DynamicTree, places: Sequence[Path], heads: MedusaHeads) -> Layout | None:
    """Give `tree` the temperatures and the number of candidates that a calibration in the files `places` found.

    That is the first calibration of `heads`, in any situation; `None` if there is none."""
    fingerprint = heads_fingerprint(heads)
    for entry in _entries(places):
        if entry["holds_for"].get("heads") == fingerprint and entry["temperatures"]:
            return TypeAdapter(Calibration).validate_python(entry).fit(tree)
    return None


def calibrations_of(folder: Path) -> list[Json]:
    """Load the calibrations in a folder of heads as JSON, except those made with other weights of the heads."""
    return _made_with(MedusaHeads.from_pretrained(folder), [folder / FILE])


def calibrations_for(heads: MedusaHeads, folder: Path | None) -> list[Calibration]:
    """Load the calibrations of these heads in their `folder` and in the user's cache."""
    return [TypeAdapter(Calibration).validate_python(entry) for entry in _made_with(heads, files_for(folder))]


def _made_with(heads: MedusaHeads, places: Sequence[Path]) -> list[Json]:
    """Return the calibrations in the files `places` that were made with these heads."""
    kept = list(_entries(places))
    # The fingerprint is that of heads in the dtype of the backbone.
    dtypes = {entry["holds_for"]["dtype"] for entry in kept}
    prints = {dtype: heads_fingerprint(copy.deepcopy(heads).to(DTYPES[dtype])) for dtype in dtypes}
    return [entry for entry in kept if entry["holds_for"]["heads"] == prints[entry["holds_for"]["dtype"]]]


def _entries(places: Sequence[Path]) -> Iterator[Any]:
    """Yield the calibrations in the files `places` as parsed JSON."""
    for place in filter(Path.is_file, places):
        yield from read_json(place)


def store(places: Sequence[Path], calibration: Calibration) -> Path:
    """Store a calibration in the first file in `places` that can be written, and return the path of this file.

    It replaces an earlier calibration of the same situation. Raises OSError if no file can be written."""
    place, *others = places
    try:
        kept = [entry for entry in _entries([place]) if entry["holds_for"] != calibration.holds_for]
        write_json(place, [*kept, asdict(calibration)])
    except OSError:
        if not others:
            raise
        return store(others, calibration)
    return place
