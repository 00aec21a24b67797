"""Loading of backbones and tokenizers from disk or the Hub, with options for device, dtype and quantisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
)

from medusa.cpu import has_fast_bfloat16
from medusa.errors import RequestError, first_line
from medusa.files import ASSETS, read_json
from medusa.gguf import gguf_file, read_gguf
from medusa.options import DTYPE_NAMES, LoadOptions
from medusa.places import SHIPPED, hub_keywords, may_be_on_hub, require_backbone, why_missing
from medusa.quantization import layer_without_groups, quantization_config, quantized_layers, warn_of_plain_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEMO = ASSETS / "backbone"  # the backbone that comes with the package
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
LOAD_DEFAULTS = LoadOptions()
AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # of which every tokenizer has at least one


@dataclass
class Loaded:
    """A loaded backbone with its name, revision and tokenizer (`None` without a tokenizer)."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    revision: str | None = None

    @property
    def bos_token_id(self) -> int | None:
        return bos_token_id(self.tokenizer, self.model.config)


def bos_token_id(tokenizer: PreTrainedTokenizerBase | None, config: PretrainedConfig) -> int | None:
    """Return the id of the BOS token that the tokenizer or, without one, the config names; `None` if neither does."""
    begin = getattr(tokenizer, "bos_token_id", None)
    return getattr(config.get_text_config(decoder=True), "bos_token_id", None) if begin is None else begin


@dataclass(frozen=True)
class BackboneFiles:
    """The files of a backbone. Each is read once, when it is first needed; RequestError if it is missing or damaged.

    The name is `demo` (the built-in model), a folder (of a model or peft adapter), a GGUF file or a Hub id."""

    name: str
    options: LoadOptions = LOAD_DEFAULTS

    @cached_property
    def source(self) -> Source:
        """Where transformers finds the files."""
        return _source(self.name)

    @cached_property
    def config(self) -> PretrainedConfig:
        """The backbone's config."""
        source = self.source
        try:
            if source.gguf is not None:
                return read_gguf(AutoConfig, source.gguf)
            return AutoConfig.from_pretrained(source.path, **_hub(source.path, self.options))
        except Exception as error:  # transformers raises errors of many types here
            raise _missing(self.name, error) from error

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """The backbone's generation config, as its model will have it."""
        source = self.source
        keywords: dict[str, Any] = {"revision": self.options.revision, **hub_keywords(source.path)}
        try:
            try:
                return GenerationConfig.from_pretrained(source.path, **keywords)
            except OSError:  # there is no such file: old checkpoints have these options in the model's config
                if source.gguf is not None:
                    return GenerationConfig.from_model_config(read_gguf(AutoConfig, source.gguf))
                keywords |= {"config_file_name": "config.json", "_from_model_config": True}
                return GenerationConfig.from_pretrained(source.path, **keywords)
        except Exception as error:  # wrong values raise errors of several types
            raise _missing(self.name, error) from error

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The backbone's tokenizer; `None` if it has none."""
        source, config = self.source, self.config
        if source.gguf is None:
            return _tokenizer((source.adapter or source.path, config._name_or_path), self.options)
        try:
            return read_gguf(AutoTokenizer, source.gguf)
        except Exception as error:
            raise _broken_tokenizer(self.name, error) from error

    def load(self) -> Loaded:
        """Load the backbone in eval mode; RequestError also if no layer can be quantised as the options ask."""
        source, config, options = self.source, self.config, self.options
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        kind = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device).type
        placed = _placement(self, device, kind)
        try:
            keywords: dict[str, object] = {
                "dtype": _dtype(options, kind),
                "attn_implementation": options.attention,
                **placed,
                **_hub(source.path, options),
            }
            if options.dtype == "float64":
                keywords["experts_implementation"] = "eager"  # the default kernel multiplies 16 and 32 bits only
            if source.gguf is not None:
                # The config is read again, because transformers changes it.
                keywords |= {"gguf_file": source.gguf.name, "config": read_gguf(AutoConfig, source.gguf)}
                keywords["quantization_config"] = GgufConfig(dequantize=True)  # to an ordinary model
            if offline := hub_keywords(source.path):
                keywords["adapter_kwargs"] = offline  # transformers also looks for an adapter of peft
            # An adapter in the base's own folder would be loaded with it; transformers leaves it out for another one.
            by_itself = source.adapter is not None and not (Path(source.path) / "adapter_config.json").is_file()
            place = source.adapter if source.adapter is not None and not by_itself else source.path
            loaded: Any = auto_class(config).from_pretrained(place, output_loading_info=True, **keywords)
            model, info = loaded
            lacking = _lacking(info)
            if by_itself and source.adapter is not None and not lacking:  # or `info` would be only about the adapter
                found = model.load_adapter(source.adapter, dtype=model.dtype)
                lacking = _lacking({} if found is None else found.to_dict())
        except Exception as error:  # transformers raises errors of many types here
            raise _missing(self.name, error) from error
        if lacking:
            told = f"no backbone at {self.name}: its files lack the weights {lacking[0]}"
            if source.adapter is not None:  # of DoRA, for example, transformers does not load all
                told += ", or transformers does not load them; merge the adapter (peft: merge_and_unload)"
            raise RequestError(told)
        if options.quantization is not None and not quantized_layers(model):
            raise RequestError(f"--quantization {options.quantization} changes no layer of {self.name}; leave it out")
        if options.quantization is not None:
            warn_of_plain_weights(model, options.quantization)
        if source.gguf is not None:
            model.config.name_or_path = str(source.gguf)
        model = model.eval() if placed else model.eval().to(device)
        return Loaded(model, self.tokenizer, self.name, options.revision)


def _lacking(info: Mapping[str, Any]) -> list[str]:
    """Return the weights that files lack; transformers only warns about them, and initialises them at random."""
    return sorted(info.get("missing_keys") or ()) or sorted(map(str, info.get("mismatched_keys") or ()))


def load_backbone(name: str, options: LoadOptions = LOAD_DEFAULTS) -> Loaded:
    """Load a backbone with its tokenizer; see `BackboneFiles.load`."""
    return BackboneFiles(name, options).load()


def load_config(name: str, options: LoadOptions = LOAD_DEFAULTS) -> PretrainedConfig:
    """Load only the config of a backbone; raise RequestError if there is no such model."""
    return BackboneFiles(name, options).config


def load_tokenizer(name: str, options: LoadOptions = LOAD_DEFAULTS) -> PreTrainedTokenizerBase | None:
    """Load only the tokenizer of a backbone; return `None` if the backbone has no tokenizer."""
    return BackboneFiles(name, options).tokenizer


def _dtype(options: LoadOptions, kind: str) -> torch.dtype | str:
    """Return the dtype of plain weights and of all inputs on a device of this kind; "auto": the checkpoint's."""
    packed, auto = options.quantization == "int4" and kind == "cuda", options.dtype == "auto"
    if packed and options.dtype not in (None, "auto", "bfloat16"):
        raise RequestError(f"--quantization int4 needs bfloat16 on a GPU, not --dtype {options.dtype}; leave it out")
    if auto and kind == "cpu" and options.quantization is None and has_fast_bfloat16():
        return torch.bfloat16
    if options.dtype is not None and not auto:
        return DTYPES[options.dtype]
    return torch.float32 if kind == "cpu" else torch.bfloat16 if packed else "auto"


def _placement(files: BackboneFiles, device: str, kind: str) -> dict[str, object]:
    """Return the keywords of `from_pretrained` for quantisation and devices; none if a plain model goes to `device`.

    Quantised weights are packed while they are loaded, on the device where they stay."""
    name, config, options = files.name, files.config, files.options
    stored = getattr(config, "quantization_config", None)
    if options.quantization is not None and (stored is not None or files.source.gguf is not None):
        raise RequestError(f"the weights of {name} are quantised already; leave out --quantization")
    if options.quantization == "int4":
        try:
            model = on_meta(config, options)
        except Exception as error:  # transformers raises errors of many types here
            raise _missing(name, error) from error
        if (odd := layer_without_groups(model)) is not None:
            raise RequestError(f"--quantization int4 of {name}: {odd}; choose int8")
    if device == "auto" or stored is not None or options.quantization is not None:
        placed: dict[str, object] = {"device_map": "auto" if device == "auto" else {"": device}}
        if options.quantization is not None:
            placed["quantization_config"] = quantization_config(options.quantization, kind)
        return placed
    return {}


def known_classes(config: PretrainedConfig) -> list[Any]:
    """Return the auto classes of transformers that load a model with this config by transformers' own code."""
    return [auto for auto in AUTO_CLASSES if type(config) in auto._model_mapping]


def auto_class(config: PretrainedConfig) -> Any:
    """Return the auto class of transformers that loads a model with this config for text.

    Models that also read images or sound are often known to the second or third class only. If no class knows the
    model, the result is the first one, whose error says so."""
    remote = getattr(config, "auto_map", None) or {}  # classes that come with the model
    return [*known_classes(config), *(auto for auto in AUTO_CLASSES if auto.__name__ in remote), *AUTO_CLASSES][0]


def on_meta(config: PretrainedConfig, options: LoadOptions = LOAD_DEFAULTS) -> PreTrainedModel:
    """Make a backbone without weights, for the names and shapes of its parameters."""
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=options.trust_remote_code)


class Source(NamedTuple):
    """Where transformers finds a backbone."""

    path: str  # a folder or Hub id; of an adapter, that of the model that it adapts
    gguf: Path | None = None  # the file in this folder that holds the model
    adapter: str | None = None  # the folder of an adapter


def _source(name: str) -> Source:
    """Find out where transformers finds a backbone; raise RequestError if the name can be no backbone's."""
    if name == SHIPPED:
        return Source(str(DEMO))
    adapter = _adapter_config(name)
    if adapter is not None and (base := read_json(adapter).get("base_model_name_or_path")):
        if not isinstance(base, str) or _adapter_config(base) is not None:
            raise RequestError(f"{name} adapts {base}, which is no model; merge the adapters, or correct {adapter}")
        return _source(base)._replace(adapter=name)
    if (gguf := gguf_file(name)) is not None:
        return Source(str(gguf.parent), gguf)
    require_backbone(name)
    return Source(name)


def _adapter_config(name: str) -> Path | None:
    """Return the config file of an adapter in a folder; `None` if transformers would take a model from this folder."""
    file = Path(name) / "adapter_config.json"
    return file if file.is_file() and not (Path(name) / "config.json").is_file() else None


def _hub(path: str, options: LoadOptions) -> dict[str, str | bool | None]:
    """Return the options for the Hub as keywords of `from_pretrained`; without a network, only local files are read."""
    return options.hub | hub_keywords(path)


def _missing(name: str, error: Exception) -> RequestError:
    """Return the error for a backbone that transformers cannot load."""
    reason = "" if name == SHIPPED or Path(name).exists() else why_missing(name)
    return RequestError(f"no backbone at {name}: {reason or first_line(error)}")


def head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Return the size of the hidden states that a backbone's LM head reads, and the number of tokens."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "word_embed_proj_dim", None) or text.hidden_size, text.vocab_size  # OPT projects its states


class TextLimits(NamedTuple):
    """What bounds the texts of a backbone."""

    context: int | None  # in tokens; `None`: unknown
    vocab_size: int


def text_limits(config: PretrainedConfig) -> TextLimits:
    """Return the context length and the vocabulary size of a backbone."""
    text = config.get_text_config(decoder=True)
    return TextLimits(getattr(text, "max_position_embeddings", None), text.vocab_size)


def _holds_tokenizer(place: str, revision: str | None) -> bool:
    """Whether a folder, or the part of a Hub repository that is on this machine, has the files of a tokenizer."""
    if not may_be_on_hub(place):
        return any((Path(place) / name).is_file() for name in TOKENIZER_FILES)
    try:
        return any(isinstance(try_to_load_from_cache(place, name, revision=revision), str) for name in TOKENIZER_FILES)
    except HFValidationError:  # no id of the Hub after all, such as one with two hyphens in a row
        return False


def _tokenizer(places: Sequence[str], options: LoadOptions) -> PreTrainedTokenizerBase | None:
    """Load a tokenizer from the first of `places` (folders or Hub ids) that has one; `None` if none of them has one."""
    for place in dict.fromkeys(places):
        try:
            return AutoTokenizer.from_pretrained(place, **_hub(place, options))
        except Exception as error:  # tokenizers raise errors of many types
            if _holds_tokenizer(place, options.revision):
                raise _broken_tokenizer(place, error) from error
    return None


def _broken_tokenizer(place: str, error: Exception) -> RequestError:
    return RequestError(f"the tokenizer at {place} cannot be loaded: {first_line(error)}")
