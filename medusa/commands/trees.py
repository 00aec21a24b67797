"""The tree in which a command arranges the guesses of heads: the one asked for, the heads' own, or a calibrated one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from decode.bench.calibration import calibrate
from decode.bench.calibration.recording import own_texts
from decode.bench.calibration.stored import TooFewStepsError, files_for, situation, store, stored, stored_fit
from decode.drafters.base import DrafterFactory
from decode.drafters.layouts import DynamicTree, Layout, default_tree, resolve_tree
from decode.settings import Settings
from decode.tree_check import require_tree_forward
from medusa.commands.options import CommandOptions
from medusa.heads.independent import MedusaHeads
from medusa.loading import Loaded


def choose_tree(command: CommandOptions, loaded: Loaded, heads: MedusaHeads, settings: Settings) -> Layout:
    """Return the tree of --tree, else the tree saved with the heads, else `auto`, a tree calibrated on this machine.

    Without a stored calibration, `auto` calibrates on texts that the backbone generates, never on the prompts. If these
    texts are too short for a calibration, the default tree is used (`default_tree`), and nothing is stored. For
    compiled steps, a calibration with compiled steps is needed; without one, a note says that eager ones decide.
    Raise RequestError if the tree does not exist, or needs more heads or more guesses of a head than there are."""
    asked: DynamicTree | None = None
    if command.models.tree != "auto" and (command.models.tree is not None or heads.config.tree):
        tree = resolve_tree(command.models.tree, heads)
        vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
        tree.candidates.require_fit(heads.config.num_heads, heads.config.draft_vocab_size(vocab_size))
        if not isinstance(tree, DynamicTree):
            return tree
        asked = tree
    require_tree_forward(loaded.model)
    name = command.models.heads  # of the folder that `medusa calibrate` takes; a model's own layer has none
    files = files_for(heads_folder(name))
    if asked is not None and (fitted := stored_fit(asked, files, heads)) is not None:
        return fitted
    note, kept = command.output.note, ""
    layer = f"--backbone {command.models.backbone} --drafter mtp:{heads.config.num_heads}"
    calibrating = f"medusa calibrate {name or layer}"
    found = stored(files, situation(loaded.model, heads, settings, command.batch_size))
    if found is None and settings.compile:
        note(
            "no calibration with compiled steps, so the tree is the one that is fastest in eager steps; "
            f"{calibrating} --compile finds the fastest in compiled steps (takes minutes)"
        )
        settings = replace(settings, compile=False)
        found = stored(files, situation(loaded.model, heads, settings, command.batch_size))
    if found is None:
        try:
            with command.output.stage("choosing a tree"):
                texts = own_texts(loaded.model, settings, loaded.bos_token_id)
                found = calibrate.calibrate(loaded.model, heads, texts, settings, command.batch_size, rounds=2)
        except TooFewStepsError:
            tree = asked or default_tree(heads)
            note(
                f"tree: {tree.num_nodes} nodes, not calibrated, because the backbone's own texts are too short; "
                f"{calibrating} --prompts FILE calibrates with other texts"
            )
            return tree
        kept = f"; calibrated now, saved in {store(files, found)}"
    if asked is not None:  # a calibration also fits the temperatures of dynamic trees and the number of candidates
        note(f"tree: dynamic, {asked.num_nodes} nodes{kept}")
        return found.fit(asked)
    best, kind = found.best, "dynamic, " if found.best.dynamic else ""
    note(f"tree: {kind}{best.nodes} nodes, predicted tau {best.tau:.2f}{kept}")
    return found.tree


def heads_folder(name: str | None) -> Path | None:
    """Return the local folder of the heads `name`, or `None` for the demo heads and heads on the Hub."""
    return Path(name) if name is not None and name != "demo" and Path(name).is_dir() else None


def tree_json(source: DrafterFactory | None) -> object:
    """Return the tree of a drafter as JSON for the results of --json, or `None` for a drafter without a tree."""
    tree = getattr(source, "tree", None)
    return None if tree is None else tree.to_json()
