"""The sections of a training recipe: every key with its type, default, bounds and description."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails

from medusa.config import LM_HEADS, MIN_VOCABULARY, USUAL_LAYERS, MedusaConfig, belongs, require_block
from medusa.errors import RequestError
from medusa.heads import HEADS, class_of, kinds_with_setting
from medusa.loading import DTYPES
from medusa.options import ATTENTIONS, QUANTIZATIONS, LoadOptions
from medusa.records.sources import DOCUMENT_SEPARATOR
from train.sections import Section, one_of, section_of, validated

NUM_HEADS = 4
FLASH = "flash_attention_2"  # only for training, because its kernels read no tree's mask
TEACHER_TILT = 0.06  # with lambda_0 = 0.1, the perplexity rises by less than 2 % (docs/training.md)


class HeadsConfig(Section):
    """The section `heads` of a recipe: the shape of the heads. Keys left out get values that suit the backbone."""

    # A kind of heads can have further keys (`Kind.Settings`), which are extra fields.

    model_config = ConfigDict(extra="allow")

    num: int | None = Field(default=None, ge=1)
    """Number of heads, by default 4; a decoding step gives at most num + 1 tokens."""
    kind: str | None = None
    """Kind of heads (docs/kinds.md): medusa (independent heads, the default), cascade, hydra, recurrent, markov, eagle,
    dflash, mtp (fine-tunes the backbone's own layer for multi-token prediction), or a kind of another package."""
    prefix_layers: int | None = Field(default=None, ge=0)
    """Number of decoder layers between the backbone and the heads (prefix attention), usually 1; 0: none."""
    block: str | None = None
    """Residual block: square (the paper's), mlp, or gated (for kinds eagle and dflash). Servers such as vLLM load
    heads of kind medusa with square blocks, and heads of the others with gated blocks."""
    layers: int | None = Field(default=None, ge=1)
    """Number of residual blocks in each head."""
    expansion: float | None = Field(default=None, gt=0)
    """Width of an mlp or gated block, as a multiple of the hidden size."""
    lm_head: Annotated[str | None, one_of(*LM_HEADS)] = None
    """LM head: own (one for each head, of vocabulary x hidden size weights), one (of all heads together; only gated
    blocks) or shared (the backbone's)."""
    feature_layers: list[int] | str | None = None
    """Layers of the backbone whose hidden states gated blocks read, joined by a matrix (EAGLE-3): usual (three layers;
    dflash's default) or a list, in which i stands for the state after i layers. Default: the last hidden state."""
    vocabulary: int | None = None
    """Number of tokens that heads guess among: the most frequent of the training text; 0: all. By default as few as are
    expected to make decoding fastest, for kinds that follow a path."""
    force_vocabulary: bool = False
    """Allow a vocabulary that is expected to slow decoding down."""
    start: str | None = None
    """Trained heads to continue from, a folder or Hub id; the other keys of this section must agree with them."""

    @model_validator(mode="after")
    def _keys_go_together(self) -> HeadsConfig:
        size = self.vocabulary
        if size and size < MIN_VOCABULARY:
            raise RequestError(f"heads.vocabulary is {size}; it must be at least {MIN_VOCABULARY}, or 0 for all tokens")
        self._check_own_keys()
        if self.feature_layers is None and class_of(self.kind or "medusa").joins_layers:
            self.feature_layers = USUAL_LAYERS
        if self.start is None:
            self._try_config()
        return self

    @property
    def own(self) -> dict[str, Any]:
        """The keys of the kind alone, as far as they are given."""
        return self.model_extra or {}

    def _check_own_keys(self) -> None:
        """Raise RequestError if a key belongs to another kind or has a wrong value, and an error for an unknown key."""
        extra = self.__pydantic_extra__ or {}
        kind = self.kind or (None if self.start else "medusa")  # the kind of heads to start from is known later
        for key, value in list(extra.items()):
            if not (owners := kinds_with_setting(key, recipe=True)):
                unknown = InitErrorDetails(type="extra_forbidden", loc=(key,), input=value)
                raise ValidationError.from_exception_data("heads", [unknown])
            if value is None:  # as if it were left out
                del extra[key]
                continue
            if kind is not None and kind not in owners:
                raise RequestError(belongs(key, owners, kind))
            checked = validated(own_section(kind or owners[0]), {key: value}, prefix="heads.")
            extra[key] = getattr(checked, key)

    def _try_config(self) -> None:
        """Raise RequestError if no backbone can have such heads, with sizes that stand for any backbone's."""
        kind = class_of(self.kind or "medusa")
        if kind.comes_with_model:
            for key in ("prefix_layers", "block", "layers", "expansion", "lm_head", "feature_layers"):
                if getattr(self, key):
                    raise RequestError(f"heads.kind {self.kind} comes with the backbone; leave heads.{key} out")
            return
        if self.block is not None:
            require_block(self.kind or "medusa", self.block, kind.block_types)
        MedusaConfig(
            hidden_size=1024,
            vocab_size=1024,
            num_heads=self.num or NUM_HEADS,
            num_layers=self.layers or 1,
            kind=self.kind or "medusa",
            prefix_layers=self.prefix_layers or 0,
            block=self.block or kind.block_types[0],
            lm_head=self.lm_head or "shared",
            feature_layers=self.feature_layers,
            **self.own,
        )


def own_key_paths() -> list[str]:
    """Return the paths of all keys that only some kinds of heads have, such as "heads.rank"."""
    names = (name for kind in HEADS for name in class_of(kind).setting_names(recipe=True))
    return [f"heads.{name}" for name in dict.fromkeys(names)]


def own_section(kind: str) -> type[Section]:
    """Make the section with the keys that only this kind of heads has."""
    settings = class_of(kind)
    without = set(settings.setting_names()) - set(settings.setting_names(recipe=True))
    return section_of(settings.Settings, {}, without)


def require_needed(section: Section, needs: dict[str, str], prefix: str = "") -> None:
    """Raise RequestError if a key has a value of its own, but the key that it needs is not set."""
    for key, needed in needs.items():
        changed = getattr(section, key) != type(section).model_fields[key].default
        if changed and not getattr(section, needed):
            raise RequestError(f"{prefix}{key} is for {prefix}{needed}; set that, too, or leave {prefix}{key} out")


class DataConfig(Section):
    """The sections `data` and `eval_data` of a recipe: texts and how to pack them. A plain string sets only `path`."""

    path: str = Field(min_length=1)
    """Texts or conversations: a file, a folder or a Hub dataset id."""
    split: str = "train"
    """Split of a Hub dataset."""
    document_separator: str = DOCUMENT_SEPARATOR
    """Line that separates the documents of a `.txt` file."""
    subset: str | None = None
    """Subset ("configuration") of a Hub dataset that has several."""
    sequence_length: int = Field(default=512, ge=4)
    """Number of tokens in a packed row, at most the backbone's context length."""
    long_documents: Literal["split", "truncate", "drop"] = "split"
    """How documents are packed into rows. split lays them end to end and cuts them at the end of each row. truncate and
    drop keep each document in one row; a longer document loses its end (truncate) or is left out (drop)."""
    streaming: bool = False
    """Pack rows while training reads them, for data larger than memory; needs training.max_steps or max_minutes."""
    shuffle_buffer: int = Field(default=256, ge=1)
    """Number of streamed rows from which the next row is drawn at random; 1 keeps the order of the data."""
    max_examples: int | None = Field(default=None, ge=1)
    """Number of records to read, by default all."""
    raw: bool = False
    """Take prompts with answers as plain text, without the chat template."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the chat template for all conversations, such as {enable_thinking: false}; a record's own
    chat_template_kwargs come first. Heads record them, and decoding then uses them by default."""
    exclude: str | None = None
    """Test texts (file, folder or dataset); examples that share `exclude_window` consecutive tokens are dropped."""
    exclude_window: int = Field(default=32, ge=1)
    """Number of consecutive shared tokens for which `exclude` drops an example."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, content: object) -> object:
        return {"path": content} if isinstance(content, str) else content


class AdapterConfig(Section):
    """The section `adapter` of a recipe, which trains the backbone too, through a LoRA adapter (Medusa-2)."""

    rank: int = Field(default=32, ge=1)
    """Rank of the LoRA matrices (paper: 32)."""
    alpha: int = Field(default=64, gt=0)
    """LoRA's alpha: the adapter's output is scaled by alpha / rank (paper: 16)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate on the inputs of the LoRA matrices (paper: 0.05). Heads train with it, but decode without it."""
    modules: str | list[str] = "all-linear"
    """Layers to adapt: all-linear (all linear layers except the LM head), or names as in peft's target_modules."""
    lm_head: bool = False
    """Adapt the LM head too, as the paper does; the heads then need their own LM heads."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate of the adapter, by default a quarter of training.learning_rate (as in the paper)."""
    lm_loss: Literal["kl", "text"] = "kl"
    """Loss of the backbone: kl (divergence from the original backbone) or text (cross-entropy on the text)."""
    lambda_0: float = Field(default=0.1, gt=0)
    """Weight of the heads' loss in the gradient of the adapter (paper: 0.2, and 0.01 in self-distillation)."""
    teacher_tilt: float | None = Field(default=None, ge=0, lt=1)
    """Power t in lm_loss kl's target, p(original backbone) x p(first head)^t, normalised; by default 0.06; 0: off."""
    schedule: Literal["constant", "linear", "sine"] = "constant"
    """How lambda_0 and teacher_tilt change over the run: constant, linear (a rise from 0) or sine (a rise along a
    quarter wave). A rise changes the backbone less."""
    heads_first: float = Field(default=0.1, ge=0, lt=1)
    """Share of the run, at its start, in which only the heads learn. Use 0 with trained heads (heads.start)."""
    quality_data: str | None = None
    """Texts on which the backbone's perplexity is measured before and after; by default a part of the training data."""
    merge: bool = False
    """Also write the backbone with the adapter merged into it, to output_dir/merged."""

    @model_validator(mode="after")
    def _choose_tilt(self) -> AdapterConfig:
        if self.teacher_tilt is None:
            self.teacher_tilt = TEACHER_TILT if self.lm_loss == "kl" else 0.0
        if self.teacher_tilt and self.lm_loss != "kl":
            only = "only lm_loss kl has a teacher to tilt; leave it out, or take adapter.lm_loss=kl"
            raise RequestError(f"adapter.teacher_tilt is {self.teacher_tilt}; {only}")
        return self


class TrainConfig(Section):
    """A whole training recipe: its top-level keys and its sections."""

    backbone: str = Field(min_length=1)
    """The model that the heads are for: a local folder, a GGUF file, a Hub id, or demo (in this package)."""
    data: DataConfig
    """Texts to train on."""
    output_dir: str = Field(min_length=1)
    """Folder to which heads, checkpoints and provenance are written."""
    heads: HeadsConfig = Field(default_factory=HeadsConfig)
    """Shape of the heads to train."""
    eval_data: DataConfig | None = None
    """Texts to evaluate on every training.eval_steps training steps (by default 500), with the same keys as data."""
    adapter: AdapterConfig | None = None
    """Train the backbone too, through a LoRA adapter (Medusa-2)."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Training arguments: our own keys, such as objective, and fields of transformers' TrainingArguments."""
    cache_features: bool = False
    """Run the backbone only once, and train the heads from its hidden states on disk."""
    features_dir: str | None = None
    """Folder for the cached hidden states, by default output_dir/features."""
    features_dtype: Annotated[str | None, one_of(*DTYPES)] = None
    """Dtype of the cached hidden states, by default the backbone's."""
    revision: str | None = None
    """Revision of the backbone on the Hub: a branch, a tag or a commit."""
    dtype: Annotated[str | None, one_of(*DTYPES)] = None
    """Dtype of the backbone, by default float32 on a CPU and the checkpoint's dtype on a GPU."""
    device: str | None = None
    """Device of the backbone, such as cpu or cuda; by default a GPU if there is one."""
    attention: Annotated[str | None, one_of(*ATTENTIONS, FLASH)] = None
    """Attention implementation of the backbone, by default sdpa if the model supports it. flash_attention_2 (of the
    package flash-attn, on a GPU) computes nothing between the documents of a row."""
    shard_backbone: bool = False
    """Shard the backbone's blocks over all processes (FSDP2), if the backbone is too large for a single GPU."""
    quantization: Annotated[str | None, one_of(*QUANTIZATIONS)] = None
    """Quantise the backbone's weights while loading: int8 or int4 (by torchao), 8bit or 4bit (by bitsandbytes)."""
    trust_remote_code: bool = False
    """Allow code that comes with the backbone to run."""

    @field_validator("heads", "training", mode="before")
    @classmethod
    def _empty_section(cls, content: object) -> object:
        return {} if content is None else content

    @model_validator(mode="after")
    def _keys_go_together(self) -> TrainConfig:
        require_needed(self, dict.fromkeys(("features_dir", "features_dtype"), "cache_features"))
        for prefix, section in (("data.", self.data), ("eval_data.", self.eval_data)):
            if section is not None:
                require_needed(section, {"exclude_window": "exclude", "shuffle_buffer": "streaming"}, prefix)
        adapter, streaming = self.adapter, self.data.streaming
        if streaming and self.cache_features:
            raise RequestError("data.streaming has no end to cache; leave cache_features out")
        if adapter and self.eval_data:
            raise RequestError("eval_data is for a frozen backbone; with an adapter, leave it out")
        if adapter and self.shard_backbone:
            raise RequestError("a sharded backbone cannot be adapted; leave shard_backbone or adapter out")
        if self.shard_backbone and self.cache_features:  # processes would wait for each other's forwards without end
            raise RequestError("a sharded backbone cannot write features; leave shard_backbone or cache_features out")
        if self.eval_data and self.eval_data.streaming:
            raise RequestError("an evaluation reads all of eval_data; leave eval_data.streaming out")
        if adapter and streaming and adapter.quality_data is None:
            raise RequestError("data.streaming has no end to measure a perplexity on; give adapter.quality_data")
        return self

    @property
    def load_options(self) -> LoadOptions:
        """The options for loading the backbone, from the recipe's keys of the same names."""
        given = {field.name: getattr(self, field.name) for field in fields(LoadOptions)}
        if self.device is None and self.training.get("use_cpu") is True:
            given["device"] = "cpu"  # the Trainer's own key, which says nothing about the backbone
        return LoadOptions(**given | {"attention": None if self.attention == FLASH else self.attention})
