"""The backbone, a pretrained causal LM of transformers, as what everyone needs of it: hidden states and logits.

The stock model is used as it is: nothing is copied, patched or left on it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import Cache

from medusa.errors import RequestError
from medusa.files import ASSETS, read_json

DEMO = ASSETS / "backbone"
TREE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
MASK_BLIND = {
    # model_type: why a tree mask does not reach, or does not suffice for, its attention (measured). The self-test
    # (decode/tree_check.py) sees less: GPT-Neo's real window is longer than it, and half precision hides MPT's biases.
    "gpt_neo": "its local attention uses a window of its own by slot index and ignores ours",
    "mpt": "its ALiBi biases follow slot indices, not positions",
    "bloom": "its ALiBi biases follow slot indices, not positions",
}
REREADS = {"phi3", "phimoe", "phi4_multimodal"}  # their `prepare_inputs_for_generation` drops the cache there
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Readout(NamedTuple):
    """What a forward gives: the LM head's input and its output."""

    hidden: Tensor
    """[..., H] the backbone's last hidden state (after its final norm): what the LM head and all Medusa heads read."""
    logits: Tensor
    """[..., V] the backbone's logits."""


class Backbone:
    """A causal LM seen as `hidden states` and `logits`.

    Most models are `lm_head(base(x))` to the last bit, which lets us skip the logits that nobody reads. That is tried
    once on a short input; models that scale or cap in between (Cohere, Gemma-2, MiniCPM3) run whole, with a hook on
    the LM head's input for as long as the call lasts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.base = model.get_decoder()
        head = model.get_output_embeddings()
        if head is None:
            raise RequestError(f"{type(model).__name__} has no LM head; load it with AutoModelForCausalLM")
        self.head: nn.Module = head
        self._seen: list[Tensor] | None = None
        if self.head not in _SPLITS:
            _SPLITS[self.head] = self._splits()
        self.splits = _SPLITS[self.head]

    @property
    def hidden_size(self) -> int:
        return self.head_weight.shape[1]

    @property
    def head_weight(self) -> Tensor:
        """[V, H] the LM head's weights: it is a Linear, or something that looks like one."""
        weight = self.head.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @cached_property
    def context(self) -> int | None:
        """How many positions the model was made for; `None` where it does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @cached_property
    def rope_boundary(self) -> int | None:
        """Where `longrope` switches all rotations of a forward, by its longest position; `None` for all others.

        (`dynamic` switches too, but only beyond the context, where nothing is decoded.)
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        # Models with several kinds of layers have parameters for each.
        kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
        ends = [
            kind.get("original_max_position_embeddings") or self.config.original_max_position_embeddings
            for kind in kinds
            if kind.get("rope_type") == "longrope"
        ]
        return min(ends, default=None)

    @property
    def rereads(self) -> bool:
        """Whether the model's own `generate` reads the whole text again once it passes `rope_boundary`."""
        return self.config.model_type in REREADS

    @property
    def device(self) -> torch.device:
        """Where inputs go: the embedding's device, which differs from the LM head's in a sharded model."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @torch.no_grad()
    def _splits(self) -> bool:
        probe = torch.arange(4, device=self.device)[None] % self.vocab_size
        hidden = getattr(self.base(input_ids=probe, use_cache=False), "last_hidden_state", None)
        if hidden is None or hidden.shape[-1] != self.hidden_size:
            return False
        # Bit for bit: a soft cap changes small logits by less than any tolerance would notice.
        return torch.equal(self.head(hidden), self.model(input_ids=probe, use_cache=False).logits)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> the LM head's output [..., V]; where a model caps or scales it, the order is the same.

        In the LM head's dtype, whatever that of `hidden`: heads in float32 share an LM head in bfloat16.
        """
        return self.head(hidden.to(self.head_weight.dtype))

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] -> the input embeddings [..., H], scaled as the model scales them."""
        return self.model.get_input_embeddings()(ids)

    def hidden_states(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """input_ids [B, T] -> hidden [B, T, H]; `kwargs` go to the model."""
        if self.splits:
            return self.base(input_ids=input_ids, **kwargs).last_hidden_state
        return self._run_whole(input_ids, **kwargs).hidden

    def forward(
        self, input_ids: Tensor, cache: Cache, last: Tensor | None = None, all_hidden: bool = False, **kwargs: Any
    ) -> Readout:
        """input_ids [B, T] on top of `cache` -> hidden [B, T, H] and logits [B, T, V].

        With `last` [B] only the position `last[b]` of row b is read: hidden [B, H], logits [B, V]; with `all_hidden`
        that goes for the logits alone.
        """
        kwargs |= {"past_key_values": cache, "use_cache": True}
        if self.splits:
            hidden = self.base(input_ids=input_ids, **kwargs).last_hidden_state
            read = at(hidden, last)
            return Readout(hidden if all_hidden else read, self.head(read))
        if last is not None and not all_hidden and self.keeps_logits:
            # Logits of all T positions are never made; those kept are the same for all rows, here at most one a row.
            kept, last = last.unique(return_inverse=True)
            kwargs["logits_to_keep"] = kept.cpu()  # an index that every device takes
        out = self._run_whole(input_ids, **kwargs)
        return Readout(out.hidden if all_hidden else at(out.hidden, last), at(out.logits, last))

    @cached_property
    def keeps_logits(self) -> bool:
        """Whether the model can be told for which positions to make logits, as those of transformers can."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See what the LM head reads, for as long as the context lasts; does nothing where nobody need see it."""
        if self.splits or self._seen is not None:
            yield
            return
        seen = self._seen = []
        handle = self.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        try:
            yield
        finally:
            handle.remove()
            self._seen = None

    def _run_whole(self, input_ids: Tensor, **kwargs: Any) -> Readout:
        if self._seen is None:
            with self.watched():
                return self._run_whole(input_ids, **kwargs)
        logits = self.model(input_ids=input_ids, **kwargs).logits
        hidden = self._seen.pop()
        self._seen.clear()
        return Readout(hidden, logits)


# What the trial said for each living LM head; nothing is left on the model itself.
_SPLITS: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def at(values: Tensor, last: Tensor | None) -> Tensor:
    """values [B, T, ...] -> those at position `last[b]` of row b [B, ...]; all of them without `last`."""
    if last is None:
        return values
    return values[torch.arange(values.shape[0], device=values.device), last.to(values.device)]


def require_tree_support(model: PreTrainedModel) -> None:
    """Refuse, by name and reason, a model that cannot verify a tree in one forward.

    Raises:
        RequestError: encoder-decoder, recurrent or convolutional layers, ALiBi, or attention that takes no dense mask.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    attention = getattr(config, "_attn_implementation", None) or ""
    reason = None
    if model.config.is_encoder_decoder:
        reason = "encoder-decoder models are not supported"
    elif getattr(model, "_is_stateful", False) or kinds - TREE_LAYERS:
        named = ", ".join(sorted(kinds - TREE_LAYERS)) or "recurrent"
        reason = f"its layers ({named}) keep a state that cannot branch, or choose by themselves what to see"
    elif config.model_type in MASK_BLIND:
        reason = MASK_BLIND[config.model_type]
    elif getattr(config, "alibi", False):
        reason = "its ALiBi biases follow slot indices, not positions"
    elif any(name in attention for name in ("flash", "flex", "paged")):
        reason = f"attention {attention!r} takes no tree mask; load it with sdpa or eager (--attention sdpa)"
    if reason:
        raise RequestError(f"{type(model).__name__} ({config.model_type}) cannot hold a tree: {reason}")


@dataclass
class Loaded:
    """A backbone from disk with its tokenizer (`None` where the folder holds none)."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    revision: str | None = None


def load_backbone(
    name_or_path: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    attention: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> Loaded:
    """The backbone `name_or_path` names: `demo`, a local folder (also one of a peft adapter) or a Hub id.

    `dtype` defaults to float32 on a CPU and to the checkpoint's own on a GPU; `device` to a GPU where there is one;
    `device="auto"` spreads the layers over what there is. `attention` defaults to sdpa where the model offers it.
    `quantization` is "4bit" or "8bit", by bitsandbytes.

    Raises:
        RequestError: no such model, a damaged file, or a value that is not allowed.
    """
    path = str(DEMO) if name_or_path == "demo" else name_or_path
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_placement(dtype, device, attention)
    on_cpu = not torch.cuda.is_available() if device == "auto" else torch.device(device).type == "cpu"
    chosen = DTYPES[dtype] if dtype else (torch.float32 if on_cpu else "auto")
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    placed: dict[str, Any] = {"device_map": "auto"} if device == "auto" else {}
    if quantization is not None:
        placed = {"device_map": placed.get("device_map", {"": device}), "quantization_config": quantized(quantization)}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=chosen, attn_implementation=attention, output_loading_info=True, **placed, **common
        )
    except Exception as error:  # transformers raises some dozen types here; all mean that this is no backbone
        raise RequestError(f"no backbone at {name_or_path}: {_reason(error)}") from error
    model, told = loaded
    # transformers fills what a file lacks with random numbers and a mere warning.
    lacking = sorted(told.get("missing_keys") or ()) or sorted(str(k) for k in told.get("mismatched_keys") or ())
    if lacking:
        raise RequestError(f"no backbone at {name_or_path}: its files lack the weights {lacking[0]}")
    model = model.eval() if placed else model.eval().to(device)
    return Loaded(model, _tokenizer((path, model.config._name_or_path), common), name_or_path, revision)


def load_config(name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The backbone's configuration alone: a quick check before its weights are loaded.

    Raises:
        RequestError: no such model."""
    path = str(DEMO) if name_or_path == "demo" else name_or_path
    adapter = Path(path) / "adapter_config.json"
    if adapter.is_file():
        path = read_json(adapter).get("base_model_name_or_path") or path
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # see load_backbone
        raise RequestError(f"no backbone at {name_or_path}: {_reason(error)}") from error


def load_tokenizer(
    name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The backbone's tokenizer without its weights; `None` where it has none.

    Raises:
        RequestError: no such model, or a damaged tokenizer."""
    config = load_config(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    places = (str(DEMO) if name_or_path == "demo" else name_or_path, config._name_or_path)
    return _tokenizer(places, {"revision": revision, "trust_remote_code": trust_remote_code})


def _tokenizer(places: Sequence[str], common: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the first place that has one: an adapter's folder often leaves it to its base model."""
    for place in places:
        try:
            return AutoTokenizer.from_pretrained(place, **common)
        except Exception as error:  # tokenizers raise what they like
            if any((Path(place) / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
                raise RequestError(f"the tokenizer at {place} cannot be loaded: {_reason(error)}") from error
    return None  # ids in, ids out: whoever needs text says so


def require_placement(dtype: str | None, device: str | None, attention: str | None = None) -> None:
    """Raises:
    RequestError: no such dtype or kind of attention, or no such device here."""
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(f"--dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    if attention not in (None, "sdpa", "eager"):
        raise RequestError(f"--attention is {attention!r}; choose sdpa or eager, which take a tree mask")
    if device in (None, "auto"):
        return
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise RequestError(f"--device is {device!r}; choose cpu, cuda, cuda:0, ..., mps or auto") from None
    if asked.type == "cuda" and (asked.index or 0) >= torch.cuda.device_count():
        raise RequestError(
            f"--device is {device!r}, and PyTorch sees {torch.cuda.device_count()} CUDA device(s); choose cpu"
        )
    if asked.type == "mps" and not torch.backends.mps.is_available():
        raise RequestError(f"--device is {device!r} but PyTorch sees no Apple GPU; choose cpu")


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def quantized(kind: str) -> Any:
    """transformers' setting for a backbone in 4 or 8 bits.

    Raises:
        RequestError: another kind, or bitsandbytes is not installed.
    """
    if kind not in ("4bit", "8bit"):
        raise RequestError(f"quantization is {kind!r}; choose 4bit or 8bit, or leave it out")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RequestError(
            f"quantization: {kind} needs bitsandbytes, which is not installed; install it or leave this out"
        )
    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )


def fingerprint(model: PreTrainedModel, name: str | None = None, revision: str | None = None) -> dict[str, Any]:
    """What identifies a backbone: its name and a few of its weights.

    64 values, at positions that depend on each parameter's name, tell fine-tuned relatives of one shape apart and
    survive a change of dtype, which a hash of the bytes would not.
    """
    values = []
    names = sorted(key for key, p in model.named_parameters() if p.is_floating_point() and p.device.type != "meta")
    parameters = dict(model.named_parameters())
    for index in range(min(64, 8 * len(names))):
        key = names[index * len(names) // 64 if len(names) > 64 else index % len(names)]
        digest = hashlib.sha256(f"{key}/{index}".encode()).digest()
        flat = parameters[key].detach().reshape(-1)
        values.append(round(float(flat[int.from_bytes(digest[:8], "big") % flat.numel()]), 6))
    return {
        "name": name or model.config._name_or_path or None,
        "revision": revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "architecture": type(model).__name__,
        "weights": values,
    }


def embedding_sample(weight: Tensor) -> list[float]:
    """64 values of an embedding [V, H], as a fingerprint has them of all weights."""
    flat = weight.detach().reshape(-1)
    places = [index * (flat.numel() - 1) // 63 for index in range(64)]
    return [round(float(value), 6) for value in flat[places]]


def differs(model: PreTrainedModel, known: dict[str, Any]) -> bool:
    """Whether `model` is visibly another one than the backbone that `known`, a fingerprint, was taken from."""
    if known.get("weights"):
        theirs, ours = torch.tensor(known["weights"]), torch.tensor(fingerprint(model)["weights"])
    elif known.get("embedding"):  # all that came with the heads of the original Hydra
        embedding = model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        theirs, ours = torch.tensor(known["embedding"]), torch.tensor(embedding_sample(embedding))
    else:
        return False
    if theirs.shape != ours.shape:
        return True
    # Rounding to bfloat16 moves a value by at most 0.4 %, and on average by half of that.
    return bool((theirs - ours).abs().mean() > 0.005 * theirs.abs().mean())
