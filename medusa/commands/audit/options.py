"""The options of an audit."""

from __future__ import annotations

from collections.abc import Sequence

from medusa.errors import RequestError
from medusa.options import Options, count, option
from medusa.places import require_backbone

DRAWS = 2000  # sampled first tokens for each prompt and setting, and sampled tokens of texts


def require_reference(name: str) -> None:
    """Raise RequestError if `name` is neither a URL nor a model that exists."""
    if not is_url(name):
        require_backbone(name)


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


class AuditOptions(Options):
    server: str | None = option(
        None, "audit this OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...)", metavar="URL"
    )
    reference: str | None = option(
        None,
        "the model whose text the server must write (a folder, GGUF file, Hub id or demo), or a second server's URL",
        metavar="MODEL|URL",
        brief="the model whose text the server must write, or a URL",
        exists=require_reference,
    )
    model: str | None = option(None, "audit this model (default: the only one of the server)", metavar="NAME")
    reference_model: str | None = option(
        None, "compare with this model of a second server (default: its only one)", metavar="NAME"
    )
    concurrency: int = count(16, "send N requests for samples at a time")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.server) != bool(self.reference):
            missing = "--reference MODEL" if self.server else "--server URL"
            raise RequestError(f"an audit compares --server with --reference; add {missing}")
        if self.reference_model and not self.has_second_server:
            raise RequestError("--reference-model is for a second server; give its URL to --reference, or leave it out")

    def check_given(self, names: Sequence[str]) -> None:
        if names and not self.server:
            raise RequestError(f"--{names[0]} belongs to an audit; add --server URL and --reference MODEL")

    @property
    def has_second_server(self) -> bool:
        """Whether the reference is a second server, and not a model."""
        return is_url(str(self.reference))
