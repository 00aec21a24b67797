"""Run `medusa fit` offline on the included language model, and show a story that grows with and without heads.

  medusa demo
  medusa demo --output runs/demo --minutes 1

The model answers 120 openings of stories; heads are trained, their tree is chosen, and the speedup is measured. Every
stage prints the command that runs it alone. The demo takes about five minutes on two CPU cores."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from decode.settings import Settings
from medusa.commands.fit import fit
from medusa.commands.fit.options import FitOptions
from medusa.commands.options import CommandOptions, Models, Output, Prompts, RuntimeOptions
from medusa.files import ASSETS
from medusa.options import LoadOptions, Options, count, group, option

if TYPE_CHECKING:
    from medusa.commands.fit.state import FitState

STORY_TOKENS = 160


class DemoOptions(Options):
    """Options of `medusa demo`."""

    shown = "output overwrite minutes max-new-tokens device dtype threads seed json quiet"
    out: str = option("medusa-demo", "write text, heads and report to DIR", metavar="DIR", name="output")
    overwrite: bool = option(False, "delete an earlier demo in DIR and start again")
    minutes: float = option(
        2.4, "generate text and train for M minutes in total", "above 0", lambda value: 0 < value < float("inf"), "M"
    )
    tokens: int = count(256, "generate at most N tokens of text per answer", name="max_new_tokens")
    load: LoadOptions = group(LoadOptions, "loading", only=("dtype", "device", "attention"))
    runtime: RuntimeOptions = group(RuntimeOptions, "runtime")
    output: Output = group(Output, "output")

    def fit_options(self) -> FitOptions:
        """Return the options of `medusa fit` for the demo."""
        return FitOptions(
            model="demo",
            prompts=Prompts(prompts=str(ASSETS / "openings.jsonl")),
            out=self.out,
            minutes=self.minutes,
            overwrite=self.overwrite,
            tokens=self.tokens,
            compile=False,  # compiling would take longer than the rest of the demo
            load=self.load,
            runtime=self.runtime,
            output=self.output,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fit_options()  # checks the folder


def run(options: DemoOptions) -> None:
    from medusa.commands.fit.conclusion import conclude

    asked, console = options.fit_options(), options.output.console
    console.print(
        "[bold]The model[/bold]: a Llama that writes children's stories, shipped with this package.\n", highlight=False
    )
    state = fit(asked)
    assert state is not None, "the demo does not stop after the plan"
    show_story(asked, state)
    conclude(asked, state)


def show_story(options: FitOptions, state: FitState) -> None:
    """Generate the story of a prompt set aside with and without heads, and show both side by side."""
    from medusa.commands.fit.stages import TEST
    from medusa.commands.models import open_models
    from medusa.commands.stories import Story, play

    settings, console = Settings(max_new_tokens=STORY_TOKENS), options.output.console
    prompts = replace(options.prompts, prompts=str(state.work / TEST), max_prompts=1)
    models = Models(backbone=options.model, heads=str(options.folder), tree="auto")
    command = CommandOptions(
        models=models, load=options.load, settings=settings, runtime=options.runtime, output=options.output
    )
    console.print("\n[bold cyan]The same story, generated with and without heads[/bold cyan]")
    opened = open_models(command, prompts.read(), [None])
    (prompt,) = opened.prompts
    plain = Story("without heads", replace(opened.generator, source=None), prompt)
    fast = Story("with heads", opened.generator, prompt)
    play(console, [plain, fast])
    equal = "yes" if plain.result.new_ids == fast.result.new_ids else "NO"
    console.print(f"    [green]green[/green]: drafted tokens that the model accepted. Equal texts: {equal}")
