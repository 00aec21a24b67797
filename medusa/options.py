"""Options as fields of dataclasses: name, default, check and help text, for Python and for the command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
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
    about: dict[str, object] = {"help": help, "allowed": allowed, "check": check, "metavar": metavar, "name": name}
    about["argparse"] = argparse
    return field(default=default, metadata=about)


def count(default: object, help: str, metavar: str = "N", **argparse: Any) -> Any:
    """Declare an option whose value is a whole number of at least 1."""
    allowed = "a whole number of at least 1"
    return option(default, help, allowed, lambda value: value >= 1, metavar, type=int, **argparse)


def share(default: float, help: str, metavar: str, name: str = "") -> Any:
    """Declare an option whose value is between 0 and 1."""
    return option(default, help, "between 0 and 1", lambda value: 0 <= value <= 1, metavar, name)


class OptionError(RequestError):
    """An invalid value of an option. The message begins with the name of the option."""


@dataclass(frozen=True)
class Options:
    """The base class of dataclasses whose fields are options. It checks all values when an object is created.

    Raises:
        OptionError: the value of an option is invalid.
    """

    def __post_init__(self) -> None:
        for known in fields(self):
            check, value = known.metadata.get("check"), getattr(self, known.name)
            if check is not None and value is not None and not check(value):
                name = (known.metadata["name"] or known.name).replace("_", "-")
                raise OptionError(f"{name} is {value}; it must be {known.metadata['allowed']}")


@dataclass(frozen=True)
class LoadOptions(Options):
    """Options for loading a backbone.

    Raises:
        RequestError: a value is invalid, or this machine does not have the device.
    """

    dtype: str | None = option(
        None, f"load weights as {', '.join(DTYPE_NAMES)} (default: float32 on a CPU, the checkpoint's dtype on a GPU)"
    )
    device: str | None = option(
        None, "compute on cpu, cuda, cuda:1 or mps; auto spreads the layers over all devices (default: a GPU if any)"
    )
    attention: str | None = option(None, "use sdpa (default if the model offers it) or eager attention")
    revision: str | None = option(None, "load this branch, tag or commit of the backbone from the Hub")
    trust_remote_code: bool = option(False, "run code that comes with the backbone")
    quantization: str | None = option(None, "load the weights in 4bit or 8bit, by bitsandbytes")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype is not None and self.dtype not in DTYPE_NAMES:
            raise RequestError(f"--dtype is {self.dtype!r}; choose one of {', '.join(DTYPE_NAMES)}")
        if self.attention is not None and self.attention not in ATTENTIONS:
            raise RequestError(f"--attention is {self.attention!r}; choose sdpa or eager, which take a tree mask")
        if self.device is not None and self.device != "auto":
            _require_device(self.device)
        if self.quantization is not None:
            _require_quantization(self.quantization)

    @property
    def hub(self) -> dict[str, str | bool | None]:
        """The options for the Hub, as keyword arguments of transformers' `from_pretrained`."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def _require_device(device: str) -> None:
    """Raise RequestError if PyTorch does not have this device here."""
    import torch

    try:
        asked = torch.device(device)
    except RuntimeError:
        raise RequestError(f"--device is {device!r}; choose cpu, cuda, cuda:0, ..., mps or auto") from None
    count = torch.cuda.device_count()
    if asked.type == "cuda" and (asked.index or 0) >= count:
        raise RequestError(f"--device is {device!r}, and PyTorch sees {count} CUDA device(s); choose cpu")
    if asked.type == "mps" and not torch.backends.mps.is_available():
        raise RequestError(f"--device is {device!r} but PyTorch sees no Apple GPU; choose cpu")


def _require_quantization(kind: str) -> None:
    """Raise RequestError if there is no such quantisation, or bitsandbytes is not installed."""
    if kind not in QUANTIZATIONS:
        raise RequestError(f"quantization is {kind!r}; choose 4bit or 8bit, or leave it out")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RequestError(
            f"quantization: {kind} needs bitsandbytes, which is not installed; install it or leave this out"
        )
