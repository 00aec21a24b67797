"""What a set of Medusa heads is, in numbers: the published JSON keys plus ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypedDict

from medusa.errors import RequestError
from medusa.heads.kinds import KINDS
from medusa.tree import Tree

GATED = "gated"  # the block of EAGLE-3
BLOCKS = ("square", "mlp", GATED)
ORIGINAL_HYDRA = "hydra"  # the block of the original Hydra's checkpoints: to be decoded with, not trained
LM_HEADS = ("own", "shared")
PREFIX_KEYS = {"heads", "key_value_heads", "width", "eps", "base", "norm"}

# Our names on the left; on the right the JSON keys that FasterDecoding, TGI and LoRAX read.
PUBLISHED_KEYS = {
    "num_heads": "medusa_num_heads",
    "num_layers": "medusa_num_layers",
    "base_model_name_or_path": "base_model_name_or_path",
}
OUR_KEYS = (
    *("kind", "prefix_layers", "block", "expansion", "lm_head", "hidden_size", "vocab_size", "vocabulary"),
    *("prefix", "backbone", "tree"),
)
LEAST_WORDS = 32  # of a vocabulary of the heads' own: more than any tree looks at


class Fingerprint(TypedDict, total=False):
    """The identity of a backbone, in a form that is stored as JSON."""

    name: str | None
    """A folder or Hub id."""
    revision: str | None
    dtype: str
    architecture: str
    """The class of transformers."""
    weights: list[float]
    """Values at fixed places of its weights."""
    embedding: list[float]
    """Values at fixed places of its input embeddings. Heads of the original Hydra come with nothing else."""


@dataclass
class MedusaConfig:
    """Shapes and kind of a set of heads, and the backbone that they belong to.

    `num_heads` heads of `num_layers` residual blocks each, on hidden states of `hidden_size`, guessing among
    `vocab_size` tokens. `block` is the paper's square one (section 2.1) or an MLP that is `expansion` times as
    wide as the hidden state (`gated`: of three matrices, in heads of kind `eagle`); `lm_head` says whether each head
    owns an LM head or borrows the backbone's.
    """

    hidden_size: int
    vocab_size: int | None = None
    """`None` where the file does not say: heads that borrow the backbone's LM head fit any vocabulary."""
    num_heads: int = 4
    num_layers: int = 1
    kind: str = "medusa"
    prefix_layers: int = 0
    """Decoder layers of the heads' own, between the backbone and the heads (`medusa.heads.prefix`)."""
    prefix: dict[str, Any] | None = None
    """What these are, where they are not ours: the arguments of `medusa.heads.prefix.Prefix`."""
    block: str = "square"
    expansion: float = 1.0
    lm_head: str = "own"
    vocabulary: int | None = None
    """How many of the `vocab_size` tokens the heads guess among (`medusa.vocabulary`); `None`: all."""
    base_model_name_or_path: str | None = None
    backbone: Fingerprint = field(default_factory=Fingerprint)
    """The fingerprint of the backbone (`medusa.fingerprint`); empty if the heads came without one."""
    tree: list[list[int]] | None = None
    """Paths of the tree that these heads are best used with; `None`: no tree was saved."""

    def __post_init__(self) -> None:
        _one_of("heads.kind", self.kind, tuple(KINDS))
        _one_of("heads.block", self.block, (*BLOCKS, ORIGINAL_HYDRA))
        if self.block == ORIGINAL_HYDRA and (self.kind != "hydra" or self.lm_head != "own"):
            raise RequestError("heads.block hydra belongs to kind hydra with LM heads of its own; take square or mlp")
        if self.block == GATED and (self.kind != "eagle" or self.num_layers != 1):
            raise RequestError(f"heads.block {GATED} belongs to kind eagle with heads.layers 1; take square or mlp")
        _one_of("heads.lm_head", self.lm_head, LM_HEADS)
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers"):
            value = getattr(self, name)
            if name == "vocab_size" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"heads.{name} is {value!r}; it must be a whole number of at least 1")
        layers = self.prefix_layers
        if isinstance(layers, bool) or not isinstance(layers, int) or layers < 0:
            raise RequestError(f"heads.prefix_layers is {layers!r}; it must be 0 (none) or more")
        if isinstance(self.expansion, bool) or not isinstance(self.expansion, (int, float)) or not self.expansion > 0:
            raise RequestError(f"heads.expansion is {self.expansion!r}; it must be above 0 (4 is usual)")

        words = self.vocabulary
        if words is not None:
            if isinstance(words, bool) or not isinstance(words, int) or words < LEAST_WORDS:
                raise RequestError(
                    f"heads.vocabulary is {words!r}; it must be at least {LEAST_WORDS}, or 0 for all tokens"
                )
            if self.vocab_size is None or words >= self.vocab_size:
                raise RequestError(
                    f"heads.vocabulary is {words} of {self.vocab_size or 'nobody knows how many'} tokens; take fewer"
                )
        if self.prefix is not None and not (isinstance(self.prefix, dict) and set(self.prefix) == PREFIX_KEYS):
            raise RequestError(f"the config's prefix is {self.prefix!r}; it must say {', '.join(sorted(PREFIX_KEYS))}")
        if not isinstance(self.backbone, dict):
            raise RequestError(f"the config's backbone is {self.backbone!r}; it must be a fingerprint, or left out")
        if self.tree is not None:
            if not isinstance(self.tree, list):
                raise RequestError(f"the config's tree is {self.tree!r}; it must be a list of paths, or left out")
            Tree.from_paths(self.tree)

    @property
    def inner_size(self) -> int:
        """Width of an MLP's hidden layer."""
        return max(1, round(self.expansion * self.hidden_size))

    def words(self, vocab_size: int) -> int:
        """Among how many tokens of a backbone with `vocab_size` of them these heads guess."""
        return self.vocabulary or vocab_size

    @property
    def servable(self) -> bool:
        """Whether a server's format can hold these heads: independent square blocks, or EAGLE-3's layer."""
        if self.kind == "eagle":
            return self.block == GATED and self.lm_head == "shared" and not self.prefix_layers
        return self.is_published and self.block == "square"

    @property
    def is_published(self) -> bool:
        """Whether a published format has names for these tensors (for MLP blocks, names of ours beside them)."""
        return self.kind == "medusa" and not self.prefix_layers and self.vocabulary is None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form. `version` is that of the file format: "2" where the LM head is the backbone's (TGI, LoRAX)."""
        out: dict[str, Any] = {theirs: getattr(self, ours) for ours, theirs in PUBLISHED_KEYS.items()}
        if self.lm_head == "shared":
            out["version"] = "2"
        return out | {key: getattr(self, key) for key in OUR_KEYS}


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RequestError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")
