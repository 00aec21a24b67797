"""The questions that a kind of heads answers: its settings and checks, its costs, its drafter and its published form.

Everything outside of `medusa/heads` asks a kind's class, and never compares the kind's name. The answers here are those
of a kind that overrides nothing. A class can be asked before heads exist, from a config alone."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, ClassVar

from medusa.config import OUR_KEYS, PUBLISHED_KEYS, RECIPE_KEYS, KindSettings, MedusaConfig
from medusa.errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TREE, LEVELS, TRELLIS, BLOCK_TRELLIS = "tree", "levels", "trellis", "block trellis"
"""The drafters that come with the package (`decode.drafters.HEADS_DRAFTERS`).

All heads at once fill a tree; heads run level by level; or look-ups in tables of pairs of candidates make the tree,
with Markov heads or with the edges of a block drafter."""

TAKEN = {*dir(MedusaConfig), *OUR_KEYS, *dir(KindSettings), "own", *PUBLISHED_KEYS.values(), "version", *RECIPE_KEYS}
"""Names that a kind's own settings cannot have: of configs, of files that other programs read, and of recipes."""


class Kind:
    """What the class of a kind of heads answers, with the usual answers."""

    # Settings and checks
    Settings: ClassVar[type[KindSettings]] = KindSettings  # a dataclass with the settings that only this kind has
    block_types: ClassVar[tuple[str, ...]] = ("square", "mlp")  # values of `block` that can be trained
    foreign_block_types: ClassVar[tuple[str, ...]] = ()  # further values, which only files of other programs have
    fixed_block_types: ClassVar[tuple[str, ...]] = ()  # values of `block` of heads that cannot be trained further
    lm_head_forms: ClassVar[tuple[str, ...]] = ("own", "shared")  # values of `lm_head`
    reads_layers: ClassVar[bool] = False  # whether heads can read several layers of the backbone (`feature_layers`)
    joins_layers: ClassVar[bool] = False  # whether new heads read several layers unless a recipe says which
    comes_with_model: ClassVar[bool] = False  # whether the model brings the weights along, for any number of heads

    # Learning
    learning_rate_scale: ClassVar[float] = 1.0  # the default learning rate, relative to that of new heads
    usual_path_dropout: ClassVar[float | None] = None  # `training.path_dropout`; `None`: there is no path term
    path_dropout: float  # set in training: the share of positions without the path term, for kinds with one

    # Drafting
    reads_raw_embeddings: bool = False  # whether heads read rows of the embedding table, without its scale
    follows_path: bool = False  # whether heads read the guesses of earlier heads
    reads_root: ClassVar[bool] = False  # whether heads that do not follow the path read the root, the token before it
    can_draw: ClassVar[bool] = True  # whether drafts can be sampled from the heads' distributions

    # Published forms
    form: ClassVar[str | None] = None  # what servers take the heads for: `medusa`, `eagle`, `dflash`, or nothing
    published_form: ClassVar[str | None] = None  # the place of the `Form` that reads other programs' files

    @classmethod
    def check(cls, config: MedusaConfig) -> None:
        """Fill in defaults that depend on other values; raise RequestError for values that do not go together."""

    @classmethod
    def trains(cls, config: MedusaConfig) -> bool:
        """Whether heads with this config can be trained further."""
        return config.block not in cls.fixed_block_types

    @classmethod
    def setting_names(cls, recipe: bool = False) -> list[str]:
        """Return the names of the kind's own settings; with `recipe`, only of those that a recipe may set."""
        return [known.name for known in fields(cls.Settings) if known.metadata.get("recipe", True) or not recipe]

    @classmethod
    def require_registrable(cls) -> None:
        """Raise RequestError if the own settings of a kind of another package cannot be set, saved and read."""
        own, place = cls.Settings, f"{cls.__name__}.Settings"
        if "__dataclass_fields__" not in getattr(own, "__dict__", ()) or not issubclass(own, KindSettings):
            raise RequestError(f"{place} is no dataclass; make it one, with the base class KindSettings")
        for known in fields(own):
            if known.default is MISSING and known.default_factory is MISSING:
                raise RequestError(f"{place} has no default for {known.name}; give it one")
            if known.name in TAKEN:
                raise RequestError(f"{place} has {known.name}, a name that all kinds use; choose another one")

    @classmethod
    def config_from(cls, backbone: PretrainedConfig, num_heads: int) -> MedusaConfig | None:
        """Return the config of heads that come with a model of this config; `None` for kinds that do not.

        RequestError: the model has no such heads."""
        return None

    def start_from_model(self, model: PreTrainedModel) -> None:
        """Take over weights that come with the model; most kinds take none."""

    @classmethod
    def module_counts(cls, config: MedusaConfig) -> dict[str, int]:
        """Return how many modules of each sort the heads have. All of them hold tensors, so files have more tensors."""
        return {"block": config.num_layers, "prefix_layer": config.prefix_layers}

    @classmethod
    def decoder_layers(cls, config: MedusaConfig) -> int:
        """Return the number of layers that keep keys and values of the text, for kinds that attend to it."""
        return 1

    @classmethod
    def output_size(cls, config: MedusaConfig) -> int:
        """Return the size of the features that the LM heads read."""
        return config.hidden_size

    @classmethod
    def inner_width(cls, config: MedusaConfig) -> int | None:
        """Return the number of hidden units in a block; `None` for blocks without hidden units."""
        return config.inner_size if config.block == "mlp" else None

    @classmethod
    def drafts_by(cls, config: MedusaConfig) -> str:
        """Return the drafter: `TREE`, `LEVELS`, `TRELLIS`, `BLOCK_TRELLIS`, or the place `module:Class` of another."""
        return LEVELS if cls.follows_path else TREE

    @classmethod
    def in_levels(cls, config: MedusaConfig) -> bool:
        """Whether a draft runs the heads once for each level of the tree, and not all of them at once."""
        return cls.drafts_by(config) == LEVELS

    @classmethod
    def has_shortlist(cls, config: MedusaConfig) -> bool:
        """Whether trees take their nodes from a few candidates of each head (`Tree.shortlist`)."""
        return cls.drafts_by(config) == TRELLIS

    @classmethod
    def lm_head_reads(cls, config: MedusaConfig) -> int:
        """Return how often a draft reads the weights of an LM head."""
        return config.num_heads if config.lm_head != "shared" or cls.in_levels(config) else 1

    @classmethod
    def is_published(cls, config: MedusaConfig) -> bool:
        """Whether the heads are saved under FasterDecoding's names (`medusa.checkpoints.published`)."""
        return cls.form == "medusa" and not config.prefix_layers and config.vocabulary is None

    @classmethod
    def servable(cls, config: MedusaConfig) -> bool:
        """Whether servers can load the heads."""
        return cls.is_published(config) and config.block == "square"
