"""The config of a set of heads, as in `config.json`: kind of heads, shapes and backbone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypedDict

from medusa.errors import RequestError, choose_one_of
from medusa.files import Json
from medusa.heads import KINDS, NATIVE, NATIVE_KINDS
from medusa.tree import Tree

GATED, GATED_EPS = "gated", 1e-6  # the block of EAGLE-3, and the epsilon of all norms in its layer
ORIGINAL_EAGLE = "eagle1"  # the block of the layer of EAGLE-1 and EAGLE-2
ORIGINAL_HYDRA = "hydra"  # the block of the original Hydra's heads, which cannot be trained further
BLOCKS = ("square", "mlp", GATED)
LM_HEADS = ("own", "shared", "one")
EMBEDDINGS = ("own", "shared")
USUAL_LAYERS = "usual"  # EAGLE-3's choice of three layers (`medusa.backbone.usual_layers`)
VARIANTS = ("attention_bias", "fc_bias", "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "qk_norm")
MIN_VOCABULARY = 32  # tokens in the smallest reduced vocabulary; usual trees need fewer guesses of a head
MAX_SIZE, MAX_COUNT = 2**24, 2**10  # far more than any model has; larger tensors could not be described
LIMITS = {"hidden_size": (1, MAX_SIZE), "vocab_size": (1, MAX_SIZE), "vocabulary": (MIN_VOCABULARY, MAX_SIZE)}
LIMITS |= {"num_heads": (1, MAX_COUNT), "num_layers": (1, MAX_COUNT), "prefix_layers": (0, MAX_COUNT)}
LIMITS |= {"rank": (1, MAX_SIZE), "window": (1, MAX_SIZE)}
"""The smallest and the largest values of fields with whole numbers."""
SIZE_LIMITS = {"layers": MAX_COUNT, "heads": MAX_COUNT, "key_value_heads": MAX_COUNT}
SIZE_LIMITS |= {"hidden_size": MAX_SIZE, "width": MAX_SIZE, "head_size": MAX_SIZE}
"""The largest values of sizes of decoder layers."""
USUAL_RANK = 256  # the default of `MedusaConfig.rank`, unless hidden states are small

PUBLISHED_KEYS = {"num_heads": "medusa_num_heads", "num_layers": "medusa_num_layers"}
PUBLISHED_KEYS |= {"base_model_name_or_path": "base_model_name_or_path"}  # keys of FasterDecoding, TGI and LoRAX
OUR_KEYS: tuple[str, ...] = ("kind", "prefix_layers", "block", "expansion", "lm_head", "hidden_size", "vocab_size")
OUR_KEYS += ("rank", "vocabulary", "prefix", "feature_layers", "layer", "embeddings", "mtp", "window")
OUR_KEYS += ("backbone", "tree", "raw_prompts", "template_options")
"""The fields with the same name in JSON; other programs ignore them."""


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


class LayerSizes(TypedDict):
    """The sizes of the decoder layers of `eagle` heads (`medusa.heads.eagle_layer`)."""

    hidden_size: int
    width: int  # the size of the MLP's hidden layer
    layers: int  # the number of decoder layers
    heads: int  # the number of attention heads
    key_value_heads: int
    head_size: int
    eps: float  # the epsilon of all norms
    rope: Json  # the parameters of the rotary embeddings, with the names of transformers' `rope_parameters`
    variants: list[str]  # some of `VARIANTS`, which are explained in `medusa.heads.eagle`


@dataclass
class MedusaConfig:
    """The config of a set of heads: kind of heads, shapes and backbone; RequestError if a value is invalid."""

    hidden_size: int
    """The size of the backbone's hidden states."""
    vocab_size: int | None = None
    """The backbone's vocabulary size; `None` if unknown, which is allowed if heads share the backbone's LM head."""
    num_heads: int = 4
    num_layers: int = 1
    """The number of residual blocks in each head."""
    kind: str = "medusa"
    """The kind of heads: a key of `medusa.heads.KINDS` or `NATIVE_KINDS`."""
    prefix_layers: int = 0
    """The number of decoder layers between the backbone and the heads (`medusa.heads.prefix`)."""
    prefix: PrefixSizes | None = None
    """The sizes of prefix layers from another program's checkpoint; `None`: the default sizes."""
    block: str = "square"
    """The block: `square` (Medusa paper, section 2.1), `mlp`, `gated` (EAGLE-3), `eagle1`, `hydra` or `mtp`."""
    expansion: float = 1.0
    """The width of the hidden layer of `mlp` and `gated` blocks, as a multiple of `hidden_size`."""
    rank: int | None = None
    """The rank R of the path term in heads of kind `markov` (`medusa.heads.markov`), `None` for other kinds.
    By default half of `hidden_size`, but at most `USUAL_RANK`."""
    lm_head: str = "own"
    """`own`: each head has an LM head. `one`: all heads have one together. `shared`: they use the backbone's."""
    vocabulary: int | None = None
    """The number of tokens that the heads guess among (`medusa.vocabulary`); `None`: all tokens."""
    feature_layers: list[int] | str | None = None
    """The layers whose hidden states `eagle` heads read, joined by a matrix (EAGLE-3). i: the state after i layers.
    `usual`: the layers that EAGLE-3's servers take by default. `None`: the backbone's last hidden state."""
    layer: LayerSizes | None = None
    """The sizes of the decoder layers of `eagle` heads; `None`: one layer with default sizes."""
    window: int | None = None
    """The number of last pairs of a token and a feature, those of its path included, to which a head of kind `eagle`
    attends; `None`: all pairs."""
    embeddings: str = "shared"
    """`shared`: heads read the backbone's input embeddings. `own`: `eagle` heads have input embeddings."""
    mtp: Json | None = None
    """For kind `mtp`: the config of the model that the layer comes from, as in the model's `config.json`."""
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

    def __post_init__(self) -> None:
        blocks = (*BLOCKS, ORIGINAL_EAGLE, ORIGINAL_HYDRA, NATIVE)
        choices = {"kind": (*KINDS, *NATIVE_KINDS), "block": blocks, "lm_head": LM_HEADS, "embeddings": EMBEDDINGS}
        for name, allowed in choices.items():
            if getattr(self, name) not in tuple(allowed):
                raise RequestError(
                    f"heads.{name} is {getattr(self, name)!r}; {choose_one_of(getattr(self, name), allowed)}"
                )
        if self.block == ORIGINAL_HYDRA and (self.kind != "hydra" or self.lm_head != "own"):
            raise RequestError("heads.block hydra belongs to kind hydra with heads.lm_head=own; take square or mlp")
        if self.block == GATED and (self.kind != "eagle" or self.num_layers != 1):
            raise RequestError(f"heads.block {GATED} belongs to kind eagle with heads.layers 1; take square or mlp")
        self._check_eagle()
        self._check_mtp()
        if self.rank is not None and self.kind != "markov":
            raise RequestError(f"heads.rank belongs to kind markov, not {self.kind}; leave it out")
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is None and name in ("vocab_size", "vocabulary", "rank", "window"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise RequestError(f"heads.{name} is {value!r}; it must be a whole number from {least} to {most}")
        if self.window is not None and self.window < self.num_heads:
            raise RequestError(f"heads.window is {self.window}; it must be at least heads.num, {self.num_heads}")
        if self.window is not None and (self.kind != "eagle" or self.decoder_layers > 1):
            raise RequestError("heads.window belongs to kind eagle with one decoder layer; leave it out")
        if type(self.expansion) not in (int, float) or not 0 < self.expansion * self.hidden_size <= MAX_SIZE:
            raise RequestError(f"heads.expansion is {self.expansion!r}; it must be above 0, such as 4, but not immense")
        if self.vocabulary is not None and (self.vocab_size is None or self.vocabulary >= self.vocab_size):
            tokens = self.vocab_size or "an unknown number of"
            raise RequestError(f"heads.vocabulary is {self.vocabulary} of {tokens} tokens; take fewer")
        if self.kind == "markov" and self.rank is None:
            self.rank = min((self.hidden_size + 1) // 2, USUAL_RANK)
        keys = PrefixSizes.__annotations__
        if self.prefix is not None and not (isinstance(self.prefix, dict) and set(self.prefix) == set(keys)):
            raise RequestError(f"the config's prefix is {self.prefix!r}; its keys must be {', '.join(sorted(keys))}")
        for key, size in (self.prefix or {}).items():
            if key != "norm" and (wrong := _size_error(key, size)):
                raise RequestError(f"the config's prefix has {key} {size!r}; it must be {wrong}")
        if not isinstance(self.backbone, dict):
            raise RequestError(f"the config's backbone is {self.backbone!r}; it must be a fingerprint, or left out")
        if not isinstance(self.raw_prompts, bool | None):
            found = f"the config's raw_prompts is {self.raw_prompts!r}"
            raise RequestError(f"{found}; it must be true (plain text), false (in a chat template), or left out")
        if not isinstance(self.template_options, dict | None):
            found = f"the config's template_options is {self.template_options!r}"
            raise RequestError(f"{found}; it must be an object such as {{'enable_thinking': false}}, or left out")
        if self.tree is not None:
            if not isinstance(self.tree, list):
                raise RequestError(f"the config's tree is {self.tree!r}; it must be a list of paths, or left out")
            Tree.from_paths(self.tree)

    def _check_eagle(self) -> None:
        """Raise RequestError if a setting of EAGLE's published layers is invalid, or the heads are not of this form."""
        layered = self.block in (GATED, ORIGINAL_EAGLE)
        if self.block == ORIGINAL_EAGLE and (self.kind != "eagle" or self.num_layers != 1):
            raise RequestError(f"heads.block {ORIGINAL_EAGLE} belongs to kind eagle with heads.layers 1; take gated")
        if self.feature_layers is not None and (self.block != GATED or self.prefix_layers):
            raise RequestError(f"heads.feature_layers needs heads.block={GATED} without heads.prefix_layers")
        for name, default in {"layer": None, "embeddings": "shared"}.items():
            if getattr(self, name) != default and not layered:
                raise RequestError(f"the config's {name} needs kind eagle with block {GATED}, not {self.block}")
        if self.lm_head == "one" and not layered:
            raise RequestError(f"heads.lm_head one needs heads.kind eagle with heads.block {GATED}; take own or shared")
        layers = self.feature_layers
        if layers is not None and layers != USUAL_LAYERS:
            numbers = layers if isinstance(layers, list) else []
            if not numbers or any(type(layer) is not int or layer < 0 for layer in numbers):
                ways = f"give numbers such as [2, 16, 29], or {USUAL_LAYERS}"
                raise RequestError(f"heads.feature_layers is {layers!r}; {ways}")
        if self.layer is not None:
            self._check_layer(self.layer)

    def _check_mtp(self) -> None:
        """Raise RequestError if the heads are of kind `mtp` and lack one of its settings, or have one by mistake."""
        native = (self.kind == NATIVE, self.block == NATIVE, self.mtp is not None)
        if any(native) and not all(native):
            raise RequestError(f"heads of kind {NATIVE} have the block {NATIVE} and the config of their model (mtp)")
        if all(native) and (not isinstance(self.mtp, dict) or not isinstance(self.mtp.get("model_type"), str)):
            raise RequestError(f"the config's mtp is {self.mtp!r}; it must be a model's config, with its model_type")
        if all(native) and (self.lm_head != "shared" or self.num_layers != 1 or self.prefix_layers):
            needs = "heads.lm_head=shared with heads.layers 1 and without heads.prefix_layers"
            raise RequestError(f"heads.kind {NATIVE} needs {needs}")

    def _check_layer(self, layer: LayerSizes) -> None:
        """Raise RequestError if a size of the decoder layers of `eagle` heads is invalid."""
        keys = LayerSizes.__annotations__
        if not isinstance(layer, dict) or set(layer) != set(keys):
            raise RequestError(f"the config's layer is {layer!r}; its keys must be {', '.join(sorted(keys))}")
        for key, size in layer.items():
            if key == "rope":
                wrong = "" if isinstance(size, dict) else "an object"
            elif key == "variants":
                wrong = "" if isinstance(size, list) else "a list"
            else:
                wrong = _size_error(key, size)
            if wrong:
                raise RequestError(f"the config's layer has {key} {size!r}; it must be {wrong}")
        for variant in layer["variants"]:
            if variant not in VARIANTS:
                choice = choose_one_of(str(variant), VARIANTS)
                raise RequestError(f"the config's layer has the variant {variant!r}; {choice}")
        if layer["heads"] % layer["key_value_heads"]:
            raise RequestError("the config's layer has heads that are no multiple of its key_value_heads")
        own = self.feature_layers is not None and self.lm_head == "one" and self.embeddings == "own"
        if layer["hidden_size"] != self.hidden_size and not own:
            needs = "feature_layers, and an LM head and embeddings of their own"
            raise RequestError(f"heads with another hidden size than the backbone's need {needs}")

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
        """The number of decoder layers of `eagle` heads."""
        return 1 if self.layer is None else self.layer["layers"]

    @property
    def output_size(self) -> int:
        """The size of the features that the LM heads read."""
        return self.hidden_size if self.layer is None else self.layer["hidden_size"]

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
        if self.kind == "eagle":  # servers' layers attend to the whole text
            whole = not self.prefix_layers and self.window is None
            return self.block == GATED and self.lm_head != "own" and whole
        return self.is_published and self.block == "square"

    @property
    def is_published(self) -> bool:
        """Whether the heads' tensors are saved under FasterDecoding's names (`medusa.checkpoints.published`)."""
        return self.kind == "medusa" and not self.prefix_layers and self.vocabulary is None

    def to_dict(self) -> Json:
        """Return the content of `config.json`. With a shared LM head its `version` is "2", for TGI and LoRAX."""
        out: Json = {published: getattr(self, ours) for ours, published in PUBLISHED_KEYS.items()}
        version = {"version": "2"} if self.lm_head == "shared" else {}
        return out | version | {key: getattr(self, key) for key in OUR_KEYS}

    @classmethod
    def from_dict(cls, content: Json) -> MedusaConfig:
        """Make a config from the content of `config.json`, which must have a `hidden_size`; ignore unknown keys."""
        keys = PUBLISHED_KEYS | {key: key for key in OUR_KEYS}
        return cls(**{field: content[key] for field, key in keys.items() if key in content})


def _size_error(key: str, size: object) -> str:
    """Say what the value `key` of a decoder layer must be if `size` is no such number; empty if it is."""
    if key in SIZE_LIMITS:
        fits = type(size) is int and 0 < size <= SIZE_LIMITS[key]
        return "" if fits else f"a whole number above 0 and at most {SIZE_LIMITS[key]}"
    fits = isinstance(size, int | float) and not isinstance(size, bool) and 0 < size < math.inf
    return "" if fits else "a number above 0"
