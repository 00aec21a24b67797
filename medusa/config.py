"""The config of a set of heads, as in `config.json`: kind of heads, shapes and backbone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypedDict

from medusa.errors import RequestError, choose_one_of
from medusa.files import Json
from medusa.heads import class_of, kinds_where, kinds_with_setting
from medusa.tree import Tree

LM_HEADS = ("own", "shared", "one")
USUAL_LAYERS = "usual"  # EAGLE-3's choice of three layers (`medusa.backbone.usual_layers`)
MIN_VOCABULARY = 32  # tokens in the smallest reduced vocabulary; usual trees need fewer guesses of a head
MAX_SIZE, MAX_COUNT = 2**24, 2**10  # far more than any model has; larger tensors could not be described
LIMITS = {"hidden_size": (1, MAX_SIZE), "vocab_size": (1, MAX_SIZE), "vocabulary": (MIN_VOCABULARY, MAX_SIZE)}
LIMITS |= {"num_heads": (1, MAX_COUNT), "num_layers": (1, MAX_COUNT), "prefix_layers": (0, MAX_COUNT)}
"""The smallest and the largest values of fields with whole numbers."""
SIZE_LIMITS = {"layers": MAX_COUNT, "heads": MAX_COUNT, "key_value_heads": MAX_COUNT}
SIZE_LIMITS |= {"hidden_size": MAX_SIZE, "width": MAX_SIZE, "head_size": MAX_SIZE}
"""The largest values of sizes of decoder layers."""
FILES_ONLY = {"recipe": False}  # the metadata of a kind's setting that a recipe cannot set

RECIPE_KEYS = ("num", "layers", "force_vocabulary", "start")  # keys of `heads` in recipes that are no fields here
PUBLISHED_KEYS = {"num_heads": "medusa_num_heads", "num_layers": "medusa_num_layers"}
PUBLISHED_KEYS |= {"base_model_name_or_path": "base_model_name_or_path"}  # keys of FasterDecoding, TGI and LoRAX
OUR_KEYS: tuple[str, ...] = ("kind", "prefix_layers", "block", "expansion", "lm_head", "hidden_size", "vocab_size")
OUR_KEYS += ("vocabulary", "prefix", "feature_layers", "backbone", "tree", "raw_prompts", "template_options")
"""The fields with the same name in JSON; other programs ignore them. A kind's own settings stand beside them."""


class Fingerprint(TypedDict, total=False):
    """Values that identify a backbone, as `medusa.fingerprint` collects them."""

    name: str | None  # the folder or Hub id
    revision: str | None
    dtype: str
    architecture: str  # the name of the model's class in transformers
    weights: list[float]  # some of the backbone's weights
    quantization: str  # how it was quantised while it was loaded; absent if it was not
    embedding: list[float]  # values of the input embeddings; heads read from original Hydra files have no `weights`


class PrefixSizes(TypedDict):
    """The sizes of the decoder layers between backbone and heads (prefix layers, `medusa.heads.prefix`)."""

    heads: int  # the number of attention heads
    key_value_heads: int
    width: int  # the size of the MLP's hidden layer
    eps: float  # the epsilon of all norms
    base: float  # the base of the rotary embeddings
    norm: bool  # whether a norm follows the last layer, as in Hydra++


@dataclass
class KindSettings:
    """The settings that only one kind of heads has (`medusa.heads.kind.Kind.Settings`). This class has none.

    A subclass has a field with a default for each of them. The kind checks them in `Kind.check`."""

    @classmethod
    def of(cls, config: MedusaConfig) -> Self:
        """Return the own settings of a config whose kind has settings of this class."""
        assert isinstance(config.own, cls)
        return config.own


@dataclass(init=False)
class MedusaConfig:
    """The config of a set of heads: kind of heads, shapes and backbone; RequestError if a value is invalid.

    The settings of the kind are arguments and attributes like the fields, such as `rank` of kind `markov`."""

    hidden_size: int
    """The size of the backbone's hidden states."""
    vocab_size: int | None = None
    """The backbone's vocabulary size; `None` if unknown, which is allowed if heads share the backbone's LM head."""
    num_heads: int = 4
    num_layers: int = 1
    """The number of residual blocks in each head."""
    kind: str = "medusa"
    """The kind of heads, a name in `medusa.heads.HEADS`."""
    prefix_layers: int = 0
    """The number of decoder layers between the backbone and the heads (`medusa.heads.prefix`)."""
    prefix: PrefixSizes | None = None
    """The sizes of prefix layers from another program's checkpoint; `None`: the default sizes."""
    block: str = "square"
    """The block: `square` (Medusa paper, section 2.1), `mlp`, or another one of the kind (`Kind.block_types`)."""
    expansion: float = 1.0
    """The width of the hidden layer of `mlp` and `gated` blocks, as a multiple of `hidden_size`."""
    lm_head: str = "own"
    """`own`: each head has an LM head. `one`: all heads have one together. `shared`: they use the backbone's."""
    vocabulary: int | None = None
    """The number of tokens that the heads guess among (`medusa.vocabulary`); `None`: all tokens."""
    feature_layers: list[int] | str | None = None
    """The layers whose hidden states the heads read, if their kind can read several. i: the state after i layers.
    `usual`: the layers that EAGLE-3's servers take by default. `None`: the backbone's last hidden state."""
    base_model_name_or_path: str | None = None
    """The folder or Hub id of the backbone."""
    backbone: Fingerprint = field(default_factory=Fingerprint)
    """The fingerprint of the backbone; empty if unknown."""
    tree: list[list[int]] | None = None
    """The paths of the best tree for these heads (`medusa.tree`); `None` if unknown."""
    raw_prompts: bool | None = None
    """Whether the prompts of the training data were plain text (True) or in a chat template; `None` if unknown."""
    template_options: Json | None = None
    """The options of the chat template with which the training data were written; `None` if there are none."""
    own: KindSettings = field(default_factory=KindSettings)
    """The settings that only this kind has."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int | None = None,
        num_heads: int = 4,
        num_layers: int = 1,
        kind: str = "medusa",
        **values: Any,
    ) -> None:
        """Make a config; `values` are the other fields, and the settings of the kind."""
        self.hidden_size, self.vocab_size, self.kind = hidden_size, vocab_size, kind
        self.num_heads, self.num_layers = num_heads, num_layers
        of_kind = {"block": class_of(kind).block_types[0], "lm_head": class_of(kind).lm_head_forms[0]}
        for known in fields(self):
            if known.name not in ("own", "hidden_size", "vocab_size", "kind", "num_heads", "num_layers"):
                usual = known.default if known.default_factory is MISSING else known.default_factory()
                setattr(self, known.name, values.pop(known.name, of_kind.get(known.name, usual)))
        before = values.pop("own", KindSettings())  # from `dataclasses.replace`
        self.own = own_settings(kind, values_of(before) | values)
        self._check()

    if not TYPE_CHECKING:  # our own code reads `own`, whose types are known

        def __getattr__(self, name: str) -> Any:
            """Return a setting of the kind; only called for names that are no attributes of the config."""
            own = self.__dict__.get("own", KindSettings)
            if name not in own.__dataclass_fields__:
                raise AttributeError(f"a config of heads of kind {self.__dict__.get('kind')} has no {name!r}")
            return getattr(own, name)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set a field or a setting of the kind; AttributeError for other names, which no file would keep."""
            if name in self.__dataclass_fields__:
                super().__setattr__(name, value)
            else:
                self.__getattr__(name)
                setattr(self.own, name, value)

    def _check(self) -> None:
        kind = class_of(self.kind)
        require_block(self.kind, self.block, (*kind.block_types, *kind.foreign_block_types))
        if self.lm_head not in LM_HEADS:
            raise RequestError(f"heads.lm_head is {self.lm_head!r}; {choose_one_of(self.lm_head, LM_HEADS)}")
        if self.lm_head not in kind.lm_head_forms:
            take = " or ".join(kind.lm_head_forms)
            raise RequestError(f"heads.lm_head {self.lm_head} is not for heads of kind {self.kind}; take {take}")
        for name, (least, most) in LIMITS.items():
            if getattr(self, name) is not None or name not in ("vocab_size", "vocabulary"):
                require_whole(name, getattr(self, name), least, most)
        if type(self.expansion) not in (int, float) or not 0 < self.expansion * self.hidden_size <= MAX_SIZE:
            raise RequestError(f"heads.expansion is {self.expansion!r}; it must be above 0, such as 4, but not immense")
        if self.vocabulary is not None and (self.vocab_size is None or self.vocabulary >= self.vocab_size):
            tokens = self.vocab_size or "an unknown number of"
            raise RequestError(f"heads.vocabulary is {self.vocabulary} of {tokens} tokens; take fewer")
        if self.feature_layers is not None:
            if not kind.reads_layers:
                raise RequestError(belongs("feature_layers", kinds_where(lambda kind: kind.reads_layers), self.kind))
            require_layer_numbers(self.feature_layers)
        keys = PrefixSizes.__annotations__
        if self.prefix is not None and not (isinstance(self.prefix, dict) and set(self.prefix) == set(keys)):
            raise RequestError(f"the config's prefix is {self.prefix!r}; its keys must be {', '.join(sorted(keys))}")
        for key, size in (self.prefix or {}).items():
            if key != "norm" and (wrong := size_error(key, size)):
                raise RequestError(f"the config's prefix has {key} {size!r}; it must be {wrong}")
        kind.check(self)
        self._check_origin()

    def _check_origin(self) -> None:
        """Raise RequestError if a field about the backbone, the data or the tree is invalid."""
        for name, types, wanted in (
            ("backbone", dict, "a fingerprint"),
            ("raw_prompts", bool | None, "true (plain text), false (in a chat template)"),
            ("template_options", dict | None, "an object such as {'enable_thinking': false}"),
            ("tree", list | None, "a list of paths"),
        ):
            if not isinstance(value := getattr(self, name), types):
                raise RequestError(f"the config's {name} is {value!r}; it must be {wanted}, or left out")
        if self.tree is not None:
            Tree.from_paths(self.tree)

    @property
    def feature_size(self) -> int:
        """The size of what the backbone hands to the heads: its hidden size, or that of several layers together."""
        if self.feature_layers is None:
            return self.hidden_size
        return self.hidden_size * (3 if self.feature_layers == USUAL_LAYERS else len(self.feature_layers))

    @property
    def reads(self) -> str:
        """The hidden states of the backbone that the heads read, in words."""
        if self.feature_layers is None:
            return "the last hidden state"
        layers = self.feature_layers
        return "the usual three layers" if isinstance(layers, str) else f"layers {', '.join(map(str, layers))}"

    @property
    def decoder_layers(self) -> int:
        """The number of layers that keep keys and values of the text, for kinds that attend to it."""
        return int(class_of(self.kind).decoder_layers(self))

    @property
    def output_size(self) -> int:
        """The size of the features that the LM heads read."""
        return int(class_of(self.kind).output_size(self))

    @property
    def inner_size(self) -> int:
        """The number of hidden units in `mlp` and `gated` blocks."""
        return max(1, round(self.expansion * self.hidden_size))

    def draft_vocab_size(self, vocab_size: int) -> int:
        """Return the number of tokens that the heads guess among, for a backbone with `vocab_size` tokens."""
        return self.vocabulary or vocab_size

    @property
    def servable(self) -> bool:
        """Whether servers can load the heads: kind `medusa` with square blocks, or kind `eagle` with gated blocks."""
        return bool(class_of(self.kind).servable(self))

    @property
    def is_published(self) -> bool:
        """Whether the heads' tensors are saved under FasterDecoding's names (`medusa.checkpoints.published`)."""
        return bool(class_of(self.kind).is_published(self))

    def to_dict(self) -> Json:
        """Return the content of `config.json`. With a shared LM head its `version` is "2", for TGI and LoRAX."""
        out: Json = {published: getattr(self, ours) for ours, published in PUBLISHED_KEYS.items()}
        version = {"version": "2"} if self.lm_head == "shared" else {}
        return out | version | {key: getattr(self, key) for key in OUR_KEYS} | values_of(self.own)

    @classmethod
    def from_dict(cls, content: Json) -> MedusaConfig:
        """Make a config from the content of `config.json`, which must have a `hidden_size`; ignore unknown keys."""
        published = {name: content[key] for name, key in PUBLISHED_KEYS.items() if key in content}
        return cls(**published, **our_keys(content))


def our_keys(content: Json) -> Json:
    """Return those keys of a `config.json` that have the same name in `MedusaConfig`, with the kind's own settings."""
    names = (*OUR_KEYS, *class_of(content.get("kind", "medusa")).setting_names())
    return {name: content[name] for name in names if name in content}


def values_of(settings: KindSettings) -> Json:
    """Return the own settings of a kind by name."""
    return {known.name: getattr(settings, known.name) for known in fields(settings)}


def own_settings(kind: str, values: Json) -> KindSettings:
    """Make the settings of a kind of heads from `values`; a setting of another kind may have its default value.

    RequestError: a setting belongs to another kind. TypeError: no kind has such a setting."""
    settings: type[KindSettings] = class_of(kind).Settings
    given, known = dict(values), {known.name for known in fields(settings)}
    for name in set(given) - known:
        if not (owners := kinds_with_setting(name)):
            raise TypeError(f"MedusaConfig has no field {name!r}, and no kind of heads has such a setting")
        if given.pop(name) != getattr(class_of(owners[0]).Settings(), name):
            raise RequestError(belongs(name, owners, kind))
    return settings(**given)


def belongs(key: str, owners: Iterable[str], kind: str) -> str:
    """Say that a key of heads belongs to other kinds than the one that is asked for."""
    return f"heads.{key} belongs to kind {' or '.join(owners)}, not {kind}; leave it out"


def require_block(kind: str, block: object, allowed: Iterable[str]) -> None:
    """Raise RequestError unless a block is among the `allowed` ones of a kind of heads."""
    if block in tuple(allowed):
        return
    owners = kinds_where(lambda kind: block in (*kind.block_types, *kind.foreign_block_types))
    found = f"{block} belongs to kind {' or '.join(owners)}, not {kind}" if owners else f"is {block!r}"
    raise RequestError(f"heads.block {found}; {choose_one_of(block, allowed)}")


def require_whole(name: str, value: object, least: int, most: int = MAX_SIZE) -> None:
    """Raise RequestError unless the setting `name` of heads is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(f"heads.{name} is {value!r}; it must be a whole number from {least} to {most}")


def require_layer_numbers(layers: object) -> None:
    """Raise RequestError unless `layers` is a list of numbers of layers, or `usual`."""
    numbers = layers if isinstance(layers, list) else []
    if layers != USUAL_LAYERS and (not numbers or any(type(layer) is not int or layer < 0 for layer in numbers)):
        ways = f"give numbers such as [2, 16, 29], or {USUAL_LAYERS}"
        raise RequestError(f"heads.feature_layers is {layers!r}; {ways}")


def size_error(key: str, size: object) -> str:
    """Say what the value `key` of a decoder layer must be if `size` is no such number; empty if it is."""
    if key in SIZE_LIMITS:
        fits = type(size) is int and 0 < size <= SIZE_LIMITS[key]
        return "" if fits else f"a whole number above 0 and at most {SIZE_LIMITS[key]}"
    fits = isinstance(size, int | float) and not isinstance(size, bool) and 0 < size < math.inf
    return "" if fits else "a number above 0"
