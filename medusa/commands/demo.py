"""Run the whole workflow offline: the embedded language model generates training text, heads are trained on this text,
a story is generated with and without heads, and the speedup is measured.

  medusa demo
  medusa demo --output runs/demo --minutes 1

Each of the four stages prints the command that runs it alone. The demo takes under six minutes on two CPU cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from decode.settings import Settings
from medusa.commands import benchmark
from medusa.commands.benchmark import BenchmarkOptions
from medusa.commands.distill.engines import LocalEngine
from medusa.commands.distill.journal import Journal
from medusa.commands.distill.tasks import Task
from medusa.commands.options import Models, Output, Prompts, RuntimeOptions
from medusa.errors import RequestError
from medusa.files import ASSETS, require_writable_folder, write_json
from medusa.options import LoadOptions, Options, count, group, option
from medusa.records.record import prompt_ids

if TYPE_CHECKING:
    from medusa.heads.independent import MedusaHeads
    from medusa.loading import Loaded

TEXT_TOKENS, TEMPERATURE = 256, 0.7
TEXT_SECONDS = 50  # time limit for generating text; a slower machine trains on less text


class DemoOptions(Options):
    shown = "output overwrite minutes texts prompts device dtype threads seed json quiet"
    out: str = option("medusa-demo", "write text, heads and results to this folder", metavar="DIR", name="output")
    overwrite: bool = option(False, "replace the results of an earlier demo")
    minutes: float = option(3.0, "train the heads for M minutes", "above 0", lambda value: value > 0, "M")
    texts: int = count(384, "train on N texts that the backbone generates")
    prompts: Prompts = group(Prompts, "prompts of the benchmark (default: 24 shipped prompts)", without=("prompt",))
    load: LoadOptions = group(LoadOptions, "loading", only=("dtype", "device", "attention"))
    runtime: RuntimeOptions = group(RuntimeOptions, "runtime")
    output: Output = group(Output, "output")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_writable_folder(self.out, option="--output")
        if self.folder.exists() and not self.overwrite:
            raise RequestError(f"{self.folder} exists already; choose another folder with --output or add --overwrite")

    @property
    def folder(self) -> Path:
        return Path(self.out)


def run(options: DemoOptions) -> None:
    from medusa.loading import load_backbone

    prompts = replace(options.prompts, prompts=options.prompts.prompts or str(ASSETS / "prompts.jsonl"))
    records = prompts.read()
    options.runtime.prepare()
    loaded = load_backbone("demo", options.load)
    options.output.console.print(
        f"[bold]The backbone[/bold]: a Llama of {loaded.model.num_parameters():,} parameters that writes children's "
        "stories, shipped with this package.\n"
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    heads = train_heads(options, loaded, generate_text(options, loaded))
    show_stories(options, loaded, heads, prompt_ids(records[0], loaded.tokenizer))
    measure(options, prompts)


def print_stage(options: DemoOptions, title: str, command: str) -> None:
    """Print the title of a stage, and the command that runs this stage alone."""
    console = options.output.console
    console.print(f"[bold cyan]{title}[/bold cyan]")
    console.print(f"    this stage alone: [dim]{command}[/dim]", soft_wrap=True, highlight=False)


def generate_text(options: DemoOptions, loaded: Loaded) -> Path:
    """Stage 1: let the backbone generate training text, and return the path of the text."""
    from decode.bench.methods import transformers_method
    from medusa.backbone import Backbone

    text = options.folder / "own_text.jsonl"
    print_stage(
        options,
        "1/4 The backbone generates its own training text",
        f"medusa distill --backbone demo --self-talk {options.texts} --temperature {TEMPERATURE} "
        f"--max-new-tokens {TEXT_TOKENS} --batch-size 64 --ignore-eos --overwrite --output {text}",
    )
    settings = Settings(max_new_tokens=TEXT_TOKENS, temperature=TEMPERATURE, ignore_eos=True)
    method = transformers_method(loaded.model, settings, loaded.tokenizer)
    about = settings, options.runtime.seed, loaded.name, loaded.tokenizer, loaded.bos_token_id
    engine = LocalEngine(*about, Backbone(loaded.model), method, 64, TEXT_SECONDS)
    tasks = [Task(index, f"text {index + 1}", engine.begin()) for index in range(options.texts)]
    text.unlink(missing_ok=True)
    journal = Journal(text, tasks)
    with journal.opened(options.output):
        seconds = engine.write(journal)
    options.output.console.print(f"    {journal.new_tokens:,} tokens in {seconds:.0f} s: {text}\n")
    return text


def train_heads(options: DemoOptions, loaded: Loaded, text: Path) -> MedusaHeads:
    """Stage 2: train heads on the text, and return the heads."""
    from medusa.heads.independent import MedusaHeads
    from train.callbacks import top1_shares
    from train.recipe import parse_recipe
    from train.run import train

    recipe, folder = ASSETS / "demo.yaml", options.folder / "heads"
    print_stage(
        options,
        f"2/4 Heads are trained on this text for {options.minutes:g} minute(s); the backbone does not change",
        f"medusa train {recipe} data.path={text} output_dir={folder} training.max_minutes={options.minutes:g} "
        "--overwrite",
    )
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    content["data"]["path"], content["output_dir"] = str(text), str(folder)
    content["training"] |= {"max_minutes": options.minutes, "seed": options.runtime.seed, "log_lines": False}
    content |= {name: getattr(options.load, name) for name in ("dtype", "device", "attention")}
    figures = train(parse_recipe(content, "demo"), overwrite=True, quiet=options.output.quiet)
    shares = ", ".join(f"head {head} {share:.0%}" for head, share in enumerate(top1_shares(figures.heads), 1))
    options.output.console.print(f"    {figures.steps} steps; share of best guesses that were right: {shares}\n")
    return MedusaHeads.from_pretrained(folder, dtype=loaded.model.dtype, device=loaded.model.device)


def show_stories(options: DemoOptions, loaded: Loaded, heads: MedusaHeads, prompt: list[int]) -> None:
    """Stage 3: generate a story with and without heads, and show both side by side."""
    from decode.bench.methods import medusa_method, plain_method
    from medusa.commands.stories import Story, play

    folder = options.folder / "heads"
    command = f'medusa generate --backbone demo --heads {folder} --prompt "Once upon a time" --max-new-tokens 160'
    print_stage(options, "3/4 The same story, generated with and without heads", command)
    assert loaded.tokenizer is not None
    settings, console = Settings(max_new_tokens=160), options.output.console
    plain = Story("without heads", plain_method(loaded.model, settings), prompt, loaded.tokenizer)
    fast = Story("with heads", medusa_method(loaded.model, heads, settings), prompt, loaded.tokenizer)
    play(console, [plain, fast])
    equal = "yes" if plain.result.new_ids == fast.result.new_ids else "NO"
    console.print(f"    [green]green[/green]: drafted tokens that the backbone accepted. Equal texts: {equal}\n")


def measure(options: DemoOptions, prompts: Prompts) -> None:
    """Stage 4: measure the speedup of decoding with heads on the prompts, and write and print the results."""
    heads = options.folder / "heads"
    command = f"medusa benchmark --backbone demo --heads {heads} --prompts {prompts.prompts}"
    print_stage(options, "4/4 The speedup is measured", command)
    models, load, output = Models(backbone="demo", heads=str(heads)), options.load, options.output
    asked = BenchmarkOptions(models=models, prompts=prompts, load=load, runtime=options.runtime, output=output)
    result, _ = benchmark.measure(asked, [], calibrates=False)
    console, report = output.console, options.folder / "benchmark.json"
    write_json(report, result.to_json())
    figures, equal = result.medusa, "equal to plain decoding on every prompt"
    if figures.equal_to_plain != 1:
        equal = f"equal to plain decoding on {figures.equal_to_plain:.0%} of the prompts (see README on low precision)"
    console.print(
        f"\n[bold green]{figures.speedup_vs_generate:.2f} times as fast as model.generate[/bold green] "
        f"({figures.speedup:.2f} times our own plain loop), {figures.tau:.2f} tokens a step, {equal}."
    )
    console.print(f"Heads: {heads}    Report: {report}")
    console.print('Next: [dim]medusa generate --backbone demo --heads demo --prompt "Once upon a time"[/dim]')
    output.write(result.to_json())
