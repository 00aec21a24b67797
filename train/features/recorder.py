"""A recorder of features: it writes texts with their hidden states to disk while the texts are generated."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.config import Fingerprint
from medusa.errors import RequestError
from medusa.files import Json, free_bytes, locked, readable
from medusa.options import dtype_name
from train.features import files
from train.features.files import Manifest, is_features, require_features_or_new, shards, token_bytes, write_shard


class Recorder:
    """Writer that adds texts with their hidden states to a folder of features, on which heads can then be trained."""

    def __init__(
        self,
        folder: Path,
        fingerprint: Fingerprint,
        hidden_size: int,
        dtype: torch.dtype,
        raw_prompts: bool | None = None,
        template_options: Json | None = None,
    ) -> None:
        """Make a recorder that writes to `folder`: a new folder, or one to which earlier recorders wrote.

        Hidden states, of the backbone with this fingerprint, are stored in `dtype`. `raw_prompts` and
        `template_options` are those of `MedusaConfig`. Raise RequestError if the folder holds anything but such
        features, or is a dataset's `FeatureCache`."""
        self.folder, self.dtype = folder, dtype
        self.manifest = Manifest(
            fingerprint,
            dtype_name(dtype),
            hidden_size,
            raw_prompts=raw_prompts,
            template_options=template_options or None,
        )
        self.texts = self.tokens = 0  # that this recorder has written to disk
        self._texts: list[dict[str, Tensor]] = []
        if is_features(folder):
            self._require_same()
        require_features_or_new(folder)

    def _require_same(self) -> None:
        held, raw_prompts = Manifest.read(self.folder), self.manifest.raw_prompts
        if not held.same_states(self.manifest) or held.rows is not None:
            other = "features of another backbone or dtype, or a cache"
            raise RequestError(f"{self.folder} holds {other}; give another folder")
        if {held.raw_prompts, raw_prompts} == {True, False}:
            here, there = ("plain text", "templated") if raw_prompts else ("templated", "plain text")
            raise RequestError(f"the prompts are {here}, and those in {self.folder} are {there}; give another folder")
        if False in (raw_prompts, held.raw_prompts) and held.template_options != self.manifest.template_options:
            here, there = (str(manifest.template_options or "none") for manifest in (self.manifest, held))
            options = f"the options of the chat template are {here}, and those in {self.folder} are {there}"
            raise RequestError(f"{options}; give another folder")

    def size(self, tokens: int) -> int:
        return tokens * token_bytes(self.manifest.hidden_size, self.dtype)

    def require_space(self, tokens: int) -> None:
        """Raise RequestError if the disk is too small for the features of `tokens` more tokens."""
        needed, free = self.size(tokens), free_bytes(self.folder)
        if needed > free:
            full = f"{tokens:,} tokens may take {readable(needed)} in {self.folder}, where {readable(free)} are free"
            raise RequestError(f"{full}; give another folder, fewer prompts or fewer new tokens")

    def add(self, input_ids: list[int], hidden: Tensor, prompt_tokens: int = 0) -> None:
        """Add a text of T >= 1 tokens, of which the first `prompt_tokens` do not count in the loss.

        `hidden` [T, H] are the hidden states of size H at these tokens. If the backbone has not read the last tokens,
        `hidden` lacks their rows, and zeros are stored."""
        ids = torch.tensor(input_ids, dtype=torch.int32)
        states = F.pad(hidden.detach().to("cpu", self.dtype), (0, 0, 0, len(ids) - len(hidden)))
        mask = torch.arange(len(ids)) >= prompt_tokens
        documents = torch.full_like(ids, len(self._texts))
        self._texts.append({"hidden": states, "input_ids": ids, "document_ids": documents, "loss_mask": mask})
        if sum(text["hidden"].nbytes for text in self._texts) >= files.SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the texts that were added since the last shard to disk, as a new shard.

        Other processes may write to the folder too; raise RequestError if they have written other features."""
        if not self._texts:
            return
        with locked(self.folder):
            if is_features(self.folder):
                self._require_same()
            else:  # not earlier: a request that fails before its first text leaves no file
                self.manifest.write(self.folder)
            number = 1 + max((int(path.stem) for path in shards(self.folder)), default=-1)
            joined = {name: torch.cat([text[name] for text in self._texts]) for name in self._texts[0]}
            write_shard(self.folder / f"{number:05}.safetensors", **joined)
            self.texts, self.tokens = self.texts + len(self._texts), self.tokens + len(joined["input_ids"])
            self._texts.clear()
