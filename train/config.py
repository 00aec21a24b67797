"""A training YAML: `backbone`, `data`, `output_dir`, `heads`, `training`; unknown keys are errors, never ignored."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from medusa.config import BLOCKS, GATED, KINDS, LM_HEADS, MIN_VOCABULARY
from medusa.errors import RequestError
from train.data import DataConfig

SCHEDULES = ("constant", "linear", "sine")
LM_LOSSES = ("kl", "text")
NUM_HEADS = 4
TEACHER_TILT = 0.06  # with lambda_0 0.1: within 2 % of the perplexity (docs/training.md)


@dataclass
class HeadsConfig:
    """The `heads` section; what is left out is chosen for the backbone (`train.architecture`)."""

    num: int | None = None
    """How many heads, 4 if not said: 3 to 5; a step can give at most one token more than there are heads."""
    kind: str | None = None
    """medusa (independent) if not said, or one that knows what was guessed before (`medusa.heads.kinds`,
    docs/kinds.md)."""
    prefix_layers: int | None = None
    """Decoder layers of the heads' own over the hidden states (prefix attention); 1 is usual, 0 none."""
    block: str | None = None
    """square (the paper's; the only one of independent heads that servers load), mlp, or gated (kind eagle only: the
    layer of EAGLE-3, which servers load)."""
    layers: int | None = None
    """Residual blocks per head."""
    expansion: float | None = None
    """Width of an MLP block in hidden sizes."""
    lm_head: str | None = None
    """own (V x H more weights a head) or shared (the backbone's)."""
    vocabulary: int | None = None
    """Guess among so many tokens, the most frequent of the training text; 0: among all. For large vocabularies."""
    force_vocabulary: bool = False
    """Also where that is expected to slow decoding down."""
    start: str | None = None
    """Go on from these trained heads, a folder or Hub id, instead of fresh ones; what is said above must agree."""


@dataclass
class AdapterConfig:
    """The `adapter` section of a training YAML: with it, the backbone learns too (Medusa-2)."""

    rank: int = 32
    """Of the low-rank matrices (paper: 32)."""
    alpha: int = 64
    """They are scaled by alpha / rank (paper: 16)."""
    dropout: float = 0.0
    """Before them (paper: 0.05); decoding shows the heads no state that it has touched."""
    modules: str | list[str] = "all-linear"
    """Which layers: all linear ones but the LM head, or names as peft takes them."""
    lm_head: bool = False
    """The LM head too (paper); heads then need LM heads of their own."""
    learning_rate: float | None = None
    """Peak; a quarter of `training.learning_rate`, which is the heads', if not said (paper: heads x 4)."""
    lm_loss: str = "kl"
    """kl: stay close to the untouched backbone; text: learn the text."""
    lambda_0: float = 0.1
    """Weight of what the heads ask of the backbone beside the LM loss (paper: 0.2; 0.01 in self-distillation)."""
    teacher_tilt: float | None = None
    """Exponent with which the teacher leans towards what the first head expected (`train.medusa2`; ours); 0 is off,
    0.06 if not said; text has no teacher."""
    schedule: str = "constant"
    """How lambda_0 and teacher_tilt are reached: constant, linear or sine (a quarter wave); rising ones spare the
    backbone."""
    heads_first: float = 0.1
    """Share of the run in which the heads learn alone; 0 where they start from trained ones (`heads.start`)."""
    quality_data: str | None = None
    """Texts whose perplexity is taken before and after; a part of the training data, if not said."""
    merge: bool = False
    """Also write the backbone with the adapter merged into it, in `output_dir`/merged."""

    def __post_init__(self) -> None:
        for name, allowed in (("schedule", SCHEDULES), ("lm_loss", LM_LOSSES)):
            if getattr(self, name) not in allowed:
                raise RequestError(f"adapter.{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        if self.rank < 1:
            raise RequestError(f"adapter.rank is {self.rank}; take 1 or more")
        if not 0 <= self.heads_first < 1:
            raise RequestError(f"adapter.heads_first is {self.heads_first}; it is a share of the run, below 1")
        if not 0 <= self.dropout < 1:
            raise RequestError(f"adapter.dropout is {self.dropout}; it must be at least 0 and below 1")
        if self.teacher_tilt is None:
            self.teacher_tilt = TEACHER_TILT if self.lm_loss == "kl" else 0.0
        if not 0 <= self.teacher_tilt < 1:
            raise RequestError(f"adapter.teacher_tilt is {self.teacher_tilt}; it must be at least 0 and below 1")
        if self.teacher_tilt and self.lm_loss != "kl":
            raise RequestError(
                "adapter.teacher_tilt is for lm_loss kl, where a teacher can be tilted; leave one of them out"
            )
        if not self.lambda_0 > 0:
            raise RequestError(f"adapter.lambda_0 is {self.lambda_0}; it must be above 0")


@dataclass
class TrainConfig:
    """All of a training YAML."""

    backbone: str
    """A local folder, a Hub id, or `demo`."""
    data: DataConfig
    output_dir: str
    """Where heads, checkpoints and provenance go."""
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    eval_data: DataConfig | None = None
    """Text to evaluate on while training, in the forms of `data`; evaluation is then every 500 steps if not said."""
    adapter: AdapterConfig | None = None
    """With it the backbone learns, too, through LoRA: Medusa-2 (`train.medusa2`)."""
    training: dict[str, Any] = field(default_factory=dict)
    """Fields of transformers' TrainingArguments and ours (objective, head_weighting, max_minutes, ...)."""
    cache_features: bool = False
    """Run the backbone once and train the heads from its hidden states on disk (`train.features`)."""
    features_dir: str | None = None
    """Where they go: `output_dir`/features if not said."""
    features_dtype: str | None = None
    """How they are stored: as the backbone gives them, or float16 or bfloat16."""
    revision: str | None = None
    """Of the backbone on the Hub."""
    dtype: str | None = None
    """Of the backbone: float32 (default on a CPU) or, on a GPU, the checkpoint's."""
    device: str | None = None
    """cpu, cuda, ...; a GPU where there is one."""
    attention: str | None = None
    """sdpa or eager."""
    shard_backbone: bool = False
    """Cut the backbone's blocks over all processes (FSDP2): for one that does not fit on a single GPU."""
    quantization: str | None = None
    """4bit or 8bit: load the backbone so, with bitsandbytes."""
    trust_remote_code: bool = False
    """Run code that comes with the backbone."""


def load_config(path: str | Path, overrides: list[str]) -> TrainConfig:
    """Read a YAML file and lay `key.sub=value` overrides over it.

    Raises:
        RequestError: no such file, not YAML, an unknown key, a missing one, or a value of the wrong kind.
    """
    path = Path(path)
    if not path.is_file():
        raise RequestError(f"no such file: {path}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise RequestError(f"{path} must hold a mapping with backbone, data, output_dir, heads and training")
    for override in overrides:
        _override(content, override)
    return parse_config(content, str(path))


def parse_config(content: dict[str, Any], source: str) -> TrainConfig:
    """A checked `TrainConfig`; see `load_config`."""
    for name in ("data", "eval_data"):
        if isinstance(content.get(name), str):
            content = content | {name: {"path": content[name]}}
    _known(content, TrainConfig, source, "")
    for name in ("backbone", "data", "output_dir"):
        if not content.get(name):
            raise RequestError(f"{source} says no {name}; add `{name}: ...`")
    _typed(content, TrainConfig, source, "")
    sections = {}
    for name in ("data", "eval_data"):
        if content.get(name) is None:
            continue
        if isinstance(content[name], dict) and not content[name].get("path"):
            raise RequestError(f"{source} says no {name}.path; add `{name}: FILE` or `{name}: {{path: FILE}}`")
        sections[name] = _section(content[name], DataConfig, source, name)
    sections["heads"] = _section(content.get("heads") or {}, HeadsConfig, source, "heads")
    if content.get("adapter") is not None:
        sections["adapter"] = _section(content["adapter"], AdapterConfig, source, "adapter")
    training = content.get("training")
    training = {} if training is None else training
    if not isinstance(training, dict):
        raise RequestError(f"{source}: training must be a mapping of fields")
    arguments = _training_arguments()
    training = {_name_here(name, arguments): value for name, value in training.items()}
    _known(training, arguments, source, "training.")
    training = _numbers(training, arguments)
    _typed(training, arguments, source, "training.")
    config = TrainConfig(**content | sections | {"training": training})
    _check_heads(config.heads)
    return config


def _training_arguments() -> type:
    from train.trainer import MedusaTrainingArguments

    return MedusaTrainingArguments


def _section(content: Any, of: type, source: str, name: str) -> Any:
    if not isinstance(content, dict):
        raise RequestError(f"{source}: {name} must be a mapping of fields, not {content!r}")
    _known(content, of, source, f"{name}.")
    _typed(content, of, source, f"{name}.")
    return of(**content)


def _typed(content: dict[str, Any], of: type, source: str, prefix: str) -> None:
    """Each value is of the kind that its field says, as far as that is a plain one: str, int, float or bool."""
    plain: dict[str, Any] = {"int": int, "str": str, "float": (int, float), "bool": bool}
    for field_ in dataclasses.fields(of):
        words = _kinds(field_)
        kinds = [plain[word] for word in words if word in plain]
        if field_.name not in content or not kinds or set(words) - set(plain) - {"None"}:
            continue
        value = content[field_.name]
        if value is None and "None" in words:
            continue
        if not any(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for kind in kinds):
            raise RequestError(f"{source}: {prefix}{field_.name} is {value!r}; it must be {' or '.join(words)}")


def _kinds(field_: dataclasses.Field[Any]) -> list[str]:
    """`int | None` as ["int", "None"], whether the annotation is kept as text or as a type."""
    annotation = field_.type.__name__ if isinstance(field_.type, type) else str(field_.type)
    return [word.strip() for word in annotation.split("|")]


OLD_NAMES = {"activation_checkpointing": "gradient_checkpointing"}  # in transformers 5.17


def _name_here(name: str, arguments: type) -> str:
    """What this version of transformers calls a field of its TrainingArguments."""
    return name if name in {f.name for f in dataclasses.fields(arguments)} else OLD_NAMES.get(name, name)


def _known(content: dict[str, Any], of: type, source: str, prefix: str) -> None:
    allowed = [f.name for f in dataclasses.fields(of)]
    for key in content:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(allowed[:12])}"
            raise RequestError(f"{source}: unknown key {prefix}{key}; {hint}")


def _check_heads(heads: HeadsConfig) -> None:
    for name, allowed in (("kind", KINDS), ("block", BLOCKS), ("lm_head", LM_HEADS)):
        value = getattr(heads, name)
        if value is not None and value not in allowed:
            raise RequestError(f"heads.{name} is {value!r}; choose one of {', '.join(allowed)}")
    fitting = ("eagle", None) if heads.start else ("eagle",)
    if heads.block == GATED and (heads.kind not in fitting or heads.layers not in (None, 1)):
        raise RequestError(f"heads.block {GATED} belongs to heads.kind eagle with heads.layers 1; take square or mlp")
    for name in ("num", "layers"):
        value = getattr(heads, name)
        if value is not None and value < 1:
            raise RequestError(f"heads.{name} is {value}; at least 1 is needed")
    if heads.vocabulary and heads.vocabulary < MIN_VOCABULARY:
        raise RequestError(
            f"heads.vocabulary is {heads.vocabulary}; it must be at least {MIN_VOCABULARY}, or 0 for all tokens"
        )
    if heads.prefix_layers is not None and heads.prefix_layers < 0:
        raise RequestError(f"heads.prefix_layers is {heads.prefix_layers}; it must be 0 (none) or more")
    if heads.expansion is not None and not heads.expansion > 0:
        raise RequestError(f"heads.expansion is {heads.expansion}; it must be above 0")


def _override(content: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise RequestError(f"{override!r} is no override; write key=value, for example training.learning_rate=1e-3")
    *parents, last = name.split(".")
    place = content
    for parent in parents:
        if isinstance(place.get(parent), str) and parent in ("data", "eval_data"):
            place[parent] = {"path": place[parent]}
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise RequestError(f"cannot set {name}: {parent} is not a mapping")
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RequestError(f"{override!r}: {text!r} is not YAML; quote it") from None


def _numbers(training: dict[str, Any], of: type) -> dict[str, Any]:
    """What YAML reads otherwise than people mean it: 1e-3 as a string (it wants 1.0e-3), `no` as False."""
    kinds = {field_.name: " | ".join(_kinds(field_)) for field_ in dataclasses.fields(of)}
    out = {}
    for key, value in training.items():
        kind = kinds[key]
        if isinstance(value, str) and ("int" in kind or "float" in kind) and "str" not in kind:
            with contextlib.suppress(ValueError):
                value = float(value)
        if isinstance(value, float) and value.is_integer() and "int" in kind and "float" not in kind:
            value = int(value)
        if isinstance(value, bool) and "bool" not in kind and ("str" in kind or "Strategy" in kind):
            value = "yes" if value else "no"
        out[key] = value
    return out
