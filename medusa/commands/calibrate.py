"""Find the fastest tree for these heads on this machine, and save the tree for --tree auto.

  medusa calibrate demo --prompts demo
  medusa calibrate runs/heads --batch-size 8 --plot calibration.png

The backbone continues the prompts. Without prompts, it generates whole texts. The command counts the right guesses of
the heads in these texts, builds trees of several sizes from the counts, and times one step of each tree. It saves the
tree with the highest estimated speed in tokens per second. A tree of one node means that plain decoding is fastest. A
quarter of the texts is held out, to measure tau (the mean number of tokens per step) with the saved tree."""

from __future__ import annotations

from dataclasses import asdict

from decode.settings import Settings
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, Models, Prompts
from medusa.errors import RequestError
from medusa.files import require_picture
from medusa.options import REQUIRED, count, group, option

DRAFTING = ("acceptance", "draft", "stop_drafting", "epsilon", "delta")


class CalibrateOptions(CommandOptions):
    shown = "heads prompts max-prompts temperature batch-size rounds plot backbone device dtype threads json"
    models: Models = group(Models, "models", only=("backbone", "heads"), heads=REQUIRED)
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
        require_picture(self.plot, "--plot")
        if self.settings.compile:
            raise RequestError(
                "--compile would compile every tree that is tried, for minutes; leave it out: --tree auto uses "
                "the tree found here with --compile, too; medusa benchmark --compile measures a tree that you name"
            )


def run(options: CalibrateOptions) -> None:
    from decode.bench.calibration.calibrate import calibrate
    from decode.bench.calibration.recording import continued_texts, own_texts
    from decode.bench.calibration.stored import files_for, store
    from decode.bench.methods import medusa_method, one_by_one
    from decode.bench.report.terminal import print_calibration
    from decode.results import tau
    from medusa.commands import models

    output, seed = options.output, options.runtime.seed
    records = options.prompts.read() if options.prompts.prompts else []
    opened = models.open_models(options, records, [None], calibrates=False)
    loaded, settings, prompts, heads = opened.loaded, opened.settings, opened.prompts, opened.drafters[0].heads
    models.hint_at_bfloat16(loaded, output)
    model, tokenizer = loaded.model, loaded.tokenizer
    assert heads is not None  # --heads is required
    with output.stage("generating") as status:
        if prompts:
            texts = continued_texts(model, tokenizer, prompts, settings, seed)
        else:
            texts = own_texts(model, settings, loaded.bos_token_id)
        held_out = [prompt for prompt, _ in texts[3::4]]
        kept = [text for index, text in enumerate(texts) if index % 4 != 3] or texts
        found = calibrate(model, heads, kept, settings, options.batch_size, None, options.rounds, status.update)
        status.update("measuring tau")
        seeds, measured = [seed] * len(held_out), None
        if held_out:
            method = medusa_method(model, heads, settings, tokenizer, found.tree)
            measured = tau(one_by_one(method, held_out, seeds))
    found.texts.source = options.prompts.prompts or found.texts.source
    place = store(files_for(models.heads_folder(options.models.heads)), found)
    print_calibration(output.console, found, measured, place)
    if options.plot:
        from decode.bench.report.plots import calibration_plot

        calibration_plot(found).savefig(options.plot, dpi=140, bbox_inches="tight")
    output.write(asdict(found) | {"measured_tau": measured, "kept_in": str(place)})
