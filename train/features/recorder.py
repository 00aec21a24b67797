"""A recorder of features: it writes texts with their hidden states to disk while the texts are generated."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.config import Fingerprint
from medusa.errors import RequestError
from medusa.files import free_bytes, readable
from train.features import files
from train.features.files import Manifest, is_features, shards, token_bytes, write_shard


class Recorder:
    """Adds texts with their hidden states to a folder of features, on which heads can be trained."""

    def __init__(self, folder: Path, known: Fingerprint, hidden_size: int, dtype: torch.dtype) -> None:
        """Prepare to write to `folder`; `known` is the backbone's fingerprint.

        Raises:
            RequestError: the folder holds other files, or features of another backbone or dtype.
        """
        self.folder, self.dtype = folder, dtype
        self.manifest = Manifest(known, str(dtype).removeprefix("torch."), hidden_size)
        self.texts = self.tokens = 0
        """Numbers of texts and tokens that this recorder has written to the folder."""
        self._texts: list[dict[str, Tensor]] = []
        if is_features(folder):
            held = Manifest.read(folder)
            if not held.same_states(self.manifest) or held.rows is not None:
                raise RequestError(
                    f"{folder} holds features of another backbone or dtype, or a cache; give another folder"
                )
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RequestError(f"{folder} holds files that are not features; give another folder")

    def size(self, tokens: int) -> int:
        """Bytes that a number of tokens take on disk."""
        return tokens * token_bytes(self.manifest.hidden_size, self.dtype)

    def require_space(self, tokens: int) -> None:
        """Check that the disk can hold a number of tokens.

        Raises:
            RequestError: the disk is too small.
        """
        needed, free = self.size(tokens), free_bytes(self.folder)
        if needed > free:
            raise RequestError(
                f"{tokens:,} tokens may take {readable(needed)} in {self.folder}, where {readable(free)} are free; "
                "give another folder, fewer prompts or fewer new tokens"
            )

    def add(self, input_ids: list[int], hidden: Tensor, prompt_tokens: int = 0) -> None:
        """Add one text [T], T >= 1, whose first `prompt_tokens` tokens are not taught.

        `hidden` is [T, H], or shorter if the backbone has not read the last tokens.
        """
        ids = torch.tensor(input_ids, dtype=torch.int32)
        states = F.pad(hidden.detach().to("cpu", self.dtype), (0, 0, 0, len(ids) - len(hidden)))
        taught = torch.arange(len(ids)) >= prompt_tokens
        documents = torch.full_like(ids, len(self._texts))
        self._texts.append({"hidden": states, "input_ids": ids, "document_ids": documents, "loss_mask": taught})
        if sum(text["hidden"].nbytes for text in self._texts) >= files.SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the texts added since the last shard as the next shard."""
        if self._texts:
            if not is_features(self.folder):  # not earlier: a request that fails before its first text leaves no file
                self.manifest.write(self.folder)
            number = 1 + max((int(path.stem) for path in shards(self.folder)), default=-1)
            joined = {name: torch.cat([text[name] for text in self._texts]) for name in self._texts[0]}
            write_shard(self.folder / f"{number:05}.safetensors", **joined)
            self.texts, self.tokens = self.texts + len(self._texts), self.tokens + len(joined["input_ids"])
            self._texts.clear()
