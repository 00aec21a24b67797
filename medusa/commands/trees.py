"""The tree in which a command arranges the guesses of heads: the one asked for, the heads' own, or a calibrated one.

A calibration may also choose another drafter: n-grams, or a mix of heads and n-grams."""

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

HEADS = "heads"  # the drafter that uses the heads alone


def choose_tree(command: CommandOptions, loaded: Loaded, heads: MedusaHeads, settings: Settings) -> Layout:
    """Return the tree for drafts of the heads alone; see `choose_drafter`."""
    tree, _ = choose_drafter(command, loaded, heads, settings, heads_only=True)
    return tree


def choose_drafter(
    command: CommandOptions, loaded: Loaded, heads: MedusaHeads, settings: Settings, heads_only: bool = False
) -> tuple[Layout, str]:
    """Return the tree of --tree, else the tree saved with the heads, else `auto`, and the drafter that uses it.

    The drafter is written as in --drafter. `auto` is the fastest tree and drafter by a calibration on this machine.
    Without a stored calibration, `auto` calibrates on texts that the backbone generates, never on the prompts. If these
    texts are too short for a calibration, the default tree is used (`default_tree`), and nothing is stored. For
    compiled steps, a calibration with compiled steps is needed; without one, a note says that eager ones decide.
    Raise RequestError if the tree does not exist, or needs more heads or more guesses of a head than there are."""
    if command.models.tree != "auto" and (command.models.tree is not None or heads.config.tree):
        tree = resolve_tree(command.models.tree, heads)
        vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
        tree.candidates.require_fit(heads.config.num_heads, heads.config.draft_vocab_size(vocab_size))
        return (fitted(tree, command, loaded, heads, settings) if isinstance(tree, DynamicTree) else tree), HEADS
    require_tree_forward(loaded.model)
    note, kept, size = command.output.note, "", command.batch_size
    files, calibrating = files_for(heads_folder(command.models.heads)), calibration_of(command, heads)
    found = stored(files, situation(loaded.model, heads, settings, size))
    if found is None and settings.compile:
        note(
            "no calibration with compiled steps, so the tree is the one that is fastest in eager steps; "
            f"{calibrating} --compile finds the fastest in compiled steps (takes minutes)"
        )
        settings = replace(settings, compile=False)
        found = stored(files, situation(loaded.model, heads, settings, size))
    if found is None:
        try:
            with command.output.stage("choosing a tree"):
                texts = own_texts(loaded.model, settings, loaded.bos_token_id)
                found = calibrate.calibrate(loaded.model, heads, texts, settings, size, rounds=2)
        except TooFewStepsError:
            return uncalibrated(default_tree(heads), command, heads), HEADS
        kept = f"; calibrated now, saved in {store(files, found)}"
    best = found.of_heads if heads_only else found.best
    kind = "dynamic, " if best.dynamic else ""
    other = "" if best.drafter == HEADS else f"drafter: {best.drafter}; "
    note(f"{other}tree: {kind}{best.nodes} nodes, predicted tau {best.tau:.2f}{kept}")
    return found.tree_of(best), best.drafter


def fitted(
    tree: DynamicTree, command: CommandOptions, loaded: Loaded, heads: MedusaHeads, settings: Settings
) -> Layout:
    """Give a dynamic tree the temperatures and the number of candidates of the first calibration of the heads.

    Without one, the temperatures are fitted to texts of the backbone. That takes a fraction of a calibration's time,
    and is not stored. If these texts are too short, the tree stays as it is."""
    require_tree_forward(loaded.model)
    known = stored_fit(tree, files_for(heads_folder(command.models.heads)), heads)
    if known is not None:
        return known
    with command.output.stage("fitting the tree's temperatures"):
        texts = own_texts(loaded.model, replace(settings, compile=False), loaded.bos_token_id)
        try:
            temperatures = calibrate.recording_of(loaded.model, heads, texts).fit_temperatures()
        except TooFewStepsError:
            return uncalibrated(tree, command, heads)
    keeping = f"{calibration_of(command, heads)} keeps them"
    command.output.note(f"tree: dynamic, {tree.num_nodes} nodes, with temperatures fitted now; {keeping}")
    return replace(tree, temperatures=temperatures)


def uncalibrated(tree: Layout, command: CommandOptions, heads: MedusaHeads) -> Layout:
    """Note that the tree is used as it is."""
    command.output.note(
        f"tree: {tree.num_nodes} nodes, not calibrated, because the backbone's own texts are too short; "
        f"{calibration_of(command, heads)} --prompts FILE calibrates with other texts"
    )
    return tree


def calibration_of(command: CommandOptions, heads: MedusaHeads) -> str:
    """The command that calibrates these heads: those of a folder, or a model's own layer, which has none."""
    layer = f"--backbone {command.models.backbone} --drafter mtp:{heads.config.num_heads}"
    return f"medusa calibrate {command.models.heads or layer}"


def heads_folder(name: str | None) -> Path | None:
    """Return the local folder of the heads `name`, or `None` for the demo heads and heads on the Hub."""
    return Path(name) if name is not None and name != "demo" and Path(name).is_dir() else None


def tree_json(source: DrafterFactory | None) -> object:
    """Return the tree of a drafter as JSON for the results of --json, or `None` for a drafter without a tree."""
    tree = getattr(source, "tree", None)
    return None if tree is None else tree.to_json()
