"""Train heads on a frozen backbone. A recipe, a YAML file, describes the run; `key=value` overrides any of its keys.

  medusa train medusa1
  medusa train medusa1 backbone=org/model data=own.jsonl
  medusa train medusa1 training.learning_rate=1e-3 --resume

Only the heads are trained and saved. Ctrl-C saves a checkpoint, and --resume continues from it. --inspect shows the
tokens that the heads would learn from the data. It does not train, and does not load the weights of the backbone:

  medusa train medusa1 data=own.jsonl --inspect
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Self

from medusa.commands.inputs import require_recipe_inputs
from medusa.commands.options import Output, RuntimeOptions
from medusa.commands.prompting import template_option
from medusa.errors import Interrupted, RequestError
from medusa.options import REQUIRED, Options, count, group, option
from medusa.records.template import template_options
from train.recipe_file import read_recipe


class TrainOptions(Options):
    shown = "config overrides resume overwrite inspect plan threads json quiet"
    config: str = option(
        REQUIRED,
        "read the backbone, data, output_dir, heads and training arguments from this YAML file; or take a recipe that "
        "is shipped: medusa1, medusa2, mtp, paper_medusa1_7b or paper_medusa2_7b",
        brief="use this YAML file, or a shipped recipe such as medusa1",
        metavar="RECIPE",
        positional=True,
    )
    overrides: tuple[str, ...] = option(
        (),
        "override a key of the file, for example heads.num=5",
        metavar="key=value",
        brief="set a key of the recipe, such as heads.num=5",
        positional=True,
        nargs="*",
    )
    resume: bool = option(False, "continue from the last checkpoint in output_dir")
    overwrite: bool = option(False, "replace the heads in output_dir")
    inspect: int | None = count(
        None,
        "show the tokens to learn in N examples (default: 3) and count the data; do not train",
        brief="show the tokens to learn in N examples",
        nargs="?",
        const=3,
    )
    ids: bool = option(False, "with --inspect: print a line for every token")
    template_option: tuple[str, ...] = template_option()
    plan: bool = option(
        False,
        "report, without training, the disk space of cache_features and the time it saves",
        brief="report the cost of cache_features, without training",
    )
    runtime: RuntimeOptions = group(RuntimeOptions, "runtime", only=("threads",))
    output: Output = group(Output, "output")

    def completed(self) -> Self:
        """Return the options, if the recipe can be read, and all inputs that it names exist."""
        require_recipe_inputs(read_recipe(self.config, list(self.overrides)))
        return self

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ids and not self.inspect:
            raise RequestError("--ids shows the tokens of --inspect; add --inspect, or leave it out")
        if self.inspect and self.plan:
            raise RequestError("--inspect and --plan each replace training; leave one out")


def run(options: TrainOptions) -> None:
    from train.checkpoints import whole_checkpoints
    from train.data.preview import preview, show
    from train.recipe import load_recipe
    from train.run import plan_features, train

    config, output = load_recipe(options.config, list(options.overrides)), options.output
    for data in filter(None, (config.data, config.eval_data)):
        data.template_options |= template_options(options.template_option)
    RuntimeOptions(seed=int(config.training.get("seed", 42)), threads=options.runtime.threads).prepare()
    if options.inspect:
        found = preview(config, options.inspect)
        show(found, output.console, ids=options.ids)
        figures = found.to_dict()
    elif options.plan:
        figures = plan_features(config, output.quiet).to_dict()
    else:
        try:
            figures = train(config, resume=options.resume, overwrite=options.overwrite, quiet=output.quiet).to_dict()
        except Interrupted as stopped:
            resumable = bool(whole_checkpoints(Path(config.output_dir)))
            way_on = f"continue with: {command_to_continue(output.command_line, resumable)}"
            raise Interrupted(stopped.number, f"{stopped.saved}{stopped.saved and '; '}{way_on}") from None
    if os.environ.get("RANK", "0") == "0":  # only one of several processes writes
        output.write(figures)


def command_to_continue(command_line: str, resumable: bool) -> str:
    """Return the command line that continues an interrupted run: with --resume if the run has saved a checkpoint."""
    words = shlex.split(command_line)
    if resumable:
        words = [word for word in words if not (word.startswith("--o") and "--overwrite".startswith(word))]
        words += [] if "--resume" in words else ["--resume"]
    return shlex.join(words)
