"""Decoding options: each option's name, default, check and help in one place.

`Settings` is what the command line, the server and the benchmarks pass on. `decode.generate` takes the fields of
`DecodingOptions` as keyword arguments; it takes all other options in the same way as `model.generate`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from decode.generation_config import (
    FILE,
    TEXT,
    plain_options,
    sampling_of,
    text_options,
    told,
    unused,
)
from decode.rules import DELTA, EPSILON, AcceptanceRule, rule_and_limit
from decode.strategies.options import require_no_compiled_grammar, require_uncontrasted
from medusa.errors import NotCompilableError, OptionError, RequestError, choose_one_of
from medusa.options import Options, count, option, share

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from decode.strategies.contrastive import Amateur
    from decode.strategies.grammar import Grammar

DRAFTS = ("topk", "sample")
CUDA_GRAPHS = ("own", "torch", "off")
"""How compiled steps use CUDA graphs on a GPU: our own, those of torch.compile, or none."""
NUMERICS = ("fast", "stable")
Function = TypeVar("Function", bound=Callable[..., object])
ONE_SHAPE = "needs steps of one shape, and {} changes the shape; leave one out"
IGNORES = f"leave out the penalties, banned and forced tokens, and stop strings of the checkpoint's {FILE}"


class DecodingOptions(Options):
    """The options of drafting and acceptance, which `model.generate` does not have."""

    acceptance: str | None = option(
        None,
        "accept drafted tokens by this rule: greedy (default at temperature 0) and rejection (default above) are "
        "lossless; typical, typical-sampled and, at temperature 0, topk:K and distance:D are lossy",
        metavar="RULE",
    )
    draft: str = option(
        "topk", "draft the heads' best guesses (topk) or samples from their distributions (sample)", metavar="KIND"
    )
    stop_drafting: float = share(
        0.0, "with --tree dynamic:N: prune nodes whose path probability is below P, with their subtrees; 0 is off", "P"
    )
    epsilon: float = share(EPSILON, "set epsilon of typical acceptance", "E")
    delta: float = share(DELTA, "set delta of typical acceptance", "D")
    compile: bool = option(
        False, "compile whole steps by torch.compile, as CUDA graphs on a GPU; the first step takes seconds to minutes"
    )
    cuda_graphs: str = option(
        CUDA_GRAPHS[0],
        "with --compile on a GPU: use our own CUDA graphs (own), those of torch.compile, which take longer and only "
        "work in the main thread (torch), or none (off)",
        metavar="KIND",
    )
    numerics: str = option(
        NUMERICS[0],
        "fast, or stable, on a CPU: a token's numbers do not depend on what is read with it, so greedy texts with and "
        "without drafts are equal in bfloat16, too",
        metavar="KIND",
        brief="fast, or stable (bfloat16 on a CPU: equal texts)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile and self.stop_drafting:
            raise OptionError("compile", ONE_SHAPE, "stop_drafting")
        if self.cuda_graphs not in CUDA_GRAPHS:
            raise OptionError("cuda_graphs", f"is {self.cuda_graphs!r}; {choose_one_of(self.cuda_graphs, CUDA_GRAPHS)}")
        if self.cuda_graphs != CUDA_GRAPHS[0] and not self.compile:
            raise OptionError("cuda_graphs", "is for compiled steps; add {}, or leave it out", "compile")
        if self.numerics not in NUMERICS:
            raise OptionError("numerics", f"is {self.numerics!r}; {choose_one_of(self.numerics, NUMERICS)}")
        if self.compile and self.numerics != NUMERICS[0]:
            raise OptionError("numerics", "stable is for steps that are not compiled; leave out {}", "compile")
        if self.compile and self.acceptance is not None and not rule_and_limit(self.acceptance)[0].compiles:
            raise NotCompilableError(f"acceptance {self.acceptance!r} cannot be compiled")
        if self.compile and self.draft == "sample":
            raise OptionError("compile", "cannot be combined with {} sample; use {} topk", "draft", "draft")

    @property
    def stable(self) -> bool:
        return self.numerics == "stable"

    @property
    def compiled(self) -> str | Literal[False]:
        """The argument `compile` of `decode.texts.stepper_for`."""
        return self.cuda_graphs if self.compile else False

    @classmethod
    def taken_from(cls, kwargs: dict[str, Any], prefix: str = "") -> DecodingOptions:
        """Pop the options, named with `prefix`, from `kwargs` and return them; a value `None` means the default."""
        given = {field.name: kwargs.pop(prefix + field.name, None) for field in fields(DecodingOptions)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def rule_for(self, do_sample: bool) -> AcceptanceRule:
        """The acceptance rule that the options choose; by default rejection if `do_sample`, else greedy.

        Raise a `RequestError` if `acceptance` or `draft` is unknown or does not fit the other options."""
        rule, limit = rule_and_limit(self.acceptance or ("rejection" if do_sample else "greedy"))
        if self.draft not in DRAFTS:
            raise RequestError(f"draft is {self.draft!r}; {choose_one_of(self.draft, DRAFTS)}")
        written, sampled = self.acceptance or rule.name, self.draft == "sample"
        if do_sample and not rule.samples:
            problem = "writes no samples" if rule.lossless else "draws nothing"
            raise RequestError(f"acceptance {written!r} {problem}; use temperature 0 (do_sample=False) or 'rejection'")
        if rule.samples and not rule.lossless and not do_sample:
            raise RequestError(
                f"acceptance {written!r} needs a temperature above 0 (do_sample=True); at 0 use 'greedy'"
            )
        if sampled and not rule.draws:
            raise RequestError(
                "draft 'sample' needs a temperature above 0 and acceptance 'rejection' or 'typical-sampled'; "
                f"with {rule.name!r} use draft 'topk'"
            )
        if sampled and not do_sample:
            raise RequestError("draft 'sample' needs a temperature above 0 (do_sample=True); at 0 use draft 'topk'")
        if sampled and self.stop_drafting:
            raise OptionError(
                "stop_drafting", "prunes by drafted tokens, which would bias samples; use {} topk", "draft"
            )
        if self.stop_drafting and not rule.walks:
            instead = "typical-sampled" if do_sample else "greedy"
            problem = f"lets texts of acceptance {written!r} depend on the batch; use {instead}"
            raise OptionError("stop_drafting", problem)
        return AcceptanceRule(rule.name, self.epsilon, self.delta, self.draft, limit)


class Settings(DecodingOptions):
    """All generation settings. The defaults are greedy decoding until EOS or 256 new tokens, with the checkpoint's own
    penalties and stop strings. Raise RequestError if they do not go together."""

    max_new_tokens: int = count(
        256, "generate at most N new tokens for each prompt", brief="generate at most N new tokens"
    )
    temperature: float = option(
        0.0, "sample at temperature T; 0 is greedy", "0 (greedy) or above", lambda value: value >= 0, "T"
    )
    top_k: int = option(
        0, "sample among the K most probable tokens; 0 is off", "0 (off) or above", lambda value: value >= 0, "K"
    )
    top_p: float = option(
        1.0,
        "sample within the probability mass P; 1 is off",
        "above 0 and at most 1 (off)",
        lambda p: 0 < p <= 1,
        "P",
        brief="sample within the probability mass P",
    )
    min_p: float = share(0.0, "sample tokens above P times the best probability; 0 is off", "P")
    repetition_penalty: float | None = option(
        None,
        "penalise repeated tokens by R; 1 is off (default: as the checkpoint says)",
        "above 0; 1 is off",
        lambda value: value > 0,
        "R",
        type=float,
    )
    stop: tuple[str, ...] | None = option(
        None,
        "end the text before STRING; repeatable (default: as the checkpoint says)",
        metavar="STRING",
        action="append",
    )
    ignore_eos: bool = option(False, "continue after the end-of-text token")
    ignore_generation_config: bool = option(False, IGNORES)
    amateur: Amateur | None = None  # the small model that the backbone is contrasted with
    grammar: Grammar | None = None  # the grammar that the text follows

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not stop for stop in self.stop or ()):
            raise RequestError("a stop string is empty; give at least one character")
        require_uncontrasted(self.compile, self.amateur)
        if self.grammar is not None:
            require_no_compiled_grammar(self.compile, self.ignore_eos)
        self.rule_for(self.do_sample)  # raises an error for rules that do not fit

    @property
    def rule(self) -> AcceptanceRule:
        """The acceptance rule that the settings choose."""
        return self.rule_for(self.do_sample)

    @property
    def uses_typical(self) -> bool:
        """Whether typical acceptance is asked for, so that epsilon and delta have an effect."""
        return self.do_sample and self.rule.kind.is_typical

    @property
    def how(self) -> tuple[AcceptanceRule, str | Literal[False], Amateur | None, bool]:
        """The arguments `rule`, `compile`, `amateur` and `stable` of `decode.texts.stepper_for`."""
        return self.rule, self.compiled, self.amateur, self.stable

    @property
    def do_sample(self) -> bool:
        return self.temperature > 0

    def of_checkpoint(self, own: GenerationConfig | None) -> Settings:
        """Make a copy with the stop strings and the repetition penalty of a checkpoint, each of them if not set here.

        `own` are the checkpoint's options. Raise a `NotCompilableError` if compiled steps are asked for, and the
        checkpoint sets another option that decides on tokens."""
        theirs = {} if self.ignore_generation_config else text_options(own)
        stop, penalty = theirs.pop("stop_strings", ()), theirs.pop("repetition_penalty", 1.0)
        if self.repetition_penalty is not None:
            penalty = self.repetition_penalty
        if self.compile and theirs:
            name, value = next(iter(theirs.items()))
            way = "--ignore-generation-config leaves it out"
            raise NotCompilableError(f"{told(name, value, own)}, which reads the text ({way})")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        return replace(self, stop=stop if self.stop is None else self.stop, repetition_penalty=penalty)

    def unused_line(self, own: GenerationConfig | None, samples: bool = True) -> str:
        """Name in one line the checkpoint's options that these settings do not use; empty if there are none.

        `samples`: whether a user can set the temperature and the like."""
        theirs = sampling_of(own) if samples else {}
        differs = any(getattr(self, name) != value for name, value in theirs.items())
        listed = ", ".join(f"{name}={value!r}" for name, value in unused(own, sampling=differs).items())
        if not listed:
            return ""
        chosen = {name: value for name, value in theirs.items() if value != getattr(Settings, name)}
        flags = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in chosen.items())
        return f"options of {FILE} that are not used: {listed}" + (f" (to sample, type {flags})" if differs else "")

    def generate_kwargs(self, tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, Any]:
        """The settings as arguments of `model.generate`, which takes penalties and the like from the checkpoint.

        They make it decode plainly, whatever else the checkpoint asks for. `grammar` is an argument of
        `decode.request.prepare` only."""
        kwargs = plain_options() | {"max_new_tokens": self.max_new_tokens, "do_sample": self.do_sample}
        if self.do_sample:
            kwargs |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            kwargs["min_p"] = self.min_p or None
        if self.ignore_generation_config:
            kwargs |= dict.fromkeys(TEXT)
        if self.repetition_penalty is not None:
            kwargs["repetition_penalty"] = self.repetition_penalty
        if self.stop is not None:
            kwargs["stop_strings"] = list(self.stop) or None
        if tokenizer is not None:
            kwargs["tokenizer"] = tokenizer
        if self.ignore_eos:
            kwargs |= {"eos_token_id": None, "exponential_decay_length_penalty": None}  # which needs an end
        if self.grammar is not None:
            kwargs["grammar"] = self.grammar
        return kwargs

    def to_dict(self) -> dict[str, object]:
        """All settings as JSON values; `acceptance` is the rule in effect, also if it was not set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        amateur = None if self.amateur is None else self.amateur.to_dict()
        grammar = None if self.grammar is None else self.grammar.source
        return values | {"acceptance": self.rule.name, "amateur": amateur, "grammar": grammar}


def near_tie(dtype: str = "", gap: float | None = None) -> str:
    """Say why greedy texts differ though decoding is right. `gap`: the greatest between the logits of two tokens."""
    measured = "" if gap is None else f" (gap of logits: at most {gap:.2g})"
    return f"two tokens are nearly tied, and {dtype}{' ' if dtype else ''}rounding decides{measured}"


def listing_options(prefix: str = "") -> Callable[[Function], Function]:
    """Decorate a function that takes the fields of `DecodingOptions` in its `kwargs`: its signature then lists them.

    The listed names start with `prefix`. The list is for help(), and for transformers, which passes a `custom_generate`
    callable only the arguments that its signature names."""

    def decorate(function: Function) -> Function:
        *own, kwargs = inspect.signature(function).parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        listed = [
            inspect.Parameter(prefix + field.name, keyword, default=field.default, annotation=field.type)
            for field in fields(DecodingOptions)
        ]
        # Functions have no declared attribute `__signature__`, which `inspect.signature` reads (PEP 362).
        vars(function)["__signature__"] = inspect.Signature([*own, *listed, kwargs])
        return function

    return decorate
