"""Find the fastest tree for these heads on this machine, and save the tree for --tree auto.

  medusa calibrate demo --prompts demo
  medusa calibrate runs/heads --batch-size 8 --plot calibration.png
  medusa calibrate --backbone org/model --drafter mtp:3

The backbone continues the prompts. Without prompts, it generates whole texts. The command counts the right guesses of
the heads in these texts, builds trees of several sizes from the counts, and times one step of each tree. It saves the
tree with the highest estimated speed in tokens per second. A tree of one node means that plain decoding is fastest.
N-grams of the text, alone and in one tree with the heads, take part; --tree auto uses them if they are fastest. A
quarter of the texts is held out, to measure tau (the mean number of tokens per step) with the choice.

With --compile, it times compiled steps, for --tree auto --compile. Compiling the steps of every tree takes minutes.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from decode.settings import Settings
from medusa.commands.effects import require_distinct
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, ModelsWithHeads, Prompts, warn_of_copies
from medusa.errors import RequestError
from medusa.files import replacing, require_picture
from medusa.options import count, group, option

if TYPE_CHECKING:
    from decode.bench.calibration.stored import Calibration

DRAFTING = ("acceptance", "draft", "stop_drafting", "epsilon", "delta")


class CalibrateOptions(CommandOptions):
    shown = "heads prompts max-prompts drafter temperature batch-size rounds plot backbone device dtype threads json"
    models: ModelsWithHeads = group(ModelsWithHeads, "models", without=("tree",))
    prompts: Prompts = group(Prompts, "prompts", without=("prompt",))
    settings: Settings = group(Settings, "generation", without=DRAFTING, max_new_tokens=128)
    batch_size: int = count(
        1, "find the fastest tree for decoding N texts at a time", brief="find the tree for batches of N texts"
    )
    contrasting: Contrasting = NO_CONTRAST
    rounds: int = count(3, "time every tree N times")
    plot: str | None = option(
        None,
        "plot tau, step time and speed over the number of nodes",
        metavar="FILE.png",
        brief="plot tau, step time and speed over the nodes",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None:
            require_distinct(json=self.output.json, plot=self.plot)
        require_picture(self.plot, "--plot")


def require_enough(prompts: int, max_new_tokens: int) -> None:
    """Raise a RequestError if `prompts` prompts cannot give a calibration enough steps, however the texts end."""
    from decode.bench.calibration.stored import MIN_STEPS

    most = (prompts - prompts // 4) * max_new_tokens  # a quarter of the texts is held out
    if most < MIN_STEPS:
        raise RequestError(
            f"a calibration needs at least {MIN_STEPS} steps, and {prompts} prompts with --max-new-tokens "
            f"{max_new_tokens} give at most {most}; give more prompts or a larger --max-new-tokens"
        )


def run(options: CalibrateOptions) -> None:
    find_tree(options)


def find_tree(options: CalibrateOptions) -> Calibration:
    """Find, store and print the fastest tree. Raise TooFewStepsError if the texts are too few or too short."""
    from decode.bench.calibration.calibrate import calibrate
    from decode.bench.calibration.recording import continued_texts, own_texts
    from decode.bench.calibration.stored import files_for, store
    from decode.bench.measure import prompts_hash
    from decode.bench.methods import medusa_method, one_by_one
    from decode.bench.report.terminal import print_calibration
    from decode.texts import TextGenerator, tau
    from medusa.commands import models
    from medusa.commands.trees import heads_folder

    output, seed = options.output, options.runtime.seed
    records = options.prompts.read() if options.prompts.prompts else []
    if records:
        require_enough(len(records), options.settings.max_new_tokens)
    opened = models.open_models(
        options, records, [options.models.drafter], calibrates=False, skip_long=options.prompts.skip_long
    )
    loaded, settings, prompts, heads = opened.loaded, opened.settings, opened.prompts, opened.drafters[0].heads
    model, tokenizer = loaded.model, loaded.tokenizer
    assert heads is not None  # the drafter is `heads` or `mtp`
    eager = replace(settings, compile=False)  # only the timing needs compiled steps
    warn_of_copies(prompts, settings)
    with output.stage("generating") as status:
        if settings.compile:  # fails now, not after the texts; the timing uses this step again
            begin, first = [[loaded.bos_token_id or 0]] * options.batch_size, replace(settings, max_new_tokens=2)
            medusa_method(model, heads, replace(first, ignore_eos=True, stop=()), tree="chain:0")(begin)
        if prompts:
            texts = continued_texts(model, tokenizer, prompts, eager, seed)
        else:
            texts = own_texts(model, eager, loaded.bos_token_id)
        held_out = [prompt for prompt, _ in texts[3::4]]
        kept = [text for index, text in enumerate(texts) if index % 4 != 3]
        found = calibrate(model, heads, kept, settings, options.batch_size, None, options.rounds, status.update)
        status.update("measuring tau")
        seeds, measured = [seed] * len(held_out), None
        if held_out:
            method = TextGenerator(model, eager, tokenizer, found.source(model, heads))
            measured = tau(one_by_one(method, held_out, seeds))
    if asked := options.prompts.prompts:
        found.texts.source = Path(asked).name if Path(asked).exists() else asked
        found.texts.prompts_sha256 = prompts_hash(prompts)
    place = store(files_for(heads_folder(options.models.heads)), found)
    print_calibration(output.console, found, measured, place)
    if options.plot:
        from decode.bench.report.plots import calibration_plot

        picture, kind = Path(options.plot), Path(options.plot).suffix[1:]
        with replacing(picture) as temporary:
            calibration_plot(found).savefig(temporary, format=kind, dpi=140, bbox_inches="tight")
    output.write(asdict(found) | {"measured_tau": measured, "kept_in": str(place)})
    return found
