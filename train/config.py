"""The sections of a training recipe: every key with its type, default, bounds and description."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from medusa.config import BLOCKS, GATED, KINDS, LM_HEADS, MIN_VOCABULARY
from medusa.errors import RequestError
from medusa.loading import DTYPES
from medusa.options import ATTENTIONS, QUANTIZATIONS, LoadOptions
from medusa.records.sources import DOCUMENT_SEPARATOR
from train.sections import OneOf, Section

NUM_HEADS = 4
TEACHER_TILT = 0.06  # with lambda_0 0.1, the perplexity stays within 2 % (docs/training.md)


class HeadsConfig(Section):
    """The section `heads`. Keys that are left out are chosen for the backbone (`train.architecture`)."""

    num: int | None = Field(default=None, ge=1)
    """Number of heads, by default 4; a step gives at most one token more than that."""
    kind: Annotated[str | None, OneOf(*KINDS)] = None
    """Kind of heads (docs/kinds.md), by default medusa: independent heads."""
    prefix_layers: int | None = Field(default=None, ge=0)
    """Decoder layers between the backbone and the heads (prefix attention); usually 1; 0: none."""
    block: Annotated[str | None, OneOf(*BLOCKS)] = None
    """Residual block: square (the paper's; servers load it in independent heads), mlp, or gated (the layer of EAGLE-3,
    which servers load; kind eagle only)."""
    layers: int | None = Field(default=None, ge=1)
    """Residual blocks per head."""
    expansion: float | None = Field(default=None, gt=0)
    """Width of an MLP block, in hidden sizes."""
    lm_head: Annotated[str | None, OneOf(*LM_HEADS)] = None
    """own: each head has an LM head of its own (V x H more weights each); shared: the backbone's."""
    vocabulary: int | None = None
    """Guess among this many tokens, the most frequent of the training text; 0: all. For large vocabularies."""
    force_vocabulary: bool = False
    """Allow a vocabulary that is expected to slow decoding down."""
    start: str | None = None
    """Continue from these trained heads (a folder or Hub id); the other keys must agree with them."""

    @model_validator(mode="after")
    def _keys_go_together(self) -> HeadsConfig:
        size = self.vocabulary
        if size and size < MIN_VOCABULARY:
            raise RequestError(f"heads.vocabulary is {size}; it must be at least {MIN_VOCABULARY}, or 0 for all tokens")
        kinds = ("eagle", None) if self.start else ("eagle",)
        if self.block == GATED and (self.kind not in kinds or self.layers not in (None, 1)):
            raise RequestError(f"heads.block {GATED} needs heads.kind eagle with heads.layers 1; take square or mlp")
        return self


class DataConfig(Section):
    """The sections `data` and `eval_data`; a plain string stands for `path`."""

    path: str = Field(min_length=1)
    """A file, a folder or a Hub dataset id."""
    split: str = "train"
    """Split of a Hub dataset."""
    document_separator: str = DOCUMENT_SEPARATOR
    """The line between the documents of a `.txt` file."""
    subset: str | None = None
    """Subset ("configuration") of a Hub dataset that has several."""
    sequence_length: int = Field(default=512, ge=4)
    """Tokens in a packed row; at most the backbone's context."""
    long_documents: Literal["split", "truncate", "drop"] = "split"
    """split: documents lie end to end and are cut at the end of each row; truncate or drop: each document lies whole in
    one row, and a longer one loses its end or is left out."""
    streaming: bool = False
    """Pack rows while training reads them, for data larger than the memory; needs training.max_steps or max_minutes."""
    shuffle_buffer: int = Field(default=256, ge=1)
    """Streamed rows from which the next one is drawn; 1 keeps the order of the file."""
    max_examples: int | None = None
    """Read at most this many records."""
    exclude: str | None = None
    """A file, folder or dataset of test prompts: drop examples that share `exclude_window` tokens in a row with it."""
    exclude_window: int = Field(default=32, ge=1)
    """Consecutive tokens that count as the same text."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, content: object) -> object:
        return {"path": content} if isinstance(content, str) else content


class AdapterConfig(Section):
    """The section `adapter`, which trains the backbone too, through LoRA (Medusa-2, `train.medusa2`)."""

    rank: int = Field(default=32, ge=1)
    """Rank of the low-rank matrices (paper: 32)."""
    alpha: int = 64
    """The matrices are scaled by alpha / rank (paper: 16)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the matrices (paper: 0.05); hidden states have none when decoding."""
    modules: str | list[str] = "all-linear"
    """Adapted layers: all linear ones except the LM head, or names as peft takes them."""
    lm_head: bool = False
    """Adapt the LM head too (paper); heads then need LM heads of their own."""
    learning_rate: float | None = None
    """Peak learning rate of the adapter, by default a quarter of the heads', training.learning_rate (paper)."""
    lm_loss: Literal["kl", "text"] = "kl"
    """kl: stay close to the original backbone; text: learn the text."""
    lambda_0: float = Field(default=0.1, gt=0)
    """Weight of the heads' loss in the backbone's gradient (paper: 0.2, and 0.01 in self-distillation)."""
    teacher_tilt: float | None = Field(default=None, ge=0, lt=1)
    """Exponent that tilts the teacher of lm_loss kl towards the first head's prediction (`train.medusa2.lm_loss`), by
    default 0.06; 0: off."""
    schedule: Literal["constant", "linear", "sine"] = "constant"
    """How lambda_0 and teacher_tilt are reached; linear and sine (a quarter wave) rise and spare the backbone."""
    heads_first: float = Field(default=0.1, ge=0, lt=1)
    """Share of the run in which the heads learn alone; take 0 for heads that start trained (heads.start)."""
    quality_data: str | None = None
    """Texts on which perplexity is measured before and after; by default a part of the training data."""
    merge: bool = False
    """Also write the backbone with the adapter merged into it, in output_dir/merged."""

    @model_validator(mode="after")
    def _choose_tilt(self) -> AdapterConfig:
        if self.teacher_tilt is None:
            self.teacher_tilt = TEACHER_TILT if self.lm_loss == "kl" else 0.0
        if self.teacher_tilt and self.lm_loss != "kl":
            raise RequestError(f"adapter.teacher_tilt is {self.teacher_tilt}; only lm_loss kl has a teacher to tilt")
        return self


class TrainConfig(Section):
    """A whole recipe."""

    backbone: str = Field(min_length=1)
    """The frozen model: a local folder, a Hub id, or demo (the embedded one)."""
    data: DataConfig
    """What to train on."""
    output_dir: str = Field(min_length=1)
    """Folder for heads, checkpoints and provenance."""
    heads: HeadsConfig = Field(default_factory=HeadsConfig)
    """What to train."""
    eval_data: DataConfig | None = None
    """Text to evaluate on during training, as for data; every 500 steps unless training.eval_steps says otherwise."""
    adapter: AdapterConfig | None = None
    """Train the backbone too, through LoRA: Medusa-2."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Fields of transformers' TrainingArguments, and ours (`train.arguments`: objective, max_minutes, ...)."""
    cache_features: bool = False
    """Run the backbone once and train the heads from its hidden states on disk (`train.features`)."""
    features_dir: str | None = None
    """Folder for the cached hidden states, by default output_dir/features."""
    features_dtype: Annotated[str | None, OneOf(*DTYPES)] = None
    """Dtype of the cached hidden states, by default the backbone's."""
    revision: str | None = None
    """Revision of the backbone on the Hub."""
    dtype: Annotated[str | None, OneOf(*DTYPES)] = None
    """The backbone's dtype, by default float32 on a CPU and the checkpoint's on a GPU."""
    device: str | None = None
    """cpu, cuda, ...; by default a GPU if there is one."""
    attention: Annotated[str | None, OneOf(*ATTENTIONS)] = None
    """The backbone's attention, by default sdpa if the model offers it."""
    shard_backbone: bool = False
    """Shard the backbone's blocks over all processes (FSDP2), for one too large for a single GPU."""
    quantization: Annotated[str | None, OneOf(*QUANTIZATIONS)] = None
    """Load the backbone in 4 or 8 bits, with bitsandbytes."""
    trust_remote_code: bool = False
    """Run code that comes with the backbone."""

    @field_validator("heads", "training", mode="before")
    @classmethod
    def _empty_section(cls, content: object) -> object:
        return {} if content is None else content

    @model_validator(mode="after")
    def _keys_go_together(self) -> TrainConfig:
        adapter, streaming = self.adapter, self.data.streaming
        for wrong, message in (
            (streaming and self.cache_features, "data.streaming has no end to cache; leave cache_features out"),
            (adapter and self.eval_data, "eval_data is for a frozen backbone; with an adapter, leave it out"),
            (
                adapter and self.shard_backbone,
                "a sharded backbone cannot be adapted; leave shard_backbone or adapter out",
            ),
            (
                adapter and streaming and adapter.quality_data is None,
                "data.streaming has no end to measure a perplexity on; name a file as adapter.quality_data",
            ),
        ):
            if wrong:
                raise RequestError(message)
        return self

    @property
    def load_options(self) -> LoadOptions:
        """The options with which the backbone is loaded."""
        return LoadOptions(**{field.name: getattr(self, field.name) for field in fields(LoadOptions)})
