"""Generate training data with the backbone, because heads must predict the text that the backbone generates.

  medusa distill --backbone org/model --prompts chats.jsonl --output own.jsonl
  medusa distill --backbone demo --self-talk 500 --output own.jsonl
  medusa distill --backbone org/model --prompts chats.jsonl --output own.jsonl \\
                 --server http://localhost:8000

The backbone answers all questions of a conversation in turn, and reads its own earlier answers instead of the file's.
Each line of the output holds one answer: the index of its prompt, its turn, the ids of prompt and answer, the number of
prompt tokens, the text, and the reason why the text ended. The same command continues an interrupted run, and retries
the texts that failed (own.failed.jsonl lists them)."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from decode.settings import Settings
from medusa.commands.distill.client import Server
from medusa.commands.distill.engines import Engine, LocalEngine, ServerEngine
from medusa.commands.distill.journal import Journal
from medusa.commands.distill.tasks import Task, digest, tasks_of
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, Models, Prompts, warn
from medusa.errors import RequestError, RunError
from medusa.files import Json, disk_may_fill, free_bytes, read_json, readable, require_writable, write_json
from medusa.options import REQUIRED, count, group, option
from medusa.records.record import Record
from medusa.records.sources import SETTINGS

BYTES_PER_LINE = 100  # of one answer, without its tokens
BYTES_PER_TOKEN = 12  # of one answer: an id, a comma, a space, and the text of the token


class DistillOptions(CommandOptions):
    """Options of `medusa distill`."""

    by_position = ()
    shown = "backbone prompts output max-prompts max-new-tokens temperature batch-size self-talk server heads overwrite"

    models: Models = group(Models, "models", without=("drafter",))
    prompts: Prompts = group(Prompts, "prompts", without=("prompt",))
    settings: Settings = group(Settings, "generation", max_new_tokens=512)
    batch_size: int = count(16, "generate N texts at a time on this machine")
    contrasting: Contrasting = NO_CONTRAST
    out: str = option(REQUIRED, "write the generated data to this file", metavar="F.jsonl", name="output")
    overwrite: bool = option(False, "replace the file if it exists")
    self_talk: int | None = count(
        None, "generate N texts after the BOS token alone, without prompts", brief="generate N texts without prompts"
    )
    self_talk_seeds: str | None = option(
        None, "with --self-talk: continue the texts in FILE, in turn, instead of the BOS token", metavar="FILE"
    )
    prefix_tokens: int | None = count(None, "continue only the first K tokens of each prompt or seed", "K")
    max_turns: int | None = count(None, "answer only the first N questions of a conversation")
    server: str | None = option(
        None,
        "generate with this OpenAI-compatible server (vLLM, SGLang, ...), and load only the backbone's tokenizer",
        metavar="URL",
        brief="generate with this OpenAI-compatible server",
    )
    model: str | None = option(
        None, "use this model of the server (default: the only model that it serves)", metavar="NAME"
    )
    concurrency: int = count(16, "send N requests at a time to the server")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_writable(self.out, "--output")
        if bool(self.self_talk) == bool(self.prompts.prompts):
            raise RequestError("give either --prompts FILE or --self-talk N")
        if self.self_talk_seeds and not self.self_talk:
            raise RequestError("--self-talk-seeds works only with --self-talk N; add --self-talk N, or use --prompts")
        if self.server and self.models.heads:
            raise RequestError(
                "--heads speed up decoding on this machine, and --server generates elsewhere; leave one out"
            )
        if self.model and not self.server:
            raise RequestError("--model names a model of --server; add --server URL, or leave it out")
        if self.models.tree and not self.models.heads:
            raise RequestError("--tree works only with --heads; add --heads H, or leave it out")


def run(options: DistillOptions) -> None:
    records, path = _records(options), Path(options.out)
    about = _about(options, records)
    _check_resume(path, about, options.overwrite)
    engine: LocalEngine | ServerEngine = _server_engine(options) if options.server else _local_engine(options)
    tasks = _tasks(options, engine, records)
    engine.check(tasks)
    _require_room(path, tasks, options.settings)
    if options.overwrite:
        path.unlink(missing_ok=True)
    journal = Journal(path, tasks)
    write_json(path.with_suffix(SETTINGS), about)
    advice = "all finished texts are kept: make room and run the same command again"
    with disk_may_fill(path, lambda: advice), journal.opened(options.output):
        seconds = engine.write(journal)
    texts, total, reasons = len(journal.done), journal.total, dict(sorted(journal.reasons.items()))
    figures = {"texts": texts, "finish_reasons": reasons, "failed": total - texts, "new_tokens": journal.new_tokens}
    options.output.write({"settings": about} | figures | {"seconds": seconds})
    if texts < total:
        raise RunError(
            f"{total - texts} of {total} texts could not be generated; {journal.failed_path} has the reasons of "
            f"{len(journal.failed)}, and the same command tries again"
        )
    ends = ", ".join(f"{number} ended by {reason}" for reason, number in reasons.items())
    options.output.progress.print(f"{texts} texts in {options.out}: {ends}", highlight=False, soft_wrap=True)


def _records(options: DistillOptions) -> list[Record]:
    """Read --prompts, or repeat the --self-talk-seeds records until there are N (--self-talk N); else return []."""
    prompts = options.prompts
    if prompts.prompts:
        return prompts.read()
    if options.self_talk_seeds:
        seeds = replace(prompts, prompts=options.self_talk_seeds, max_prompts=options.self_talk).read()
        return list(islice(cycle(seeds), options.self_talk))
    return []


def _tasks(options: DistillOptions, engine: Engine, records: list[Record]) -> list[Task]:
    """Make a task for each record. Without records, make N tasks (--self-talk N) to generate texts from BOS alone."""
    if not records:
        return [Task(index, "--self-talk", engine.begin()) for index in range(options.self_talk or 0)]
    tasks = tasks_of(records, engine.tokenizer, options.prefix_tokens, options.max_turns)
    cut = sum(len(record.turns) > task.turns for record, task in zip(records, tasks, strict=True))
    if cut and not options.max_turns and not options.prefix_tokens:
        warn(f"only the first question of {cut} conversations is answered: this tokenizer has no chat template")
    return tasks


def _about(options: DistillOptions, records: list[Record]) -> Json:
    """Collect, as JSON, all settings that affect the generated texts. A continued run must have the same settings."""
    settings, models, load = options.settings, options.models, options.load
    about = settings.to_dict() | {"backbone": models.backbone, "revision": load.revision, "dtype": load.dtype}
    about |= {"server": bool(options.server), "server_model": options.model, "seed": options.runtime.seed}
    about |= {name: getattr(options.prompts, name) for name in ("prompts", "max_prompts", "split")}
    about |= {name: getattr(options, name) for name in ("self_talk", "self_talk_seeds", "prefix_tokens", "max_turns")}
    about["prompts_digest"] = digest(records)
    if settings.do_sample:  # greedy texts do not depend on these options
        about |= {"batch_size": options.batch_size, "heads": models.heads, "tree": models.tree}
    return json.loads(json.dumps(about))


def _check_resume(path: Path, about: Json, overwrite: bool) -> None:
    """Raise a `RequestError` if the output file exists and its settings are not `about`, unless `overwrite` is true."""
    sidecar = path.with_suffix(SETTINGS)
    if path.exists() and not overwrite and not (sidecar.exists() and read_json(sidecar) == about):
        raise RequestError(f"{path} exists and was made with other settings; choose another file or add --overwrite")


def _require_room(path: Path, tasks: list[Task], settings: Settings) -> None:
    """Raise a `RequestError` if not even the shortest possible answers fit on the disk."""
    prompts, turns = sum(len(task.ids or ()) for task in tasks), sum(task.turns for task in tasks)
    least = 3 * prompts + BYTES_PER_LINE * turns
    most = least + BYTES_PER_TOKEN * (prompts + settings.max_new_tokens * turns)
    free = free_bytes(path)
    if least > free:
        raise RequestError(
            f"{path} will take {readable(least)} at least, and its disk has {readable(free)} left; choose a file on "
            "another disk, or fewer prompts with --max-prompts"
        )
    if most > free:
        warn(f"{path} may take {readable(most)}, and its disk has {readable(free)} left")


def _local_engine(options: DistillOptions) -> LocalEngine:
    from decode.bench.methods import DrafterMethod, Method, transformers_method
    from medusa.backbone import Backbone
    from medusa.commands.models import open_models

    opened = open_models(options, drafters=[None] if options.models.heads else [])
    loaded, settings = opened.loaded, opened.settings
    method: Method = transformers_method(loaded.model, settings, loaded.tokenizer)
    if opened.source is not None:
        method = DrafterMethod(loaded.model, opened.source, settings, loaded.tokenizer)
    backbone = loaded.name, loaded.tokenizer, loaded.bos_token_id, Backbone(loaded.model)
    return LocalEngine(settings, options.runtime.seed, *backbone, method, options.batch_size)


def _server_engine(options: DistillOptions) -> ServerEngine:
    from medusa.loading import bos_token_id, load_config, load_tokenizer

    name, load = options.models.backbone, options.load
    config, tokenizer = load_config(name, load), load_tokenizer(name, load)
    options.runtime.prepare()
    server = Server(str(options.server), options.model)
    backbone = name, tokenizer, bos_token_id(tokenizer, config)
    return ServerEngine(options.settings, options.runtime.seed, *backbone, server, options.concurrency)
