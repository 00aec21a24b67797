"""Random cases for fuzz.py: a model, a drafter with its tree, prompts and options, all drawn from two numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa.heads import KINDS, NATIVE
from medusa.heads.eagle_layer import VARIANTS
from medusa.shipped import named_trees
from tiny_models import COMMON, RECURRENT, SUPPORTED, VOCAB

FAMILIES = SUPPORTED | RECURRENT
EAGER_ONLY = ("gemma2", "gptj", "gpt_oss", "mamba", "mamba2", "falcon_mamba")  # transformers offers no sdpa for these
REDUCED = 45  # tokens that heads with a reduced vocabulary guess among
NAMED = (*sorted(named_trees()), "example")
DRAFTERS = {"heads": 40, "scripted": 12, "model": 10, "ngram": 9, "lookahead": 8, "rest": 6, "mix": 9, "blockwise": 6}
"""The drafters, with their shares of all cases in per cent. `scripted` knows the text (`fuzz_models.Scripted`)."""
DOORS = {"steps": 50, "generate": 35, "custom_generate": 15}
Numbers = list[int]


@dataclass(frozen=True)
class Case:
    """One comparison with `model.generate`; all its parts are numbers, texts, and lists and dictionaries of these."""

    seed: int  # of the weights, and of whatever is drawn later
    family: str  # a name of architectures.yaml
    attention: str
    model: dict[str, Any]  # settings of the model's configuration
    prompts: list[Numbers]
    drafter: str
    tree: str | list[Numbers] | None
    heads: dict[str, Any]  # settings of the heads; `fitted`: steps of training on the text that they will draft
    door: str  # the function that decodes
    form: str  # how prompts and options are given: `plain`, `config` (a GenerationConfig), `mask` (a boolean mask)
    options: dict[str, Any]  # of generation; `fuzz_models.arguments` turns them into arguments

    @property
    def rows(self) -> list[Numbers]:
        """The prompt of each row; copies for samples follow each other."""
        return [prompt for prompt in self.prompts for _ in range(self.options.get("copies", 1))]

    @property
    def kind(self) -> str:
        """The drafter, with the kind of heads if it has heads."""
        name = self.drafter.partition(":")[0]
        return f"{name}, {self.heads['kind']}" if name in ("heads", "blockwise") else name

    @property
    def shape(self) -> str:
        """The sort of tree."""
        if self.tree is None:
            return "no choice"
        return self.tree.partition(":")[0] if isinstance(self.tree, str) else "drawn"

    def __str__(self) -> str:
        lengths = ", ".join(str(len(prompt)) for prompt in self.prompts)
        parts = [f"{self.family} ({self.attention}) {self.model}", f"prompts of {lengths} tokens", self.drafter]
        parts += [f"tree {self.tree}", f"heads {self.heads}", f"{self.door} ({self.form})", f"options {self.options}"]
        return "; ".join(parts)


def draw_case(seed: int, number: int) -> Case:
    """Draw the case `number` of a run with `seed`."""
    rng = random.Random(f"{seed} {number}")
    family, drafter, door = rng.choice(list(FAMILIES)), _pick(rng, DRAFTERS), _pick(rng, DOORS)
    prompts, num_heads = _prompts(rng, "longrope" in family), rng.randint(1, 5)
    options = _options(rng, drafter, prompts)
    tree = _tree(rng, num_heads) if drafter in ("heads", "model", "mix") else None
    if drafter != "heads" or not str(tree).startswith("dynamic"):
        options.pop("stop_drafting", None)
    if door == "custom_generate":  # `model.generate` passes no tokenizer, no seeds, and the length with the padding
        options.pop("stop_strings", None)
        if options.pop("max_length", None):
            options["max_new_tokens"] = 20
        if "seed" in options.get("sampled", {}):
            options["sampled"] = {"top_k": 1}
    return Case(
        seed=rng.randrange(2**31),
        family=family,
        attention="eager" if family in EAGER_ONLY else rng.choice(["sdpa", "eager"]),
        model=_model(rng, FAMILIES[family]),
        prompts=prompts,
        drafter=_drafter(rng, drafter),
        tree=tree,
        heads=_heads(rng, num_heads),
        door=door,
        form=rng.choice(["plain", "plain", "config", "mask"]),
        options=options,
    )


def _pick(rng: random.Random, shares: Mapping[str, int]) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]


def _ids(rng: random.Random, least: int, most: int) -> Numbers:
    """Draw from `least` to `most` token ids; sometimes few different ones, so that n-grams repeat."""
    few = rng.sample(range(VOCAB), 4)
    return rng.choices(few if rng.random() < 0.3 else range(VOCAB), k=rng.randint(least, most))


def _prompts(rng: random.Random, short: bool) -> list[Numbers]:
    """Draw prompts. Texts of batches with longrope stay `short`: other batches are refused."""
    rows = rng.choices([1, 2, 3, 5], [55, 20, 15, 10])[0]
    longest = 8 if short and rows > 1 else rng.choice([1, 6, 20, 60])
    least = longest if rng.random() < 0.2 else 1  # some batches need no padding
    return [_ids(rng, least, longest) for _ in range(rows)]


def _model(rng: random.Random, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Draw changes of a configuration: windows, chunks, groups of attention heads, tied embeddings."""
    changes: dict[str, Any] = {}
    for name in ("sliding_window", "attention_chunk_size"):
        if entry.get(name):
            changes[name] = rng.randint(2, 24)
    if "num_key_value_heads" not in entry and "num_kv_heads" not in entry and rng.random() < 0.5:
        changes["num_key_value_heads"] = rng.choice([1, 2, 4])
    if rng.random() < 0.15 and "tie_word_embeddings" not in entry:
        changes["tie_word_embeddings"] = True
    return changes


def _tree(rng: random.Random, num_heads: int) -> str | list[Numbers] | None:
    """Draw a tree for `num_heads` heads; some named trees are deeper than that, and are refused."""
    kind = _pick(rng, {"topk": 25, "dynamic": 25, "drawn": 25, "chain": 10, "named": 10, "saved": 5})
    if kind == "topk":
        return "topk:" + ",".join(str(rng.choice([1, 2, 3, 5, 20])) for _ in range(rng.randint(1, min(num_heads, 2))))
    if kind == "dynamic":
        return f"dynamic:{rng.randint(2, 16 if num_heads == 1 else 60)}"
    if kind == "drawn":
        paths: list[Numbers] = [[]]
        for _ in range(rng.randint(1, 40)):
            path = [*rng.choice(paths), min(int(rng.expovariate(0.15)), REDUCED - 1)]
            if path not in paths and len(path) <= num_heads:
                paths.append(path)
        return paths[1:]
    return {"chain": "chain", "named": rng.choice(NAMED)}.get(kind)


def _heads(rng: random.Random, num_heads: int) -> dict[str, Any]:
    """Draw the settings of heads of any kind."""
    settings: dict[str, Any] = {"kind": rng.choice([*KINDS, "eagle", NATIVE])}
    settings |= {"num_heads": num_heads, "fitted": rng.choice([0, 40]), "lm_head": rng.choice(["own", "shared"])}
    if settings["kind"] == NATIVE:  # a layer that came with a Llama
        layer = COMMON | {"model_type": "llama", "num_mtp_layers": 1}
        return settings | {"block": NATIVE, "lm_head": "shared", NATIVE: layer}
    if rng.random() < 0.2:
        settings["vocabulary"] = REDUCED
    if settings["kind"] == "dflash":
        return settings | _block_drafter(rng)
    if settings["kind"] == "eagle" and rng.random() < 0.6:
        return settings | _eagle_layer(rng)
    settings |= {"block": rng.choice(["square", "mlp"]), "num_layers": rng.randint(1, 2)}
    return settings | {"prefix_layers": rng.choice([0, 0, 1])}


def _block_drafter(rng: random.Random) -> dict[str, Any]:
    """Draw the settings of a block drafter."""
    layers = rng.randint(1, 2)
    settings: dict[str, Any] = {"lm_head": rng.choice(["shared", "one"]), "num_layers": layers}
    settings |= {"edges": rng.choice(["none", "markov", "pairwise"]), "layout": rng.choice(["fill", "shifted"])}
    settings["feature_layers"] = rng.choice([None, [1, 0], [0, 1, 2]])
    offered = {"mask_token": rng.randrange(VOCAB), "conv": [rng.randint(1, 3), 4], "causal": True}
    offered["windows"] = [rng.choice([None, rng.randint(1, 12)]) for _ in range(layers)]
    offered |= {"confidence": True} if settings["edges"] == "markov" else {}
    return settings | {name: value for name, value in offered.items() if rng.random() < 0.4}


def _eagle_layer(rng: random.Random) -> dict[str, Any]:
    """Draw a layer of EAGLE-1 or EAGLE-3."""
    hidden = COMMON["hidden_size"]
    layer = {"hidden_size": hidden, "width": 20, "layers": 1, "heads": 4, "key_value_heads": 2, "head_size": 8}
    layer |= {"eps": 1e-5, "rope": {}, "variants": []}
    if rng.random() < 0.2:
        return {"block": "eagle1", "layer": layer | {"variants": rng.choice([[], ["fc_bias"]])}}
    settings: dict[str, Any] = {"block": "gated", "lm_head": rng.choice(["own", "shared", "one"])}
    if rng.random() < 0.7:
        settings["feature_layers"] = rng.choice([[1, 0], [0, 1, 2], [2], [1]])
    if rng.random() < 0.4 and "feature_layers" in settings:
        variants = [name for name in VARIANTS if rng.random() < 0.5]
        layer |= {"hidden_size": 24, "layers": rng.randint(1, 2), "variants": variants}
        settings |= {"layer": layer, "lm_head": "one", "embeddings": "own"}
    return settings


def _drafter(rng: random.Random, name: str) -> str:
    """Draw the options of a drafter, as `--drafter` takes them."""
    ngram = f"ngram:n={rng.randint(2, 4)},tokens={rng.randint(1, 10)},matches={rng.randint(1, 3)}"
    if name == "ngram":
        return ngram
    if name == "lookahead":
        return f"lookahead:window={rng.randint(1, 8)},n={rng.randint(3, 5)},guesses={rng.randint(1, 6)}"
    if name == "mix":
        others = rng.choice(["heads", "blockwise", "lookahead:n=3,window=3"])
        return f"mix:{rng.choice(['', 'nodes=12,'])}{others}+{ngram}"
    if name == "rest":
        return f"rest:nodes={rng.randint(2, 30)},tokens={rng.randint(1, 6)},min_n={rng.randint(1, 3)}"
    return name


def _sampling(rng: random.Random, draws: bool) -> dict[str, Any]:
    """Draw how to sample: from one token (then drafts may be drawn, too), or with the seed of the first row."""
    if rng.random() < 0.5:
        return {"draft": rng.choice(["topk", "sample"]) if draws else "topk", "top_k": 1, "temperature": 0.7}
    limits = rng.choice([{"top_k": rng.randint(2, 9)}, {"top_p": 0.8}, {"min_p": 0.1}, {}])
    return {"seed": rng.randrange(10**6), "temperature": round(rng.uniform(0.3, 2), 2), **limits}


def _options(rng: random.Random, drafter: str, prompts: list[Numbers]) -> dict[str, Any]:
    """Draw options of generation; every third case has only a maximum of new tokens."""
    options: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, rng.randint(3, 12), rng.randint(12, 40)])}
    if rng.random() < 0.1:
        options = {"max_length": rng.randint(max(map(len, prompts)) + 1, 90)}
    if drafter == "heads" and rng.random() < 0.08:
        options["compile"] = True  # `fuzz.py` runs compiled steps without a compiler
    if rng.random() < 0.33:
        return options
    maximum, draws = options.get("max_new_tokens", 20), drafter in ("heads", "blockwise", "model")
    token = rng.randrange(VOCAB)
    offered: dict[str, Any] = {
        "eos_token_id": rng.choice([token, rng.sample(range(VOCAB), rng.randint(1, 6))]),
        "min_new_tokens": rng.randint(0, maximum),
        "min_length": rng.randint(1, 40),
        "repetition_penalty": round(rng.uniform(0.5, 2), 2),
        "encoder_repetition_penalty": round(rng.uniform(0.5, 2), 2),
        "no_repeat_ngram_size": rng.randint(1, 4),
        "encoder_no_repeat_ngram_size": rng.randint(1, 3),
        "bad_words_ids": [_ids(rng, 1, 2) for _ in range(rng.randint(1, 8))],
        "suppress_tokens": rng.sample(range(VOCAB), rng.randint(1, 30)),
        "begin_suppress_tokens": rng.sample(range(VOCAB), rng.randint(1, 30)),
        "forced_bos_token_id": token,
        "forced_eos_token_id": token,
        "exponential_decay_length_penalty": [rng.randint(1, 10), 1.3],
        "sequence_bias": [[_ids(rng, 1, 2), round(rng.uniform(-9, 9), 2)] for _ in range(rng.randint(1, 5))],
        "renormalize_logits": True,
        "remove_invalid_values": True,
        "stop_strings": [chr(ord("A") + rng.randrange(26)) for _ in range(2)],
        "allowed": rng.randint(2, 5),
        "processor": rng.randint(1, 9),
        "criterion": rng.randint(5, 15),
        "output_scores": True,
        "output_logits": True,
        "use_cache": False,
        "sampled": _sampling(rng, draws),
        "copies": 2,
        "stop_drafting": round(rng.uniform(0.01, 0.3), 2),
        "guidance_scale": 1.5,
        "num_beams": 2,
    }
    if "compile" in options:
        # Compiled steps take no other processors that read the text, and draw other samples than `model.generate`.
        offered = {name: offered[name] for name in ("eos_token_id", "copies", "criterion", "repetition_penalty")}
        offered["sampled"] = {"draft": "topk", "top_k": 1, "temperature": 0.7}
    rare = {"use_cache": 0.02, "guidance_scale": 0.01, "num_beams": 0.01, "copies": 0.04, "stop_drafting": 0.2}
    options |= {name: value for name, value in offered.items() if rng.random() < rare.get(name, 0.1)}
    if "copies" in options and "sampled" not in options:
        del options["copies"]  # `model.generate` gives copies of samples only
    if "exponential_decay_length_penalty" in options:
        options.setdefault("eos_token_id", token)
    return options
