"""A tiny backbone on disk with a tokenizer of letters, heads for it, and prompts, for the tests of commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa.tree import named_trees
from tests.helpers import LETTERS, VOCAB, plain, random_heads, tiny_model
from tiny_models import letter_tokenizer

PROMPTS = ["abc", "hgfedcba", "d"]
NEW = 12
GENERATION = ("--max-new-tokens", str(NEW))


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


class Distilled(NamedTuple):
    """What `medusa distill` did: its status, its messages, the lines of its output, and the results of --json."""

    status: int
    err: str
    lines: list[dict[str, Any]]
    figures: dict[str, Any]


class Place(NamedTuple):
    """The files on disk and the expected texts."""

    backbone: str
    bare: str
    """The same without a tokenizer and special tokens."""
    heads: str
    prompts: str
    texts: list[list[int]]
    """Greedy continuations of PROMPTS, EOS ignored."""
    eos: int

    @property
    def models(self) -> tuple[str, ...]:
        return ("--backbone", self.backbone, "--heads", self.heads)

    @property
    def asked(self) -> tuple[str, ...]:
        """The models, the prompts and a length."""
        return (*self.models, "--prompts", self.prompts, *GENERATION)


def talkative() -> tuple[Any, list[list[int]], int]:
    """A random backbone whose texts are not loops, and a token of its first text to use as EOS."""
    ids = [ids_of(prompt) for prompt in PROMPTS]
    for seed in range(100):
        model = tiny_model("llama", seed, num_hidden_layers=1)
        texts = [plain(model, prompt, max_new_tokens=NEW) for prompt in ids]
        for place, token in enumerate(texts[0]):
            alone = token not in texts[0][:place] and not any(token in other for other in (*ids, *texts[1:]))
            in_no_prompt = token >= 26  # prompts of tests are small letters
            if 6 <= place < NEW - 2 and alone and in_no_prompt and all(len(set(text)) > 6 for text in texts):
                return model, texts, token
    raise AssertionError("no seed gives a backbone that these tests can use")


def build(folder: Path) -> Place:
    """A backbone that ends its answer to the first prompt after a few tokens, heads for it, and prompts."""
    model, texts, eos = talkative()
    used = {LETTERS.index(letter) for letter in "".join(PROMPTS)}.union([eos], *texts)
    bos = next(token for token in reversed(range(VOCAB)) if token not in used)
    model.save_pretrained(folder / "bare")  # neither tokenizer nor special tokens
    model.config.eos_token_id = model.generation_config.eos_token_id = eos
    model.config.bos_token_id = model.generation_config.bos_token_id = bos
    model.save_pretrained(folder / "backbone")
    letter_tokenizer(bos, eos).save_pretrained(folder / "backbone")
    heads = random_heads(model)
    heads.config.tree = named_trees()["eight"]  # without one of its own, `auto` would calibrate
    heads.config.tree = [path for path in heads.config.tree if len(path) <= heads.config.num_heads]
    heads.save_pretrained(folder / "heads")
    lines = [{"prompt": text, "category": kind} for text, kind in zip(PROMPTS, "xyx", strict=True)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return Place(*(str(folder / name) for name in ("backbone", "bare", "heads", "prompts.jsonl")), texts, eos)


def with_template(backbone: str, template: str, folder: Path) -> str:
    """Copy the backbone into a folder, with a chat template; give the folder's name."""
    AutoModelForCausalLM.from_pretrained(backbone).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write a JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines_of(path: Path) -> list[Any]:
    """Read the JSON of each finished line; only a newline ends one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def by_key(lines: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """The lines that `medusa distill` wrote, by their prompt and turn."""
    found = {(line["index"], line["turn"]): line for line in lines}
    assert len(found) == len(lines), "no text twice"
    return found


def ids_of(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def until_eos(place: Place) -> list[list[int]]:
    return [text[: text.index(place.eos) + 1] if place.eos in text else text for text in place.texts]


def letters(ids: list[int], place: Place) -> str:
    return "".join(LETTERS[token] for token in ids if token != place.eos)
