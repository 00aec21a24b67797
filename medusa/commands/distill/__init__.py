"""Generate training data with the backbone, because heads must predict the text that the backbone generates.

  medusa distill --backbone org/model --prompts chats.jsonl --output own.jsonl
  medusa distill --backbone demo --self-talk 500 --temperature 1 \\
                 --output own.jsonl
  medusa distill --backbone org/model --questions 1000 --temperature 1 \\
                 --output questions.jsonl
  medusa distill --backbone org/model --prompts chats.jsonl --output own.jsonl \\
                 --server http://localhost:8000

The backbone answers all questions of a conversation in turn, and reads its own earlier answers instead of the file's.
Each line of the output holds one answer: the index of its prompt, its turn, the ids of prompt and answer, the number of
prompt tokens, the text, and the reason why the text ended. The same command continues an interrupted run, and retries
the texts that failed (own.failed.jsonl lists them)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from decode.settings import Settings
from medusa.commands.distill.checks import require_room, require_same_settings, why_cut, why_short
from medusa.commands.distill.client import Server
from medusa.commands.distill.journal import Journal, ShortAnswersError
from medusa.commands.distill.tasks import Task, digest, tasks_of
from medusa.commands.effects import require_no_input
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, Models, Prompts, warn
from medusa.commands.prompting import PromptForm, prompt_form
from medusa.errors import RequestError, RunError
from medusa.files import Json, disk_may_fill, read_json, require_writable, write_json
from medusa.interruptions import interruptible
from medusa.options import REQUIRED, count, group, option
from medusa.records.questions import QuestionForm, question_form
from medusa.records.record import Record, naming, tokens_of
from medusa.records.sources import SETTINGS, WEIGHTS, require_records
from medusa.records.template import template_options

if TYPE_CHECKING:
    from medusa.commands.distill.engines import LocalEngine, ServerEngine


class DistillOptions(CommandOptions):
    """Options of `medusa distill`."""

    by_position = ()
    shown = "backbone prompts output max-prompts max-new-tokens temperature batch-size self-talk server heads overwrite"

    models: Models = group(Models, "models", without=("drafter",))
    prompts: Prompts = group(Prompts, "prompts", without=("prompt", "skip_long"))
    settings: Settings = group(Settings, "generation", max_new_tokens=512)
    batch_size: int = 1  # for which a tree is calibrated: drafts pay where few texts are left
    width: int | None = count(
        None,
        "generate N texts at a time on this machine (default: as many as memory and speed allow; with --compile 64, if "
        "memory allows them)",
        name="batch_size",
        brief="generate N texts at a time on this machine",
    )
    contrasting: Contrasting = NO_CONTRAST
    out: str = option(REQUIRED, "write the generated data to this file", metavar="F.jsonl", name="output")
    overwrite: bool = option(False, "replace the file if it exists")
    self_talk: int | None = count(
        None, "generate N texts after the BOS token alone, without prompts", brief="generate N texts without prompts"
    )
    self_talk_seeds: str | None = option(
        None,
        "with --self-talk: continue the texts in FILE, in turn, instead of the BOS token",
        metavar="FILE",
        exists=require_records,
    )
    questions: int | None = count(
        None, "let a chat model write N questions of users, which other commands read as prompts"
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
        if Path(self.out).suffix != ".jsonl":
            raise RequestError(f"--output is {self.out}; its name must end in .jsonl, by which others know the format")
        require_no_input(self.out, "output", prompts=self.prompts.prompts, self_talk_seeds=self.self_talk_seeds)
        if sum(map(bool, (self.prompts.prompts, self.self_talk, self.questions))) != 1:
            raise RequestError("give one of --prompts FILE, --self-talk N and --questions N")
        if self.questions:
            self._require_asking()
        if (self.self_talk or 0) > 1 and not self.self_talk_seeds and not self.settings.do_sample:
            raise RequestError("--self-talk needs --temperature, such as 1; at temperature 0 all texts are equal")
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

    def _require_asking(self) -> None:
        if self.raw:
            raise RequestError("--questions are written in the chat template, which --raw turns off; leave one out")
        if not self.settings.do_sample:
            raise RequestError("--questions need --temperature, such as 1; at temperature 0 all of them are equal")
        if self.prefix_tokens or self.max_turns:
            option = "--prefix-tokens" if self.prefix_tokens else "--max-turns"
            raise RequestError(
                f"{option} is for texts and conversations, and --questions writes new ones; leave one out"
            )

    def check_given(self, names: Sequence[str]) -> None:
        if "concurrency" in names and not self.server:
            raise RequestError("--concurrency counts requests to --server; add --server URL, or use --batch-size")


@dataclass(frozen=True)
class DistillFigures:
    """What `medusa distill` wrote: the number of answers and their tokens, and the seconds that it took."""

    path: Path
    """The file with the answers."""
    texts: int
    """The answers in the file, with those of earlier runs."""
    failed: int
    """The answers that could not be generated; `failed_path` lists the reasons."""
    failed_path: Path
    tokens: int
    """The tokens of all answers in the file; of a server's chat, as it counts them, or else those of the text."""
    new_tokens: int
    """Those that this run generated."""
    seconds: float
    """The seconds of decoding in this run."""
    finish_reasons: dict[str, int]
    """The number of answers for each reason why they ended."""
    settings: Json
    """The settings that affect the answers, as they are stored next to the file."""
    warning: str | None = None
    """What is wrong with most answers, such as the limit that cut them, and what to type instead."""

    def __str__(self) -> str:
        ends = ", ".join(f"{number} ended by {reason}" for reason, number in self.finish_reasons.items())
        return f"{self.texts} texts in {self.path}: {ends}"

    def to_json(self) -> Json:
        """Return the figures for --json."""
        names = ("texts", "finish_reasons", "failed", "new_tokens", "seconds")
        return {"settings": self.settings} | {name: getattr(self, name) for name in names}


def run(options: DistillOptions) -> None:
    figures = distill(options)
    options.output.write(figures.to_json())
    if figures.failed:
        raise RunError(
            f"{figures.failed} of {figures.texts + figures.failed} texts could not be generated; {figures.failed_path} "
            "has the reasons, and the same command tries again"
        )
    options.output.note(str(figures))
    if figures.warning:
        warn(figures.warning)


def distill(options: DistillOptions) -> DistillFigures:
    """Generate the answers that the output file lacks, and return figures; progress and notes go to standard error.

    Raise RequestError if the request is wrong, RunError if the disk is full or no server answers, and `Interrupted`
    after Ctrl-C or SIGTERM. The finished answers are kept, and another call with the same options continues. Raise
    RunError and delete the answers if most of the first 32 are empty or one token long."""
    records, path = _records(options), Path(options.out)
    form = _form(options)
    about = _about(options, records, form)
    require_same_settings(path, about, options.overwrite)
    if line := form.line(records):
        options.output.note(line)
    tasks = _tasks(options, records, form)
    _require_answerable(options, tasks)
    require_room(path, tasks, options.settings)
    asks = tasks[0].asks if tasks else None
    local = None if options.server else _local_engine(options, asks)
    if local is not None:
        about[WEIGHTS] = local.weights
        require_same_settings(path, about, options.overwrite, local.quantized)
    engine = local or _server_engine(options, asks)
    journal = Journal(path, tasks, options.overwrite)
    if not (noted := path.with_suffix(SETTINGS)).exists() or read_json(noted) != about:
        write_json(noted, about)
    advice = "all finished texts are kept: make room and run the same command again"
    kept = partial(_kept, options, journal)
    try:
        with interruptible(kept), disk_may_fill(path, lambda: advice), journal.opened(options.output):
            seconds = engine.write(journal)
    except ShortAnswersError as found:
        for written in (path, path.with_suffix(SETTINGS), journal.failed_path):  # heads must not learn from them
            written.unlink(missing_ok=True)
        reason = why_short(form, records, seeds=options.self_talk_seeds is not None)
        raise RunError(f"{found}, so {path} is not kept: {reason}") from None
    return DistillFigures(
        path=path,
        texts=len(journal.done),
        failed=journal.total - len(journal.done),
        failed_path=journal.failed_path,
        tokens=journal.tokens,
        new_tokens=journal.new_tokens,
        seconds=seconds,
        finish_reasons=dict(sorted(journal.reasons.items())),
        settings=about,
        warning=None
        if options.settings.ignore_eos  # then the limit ends every text, as asked
        else why_cut(path, journal.reasons, options.settings.max_new_tokens, options.files.tokenizer),
    )


def _kept(options: DistillOptions, journal: Journal) -> str:
    """Say how many answers an interrupted run has kept, and which command continues it."""
    command = options.output.continuing
    way = f"; continue with: {command}" if command else "; the same options continue"
    return f"{len(journal.done)} of {journal.total} texts are kept in {journal.path}{way}"


def _form(options: DistillOptions) -> PromptForm:
    """Choose the form of prompts. A server applies the template itself, even if there is no tokenizer here."""
    name, tokenizer = options.models.backbone, options.files.tokenizer
    if options.server and tokenizer is None:
        given = template_options(options.template_option)
        return PromptForm(bool(options.raw), name, has_template=True, asked=options.raw, options=given)
    return prompt_form(options.raw, tokenizer, name, options.models.heads, options.template_option)


def _records(options: DistillOptions) -> list[Record]:
    """Read --prompts, or repeat the --self-talk-seeds records until there are N (--self-talk N); else return [].

    Seeds and, with --prefix-tokens, prompts are beginnings of texts, and not questions to answer."""
    prompts = options.prompts
    if prompts.prompts:
        records = prompts.read()
        return [record.as_text() for record in records] if options.prefix_tokens else records
    if options.self_talk_seeds:
        seeds = replace(prompts, prompts=options.self_talk_seeds, max_prompts=options.self_talk).read()
        if len(seeds) < (options.self_talk or 0) and not options.settings.do_sample:
            raise RequestError(
                f"--self-talk {options.self_talk} continues {len(seeds)} seeds several times, and at temperature 0 all "
                "texts of a seed are equal; add --temperature 1, or ask for fewer texts"
            )
        return list(islice(cycle([seed.as_text() for seed in seeds]), options.self_talk))
    return []


def _tasks(options: DistillOptions, records: list[Record], form: PromptForm) -> list[Task]:
    """Make a task for each record, or N tasks: to write questions, or to generate texts from BOS alone."""
    if options.questions:
        asks = question_form(options.files.tokenizer, options.models.backbone, form.options)
        return [Task(index, "--questions", asks.begin, asks=asks) for index in range(options.questions)]
    if not records:
        from medusa.loading import bos_token_id

        if (bos := bos_token_id(options.files.tokenizer, options.files.config)) is None:
            name = options.models.backbone
            raise RequestError(f"{name} has no BOS token; give --self-talk-seeds FILE or --prompts FILE")
        return [Task(index, "--self-talk", [bos]) for index in range(options.self_talk or 0)]
    tasks = tasks_of(records, options.files.tokenizer, form, options.prefix_tokens, options.max_turns)
    cut = sum(len(record.turns) > task.turns for record, task in zip(records, tasks, strict=True))
    if cut and not options.max_turns and not options.prefix_tokens:
        reason = "--raw turns the chat template off" if form.has_template else "this tokenizer has no chat template"
        warn(f"only the first question of {cut} conversations is answered: {reason}")
    return tasks


def _require_answerable(options: DistillOptions, tasks: list[Task]) -> None:
    """Raise RequestError for a task that cannot be done, before a model is loaded or a server is asked.

    On this machine, a first prompt may be too long, or the chat template may reject it. The texts that a server
    continues need a tokenizer here."""
    from decode.request import require_fitting
    from medusa.loading import text_limits

    tokenizer, limits = options.files.tokenizer, text_limits(options.files.config)
    for task in tasks:
        if not options.server:
            prompt = task.prompt([], tokenizer)
            with naming(task.where):
                require_fitting([prompt], limits)
        elif task.ids is not None and tokenizer is None:
            name = options.models.backbone
            raise RequestError(f"{task.where}: {name} has no tokenizer, and the server's texts need one")


def _about(options: DistillOptions, records: list[Record], form: PromptForm) -> Json:
    """Collect, as JSON, all settings that affect the generated texts. A continued run must have the same settings."""
    settings, models, load = options.settings, options.models, options.load
    found = settings.to_dict() | {"backbone": models.backbone, "revision": load.revision, "dtype": load.dtype}
    found |= {"server": bool(options.server), "server_model": options.model, "seed": options.runtime.seed}
    found |= {name: getattr(options.prompts, name) for name in ("prompts", "max_prompts", "split")}
    found |= {name: getattr(options, name) for name in ("self_talk", "self_talk_seeds", "prefix_tokens", "max_turns")}
    found["prompts_digest"] = digest(records)
    found["raw"] = next((form.raw for record in records if record.is_prompt), None)  # no other records depend on it
    if options.questions:
        found["questions"] = options.questions
    if form.options:
        found["template_options"] = form.options
    if load.quantization:
        found["quantization"] = load.quantization
    if not settings.rule_for(settings.do_sample).keeps_texts:
        found |= {"heads": models.heads, "tree": models.tree}
    return json.loads(json.dumps(found))


def _with_end(settings: Settings, asks: QuestionForm | None, options: DistillOptions) -> Settings:
    """Let questions stop at the text after them, unless it begins with an EOS token, or no question is written.

    Raise RequestError if a server would not show where a question ends."""
    if asks is None:
        return settings
    from medusa.records.pieces import special_ids

    tokenizer, eos = options.files.tokenizer, options.files.generation_config.eos_token_id
    assert tokenizer is not None
    first = tokens_of(asks.end, tokenizer)[0]
    ends = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    if options.server and first in special_ids(tokenizer) - ends:
        raise RequestError(f"a question ends with the token {asks.end}, which servers hide; leave out --server")
    return settings if first in ends else replace(settings, stop=(*(settings.stop or ()), asks.end))


def _local_engine(options: DistillOptions, asks: QuestionForm | None) -> LocalEngine:
    from medusa.commands.distill.engines import LocalEngine
    from medusa.commands.models import open_models
    from medusa.loading import text_limits

    opened = open_models(options, drafters=[None] if options.models.heads else [])
    opened.settings = _with_end(opened.settings, asks, options)
    return LocalEngine(opened.generator, options.runtime.seed, text_limits(options.files.config), options.width)


def _server_engine(options: DistillOptions, asks: QuestionForm | None) -> ServerEngine:
    from medusa.commands.distill.engines import ServerEngine, server_parameters

    files = options.files
    settings = _with_end(options.settings, asks, options)
    parameters = server_parameters(settings, files.generation_config)
    if line := settings.unused_line(files.generation_config):
        options.output.note(line)
    options.runtime.prepare()
    server = Server(str(options.server), options.model)
    return ServerEngine(settings, options.runtime.seed, files.tokenizer, server, options.concurrency, parameters)
