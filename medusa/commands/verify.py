"""Evidence that decoding with heads changes nothing: greedy texts compared, and a million draws against the target.

  medusa verify --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl
  medusa verify --backbone demo --drafter ngram --prompts medusa/assets/prompts.jsonl
  medusa verify --backbone org/model --heads org/heads --prompts own.jsonl --full --report evidence.html

Greedy: every prompt with and without heads. Sampling: for the first prompts, a million draws of the tokens after a
fixed root, by both forms of rejection, against the backbone's own distribution; the lossy rules go through the same
experiment and are seen to differ. The report is a page with tables and pictures. Exit status 1: there is evidence
against equality. The chance that draws give it where nothing is wrong is at most 1 in 10,000.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.commands import common
from medusa.errors import RequestError

if TYPE_CHECKING:
    from decode.bench.report.html import Page
    from matplotlib.figure import Figure

    from decode.bench.losslessness import Case, Greedy
    from decode.draft import DrafterFactory
    from decode.settings import Settings

TOKENS_SHOWN = 24
INK = {"backbone": "#52606d", "draft": "#f2a541", "topk": "#0b7a75", "sample": "#7a3e9d"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser, required=False)
    common.add_drafter(parser)
    common.add_amateur(parser)
    common.add_prompts(parser)
    group = parser.add_argument_group("what is tried")
    group.add_argument("--max-new-tokens", type=common.positive, default=128, metavar="N", help="greedy (default: 128)")
    group.add_argument("--batch-size", type=common.positive, default=1, metavar="N", help="greedy, with heads")
    group.add_argument("--tree", metavar="FILE|NAME", help="as for medusa generate")
    group.add_argument("--draws", type=common.positive, default=1_000_000, metavar="N", help="default: a million")
    group.add_argument(
        "--sampled-prompts", type=common.positive, default=4, metavar="N", help="drawn from (default: the first 4)"
    )
    group.add_argument("--full", action="store_true", help="temperatures 0.5, 1 and 1.5, each with top-p 1 and 0.9")
    common.add_stop_drafting(group)
    common.add_compile(group)
    group.add_argument("--epsilon", type=float, default=0.09, help="of typical acceptance (default: 0.09)")
    group.add_argument("--delta", type=float, default=0.3, help="of typical acceptance (default: 0.3)")
    group.add_argument(
        "--report", default="verify.html", metavar="FILE", help="a page with pictures (default: verify.html)"
    )
    group.add_argument("--overwrite", action="store_true", help="replace an existing report")
    common.add_machine(parser)


def run(args: argparse.Namespace) -> int:
    from decode.request import resolve_acceptance
    from medusa.files import require_absent

    resolve_acceptance("typical", True, args.epsilon, args.delta)
    resolve_acceptance("rejection", True, stop_drafting=args.stop_drafting)
    plan = common.plan_of(args, args.drafter)
    common.contrast_of(args)
    records = common.read_prompts(args)
    for path in (args.json, args.report):
        common.check_output(path)
    require_absent(Path(args.report), args.overwrite)
    common.check_models(args, plan)

    from decode.bench.losslessness import require_room
    from decode.settings import Settings
    from medusa.backbone import Backbone
    from medusa.records import prompt_ids

    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    source = common.open_source(args, loaded, plan)
    if source.num_nodes == 1:
        raise RequestError("the tree chain:0 drafts nothing, so there is nothing to verify; give a deeper one")
    settings = common.with_amateur(args, loaded, Settings(max_new_tokens=args.max_new_tokens))
    prompts = [prompt_ids(record, loaded.tokenizer) for record in records]
    common.require_fitting(prompts, loaded, settings.amateur)
    require_room(prompts[: args.sampled_prompts], Backbone(loaded.model))
    if settings.amateur is not None:
        require_room(prompts[: args.sampled_prompts], Backbone(settings.amateur.model), "amateur")
    greedy, cases = measure(args, loaded, source, prompts, settings)

    from decode.bench import losslessness as evidence

    passed = greedy.passed and evidence.passes(cases)
    content = {
        "settings": {
            "backbone": args.backbone,
            "heads": args.heads,
            **common.drafter_json(args.drafter, source),
            "amateur": None if settings.amateur is None else settings.amateur.to_dict(),
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "max_new_tokens": args.max_new_tokens,
            "batch_size": args.batch_size,
            "epsilon": args.epsilon,
            "delta": args.delta,
            "seed": args.seed,
        },
        "greedy": greedy.to_dict(),
        "sampling": {
            "draws": args.draws,
            "false_alarm_rate": evidence.FALSE_ALARM,
            "smallest_allowed_p_value": evidence.threshold(cases),
            "cases": [line for case in cases for line in case.to_dict()],
        },
        "passed": passed,
    }
    common.write_results(args, content)
    names = TokenNames(loaded.tokenizer)
    page(content["settings"], greedy, cases, passed, names).save(Path(args.report))
    show(args, content["settings"]["dtype"], greedy, cases, passed)
    return 0 if passed else 1


def measure(
    args: argparse.Namespace, loaded: Any, source: DrafterFactory, prompts: list[list[int]], settings: Settings
) -> Any:
    """Both experiments, with a bar of progress; `settings`: of greedy decoding."""
    import torch
    from rich.progress import Progress

    from decode.bench import losslessness as evidence
    from decode.bench.methods import medusa_method, plain_method

    model = loaded.model
    temperatures = (0.5, 1.0, 1.5) if args.full else (1.0,)
    targets = [(t, p) for t in temperatures for p in ((1.0, 0.9) if args.full else (1.0,))]
    chosen = list(enumerate(prompts))[: args.sampled_prompts]
    cases = []
    generator = torch.Generator(loaded.model.device).manual_seed(args.seed)
    with Progress(console=common.console(args), disable=args.quiet, transient=True) as progress:
        task = progress.add_task("greedy", total=len(prompts))
        greedy = evidence.compare_greedy(
            model,
            plain_method(model, settings, loaded.tokenizer),
            medusa_method(
                model, source.heads, replace(settings, compile=args.compile), loaded.tokenizer, drafter=source
            ),
            prompts,
            args.batch_size,
            lambda: progress.advance(task),
            settings.amateur,
        )
        rules = evidence.rules_for(source)
        task = progress.add_task("draws", total=len(chosen) * len(targets) * len(rules) * args.draws)
        for number, prompt in chosen:
            for temperature, top_p in targets:
                sampling = replace(
                    settings, temperature=temperature, top_p=top_p, epsilon=args.epsilon, delta=args.delta
                )
                experiment = evidence.Experiment(model, None, None, prompt, sampling, generator, source)
                for rule in rules:
                    cases.append(experiment.run(rule, number, args.draws, lambda n: progress.advance(task, n)))
    return greedy, cases


class TokenNames:
    """Short names of tokens for tables and pictures."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, token: int | None) -> str:
        if token is None:
            return "the end"
        text = str(token) if self.tokenizer is None else self.tokenizer.decode([token])
        return text.replace(" ", "\u00b7").replace("\n", "\u21b5") or str(token)


def page(settings: dict[str, Any], greedy: Greedy, cases: list[Case], passed: bool, names: TokenNames) -> Page:
    """The report."""
    from decode.bench.report.html import Page

    from decode.bench import losslessness as evidence

    who = f"the heads {settings['heads']}" if settings["heads"] else f"drafts by {settings['drafter']}"
    made = Page(f"Do {who} change what the backbone {settings['backbone']} says?")
    verdict = "No evidence that they do." if passed else "Yes: there is evidence against equality."
    made.text(verdict, "good" if passed else "bad")
    made.text(f"{settings['dtype']}, a tree of {settings['nodes']} nodes, seed {settings['seed']}.", "faint")
    if settings["amateur"]:
        told = ", ".join(f"{name} {value}" for name, value in settings["amateur"].items() if value is not None)
        made.text(f"What the backbone says is contrasted with an amateur throughout: {told}.", "faint")
    made.heading("Greedy")
    made.text(in_words(greedy, settings["dtype"]))
    if greedy.divergences:
        made.table(
            ["prompt", "at token", "plain", "with drafts", "gap of logits", "top-2 gap", "put down to rounding up to"],
            [
                [
                    *(str(d.prompt + 1), str(d.position + 1), names(d.plain_token), names(d.medusa_token)),
                    *("" if d.gap is None else f"{d.gap:.3g}", f"{d.top2_gap:.3g}", f"{d.bound:.3g}"),
                ]
                for d in greedy.divergences
            ],
        )
    made.heading("Sampling")
    draws = f"{cases[0].first.draws:,}"
    made.text(
        f"{draws} draws by each rule, from a fixed root, through the production acceptance code. A p-value below "
        f"{evidence.threshold(cases):.1e} in a judged row is evidence against equality; the chance of any such value "
        f"where nothing is wrong is at most {evidence.FALSE_ALARM:.0e}. 'Variation' is the total variation distance, "
        "'expected' what a true sample of this size shows. 'Tokens' 1 is the first drafted token, 2 that and the next "
        "together. A * means: against the truncated target, of which typical-sampled claims to be a sample. 'Accepted' "
        "counts drafted tokens a step from this context, by the tree's first two levels, and with draft sample by its "
        "first two children a node: it is no forecast of speed. The lossy rules are tried for comparison, not judged: "
        "'lossy' is seen to differ, 'unseen' is not in this context."
    )
    groups = dict.fromkeys((case.prompt, case.temperature, case.top_p) for case in cases)
    for key in groups:
        same = [case for case in cases if (case.prompt, case.temperature, case.top_p) == key]
        made.picture(
            draw(same, names),
            f"Prompt {key[0] + 1}, temperature {key[1]:g}, top-p {key[2]:g}. Above: the most probable first tokens; "
            "bars are the backbone's probabilities, the line is the first head's (if heads draft), marks are "
            "frequencies of what was written. Below: (frequency - probability) in standard deviations of a true "
            "sample; 95 % lie in the band.",
        )
    made.heading("All figures")
    made.table(*table(cases, evidence.threshold(cases)))
    return made


def in_words(greedy: Greedy, dtype: str) -> str:
    """The greedy outcome in one or two sentences."""
    line = f"{greedy.equal} of {greedy.prompts} texts are equal, token by token."
    if greedy.ties:
        line += (
            f" {greedy.ties} part where the two best logits lie so close that {dtype} rounding decides between them."
        )
    errors = len(greedy.divergences) - greedy.ties
    if errors:
        line += f" {errors} part where rounding cannot explain it."
    return line


def table(cases: list[Case], threshold: float) -> tuple[list[str], list[list[str]]]:
    """Head and rows."""
    head = ["rule", "draft", "prompt", "T", "top-p", "tokens", "variation", "expected", "std of difference"]
    head += ["expected", "p-value", "verdict", "accepted"]
    rows = []
    for case in cases:
        for tokens, found in ((1, case.first), (2, case.joint)):
            differs = found.p_value < threshold
            seen, unseen = ("DIFFERS", "passed") if case.rule.is_judged else ("lossy", "unseen")
            rule = case.rule.acceptance + ("*" if case.rule.against != "target" else "")
            rows.append(
                [
                    *(
                        rule,
                        case.rule.draft,
                        str(case.prompt + 1),
                        f"{case.temperature:g}",
                        f"{case.top_p:g}",
                        str(tokens),
                    ),
                    *(f"{found.total_variation:.5f}", f"{found.expected_total_variation:.5f}"),
                    *(f"{found.std_of_difference:.2e}", f"{found.expected_std:.2e}", f"{found.p_value:.2g}"),
                    seen if differs else unseen,
                    f"{case.mean_accepted:.2f}",
                ]
            )
    return head, rows


def draw(cases: list[Case], names: TokenNames) -> Figure:
    """One prompt's rejection cases in one picture: backbone, draft, frequencies; below, deviations."""
    from matplotlib.figure import Figure

    judged = [case for case in cases if case.rule.acceptance == "rejection"]
    target = judged[0].target
    shown = target.topk(min(TOKENS_SHOWN, int((target > 0).sum()))).indices
    at = range(len(shown))
    figure = Figure(figsize=(11, 4.6))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.3])
    above.bar(at, target[shown], color=INK["backbone"], alpha=0.35, label="backbone")
    if judged[0].draft is not None:
        above.plot(at, judged[0].draft[shown], color=INK["draft"], marker=".", label="draft (head 1)")
    labels = {"topk": "written, --draft topk", "sample": "written, --draft sample"}
    for place, case in enumerate(judged):
        shift = [x + 0.24 * (place - 0.5) for x in at]
        color, label = INK[case.rule.draft], labels[case.rule.draft]
        above.plot(shift, case.frequencies[shown], "_", markersize=9, markeredgewidth=2, color=color, label=label)
        deviation = (target[shown] * (1 - target[shown]) / case.first.draws).sqrt().clamp_min(1e-12)
        below.plot(shift, (case.frequencies[shown] - target[shown]) / deviation, "o", markersize=3.5, color=color)
    above.set_yscale("log")
    above.set_ylabel("probability")
    above.legend(frameon=False, fontsize=8, ncols=4, loc="upper right")
    below.axhspan(-2, 2, color=INK["topk"], alpha=0.12)
    below.set_ylim(-5, 5)
    below.set_ylabel("deviation")
    words = [names(int(token)).replace("$", "\\$") for token in shown]  # no formula to matplotlib
    below.set_xticks(list(at), words, rotation=60, ha="right", fontsize=8)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def show(args: argparse.Namespace, dtype: str, greedy: Greedy, cases: list[Case], passed: bool) -> None:
    """The outcome for people."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from decode.bench import losslessness as evidence

    console = common.output_console(args)
    console.print(f"greedy: {in_words(greedy, dtype)}")
    head, rows = table(cases, evidence.threshold(cases))
    narrow = [0, 1, 2, *((3, 4, 5) if args.full else (5, 6, 7)), 10, 11]  # of 80 letters; the page has them all
    title = f"{cases[0].first.draws:,} draws by each rule"
    shown = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left"
    )
    for column in narrow:
        shown.add_column(head[column], no_wrap=True)
    for row in rows:
        style = {"DIFFERS": "red", "passed": ""}.get(row[head.index("verdict")], "dim")
        shown.add_row(*(row[column] for column in narrow), style=style)
    console.print(shown)
    console.print(f"[bold]{'passed' if passed else 'FAILED: evidence against equality'}[/]; report: {args.report}")
