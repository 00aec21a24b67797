"""Let the backbone write its own training data: heads learn to guess what it says, not what a data set says.

  medusa distill --backbone org/model --prompts questions.jsonl --output own.jsonl
  medusa distill --backbone demo --self-talk 500 --temperature 1 --output own.jsonl
  medusa distill --backbone org/model --prompts chats.jsonl --server http://localhost:8000 --output own.jsonl

Every question of a conversation is answered in its turn, with the backbone's own answers before it. A line of the
output holds one answer: `index` and `turn`, `input_ids` (prompt and answer) and how many of them are the prompt's, the
answer's text and why it ended. An interrupted run goes on where it stopped; what failed is named in F.failed.jsonl, and
tried again by the same command.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.commands import common
from medusa.commands.distill.engines import LocalEngine, ServerEngine, begin_with
from medusa.commands.distill.journal import Journal
from medusa.commands.distill.tasks import Task, digest, tasks_of
from medusa.errors import RequestError, RunError
from medusa.files import disk_may_fill, free_bytes, read_json, readable, write_json
from medusa.records.record import Record
from medusa.records.sources import SETTINGS, read_records

if TYPE_CHECKING:
    from decode.settings import Settings
    from medusa.loading import Loaded

BYTES_PER_LINE = 100  # without its tokens
BYTES_PER_TOKEN = 12  # in a line: an id, a comma, a space, and the token's text once more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser, required=False)
    common.add_prompts(parser, text=False)
    group = parser.add_argument_group("what to write")
    group.add_argument("--output", required=True, metavar="F.jsonl", help="where the data goes")
    group.add_argument("--overwrite", action="store_true", help="start anew where the output exists")
    group.add_argument(
        "--self-talk", type=common.positive, metavar="N", help="N texts from nothing but the BOS token, no prompts"
    )
    group.add_argument(
        "--self-talk-seeds", metavar="FILE", help="begin them as the texts in FILE do, in turn, instead of with BOS"
    )
    group.add_argument(
        "--prefix-tokens", type=common.positive, metavar="K", help="give only the first K tokens of a prompt or seed"
    )
    group.add_argument("--max-turns", type=common.positive, metavar="N", help="answer the first N questions of each")
    server = parser.add_argument_group("another engine", "the backbone here is then only asked for its tokenizer")
    server.add_argument("--server", metavar="URL", help="an OpenAI-compatible server (vLLM, SGLang, ...) writes")
    server.add_argument("--model", metavar="NAME", help="on that server (default: the only one that it serves)")
    server.add_argument(
        "--concurrency", type=common.positive, default=16, metavar="N", help="questions at a time (default: 16)"
    )
    common.add_generation(parser, max_new_tokens=512)
    parser.set_defaults(batch_size=16)
    common.add_machine(parser)


def run(args: argparse.Namespace) -> None:
    settings = common.settings_of(args)
    _check_combination(args)
    output = Path(args.output)
    common.check_output(args.output)
    common.check_output(args.json)
    records = _records(args)
    about = _about(args, settings, records)
    _check_resume(output, about, args.overwrite)
    common.check_models(args)
    common.prepare_machine(args)
    engine = _server_engine(args, settings) if args.server else _local_engine(args, settings)
    tasks = _tasks(args, engine, records)
    engine.check(tasks)
    _require_room(output, tasks, settings)

    if args.overwrite:
        output.unlink(missing_ok=True)
    journal = Journal(output, keep={task.index for task in tasks if task.turns > 1})
    write_json(output.with_suffix(SETTINGS), about)
    with disk_may_fill(output, lambda: "the texts so far are whole: make room and run the same command again"), journal:
        seconds = engine.write(tasks, journal)
    common.write_results(args, {"settings": about} | _figures(args, tasks, journal, seconds))


def _check_combination(args: argparse.Namespace) -> None:
    """Raises:
    RequestError: options that do not go together."""
    if bool(args.self_talk) == bool(args.prompts):
        raise RequestError("give either --prompts FILE or --self-talk N")
    if args.self_talk_seeds and not args.self_talk:
        raise RequestError("--self-talk-seeds begins the texts of --self-talk N; give N, or --prompts")
    if args.server and args.heads:
        raise RequestError("--heads speed up this machine's decoding and --server writes elsewhere; give one of them")
    if args.model and not args.server:
        raise RequestError("--model is one of a --server's; give its URL")
    if args.tree and not args.heads:
        raise RequestError("--tree is for --heads H; give heads, or leave it out")


def _records(args: argparse.Namespace) -> list[Record]:
    """The prompts; of self-talk the seeds, as many times as it takes; nothing where it starts from BOS."""
    if args.prompts:
        return common.read_prompts(args)
    if args.self_talk_seeds:
        seeds = list(islice(read_records(args.self_talk_seeds, split=args.split), args.self_talk))
        return list(islice(cycle(seeds), args.self_talk))
    return []


def _tasks(args: argparse.Namespace, engine: LocalEngine | ServerEngine, records: list[Record]) -> list[Task]:
    if not records:
        return [Task(index, "--self-talk", ids) for index, ids in enumerate([engine.begin()] * args.self_talk)]
    tasks = tasks_of(records, engine.tokenizer, prefix_tokens=args.prefix_tokens, max_turns=args.max_turns)
    unasked = sum(len(r.turns) > t.turns for r, t in zip(records, tasks, strict=True)) if not args.max_turns else 0
    if unasked and not args.prefix_tokens:
        common.warn(f"of {unasked} conversations only the first question is asked: this tokenizer has no chat template")
    return tasks


def _about(args: argparse.Namespace, settings: Settings, records: list[Record]) -> dict[str, Any]:
    """What the texts depend on, as it will be read back: a run that goes on must have the same."""
    about = settings.to_dict() | {
        "backbone": args.backbone,
        "revision": args.revision,
        "server_model": args.model if args.server else None,
        "server": bool(args.server),
        "prompts": args.prompts,
        "prompts_digest": digest(records),
        "self_talk": args.self_talk,
        "self_talk_seeds": args.self_talk_seeds,
        "prefix_tokens": args.prefix_tokens,
        "max_prompts": args.max_prompts,
        "max_turns": args.max_turns,
        "split": args.split,
        "dtype": args.dtype,
        "seed": args.seed,
    }
    if settings.do_sample:  # greedy text does not depend on them, so they may change on the way
        about |= {"batch_size": args.batch_size, "heads": args.heads, "tree": args.tree}
    return json.loads(json.dumps(about))


def _check_resume(output: Path, about: dict[str, Any], overwrite: bool) -> None:
    """Raises:
    RequestError: the output was made with other settings, and may not be replaced."""
    if output.exists() and not overwrite:
        sidecar = output.with_suffix(SETTINGS)
        known = read_json(sidecar) if sidecar.exists() else None
        if known != about:
            raise RequestError(f"{output} exists and was made with other settings; choose another or add --overwrite")


def _require_room(output: Path, tasks: list[Task], settings: Settings) -> None:
    """Raises:
    RequestError: not even the shortest answers would fit on the disk."""
    prompts = sum(len(task.ids or ()) for task in tasks)
    turns = sum(task.turns for task in tasks)
    least = 3 * prompts + BYTES_PER_LINE * turns
    most = least + BYTES_PER_TOKEN * (prompts + settings.max_new_tokens * turns)
    free = free_bytes(output)
    if least > free:
        raise RequestError(
            f"{output} will take {readable(least)} at least, and its disk has {readable(free)} left; choose another "
            "place, or fewer prompts with --max-prompts"
        )
    if most > free:
        common.warn(f"{output} may take {readable(most)}, and its disk has {readable(free)} left")


def _figures(args: argparse.Namespace, tasks: list[Task], journal: Journal, seconds: float) -> dict[str, Any]:
    """What there is now, told and as a dict.

    Raises:
        RunError: some texts could not be had."""
    reasons = dict(sorted(journal.reasons.items()))
    total = sum(task.turns for task in tasks)
    missing = total - len(journal.done)
    figures = {
        "texts": len(journal.done),
        "finish_reasons": reasons,
        "failed": missing,
        "new_tokens": journal.new_tokens,
        "seconds": seconds,
    }
    if missing:
        common.write_results(args, figures)
        raise RunError(
            f"{missing} of {total} texts could not be had, {len(journal.failed)} of them for reasons that "
            f"{journal.failed_path} names; the same command tries them again"
        )
    if not args.quiet:
        told = ", ".join(f"{number} ended by {reason}" for reason, number in reasons.items())
        common.console(args).print(
            f"{len(journal.done)} texts in {args.output}: {told}", highlight=False, soft_wrap=True
        )
    return figures


def _local_engine(args: argparse.Namespace, settings: Settings) -> LocalEngine:
    from decode.bench.methods import medusa_method, transformers_method

    loaded = common.open_backbone(args)
    if args.heads:
        heads = common.open_heads(args, loaded)
        tree = common.choose_tree(args, loaded, heads, settings)
        method = medusa_method(loaded.model, heads, settings, loaded.tokenizer, tree)
    else:
        method = transformers_method(loaded.model, settings, loaded.tokenizer)
    return LocalEngine(args, loaded, method, settings)


def _server_engine(args: argparse.Namespace, settings: Settings) -> ServerEngine:
    from medusa.commands.distill.client import Server
    from medusa.loading import load_tokenizer

    server = Server(args.server, args.model)
    tokenizer = load_tokenizer(args.backbone, common.load_options(args))
    return ServerEngine(args, server, tokenizer, settings)


def self_talk_prompts(loaded: Loaded, count: int) -> list[list[int]]:
    """`count` prompts of BOS alone."""
    return [begin_with(loaded.bos_token_id, loaded.name)] * count


def write_own_text(
    loaded: Loaded,
    prompts: Sequence[list[int]],
    settings: Settings,
    output: Path,
    args: argparse.Namespace,
    seconds_at_most: float = float("inf"),
) -> tuple[int, float]:
    """Append the backbone's continuations of `prompts` to `output`; returns new tokens and seconds."""
    from decode.bench.methods import transformers_method

    engine = LocalEngine(args, loaded, transformers_method(loaded.model, settings, loaded.tokenizer), settings)
    tasks = [Task(index, f"prompt {index + 1}", prompt) for index, prompt in enumerate(prompts)]
    with Journal(output) as journal:
        seconds = engine.write(tasks, journal, seconds_at_most)
    return journal.new_tokens, seconds
