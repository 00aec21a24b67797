"""Options as dataclass fields with a default, a check and a help text, for Python and the command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from medusa.errors import RequestError

REQUIRED = MISSING
"""The default of an option that the user must give."""
DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")
ATTENTIONS = ("sdpa", "eager")
QUANTIZATIONS = ("4bit", "8bit")


def option(
    default: object,
    help: str,
    allowed: str = "",
    check: Callable[[Any], bool] | None = None,
    metavar: str = "",
    name: str = "",
    **argparse: object,
) -> Any:
    """Declare an option: a dataclass field whose metadata describe its argument on the command line.

    Args:
        default: the default value, or `REQUIRED`.
        help: the help text. The command line adds the default.
        allowed: a description of the valid values, for error messages.
        check: a function that returns whether a value is valid. `None` (the option is not given) is always valid.
        metavar: the placeholder of the value in the help text.
        name: the name of the argument, if it differs from the field's name.
        argparse: further keywords for `add_argument`; also `positional`, and `hidden` for fields without an argument.
    """
    about = {"help": help, "allowed": allowed, "check": check, "metavar": metavar, "name": name, "argparse": argparse}
    return field(default=default, metadata=about)


def count(default: object, help: str, metavar: str = "N", **argparse: Any) -> Any:
    """Declare an option whose value is a whole number of at least 1."""
    allowed = "a whole number of at least 1"
    return option(default, help, allowed, lambda value: value >= 1, metavar, type=int, **argparse)


def share(default: float, help: str, metavar: str, name: str = "") -> Any:
    """Declare an option whose value is between 0 and 1."""
    return option(default, help, "between 0 and 1", lambda value: 0 <= value <= 1, metavar, name)


def argument_name(known: Field[object]) -> str:
    """Return the name of an option's argument on the command line, without `--`."""
    return (known.metadata["name"] or known.name).replace("_", "-")


class OptionError(RequestError):
    """An invalid value of an option. The message begins with the option's name."""


@dataclass(frozen=True)
class Options:
    """Base class of dataclasses whose fields are options. Each value is checked when an instance is made.

    Raises:
        OptionError: the value of an option is invalid.
    """

    def __post_init__(self) -> None:
        for known in fields(self):
            check, value = known.metadata.get("check"), getattr(self, known.name)
            if check is not None and value is not None and not check(value):
                raise OptionError(f"{argument_name(known)} is {value}; it must be {known.metadata['allowed']}")

    def check_given(self, names: Sequence[str]) -> None:
        """Check which arguments the user gave on the command line, even with their default values; here none.

        Subclasses raise a `RequestError` for arguments that have no effect. `names`: the arguments without `--`."""


@dataclass(frozen=True)
class LoadOptions(Options):
    """Options for loading a backbone.

    Raises:
        RequestError: a value is invalid, or this machine does not have the device.
    """

    dtype: str | None = option(
        None, f"load weights as {' or '.join(DTYPE_NAMES)} (default: float32 on a CPU, the checkpoint's dtype on a GPU)"
    )
    device: str | None = option(
        None, "compute on cpu, cuda, cuda:1 or mps; auto spreads the layers over all devices (default: a GPU if any)"
    )
    attention: str | None = option(None, "compute attention by sdpa or eager (default: sdpa if the model has it)")
    revision: str | None = option(None, "load this branch, tag or commit of the backbone from the Hub")
    trust_remote_code: bool = option(False, "run the Python code that comes with the backbone")
    quantization: str | None = option(None, "load weights quantised by bitsandbytes: 4bit or 8bit")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype is not None and self.dtype not in DTYPE_NAMES:
            raise RequestError(f"--dtype is {self.dtype!r}; choose one of {', '.join(DTYPE_NAMES)}")
        if self.attention is not None and self.attention not in ATTENTIONS:
            raise RequestError(f"--attention is {self.attention!r}; choose sdpa or eager, which take tree masks")
        if self.device is not None and self.device != "auto":
            _require_device(self.device)
        if self.quantization not in (None, *QUANTIZATIONS):
            raise RequestError(f"quantization is {self.quantization!r}; choose 4bit or 8bit, or leave it out")
        if self.quantization is not None and importlib.util.find_spec("bitsandbytes") is None:
            raise RequestError(
                f"quantization: {self.quantization} needs bitsandbytes, which is not installed; install it, or leave "
                "quantization out"
            )

    @property
    def hub(self) -> dict[str, str | bool | None]:
        """The options for the Hub, as keyword arguments of transformers' `from_pretrained`."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def _require_device(device: str) -> None:
    """Raise a `RequestError` if PyTorch has no such device on this machine."""
    import torch

    try:
        asked = torch.device(device)
    except RuntimeError:
        raise RequestError(f"--device is {device!r}; choose cpu, cuda, cuda:0, ..., mps or auto") from None
    count = torch.cuda.device_count()
    if asked.type == "cuda" and (asked.index or 0) >= count:
        raise RequestError(
            f"--device is {device!r}, and PyTorch sees {count} CUDA device(s); choose cpu or leave it out"
        )
    if asked.type == "mps" and not torch.backends.mps.is_available():
        raise RequestError(f"--device is {device!r} and PyTorch sees no Apple GPU; choose cpu or leave it out")
