"""The whole story in one command, offline: a small language model writes its own training text, heads are trained on
it for three minutes, and the same stories come out sooner.

  medusa demo
  medusa demo --output runs/demo --minutes 1

Four stages, each with the command that runs it alone. Takes under six minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.commands import common, distill
from medusa.errors import RequestError
from medusa.files import ASSETS, write_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from decode.bench.figures import BenchmarkResult
    from decode.bench.methods import Method
    from decode.results import Result
    from medusa.heads.independent import MedusaHeads
    from medusa.loading import Loaded

TEXTS, TEXT_TOKENS, TEMPERATURE = 384, 256, 0.7
WRITING_SECONDS = 50  # at most; a slower machine trains on less text
SLOWER = 10  # the story is shown this many times slower than it was written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", default="medusa-demo", metavar="DIR", help="default: ./%(default)s")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier demo left there")
    parser.add_argument("--minutes", type=float, default=3.0, metavar="M", help="of training (default: %(default)g)")
    parser.add_argument(
        "--texts", type=common.positive, default=TEXTS, metavar="N", help="it writes to train on (default: %(default)s)"
    )
    parser.add_argument("--prompts", metavar="FILE", help="benchmark on these (default: 24 of ours)")
    parser.add_argument("--max-prompts", type=common.positive, metavar="N", help="the first N of them only")
    parser.add_argument("--split", default="train", help=argparse.SUPPRESS)
    common.add_machine(parser)
    parser.set_defaults(backbone="demo", revision=None, trust_remote_code=False, heads=None)


def run(args: argparse.Namespace) -> None:
    if not args.minutes > 0:
        raise RequestError(f"--minutes is {args.minutes:g}; it must be above 0")
    common.check_output(args.json)
    output = Path(args.output)
    if output.exists() and not args.overwrite:
        raise RequestError(f"{output} exists already; choose another place with --output or add --overwrite")
    if args.prompts is None:
        args.prompts = str(ASSETS / "prompts.jsonl")
    records = common.read_prompts(args)

    from medusa.records.record import prompt_ids

    common.prepare_machine(args)
    console = common.output_console(args)
    loaded = common.open_backbone(args)
    console.print(
        f"[bold]The backbone[/bold]: a Llama of {loaded.model.num_parameters():,} parameters that writes children's "
        "stories, shipped with this package.\n"
    )
    output.mkdir(parents=True, exist_ok=True)
    text = write(args, console, loaded, output)
    heads = fit(args, console, loaded, text, output)
    prompts = [prompt_ids(record, loaded.tokenizer) for record in records]
    tell(args, console, loaded, heads, prompts[0])
    result = measure(args, console, loaded, heads, prompts, [record.category for record in records], output)
    finish(console, result, output)
    common.write_results(args, result.to_json())


def stage(console: Console, number: int, title: str, command: str) -> None:
    console.print(f"[bold cyan]{number}/4 {title}[/bold cyan]")
    console.print(f"    alone: [dim]{command}[/dim]", soft_wrap=True, highlight=False)


def write(args: argparse.Namespace, console: Console, loaded: Loaded, output: Path) -> Path:
    """Stage 1: training text in the backbone's own words."""
    from decode.settings import Settings

    text = output / "own_text.jsonl"
    stage(
        console,
        1,
        "The backbone writes its own training text",
        f"medusa distill --backbone demo --self-talk {args.texts} --temperature {TEMPERATURE} "
        f"--max-new-tokens {TEXT_TOKENS} --batch-size 64 --ignore-eos --overwrite --output {text}",
    )
    settings = Settings(max_new_tokens=TEXT_TOKENS, temperature=TEMPERATURE, ignore_eos=True)
    text.unlink(missing_ok=True)
    args.batch_size = 64
    prompts = distill.self_talk_prompts(loaded, args.texts)
    tokens, seconds = distill.write_own_text(loaded, prompts, settings, text, args, seconds_at_most=WRITING_SECONDS)
    console.print(f"    {tokens:,} tokens in {seconds:.0f} s: {text}\n")
    return text


def fit(args: argparse.Namespace, console: Console, loaded: Loaded, text: Path, output: Path) -> MedusaHeads:
    """Stage 2: heads, trained on that text."""
    from medusa.heads.independent import MedusaHeads
    from train.recipe import parse_recipe
    from train.run import train

    folder = output / "heads"
    recipe = ASSETS / "demo.yaml"
    stage(
        console,
        2,
        f"Heads are trained on it for {args.minutes:g} minute(s); the backbone stays as it is",
        f"medusa train {recipe} data.path={text} output_dir={folder} training.max_minutes={args.minutes:g} --overwrite",
    )
    import yaml

    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    content["data"]["path"], content["output_dir"] = str(text), str(folder)
    content["training"] |= {"max_minutes": args.minutes, "seed": args.seed, "log_lines": False}
    content |= {"dtype": args.dtype, "device": args.device, "attention": args.attention}
    figures = train(parse_recipe(content, "demo"), overwrite=True, quiet=args.quiet)
    shares = ", ".join(f"head {head} {share:.0%}" for head, share in enumerate(figures.top1, 1))
    console.print(f"    {figures.steps} steps; best guesses that were right: {shares}\n")
    return MedusaHeads.from_pretrained(folder, dtype=loaded.model.dtype, device=loaded.model.device)


def tell(args: argparse.Namespace, console: Console, loaded: Loaded, heads: MedusaHeads, prompt: list[int]) -> None:
    """Stage 3: one story, side by side."""
    from decode.bench.methods import medusa_method, plain_method
    from decode.settings import Settings

    folder = Path(args.output) / "heads"
    stage(
        console,
        3,
        "The same story, plainly and with heads",
        f'medusa generate --backbone demo --heads {folder} --prompt "Once upon a time" --max-new-tokens 160',
    )
    settings = Settings(max_new_tokens=160)
    plain = Story(plain_method(loaded.model, settings), prompt, loaded.tokenizer)
    quick = Story(medusa_method(loaded.model, heads, settings), prompt, loaded.tokenizer)
    play(console, plain, quick)
    console.print(
        f"    [green]green[/green]: guessed by heads and confirmed by the backbone. Equal texts: "
        f"{'yes' if plain.result.new_ids == quick.result.new_ids else 'NO'}\n"
    )


class Story:
    """A story as it was written: what each step gave, and when."""

    def __init__(self, method: Method, prompt: list[int], tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        method([prompt], None)  # warm-up
        self.steps: list[tuple[float, list[int]]] = []
        start = time.perf_counter()
        self.result: Result = method([prompt], lambda row, ids: self.steps.append((time.perf_counter() - start, ids)))[
            0
        ]

    @property
    def tokens_per_second(self) -> float:
        return len(self.result.new_ids) / self.result.seconds

    def until(self, seconds: float) -> Text:
        """The story as far as it was written then; accepted guesses in green."""
        from rich.text import Text

        text = Text()
        ids: list[int] = []
        for at, step in self.steps:
            if at > seconds:
                break
            for index, token in enumerate(step):
                before = self.tokenizer.decode(ids, skip_special_tokens=True)
                ids.append(token)
                piece = self.tokenizer.decode(ids, skip_special_tokens=True)[len(before) :]
                text.append(piece, style="green" if index else "")
        return text


def play(console: Console, plain: Story, quick: Story) -> None:
    """Both stories being written, side by side; on anything but a terminal only how they ended."""
    from rich.columns import Columns
    from rich.live import Live
    from rich.panel import Panel

    width = max(30, console.width // 2 - 2)

    def frame(seconds: float) -> Columns:
        titles = ((plain, "one token a step"), (quick, "with heads"))
        return Columns(
            Panel(
                story.until(seconds),
                title=f"{title}: {story.tokens_per_second:.0f} tokens/s, {len(story.steps)} steps",
                width=width,
                height=2 + max(6, 1300 // width),
            )
            for story, title in titles
        )

    end = max(plain.steps[-1][0], quick.steps[-1][0])
    if console.is_terminal:
        console.print(f"    (shown {SLOWER} times slower than it was written)")
        start = time.perf_counter()
        with Live(console=console, refresh_per_second=12) as live:
            while (shown := (time.perf_counter() - start) / SLOWER) < end:
                live.update(frame(shown))
                time.sleep(0.05)
            live.update(frame(end))
    else:
        console.print(frame(end))


def measure(
    args: argparse.Namespace,
    console: Console,
    loaded: Loaded,
    heads: MedusaHeads,
    prompts: list[list[int]],
    categories: list[str | None],
    output: Path,
) -> BenchmarkResult:
    """Stage 4: the speedup."""
    from decode.bench.measure import BenchmarkJob, run_benchmark
    from decode.bench.report.terminal import print_benchmark
    from decode.drafters import drafter_factory
    from decode.drafters.base import DrafterContext
    from decode.settings import Settings

    folder = output / "heads"
    stage(
        console,
        4,
        "The speedup, measured",
        f"medusa benchmark --backbone demo --heads {folder} --prompts {args.prompts}",
    )
    source = drafter_factory("heads", DrafterContext(loaded.model, heads))
    job = BenchmarkJob(
        loaded=loaded,
        source=source,
        settings=Settings(max_new_tokens=128),
        prompts=prompts,
        categories=categories,
        heads=str(folder),
        tree=common.drafter_json(None, source)["tree"],
        seed=args.seed,
        command=shlex.join(["medusa", *args.words]),
    )
    with common.progress_bars(args) as start_progress:
        result = run_benchmark(replace(job, start_progress=start_progress))
    print_benchmark(console, result)
    write_json(output / "benchmark.json", result.to_json())
    return result


def finish(console: Console, result: BenchmarkResult, output: Path) -> None:
    figures = result.medusa
    equal = (
        "equal to plain decoding on every prompt"
        if figures.equal_to_plain == 1
        else (f"equal to plain decoding on {figures.equal_to_plain:.0%} of the prompts (see README on low precision)")
    )
    console.print(
        f"\n[bold green]{figures.speedup_vs_generate:.2f} times as fast as model.generate[/bold green] "
        f"({figures.speedup:.2f} times our own plain loop), {figures.tau:.2f} tokens a step, {equal}."
    )
    console.print(f"Heads: {output / 'heads'}    Report: {output / 'benchmark.json'}")
    console.print('Next: [dim]medusa generate --backbone demo --heads demo --prompt "Once upon a time"[/dim]')
