"""Heads from configs, from disk and from the Hub, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

import torch
from torch import nn

from medusa.config import MedusaConfig
from medusa.files import Json
from medusa.heads import class_of

if TYPE_CHECKING:
    from medusa.checkpoints.checkpoint import Checkpoint
    from medusa.checkpoints.folder import HubOptions
    from medusa.export.repository import PushOptions


class PretrainedHeads(nn.Module):
    """Makes, loads, saves and publishes heads; the base class of all kinds."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.provenance: Json | None = None
        """The content of their `provenance.json`; `None` without one."""

    @classmethod
    def from_config(cls, config: MedusaConfig) -> Self:
        """Make untrained heads of the kind that `config` names."""
        heads = class_of(config.kind)(config)
        assert isinstance(heads, cls)
        return heads

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Make heads from a checkpoint, whose tensors are not copied."""
        with torch.device("meta"):
            heads = cls.from_config(checkpoint.config)
        heads.load_state_dict(checkpoint.tensors, assign=True)
        heads.provenance = checkpoint.provenance
        return heads.eval()

    def checkpoint(self) -> Checkpoint:
        """The config, tensors and provenance of these heads, not copied."""
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
        """Load heads from `demo`, a local folder or a Hub id, in any format of docs/formats.md.

        Args:
            name_or_path: the name, folder or id.
            dtype, device: by default the dtype of the file, on the CPU.
            hub: `revision`, `token`, `cache_dir` and `local_files_only` of `huggingface_hub.snapshot_download`.

        Raises:
            RequestError: no heads there, a damaged file, or tensors that are missing, unknown or of the wrong shape.
        """
        from medusa.checkpoints.folder import load

        return cls.from_checkpoint(load(name_or_path, **hub)).to(device=device, dtype=dtype)

    def save_pretrained(self, folder: str | Path, provenance: Json | None = None, overwrite: bool = True) -> None:
        """Write the heads into `folder`, each file whole or not at all.

        Args:
            folder: made if it does not exist.
            provenance: the content of `provenance.json`; by default that of these heads.
            overwrite: replace heads in the folder.

        Raises:
            RequestError: the folder holds heads and `overwrite` is off.
        """
        from medusa.checkpoints.folder import save

        checkpoint = self.checkpoint()
        save(checkpoint if provenance is None else replace(checkpoint, provenance=provenance), Path(folder), overwrite)

    def push_to_hub(self, repo_id: str, **options: Unpack[PushOptions]) -> str:
        """Publish the heads with a model card and code for plain transformers (`medusa.export.repository`).

        Args:
            repo_id: the repository's Hub id.
            options: `private`, `token`, `revision`, `commit_message`, `license` and `benchmark`.

        Returns:
            The address of the commit.
        """
        from medusa.export.repository import push

        return push(self.checkpoint(), repo_id, **options)
