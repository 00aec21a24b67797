"""Heads on disk: one folder with `config.json`, `medusa_lm_head.safetensors` and, from our trainer, `provenance.json`.

Tensors carry the published names, one set per head h and residual block l of L, in torch's [out, in] layout:

    {h}.{l}.linear.weight [H, H]   {h}.{l}.linear.bias [H]      square block (FasterDecoding, TGI, LoRAX)
    {h}.{l}.up.weight [E, H]  .up.bias [E]  .down.weight [H, E]  .down.bias [H]      MLP block (ours)
    {h}.{L}.weight [V, H]                                        own LM head; absent where it is the backbone's

so square heads are files that others load as they are. The number of heads, blocks and the sizes are read off the
tensors: published configs say 2 heads where the file holds 5. Heads of other kinds than `medusa`, heads with prefix
attention and heads with a vocabulary of their own, which no server knows, keep the names of their modules.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa.checkpoints.eagle3 import from_eagle3, is_eagle3
from medusa.checkpoints.hydra import WEIGHTS as HYDRA_WEIGHTS
from medusa.checkpoints.hydra import from_original
from medusa.checkpoints.names import PUBLISHED, Found, find, is_inside_a_model, is_of_heads
from medusa.checkpoints.stored import INDICES, Stored, read_index
from medusa.config import OUR_KEYS, PUBLISHED_KEYS, MedusaConfig
from medusa.errors import RequestError
from medusa.files import ASSETS, read_json, replacing, require_absent, write_json
from medusa.heads.independent import MedusaHeads, MLPBlock, SquareBlock
from medusa.heads.kinds import build

CONFIG, WEIGHTS, LEGACY_WEIGHTS, PROVENANCE = (
    "config.json",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "provenance.json",
)
DEMO = ASSETS / "heads"

# (our parameter, published name of its tensor) per kind of block
PARTS = {
    "square": {"weight": "linear.weight", "bias": "linear.bias"},
    "mlp": {"up": "up.weight", "up_bias": "up.bias", "down": "down.weight", "down_bias": "down.bias"},
}
TENSOR_NAME = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.(?P<part>(?:linear\.|up\.|down\.)?(?:weight|bias))")
HEADS_FILES = (WEIGHTS, LEGACY_WEIGHTS, HYDRA_WEIGHTS)
HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")

Tensors = dict[str, Tensor]


def save_heads(
    heads: MedusaHeads, folder: str | Path, provenance: dict[str, Any] | None = None, overwrite: bool = True
) -> None:
    """Write `heads` into `folder`, each file whole or not at all; with `provenance`, by default what they came with.

    Raises:
        RequestError: heads lie there already and `overwrite` is off.
    """
    folder = Path(folder)
    require_absent(folder / WEIGHTS, overwrite)
    save_tensors(to_published(heads), folder / WEIGHTS)
    write_json(folder / CONFIG, heads.config.to_dict())
    provenance = heads.provenance if provenance is None else provenance
    if provenance is not None:
        write_json(folder / PROVENANCE, provenance)


def save_tensors(tensors: Tensors, path: Path) -> None:
    """As safetensors, the file whole or not at all."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(ready, temporary, metadata={"format": "pt"})


def load_heads(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> MedusaHeads:
    """Heads from `demo`, a local folder or a Hub id, recognised from their tensors.

    Args:
        dtype, device: of the heads; by default those of the file, on the CPU.
        revision: a branch, tag or commit on the Hub.
        token: for private and gated repositories; by default that of `hf auth login`.
        cache_dir: where downloads are kept, by default the Hub's own cache.
        local_files_only: take what was downloaded before and ask nobody.

    Raises:
        RequestError: no heads there, a damaged file, or tensors that are missing, unknown or of the wrong shape.
    """
    folder = find_folder(name_or_path, revision, token, cache_dir, local_files_only)
    stored = _stored(folder)
    published = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if not isinstance(published, dict):
        raise RequestError(f"{folder / CONFIG} holds no JSON object")
    source = str(stored.paths[0] if len(stored.paths) == 1 else folder)
    if stored.paths and stored.paths[0].name == HYDRA_WEIGHTS:
        heads = _filled(*from_original(dict(stored), published, source), source)
    elif "kind" in published:  # ours
        heads = from_published(dict(stored), published, source)
    elif is_eagle3(stored):
        heads = _filled(*from_eagle3(stored, published, source), source)
    else:
        heads = _of_others(stored, published, source, str(name_or_path))
    heads.provenance = read_json(folder / PROVENANCE) if (folder / PROVENANCE).is_file() else None
    return heads.to(device=device, dtype=dtype).eval()


def _of_others(stored: Stored, published: dict[str, Any], source: str, asked: str) -> MedusaHeads:
    """Heads by whoever's names, alone or inside the model `asked` for; `published` is the config beside them."""
    found = find(stored, published, source)
    if found.names is not PUBLISHED or found.prefix:  # a config of other things, where a name may mean another
        published = {key: published[key] for key in ("base_model_name_or_path", "vocab_size") if key in published}
    if found.prefix and len(found.tensors) < len(stored):  # the backbone that they belong to is around them
        published["base_model_name_or_path"] = asked
    return from_published(found.tensors, published, source, found)


def find_folder(
    name_or_path: str | Path,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """The local folder of these heads, downloaded where `name_or_path` is a Hub id."""
    if str(name_or_path) == "demo":
        return DEMO
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    if not HUB_ID.fullmatch(str(name_or_path)) or Path(name_or_path).parent.is_dir():
        raise RequestError(f"no heads at {name_or_path}: give a folder that exists, a Hub id such as org/name, or demo")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(*patterns: str) -> Path:
        where: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
        where["local_files_only"] = local_files_only
        return Path(snapshot_download(str(name_or_path), allow_patterns=[*patterns], **where))

    try:
        folder = fetch(CONFIG, PROVENANCE, *HEADS_FILES, *INDICES)
        if any((folder / name).is_file() for name in HEADS_FILES):
            return folder
        for index in (folder / name for name in INDICES if (folder / name).is_file()):
            places = read_index(index)
            inside = {place for name, place in places.items() if is_inside_a_model(name)}
            return fetch(*sorted(inside or set(places.values())))  # of a whole model the files with heads in them
        fetch("*.safetensors")
        return folder if any(folder.glob("*.safetensors")) else fetch("*.bin")
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RequestError(f"no heads at {name_or_path}: neither a local folder nor on the Hub ({reason})") from None


def _stored(folder: Path) -> Stored:
    """What holds heads in a folder: a file of heads, or a model's files.

    Raises:
        RequestError: nothing does.
    """
    path = next((folder / name for name in HEADS_FILES if (folder / name).is_file()), None)
    if path is not None:
        return Stored.of_files(folder, [path])
    stored = Stored.of_model(folder)
    if not is_eagle3(stored) and not any(map(is_of_heads, stored)):
        raise RequestError(
            f"no heads in {folder}: it holds neither {', '.join(HEADS_FILES)} nor a model with heads inside"
        )
    return stored


def from_published(tensors: Tensors, published: dict[str, Any], source: str, found: Found | None = None) -> MedusaHeads:
    """Heads from tensors of the published names; `published` is the config that came with them.

    Args:
        source: of the tensors, for messages.
        found: what they are called there, where that is not their published names, and which tokens they are for.

    Raises:
        RequestError: a tensor is missing, unknown or of the wrong shape; all named with `source`.
    """
    if published.get("kind", "medusa") != "medusa" or published.get("prefix_layers") or published.get("vocabulary"):
        return _from_own_names(tensors, published, source)
    found = found or Found(tensors, PUBLISHED, "")
    config = _config_of(found, published, source)
    wanted = _published_shapes(config)
    for name, shape in wanted.items():
        if name not in tensors:
            raise RequestError(f"{source} misses the tensor {found.called(name)}; its heads are not complete")
        if tuple(tensors[name].shape) != shape:
            size = list(tensors[name].shape)
            raise RequestError(f"{source}: {found.called(name)} has the shape {size}, not {list(shape)}")
    unknown = sorted(set(tensors) - set(wanted))
    if unknown:
        name = found.called(unknown[0])
        raise RequestError(f"{source} holds the tensor {name}, which belongs to no head; remove it")
    stacked = _stacked(tensors, config)
    if found.words is not None:
        vocab_size = published.get("vocab_size") or 1 + int(found.words.max())
        config = replace(config, vocabulary=len(found.words), vocab_size=vocab_size)
        _require_words(found.words, config, source)
        stacked["vocabulary"] = found.words
    with torch.device("meta"):
        heads = MedusaHeads(config)
    heads.load_state_dict(stacked, assign=True)
    return heads


def _from_own_names(tensors: Tensors, published: dict[str, Any], source: str) -> MedusaHeads:
    """Heads of a kind that has no published form; the config is ours, and what it says must be there."""
    try:
        config = MedusaConfig(
            **{key: published[key] for key in OUR_KEYS if key in published},
            **{ours: published[theirs] for ours, theirs in PUBLISHED_KEYS.items() if theirs in published},
        )
    except TypeError:
        raise RequestError(f"{source}: its {CONFIG} does not say what these heads are") from None
    return _filled(config, tensors, source)


def _filled(config: MedusaConfig, tensors: Tensors, source: str) -> MedusaHeads:
    """Heads as `config` says with these tensors, by our names.

    Raises:
        RequestError: one is missing, unknown or of the wrong shape.
    """
    with torch.device("meta"):
        heads = build(config)
    wanted = heads.state_dict()
    for name, tensor in wanted.items():
        if name not in tensors:
            raise RequestError(f"{source} misses the tensor {name}; its heads are not complete")
        if tensors[name].shape != tensor.shape:
            raise RequestError(f"{source}: {name} has the shape {list(tensors[name].shape)}, not {list(tensor.shape)}")
    unknown = sorted(set(tensors) - set(wanted))
    if unknown:
        raise RequestError(f"{source} holds the tensor {unknown[0]}, which belongs to no head; remove it")
    if config.vocabulary is not None:
        _require_words(tensors["vocabulary"], config, source)
    heads.load_state_dict(tensors, assign=True)
    return heads


def _require_words(words: Tensor, config: MedusaConfig, source: str) -> None:
    if words.dtype != torch.int64:
        raise RequestError(f"{source}: vocabulary is {words.dtype}; it must be a list of token ids (int64)")
    assert config.vocab_size is not None, "refused by the config"
    if words.min() < 0 or words.max() >= config.vocab_size or len(words.unique()) < len(words):
        raise RequestError(f"{source}: vocabulary must name tokens below {config.vocab_size}, each once")


def _config_of(found: Found, published: dict[str, Any], source: str) -> MedusaConfig:
    """Count heads, blocks and sizes from the tensors; take the rest from the config."""
    tensors = found.tensors
    matches = {name: TENSOR_NAME.fullmatch(name) for name in tensors}
    for name, tensor in tensors.items():
        if tensor.ndim not in (1, 2) or not tensor.is_floating_point():
            raise RequestError(
                f"{source}: {found.called(name)} is {list(tensor.shape)} of {tensor.dtype}; heads are matrices and "
                "vectors of floats"
            )
    unknown = sorted(name for name, match in matches.items() if match is None)
    if unknown or not tensors:
        held = f"holds the tensor {found.called(unknown[0])}" if unknown else "holds no tensor"
        raise RequestError(f"{source} {held}; Medusa heads are named as in {found.called('0.0.linear.weight')}")
    parts = {(int(m["head"]), int(m["layer"]), m["part"]) for m in matches.values() if m is not None}
    count = 1 + max(head for head, _, _ in parts)
    if count > len(tensors):  # an absurd index, before as many tensors are asked for
        raise RequestError(
            f"{source} names head {count - 1} but holds {len(tensors)} tensors; its heads are not complete"
        )
    layers = 1 + max((layer for _, layer, part in parts if part != "weight"), default=-1)
    own = any(part == "weight" for _, _, part in parts)
    block = "mlp" if any(part.startswith("up") for _, _, part in parts) else "square"
    first = tensors.get(f"0.0.{'up' if block == 'mlp' else 'linear'}.weight")
    if first is None or first.ndim != 2:
        raise RequestError(f"{source} misses the first head's first block; its heads are not complete")
    lm_head = tensors.get(f"0.{layers}.weight")
    ours = {key: published[key] for key in OUR_KEYS if key in published}
    return MedusaConfig(
        **ours
        | {
            "block": block,
            "expansion": first.shape[0] / first.shape[1] if block == "mlp" else 1.0,
            "lm_head": "own" if own else "shared",
            "hidden_size": first.shape[1],
            "vocab_size": lm_head.shape[0] if lm_head is not None else published.get("vocab_size"),
            "num_heads": count,
            "num_layers": layers,
            "base_model_name_or_path": published.get("base_model_name_or_path"),
        }
    )


def _published_shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    size, inner = config.hidden_size, config.inner_size
    shapes: dict[str, tuple[int, ...]] = {
        "linear.weight": (size, size),
        "linear.bias": (size,),
        "up.weight": (inner, size),
        "up.bias": (inner,),
        "down.weight": (size, inner),
        "down.bias": (size,),
    }
    out = {
        f"{head}.{layer}.{part}": shapes[part]
        for head in range(config.num_heads)
        for layer in range(config.num_layers)
        for part in PARTS[config.block].values()
    }
    if config.lm_head == "own" and config.vocab_size is not None:
        out |= {f"{head}.{config.num_layers}.weight": (config.vocab_size, size) for head in range(config.num_heads)}
    return out


def to_published(heads: MedusaHeads) -> Tensors:
    """The stacked weights as one tensor per head, under the published names and in torch's [out, in] layout."""
    config, out = heads.config, {}
    if not config.is_published:
        return heads.state_dict()
    for head in range(config.num_heads):
        for layer, block in enumerate(heads.blocks):
            assert isinstance(block, (SquareBlock, MLPBlock))
            for ours, theirs in PARTS[config.block].items():
                stacked = getattr(block, ours)[head]  # matrices [in, out], biases [1, out]
                out[f"{head}.{layer}.{theirs}"] = stacked[0] if "bias" in theirs else stacked.T
        if heads.lm_heads is not None:
            out[f"{head}.{config.num_layers}.weight"] = heads.lm_heads[head].T
    return out


def _stacked(tensors: Tensors, config: MedusaConfig) -> Tensors:
    """The inverse of `to_published`."""

    def stack(name: str) -> Tensor:
        return torch.stack([tensors[f"{head}.{name}"] for head in range(config.num_heads)])

    out = {
        f"blocks.{layer}.{ours}": _transposed(stack(f"{layer}.{theirs}"))
        for layer in range(config.num_layers)
        for ours, theirs in PARTS[config.block].items()
    }
    if config.lm_head == "own":
        out["lm_heads"] = _transposed(stack(f"{config.num_layers}.weight"))
    return out


def _transposed(stacked: Tensor) -> Tensor:
    """[K, out, in] -> [K, in, out]; biases [K, out] -> [K, 1, out]."""
    return stacked.transpose(1, 2).contiguous() if stacked.ndim == 3 else stacked.unsqueeze(1)
