"""Options as dataclass fields with a default, a check and a help text, for Python and the command line.

The options of a command are one dataclass. Its `option` fields are arguments; its `group` fields hold the options of
another dataclass, which form an argument group:

    class GenerateOptions(Options):
        settings: Settings = group(Settings, "generation", max_new_tokens=128)     # another default
        plain: bool = option(False, "decode without a drafter")
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, dataclass_transform

from medusa.errors import OptionError, RequestError, choose_one_of, did_you_mean

REQUIRED = MISSING  # the default of an option that the user must give
DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")
ATTENTIONS = ("sdpa", "eager")
QUANTIZATIONS = {"int8": "torchao", "int4": "torchao", "8bit": "bitsandbytes", "4bit": "bitsandbytes"}
"""Ways to quantise the weights of a backbone while it is loaded, each with the package that does it."""


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype of torch, such as float32 for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def option(
    default: object,
    help: str,
    allowed: str = "",
    check: Callable[[Any], bool] | None = None,
    metavar: str = "",
    name: str = "",
    brief: str = "",
    exists: Callable[[str], object] | None = None,
    **keywords: object,
) -> Any:
    """Declare an option: a dataclass field whose metadata describe its argument on the command line.

    The option must be given if `default` is `REQUIRED`.

    Args:
        help: the help text. The command line adds the default.
        brief: a shorter help text for `--help`, of at most 54 characters with the default; by default `help`.
        allowed: a description of the valid values, for error messages.
        check: a function that returns whether a value is valid. `None` (the option is not given) is always valid.
        name: the name of the argument, if it differs from the field's name.
        exists: a function that raises RequestError if a value names an input that does not exist. The command line
            calls it before torch is imported, which takes seconds.
        keywords: more keywords for `add_argument`, `positional=True` (no `--`) or `hidden=True` (only for Python)."""
    about: dict[str, object] = {"help": help, "allowed": allowed, "check": check, "metavar": metavar, "name": name}
    about |= {"brief": brief, "exists": exists, "argparse": keywords}
    return field(default=default, metadata=about)


def count(default: object, help: str, metavar: str = "N", **keywords: Any) -> Any:
    """Declare an option whose value is a whole number of at least 1."""
    allowed = "a whole number of at least 1"
    return option(default, help, allowed, lambda value: value >= 1, metavar, type=int, **keywords)


def positive(default: float | None, help: str, metavar: str) -> Any:
    """Declare an option whose value is a number above 0."""
    return option(default, help, "above 0", lambda value: value > 0, metavar, type=float)


def share(default: float, help: str, metavar: str, name: str = "") -> Any:
    """Declare an option whose value is a number from 0 to 1."""
    return option(default, help, "between 0 and 1", lambda value: 0 <= value <= 1, metavar, name)


def argument_name(known: Field[object]) -> str:
    """Return the name of an option's argument on the command line, without `--`."""
    return (known.metadata["name"] or known.name).replace("_", "-")


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True)
class Options:
    """Base class of options: a subclass becomes a frozen dataclass, keyword-only unless it is declared `kw_only=False`.

    A new instance raises OptionError if a value is invalid."""

    shown: ClassVar[str] = ""
    """The arguments that a command's `--help` lists, separated by spaces; `--help-all` lists all."""
    by_position: ClassVar[tuple[str, ...]] = ()
    """The arguments that words without `--` fill, in this order. `name...` stands for all words that are left."""

    def __init_subclass__(cls, kw_only: bool = True) -> None:
        dataclass(frozen=True, kw_only=kw_only)(cls)

    def __post_init__(self) -> None:
        for known in fields(self):
            check, value = known.metadata.get("check"), getattr(self, known.name)
            if check is not None and value is not None and not check(value):
                name = known.metadata["name"] or known.name
                raise OptionError(name, f"is {value}; it must be {known.metadata['allowed']}")

    @classmethod
    def filled_by_position(cls, given: Collection[str]) -> Sequence[str]:
        """Return the arguments that words without `--` fill, in order. `given` are the arguments given by name."""
        return [name for name in cls.by_position if name not in given]

    def completed(self) -> Self:
        """Return the options with the values that other options imply, such as the backbone that heads record.

        A command calls this after all options are read and checked, because it may read files."""
        return self

    def check_given(self, names: Sequence[str]) -> None:
        """Reject arguments that the user gave but that have no effect; this base class rejects none.

        Subclasses raise a `RequestError`. `names` are the arguments on the command line, without `--`. They include
        arguments that the user gave with their default values."""


class Group(NamedTuple):
    """Options of one dataclass that form an argument group of a command."""

    title: str
    make: Callable[..., Options]  # the dataclass, with the defaults of the command
    arguments: list[tuple[Field[object], object]]  # the options that are arguments of the command, with their defaults


def group(
    kind: type[Options], title: str, *, only: Collection[str] = (), without: Collection[str] = (), **defaults: object
) -> Any:
    """Make a field for the options of another dataclass, `kind`; these options form an argument group called `title`.

    Args:
        only: names of the options that become arguments; by default all.
        without: names of options that do not become arguments: the user cannot change their defaults.
        defaults: by option name, defaults that replace those in `kind`; REQUIRED if the user must give the option."""
    own_first = sorted(fields(kind), key=lambda known: known.name not in kind.__annotations__)  # then inherited fields
    chosen = [known for known in own_first if known.name not in without and (not only or known.name in only)]
    arguments = [(known, defaults.get(known.name, known.default)) for known in chosen if "help" in known.metadata]
    make = partial(kind, **{name: value for name, value in defaults.items() if value is not REQUIRED})
    return field(default_factory=make, metadata={"group": Group(title, make, arguments)})


class LoadOptions(Options, kw_only=False):
    """Options for loading a backbone; RequestError if a value is invalid or this machine does not have the device."""

    dtype: str | None = option(
        None,
        f"load weights as {', '.join(DTYPE_NAMES)} or auto: bfloat16 on a CPU that is faster with it, the checkpoint's "
        "dtype on a GPU (default: float32 on a CPU, the checkpoint's dtype on a GPU)",
        brief="load weights as float32, bfloat16, float16 or auto",
    )
    device: str | None = option(
        None,
        "compute on cpu, cuda, cuda:1 or mps; auto spreads the layers over all devices (default: a GPU if any)",
        brief="compute on cpu, cuda, cuda:1, mps or auto",
    )
    attention: str | None = option(None, "compute attention by sdpa or eager (default: sdpa if the model has it)")
    revision: str | None = option(None, "load this branch, tag or commit of the backbone from the Hub")
    trust_remote_code: bool = option(False, "run the Python code that comes with the backbone")
    quantization: str | None = option(
        None,
        "quantise weights while loading: int8 or int4 (by torchao), 8bit or 4bit (by bitsandbytes)",
        metavar="NAME",
        brief="quantise weights: int8, int4, 8bit or 4bit",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype is not None and self.dtype not in (known := (*DTYPE_NAMES, "auto")):
            raise RequestError(f"--dtype is {self.dtype!r}; {choose_one_of(self.dtype, known)}")
        if self.attention is not None and self.attention not in ATTENTIONS:
            raise RequestError(f"--attention is {self.attention!r}; {choose_one_of(self.attention, ATTENTIONS)}")
        if self.device is not None and self.device != "auto":
            _require_device(self.device)
        if (kind := self.quantization) is None:
            return
        if kind not in QUANTIZATIONS:
            raise RequestError(f"quantization is {kind!r}; {choose_one_of(kind, QUANTIZATIONS)}")
        if importlib.util.find_spec(needed := QUANTIZATIONS[kind]) is None:
            absent = f"quantization: {kind} needs {needed}, which is not installed"
            raise RequestError(f"{absent}; install it, or leave quantization out")

    @property
    def hub(self) -> dict[str, str | bool | None]:
        """The options for the Hub, as keyword arguments of transformers' `from_pretrained`."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def _require_device(device: str) -> None:
    """Raise RequestError if PyTorch has no such device on this machine."""
    import torch

    try:
        asked = torch.device(device)
    except RuntimeError:
        near = did_you_mean(device, ("cpu", "cuda", "mps", "auto"))
        raise RequestError(f"--device is {device!r}; choose cpu, cuda, cuda:0, ..., mps or auto{near}") from None
    count = torch.cuda.device_count()
    if asked.type == "cuda" and (asked.index or 0) >= count:
        raise RequestError(f"--device is {device!r}, and PyTorch sees {count} GPU(s); choose cpu or leave it out")
    if asked.type == "mps" and not torch.backends.mps.is_available():
        raise RequestError(f"--device is {device!r} and PyTorch sees no Apple GPU; choose cpu or leave it out")
