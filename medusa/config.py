"""The shapes and kind of a set of Medusa heads, as in `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from medusa.errors import RequestError
from medusa.files import Json
from medusa.heads import KINDS
from medusa.tree import Tree

GATED, GATED_EPS = "gated", 1e-6
"""The block of EAGLE-3, and the epsilon of its norms."""
ORIGINAL_HYDRA = "hydra"
"""The block of the original Hydra's checkpoints, whose heads can decode but cannot be trained."""
BLOCKS = ("square", "mlp", GATED)
LM_HEADS = ("own", "shared")
MIN_VOCABULARY = 32
"""The smallest draft vocabulary, in tokens: more than trees usually need."""

PUBLISHED_KEYS = {"num_heads": "medusa_num_heads", "num_layers": "medusa_num_layers"}
PUBLISHED_KEYS |= {"base_model_name_or_path": "base_model_name_or_path"}
"""Fields, and the JSON keys under which FasterDecoding, TGI and LoRAX read them."""
OUR_KEYS: tuple[str, ...] = ("kind", "prefix_layers", "block", "expansion", "lm_head", "hidden_size", "vocab_size")
OUR_KEYS += ("vocabulary", "prefix", "backbone", "tree")
"""Fields whose JSON keys are their names."""


class Fingerprint(TypedDict, total=False):
    """The identity of a backbone (`medusa.fingerprint`)."""

    name: str | None  # a folder or Hub id
    revision: str | None
    dtype: str
    architecture: str  # the class of transformers
    weights: list[float]  # values at fixed places of the weights
    embedding: list[float]  # values of the input embeddings alone, for heads of the original Hydra


class PrefixSizes(TypedDict):
    """The sizes of prefix layers."""

    heads: int
    key_value_heads: int
    width: int  # of the MLP's hidden layer
    eps: float  # of all norms
    base: float  # of the rotary positions
    norm: bool  # whether a norm follows the last layer, as in Hydra++


@dataclass
class MedusaConfig:
    """Shapes and kind of a set of heads, and the backbone that they belong to.

    `num_heads` heads of `num_layers` residual blocks each read hidden states of `hidden_size` and guess among
    `vocab_size` tokens. `block` is the paper's square block (section 2.1) or an MLP `expansion` times as wide as the
    hidden state (`gated`: of three matrices, in heads of kind `eagle`). With `lm_head` own each head has an LM head;
    with shared all use the backbone's.

    Raises:
        RequestError: a value that is not allowed.
    """

    hidden_size: int
    vocab_size: int | None = None
    """`None` if the file does not say: heads that share the backbone's LM head fit any vocabulary."""
    num_heads: int = 4
    num_layers: int = 1
    kind: str = "medusa"
    prefix_layers: int = 0
    """Number of decoder layers between the backbone and the heads (`medusa.heads.prefix`)."""
    prefix: PrefixSizes | None = None
    """Sizes of prefix layers that were not trained here; `None`: the default sizes."""
    block: str = "square"
    expansion: float = 1.0
    lm_head: str = "own"
    vocabulary: int | None = None
    """Number of tokens that the heads guess among (`medusa.vocabulary`); `None`: all `vocab_size`."""
    base_model_name_or_path: str | None = None
    backbone: Fingerprint = field(default_factory=Fingerprint)
    """Empty if the heads came without a fingerprint."""
    tree: list[list[int]] | None = None
    """Paths of the best tree for these heads; `None`: no tree was saved."""

    def __post_init__(self) -> None:
        _require_one_of("heads.kind", self.kind, tuple(KINDS))
        _require_one_of("heads.block", self.block, (*BLOCKS, ORIGINAL_HYDRA))
        _require_one_of("heads.lm_head", self.lm_head, LM_HEADS)
        if self.block == ORIGINAL_HYDRA and (self.kind != "hydra" or self.lm_head != "own"):
            raise RequestError("heads.block hydra belongs to kind hydra with LM heads of its own; take square or mlp")
        if self.block == GATED and (self.kind != "eagle" or self.num_layers != 1):
            raise RequestError(f"heads.block {GATED} belongs to kind eagle with heads.layers 1; take square or mlp")
        for name in ("hidden_size", "num_heads", "num_layers"):
            _require_count(name, getattr(self, name))
        _require_count("prefix_layers", self.prefix_layers, at_least=0)
        if self.vocab_size is not None:
            _require_count("vocab_size", self.vocab_size)
        if isinstance(self.expansion, bool) or not isinstance(self.expansion, (int, float)) or not self.expansion > 0:
            raise RequestError(f"heads.expansion is {self.expansion!r}; it must be above 0 (4 is usual)")
        if self.vocabulary is not None:
            _require_count("vocabulary", self.vocabulary, at_least=MIN_VOCABULARY)
            if self.vocab_size is None or self.vocabulary >= self.vocab_size:
                tokens = self.vocab_size or "an unknown number of"
                raise RequestError(f"heads.vocabulary is {self.vocabulary} of {tokens} tokens; take fewer")
        keys = PrefixSizes.__annotations__
        if self.prefix is not None and not (isinstance(self.prefix, dict) and set(self.prefix) == set(keys)):
            raise RequestError(f"the config's prefix is {self.prefix!r}; its keys must be {', '.join(sorted(keys))}")
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

    def draft_vocab_size(self, vocab_size: int) -> int:
        """Number of tokens that the heads guess among, out of the backbone's `vocab_size`."""
        return self.vocabulary or vocab_size

    @property
    def servable(self) -> bool:
        """Whether a server's format can hold these heads: independent square blocks, or EAGLE-3's layer."""
        if self.kind == "eagle":
            return self.block == GATED and self.lm_head == "shared" and not self.prefix_layers
        return self.is_published and self.block == "square"

    @property
    def is_published(self) -> bool:
        """Whether the published format, with this project's names for MLP blocks, has names for these tensors."""
        return self.kind == "medusa" and not self.prefix_layers and self.vocabulary is None

    def to_dict(self) -> Json:
        """The JSON form. Its `version` is the format's: "2" if heads share the backbone's LM head (TGI, LoRAX)."""
        out: Json = {published: getattr(self, ours) for ours, published in PUBLISHED_KEYS.items()}
        if self.lm_head == "shared":
            out["version"] = "2"
        return out | {key: getattr(self, key) for key in OUR_KEYS}

    @classmethod
    def from_dict(cls, content: Json) -> MedusaConfig:
        """The inverse of `to_dict`; unknown keys are ignored.

        Raises:
            RequestError: a value that is not allowed.
            TypeError: no hidden size.
        """
        keys = PUBLISHED_KEYS | {key: key for key in OUR_KEYS}
        return cls(**{field: content[key] for field, key in keys.items() if key in content})


def _require_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RequestError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")


def _require_count(name: str, value: object, at_least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise RequestError(f"heads.{name} is {value!r}; it must be a whole number of at least {at_least}")
