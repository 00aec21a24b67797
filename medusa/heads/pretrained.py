"""Heads from configs, from disk and from the Hub, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from medusa.config import MedusaConfig
from medusa.files import Json
from medusa.heads.kinds import class_of

if TYPE_CHECKING:
    from medusa.checkpoints.checkpoint import Checkpoint


class PretrainedHeads(nn.Module):
    """The part of heads that makes, loads, saves and publishes them."""

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
        """Make heads with the tensors of a checkpoint, which are not copied."""
        with torch.device("meta"):
            heads = cls.from_config(checkpoint.config)
        heads.load_state_dict(checkpoint.tensors, assign=True)
        heads.provenance = checkpoint.provenance
        return heads.eval()

    def checkpoint(self) -> Checkpoint:
        """Config, tensors and provenance of these heads; nothing is copied."""
        from medusa.checkpoints.checkpoint import Checkpoint

        return Checkpoint(self.config, self.state_dict(), self.provenance)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Load heads from `demo`, a local folder or a Hub id, in any format of docs/formats.md.

        Args:
            name_or_path: which heads.
            dtype, device: where the heads are kept; by default the dtype of the file, on the CPU.
            revision: a branch, tag or commit on the Hub.
            token: for private and gated repositories; by default that of `hf auth login`.
            cache_dir: where downloads are kept; by default the Hub's own cache.
            local_files_only: use earlier downloads only.

        Raises:
            RequestError: no heads there, a damaged file, or tensors that are missing, unknown or of the wrong shape.
        """
        from medusa.checkpoints.find import HubOptions
        from medusa.checkpoints.load import load

        checkpoint = load(name_or_path, HubOptions(revision, token, cache_dir, local_files_only))
        return cls.from_checkpoint(checkpoint).to(device=device, dtype=dtype)

    def save_pretrained(self, folder: str | Path, provenance: Json | None = None, overwrite: bool = True) -> None:
        """Write the heads into `folder`, each file whole or not at all.

        Args:
            folder: made if it does not exist.
            provenance: the content of `provenance.json`; by default that of these heads.
            overwrite: replace heads that lie there.

        Raises:
            RequestError: heads lie there and `overwrite` is off.
        """
        from medusa.checkpoints.save import save

        checkpoint = self.checkpoint()
        save(checkpoint if provenance is None else replace(checkpoint, provenance=provenance), Path(folder), overwrite)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        license: str | None = None,
        benchmark: str | Path | None = None,
    ) -> str:
        """Publish the heads on the Hub, with a model card and code for plain transformers.

        Args: those of `medusa.export.repository.push`.

        Returns:
            The address of the commit.
        """
        from medusa.export.repository import push

        return push(
            self.checkpoint(),
            repo_id,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            license=license,
            benchmark=benchmark,
        )
