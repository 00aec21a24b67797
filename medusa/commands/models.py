"""What a command decodes with, resolved once: the backbone, the heads, other drafters, prompts and settings.

This module imports torch and transformers, so commands import it only when they run: `--help` stays fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.compiled.stepper import require_compilable, why_not_compiled, why_rope_not_compiled, why_too_long
from decode.drafters import drafter_factory, parse, small_model
from decode.drafters.base import DrafterConfig, DrafterContext, DrafterFactory, require_no_tree
from decode.drafters.layouts import TreeLike, require_draftable, require_sizes
from decode.drafters.trained_heads import HeadsDrafterConfig
from decode.generation_config import FILE as GENERATION_CONFIG
from decode.settings import Settings
from decode.strategies.contrastive import Amateur, Contrast
from decode.strategies.grammar import Grammars
from decode.texts import Result, TextGenerator
from medusa.backbone import Backbone, require_tree_support
from medusa.commands.cpu import load_tuned
from medusa.commands.options import CommandOptions, warn
from medusa.commands.prompting import PromptForm, fitting, prompt_form
from medusa.commands.structured import Structured
from medusa.commands.trees import HEADS, choose_drafter, tree_json
from medusa.errors import RequestError
from medusa.fingerprint import differs
from medusa.heads.independent import MedusaHeads
from medusa.loading import BackboneFiles, Loaded, TextLimits, head_sizes, text_limits
from medusa.options import LoadOptions
from medusa.quantization import quantization_of
from medusa.records.record import Record, naming


def check_models(
    command: CommandOptions, drafters: Sequence[DrafterConfig] = (HeadsDrafterConfig(),)
) -> MedusaHeads | None:
    """Check that models and tree fit the backbone, before its weights are loaded; raise RequestError if they do not.

    Return the heads that the user gave, on the CPU and in the dtype of their file; `None` if no drafter needs them.
    Raise NotCompilableError if the settings ask for compiled steps, and the backbone's files rule them out."""
    models, files, settings = command.models, command.files, command.settings
    require_compilable_files(files, settings)
    for drafter in drafters:
        drafter.check(files.config)
    smaller = [("amateur", command.contrasting.amateur), *(("draft model", name) for name in command.draft_models)]
    for role, small in smaller:
        if small is not None:
            theirs = small_files(command, small)
            small_model.require_same_vocabulary(small, theirs.config, files.config, role)
            small_model.require_same_tokenizer(small, theirs.tokenizer, files.tokenizer, models.backbone, role)
    given, sizes = None, head_sizes(files.config)
    if models.heads is not None and any(drafter.needs_heads for drafter in drafters):
        given = MedusaHeads.from_pretrained(models.heads)
        require_sizes(given.config, *sizes)
    for drafter in drafters:
        heads = given if drafter.needs_heads else drafter.planned_heads(files.config)
        if heads is None:
            continue
        for tree in drafter.layouts(heads, models.tree, settings.stop_drafting):
            require_draftable(heads.config, *sizes, tree, settings.draft == "sample")
    return given


def small_files(command: CommandOptions, name: str) -> BackboneFiles:
    """Return the files of a small model, such as the amateur of contrastive decoding."""
    trusting = LoadOptions(trust_remote_code=command.load.trust_remote_code)
    return BackboneFiles(small_model.small_model_path(name), trusting)


def require_compilable_files(files: BackboneFiles, settings: Settings) -> None:
    """Raise NotCompilableError if `settings` ask for compiled steps, and the files of the backbone rule them out."""
    settings.of_checkpoint(files.generation_config)
    if settings.compile:
        require_compilable(why_rope_not_compiled(files.config))


class Opened:
    """What a command decodes with, resolved once: models, tree, form of prompts, prompts and settings.

    Making it checks all files. `encode` reads the prompts, and `load` the weights."""

    def __init__(self, command: CommandOptions, drafters: Sequence[str | None] = (), calibrates: bool = True) -> None:
        """Check a command's models, and choose the form of its prompts; see `open_models`."""
        self.command, self.specs, self.calibrates = command, drafters, calibrates
        self.configs = [_drafter_config(command, drafter, len(drafters) == 1) for drafter in drafters]
        self.names = [drafter or HEADS for drafter in drafters]
        """The drafters as in --drafter; after a calibration has chosen, also those that the user did not name."""
        self.given_heads = check_models(command, self.configs)
        command.runtime.prepare()
        self.form = form_of(command)
        self.records: list[Record] = []
        self.prompts: list[list[int]] = []

    def encode(self, records: Sequence[Record]) -> list[list[int]]:
        """Return the token ids of each prompt, and print whether they go through the chat template."""
        tokenizer = self.command.files.tokenizer
        for line in filter(None, (self.form.line(records), self.form.hint(records, tokenizer))):
            self.command.output.note(line)
        return self.form.ids(records, tokenizer)

    @cached_property
    def loaded(self) -> Loaded:
        """The backbone with its tokenizer, which is loaded and tuned for this machine at the first use."""
        command = self.command
        return load_tuned(command.files, command.runtime.threads, command.output).loaded

    def load(self, samples: bool = True) -> None:
        """Load the backbone, and settle the settings; see `open_models`."""
        command, loaded = self.command, self.loaded
        self.settings = settings = command.settings.of_checkpoint(loaded.model.generation_config)
        if line := settings.unused_line(loaded.model.generation_config, samples):
            command.output.note(line)
        if self.configs:
            require_tree_support(loaded.model)
        if settings.compile:
            require_compilable(why_not_compiled(Backbone(loaded.model)))
        if settings.stop:
            require_tokenizer(loaded, "--stop" if command.settings.stop else f"a stop string of {GENERATION_CONFIG}")
        if (contrasting := command.contrasting).amateur is not None:
            model = small_model.load_small_model(contrasting.amateur, self.context, "amateur")
            contrast = Contrast(contrasting.alpha, contrasting.beta, contrasting.temperature)
            self.settings = replace(settings, amateur=Amateur(model, contrast, contrasting.amateur))

    @property
    def context(self) -> DrafterContext:
        """What drafters and small models are made from: the backbone with its tokenizer, but without heads."""
        loaded, trusts = self.loaded, self.command.load.trust_remote_code
        return DrafterContext(loaded.model, tokenizer=loaded.tokenizer, name=loaded.name, trust_remote_code=trusts)

    @cached_property
    def drafters(self) -> list[DrafterFactory]:
        """The drafters. The first use, after all checks of a command, loads their models and may calibrate a tree."""
        return [self._drafter(place, config) for place, config in enumerate(self.configs)]

    def _drafter(self, place: int, config: DrafterConfig) -> DrafterFactory:
        tree: TreeLike = None
        if (heads := self.heads_of(config)) is not None and config.takes_tree:
            tree = self.command.models.tree
            if self.calibrates:
                settings = replace(self.settings, grammar=None)  # trees suit free text
                heads_only = self.specs[place] is not None or settings.compile  # mixes cannot be compiled
                tree, chosen = choose_drafter(self.command, self.loaded, heads, settings, heads_only)
                if chosen != HEADS:
                    self.names[place], config = chosen, parse(chosen)
                    tree = tree if config.takes_tree else None
        stop_drafting = self.command.settings.stop_drafting if config.takes_tree else 0.0
        return drafter_factory(config, self.context._replace(heads=heads, tree=tree, stop_drafting=stop_drafting))

    def heads_of(self, config: DrafterConfig) -> MedusaHeads | None:
        """Return the heads that a drafter needs, or those that come with the backbone; `None` if it has no heads.

        Raise RequestError if they do not fit the backbone."""
        if config.needs_heads and self.given_heads is not None:
            return fitted_heads(self.given_heads, self.loaded)
        return config.own_heads(self.loaded.model)

    @property
    def source(self) -> DrafterFactory | None:
        """The first drafter; `None` if the command decodes without a drafter."""
        return next(iter(self.drafters), None)

    @cached_property
    def generator(self) -> TextGenerator:
        """What writes texts with the first drafter, or without one."""
        return TextGenerator(self.loaded.model, self.settings, self.loaded.tokenizer, self.source)

    def job(self) -> dict[str, Any]:
        """Return the fields of a `decode.bench.methods.Job` with the first drafter, which must exist."""
        command, source = self.command, self.source
        fields: dict[str, Any] = {
            "loaded": self.loaded,
            "source": source,
            "settings": self.settings,
            "prompts": self.prompts,
        }
        fields |= {"heads": command.models.heads, "drafter": self.names[0], "tree": tree_json(source)}
        return fields | {"batch_size": command.batch_size, "seed": command.runtime.seed}

    def structure(self, structured: Structured, use: str) -> None:
        """Let the texts follow the grammar that the options choose, if there is one; errors name the `use`.

        Raise a `RequestError` if the grammar is not valid, or the settings cannot be combined with a grammar."""
        if (source := structured.source()) is not None:
            grammars = Grammars(self.loaded.model, require_tokenizer(self.loaded, use))
            self.settings = replace(self.settings, grammar=grammars.compiled(source))


def open_models(
    command: CommandOptions,
    records: Sequence[Record] = (),
    drafters: Sequence[str | None] = (),
    calibrates: bool = True,
    skip_long: bool = False,
    room: int = 0,
    samples: bool = True,
) -> Opened:
    """Check the models of a command, encode the prompts, and load the backbone.

    A drafter is written as in --drafter; `None` means the Medusa heads. With `calibrates`, heads without a tree get one
    that suits this machine. With `skip_long`, prompts that leave no `room` for so many tokens are left out. `samples`:
    whether the command has options of sampling. Raise RequestError if a model is missing or does not fit, a prompt is
    too long, steps cannot be compiled, or there is no tokenizer to find stop strings."""
    opened = Opened(command, drafters, calibrates)
    prompts, note = opened.encode(records), command.output.note
    opened.records, opened.prompts = fitting(records, prompts, limits_of(command), skip_long, note, room)
    opened.load(samples)
    for record, prompt in zip(opened.records, opened.prompts, strict=True) if opened.settings.compile else ():
        with naming(record.where):
            require_compilable(why_too_long(opened.loaded.model, len(prompt), opened.settings.max_new_tokens))
    return opened


def limits_of(command: CommandOptions) -> dict[str, TextLimits]:
    """Return what bounds the texts of a backbone and an amateur model, by their roles. No weights are loaded."""
    limits, amateur = {"backbone": text_limits(command.files.config)}, command.contrasting.amateur
    if amateur is not None:
        limits["amateur"] = text_limits(small_files(command, amateur).config)
    return limits


def form_of(command: CommandOptions) -> PromptForm:
    """Choose whether a command's prompts go through the tokenizer's chat template."""
    models = command.models
    return prompt_form(command.raw, command.files.tokenizer, models.backbone, models.heads, command.template_option)


def _drafter_config(command: CommandOptions, spec: str | None, alone: bool) -> DrafterConfig:
    """Parse `spec`, a drafter as in --drafter (`None`: the heads), and check it against the command's options.

    If the drafter is the command's only one (`alone`) and takes no tree, --tree is an error. Raise RequestError if
    there is no such drafter, the drafter needs --heads, or an option does not suit the drafter."""
    models, settings = command.models, command.settings
    config = parse(spec or "heads")
    if settings.compile and not config.compiles:
        raise RequestError(f"--drafter {spec} cannot be compiled, because it works on the CPU; leave out --compile")
    if settings.draft == "sample" and not config.can_draw:
        raise RequestError(f"--drafter {spec} has no probabilities to draw guesses from; use --draft topk")
    if not config.takes_tree and alone:
        require_no_tree(models.tree, settings.stop_drafting)
    if config.needs_heads and models.heads is None:
        raise RequestError(f"there are no heads, and drafter {spec or 'heads'} needs --heads H")
    return config


def require_tokenizer(loaded: Loaded, use: str) -> PreTrainedTokenizerBase:
    """Return the backbone's tokenizer; without one, raise a `RequestError` that names `use`, which needs it."""
    if loaded.tokenizer is None:
        raise RequestError(
            f"{loaded.name} has no tokenizer, and {use} needs one; add its files to the backbone's folder"
        )
    return loaded.tokenizer


def fitted_heads(heads: MedusaHeads, loaded: Loaded) -> MedusaHeads:
    """Check the shapes of heads, and bring them to the backbone's dtype and device.

    Heads that were trained for another backbone cause a warning."""
    backbone = Backbone(loaded.model)
    require_sizes(heads.config, backbone.hidden_size, backbone.vocab_size)
    Backbone(loaded.model, heads.config.feature_layers)  # raises RequestError if it lacks one of the layers
    known, quantization = heads.config.backbone, quantization_of(loaded.model)
    if known.get("weights") and known.get("quantization") != quantization:
        asked = known.get("quantization")
        warn(
            f"these heads were trained for {known.get('name')} with quantization {asked or 'none'}, and {loaded.name} "
            f"is loaded with {quantization or 'none'}; the text stays correct, but fewer guesses may be accepted; "
            + (f"add --quantization {asked}" if asked else "leave out --quantization")
        )
    elif differs(loaded.model, known):
        warn(
            f"these heads were trained for {known.get('name')}, which has the same shape as {loaded.name} but other "
            "weights; the text stays correct, but fewer guesses may be accepted (medusa fit --start continues heads)"
        )
    return heads.to(device=backbone.head_weight.device, dtype=backbone.dtype)


def results_json(command: CommandOptions, opened: Opened, results: Sequence[Result]) -> dict[str, object]:
    """Return the settings, the models, the drafter and the finished texts as JSON for --json."""
    settings, source = opened.settings, opened.source
    about = settings.to_dict() | {
        "backbone": command.models.backbone,
        "heads": command.models.heads,
        "drafter": None if source is None else opened.names[0],
        "tree": tree_json(source),
        "nodes": None if source is None else source.num_nodes,
    }
    return {"settings": about, "results": [one.to_json(opened.loaded.tokenizer, settings.stop) for one in results]}
