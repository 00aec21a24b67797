"""The base class of `MedusaHeads`: it makes heads from configs, loads and saves them, and publishes them on the Hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

import torch
from torch import nn

from medusa.config import MedusaConfig
from medusa.errors import RequestError, require_arguments
from medusa.files import Json
from medusa.heads import class_of

if TYPE_CHECKING:
    from medusa.checkpoints.checkpoint import Checkpoint
    from medusa.checkpoints.folder import HubOptions
    from medusa.export.repository import PushOptions


class PretrainedHeads(nn.Module):
    """The base class of `MedusaHeads`, which loads, saves and publishes heads. Subclasses add the modules."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.provenance: Json | None = None  # the content of `provenance.json`

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @classmethod
    def from_config(cls, config: MedusaConfig) -> Self:
        """Create untrained heads with the config's kind and shapes."""
        heads = class_of(config.kind)(config)
        assert isinstance(heads, cls)
        return heads

    def checkpoint(self) -> Checkpoint:
        """Return the config, the tensors and the provenance of these heads; the tensors are not copied."""
        from medusa.checkpoints.checkpoint import Checkpoint

        return Checkpoint(self.config, self.state_dict(), self.provenance)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **hub: Unpack[HubOptions],
    ) -> Self:
        """Load heads in eval mode from a local folder, the Hub or the package, in any format of docs/formats.md.

        Raise RequestError if an argument is wrong, there are no heads, a file is damaged, or a tensor is missing,
        unknown or wrong in shape.

        Args:
            name_or_path: a folder, a Hub id such as `org/heads`, or `demo` for the heads that come with the package.
            dtype, device: the dtype and device of the heads; by default the dtype in the file, on the CPU. Tensors of
                several dtypes become float32, or float64 if one is.
            hub: `revision`, `token`, `cache_dir` and `local_files_only` of `huggingface_hub.snapshot_download`."""
        from medusa.checkpoints.folder import HubOptions, load

        _require_placement(dtype, device)
        require_arguments("from_pretrained", hub, HubOptions.__annotations__)
        checkpoint = load(name_or_path, **hub)
        with torch.device("meta"):
            heads = cls.from_config(checkpoint.config)
        heads.load_state_dict(checkpoint.tensors, assign=True)  # not copied
        heads.provenance = checkpoint.provenance
        return heads.eval().to(device=device, dtype=dtype or checkpoint.dtype)

    def save_pretrained(self, folder: str | Path, provenance: Json | None = None, overwrite: bool = True) -> None:
        """Write the heads into `folder`, each file atomically. The folder is created if it does not exist.

        `provenance` is the content of `provenance.json`; by default that of these heads. Raise RequestError if the
        folder contains heads and `overwrite` is false."""
        from medusa.checkpoints.folder import save

        checkpoint = self.checkpoint()
        save(checkpoint if provenance is None else replace(checkpoint, provenance=provenance), Path(folder), overwrite)

    def push_to_hub(self, repo_id: str, **options: Unpack[PushOptions]) -> str:
        """Publish the heads on the Hub, with a model card and code that decodes with plain transformers.

        The repository, such as `org/heads`, is created if it does not exist. The `options` are `private`, `token`,
        `revision`, `commit_message`, `license` and `benchmark`. The address of the commit is returned."""
        from medusa.export.repository import PushOptions, push

        require_arguments("push_to_hub", options, PushOptions.__annotations__)
        return push(self.checkpoint(), repo_id, **options)


def _require_placement(dtype: object, device: object) -> None:
    """Raise RequestError unless PyTorch has this dtype and this device; `None` is always valid."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise RequestError(f"dtype is {dtype!r}; give a torch.dtype, such as torch.float32")
    try:
        if device is not None and not isinstance(device, torch.device | str | int):
            raise TypeError
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError):  # AssertionError: PyTorch was built without this backend
        raise RequestError(f"device is {device!r}, which PyTorch does not have here; give cpu, cuda or mps") from None
