"""Every drafter: greedy text and samples equal `model.generate`, and unsupported requests are rejected."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import generate, steps
from decode.drafters import DRAFTERS, parse
from decode.drafters.model import DraftModel, DraftModelConfig
from decode.drafters.retrieval.datastore import Piece, build
from medusa.errors import RequestError
from tests.helpers import left_padded, plain, random_heads, random_ids, shared_model, weekly

NEW = 20
PROMPTS = [random_ids(9, seed=1), [4, 5, 6, 7, 4, 5], random_ids(14, seed=3)]
GUESSERS = {
    # What each test goes through: the drafter, as a user types it.
    "heads": "heads",
    "blockwise": "blockwise",
    "blockwise, short": "blockwise:tokens=2",
    "ngram": "ngram",
    "ngram, trie": "ngram:n=3,tokens=6,matches=4,nodes=7",
    "rest": "rest:DIR,min_n=1",
    "rest, chain": "rest:DIR,min_n=1,matches=1,tokens=3",
    "model": "model:",
    "model, sure": "model:tokens=6,confidence=0.02",
    "model, tree": "model:widths=3x2x1",
    "model, dynamic": "model:nodes=9,tokens=3",
    "lookahead": "lookahead:window=6,n=3,guesses=4",
    "mix": "mix:heads+ngram",
    "mix, window": "mix:lookahead:window=4,guesses=3+ngram:n=2,tokens=3",
    "mix, alone": "mix:nodes=9,least=0.4,heads+ngram:n=3,tokens=6,matches=2",
    "mix, few nodes": "mix:nodes=6,ngram:n=2,tokens=4,matches=3+blockwise+heads",
}
OF_ANY_MODEL = [name for name in DRAFTERS if name != "mtp"]  # test_mtp.py has the models that come with such a layer


def repetitive(model: Any, prompt: list[int]) -> list[int]:
    """A prompt that contains the model's continuation, so that prompt lookup finds matches."""
    return prompt + plain(model, prompt, max_new_tokens=NEW) + prompt


def draft_model(model: Any, scale: float = 0.2) -> Any:
    """The same model with some noise, so that some of its predictions are correct."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(scale * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return draft


class Guesser:
    """A drafter's specification; draft models and datastores are made from the model that they draft for."""

    def __init__(self, spec: str, folder: Path) -> None:
        self.spec, self.needs_heads, self.folder = spec, spec.startswith(("heads", "blockwise")), folder

    def __call__(self, model: Any) -> Any:
        if self.spec.startswith("rest"):
            return self.spec.replace("DIR", str(self.datastore(model)))
        if not self.spec.startswith("model"):
            return self.spec
        plan = parse(self.spec.replace("model:", "model:any,").rstrip(","))
        assert isinstance(plan, DraftModelConfig)
        return DraftModel(draft_model(model), plan.tree, plan.topk, plan.confidence)

    def datastore(self, model: Any) -> Path:
        """A datastore of the model's continuations of some prompts."""
        config = model.config.get_text_config(decoder=True)
        room = config.max_position_embeddings
        prompts = PROMPTS[1:] if room < 100 else [*PROMPTS[1:], repetitive(model, PROMPTS[0])]
        texts = [prompt + plain(model, prompt, max_new_tokens=min(NEW, room - len(prompt))) for prompt in prompts]
        about = {"backbone": "this", "tokenizer": None, "vocab_size": config.vocab_size}
        pieces = [Piece("here", text) for text in texts]
        build(self.folder, pieces, lambda piece: list(map(int, piece.content)), about, overwrite=True)
        return self.folder


FURTHER = ("blockwise, short", "rest, chain", "model, sure", "mix, window")  # options of drafters that others try


@pytest.fixture(params=[*(name for name in GUESSERS if name not in FURTHER), *weekly(*FURTHER)])
def drafter(request: Any, tmp_path: Path) -> Guesser:
    return Guesser(GUESSERS[request.param], tmp_path / "datastore")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("mistral, window", "lookahead"), ("gemma3_text", "lookahead")),
        *(("gpt2", "model, tree"), ("llama4_text", "model, tree")),
    ],
)
def test_greedy_is_plain_greedy_with_other_backbones(family: str, name: str, tmp_path: Path) -> None:
    """Drafters with a cache or masks of their own: guesses of the others are verified alike."""
    model = shared_model(family)
    guesser = Guesser(GUESSERS[name], tmp_path / "datastore")(model)
    for prompt in (PROMPTS[0], repetitive(model, PROMPTS[0])):
        taken = list(steps(model, None, torch.tensor([prompt]), drafter=guesser, max_new_tokens=NEW, do_sample=False))
        text = plain(model, prompt, max_new_tokens=NEW)
        assert [token for step in taken for token in step.ids[0]] == text
    assert len(taken) < len(text), "nothing was accepted: no power"


def test_a_ragged_batch_is_plain_greedy(llama: Any, drafter: Guesser) -> None:
    prompts = [*PROMPTS, repetitive(llama, PROMPTS[0])]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 9, "pad_token_id": 0}
    texts = [plain(llama, prompt, **options) for prompt in prompts]
    assert len({len(text) for text in texts}) > 1, "all rows end together: no power"
    taken = list(steps(llama, random_heads(llama), **left_padded(prompts), drafter=drafter(llama), **options))
    assert [[token for step in taken for token in step.ids.get(row, ())] for row in range(len(prompts))] == texts
    if not drafter.needs_heads:
        assert sum(3 in step.ids for step in taken) < len(texts[3]), "nothing was accepted: no power"


def test_up_to_the_end_of_the_context(drafter: Guesser) -> None:
    model = shared_model("gpt2", max_position_embeddings=32)
    options = {"drafter": drafter(model), "max_new_tokens": 50, "do_sample": False}
    for room in (1, 2, 5):
        prompt = ([1, 2, 3] * 11)[: 32 - room]
        out = generate(model, random_heads(model), torch.tensor([prompt]), **options)
        assert out[0, len(prompt) :].tolist() == plain(model, prompt, max_new_tokens=room)


# Who is refused


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "oracle",
            "there is no drafter 'oracle'; choose one of heads, blockwise, mtp, model, ngram, rest, lookahead, mix",
        ),
        ("ngram:length=3", "no option 'length=3'; its options: n=, min_n=, tokens="),
        ("ngram:5", "no option '5'"),
        ("ngram:n=3,n=4", "n is given twice"),
        ("ngram:n=many", "n is 'many'; it must be a whole number"),
        ("ngram:n=0", "n is 0; it must be at least 1"),
        ("ngram:n=2,min_n=3", "n is 2; it must be at least 3"),
        ("ngram:tokens=0", "tokens is 0; it must be at least 1"),
        ("model", "drafter model needs model; its options: model=, tokens="),
        ("model:", "drafter model needs model"),
        ("model:x,tokens=0", "tokens is 0; it must be at least 1"),
        ("model:x,widths=3,nodes=9", "give one of widths, nodes and confidence"),
        ("model:x,widths=wide", "widths is 'wide'; write numbers such as 3x2x1"),
        ("model:x,widths=20x20x20", "4096"),
        ("model:x,widths=0x2", "topk"),
        ("model:x,confidence=2", "confidence is 2.0; it must be at least 0 and below 1"),
        ("model:x,nodes=1", "dynamic:1 is no tree"),
        ("rest", "drafter rest needs datastore; its options: datastore=, nodes="),
        ("rest:", "drafter rest needs datastore"),
        ("rest:x,n=17", "n is 17; a datastore is sorted by 16 tokens"),
        ("rest:x,n=2,min_n=3", "n is 2; it must be at least 3"),
        ("rest:x,nodes=1", "nodes is 1; it must be at least 2"),
        ("rest:x,tokens=0", "tokens is 0; it must be at least 1"),
        ("rest:x,matches=0", "matches is 0; it must be at least 1"),
        ("lookahead:n=2", "drafter lookahead: n is 2; it must be at least 3"),
        ("lookahead:window=200,n=200", "a draft has up to 41790 nodes; at most 4096 can be verified in one forward"),
        ("ngram:tokens=10,matches=1000000000", "a draft has up to 10000000001 nodes; at most 4096"),
        ("rest:x,nodes=5000000", "a draft has up to 5000000 nodes; at most 4096"),
        ("mix:rest:runs/c+++ngram", "has an empty part; a mix is split at each +, so a path in it cannot hold one"),
        (
            "mix:rest:a+b/store+ngram",
            "'b/store' is no drafter; a mix is split at each +, so a path in it cannot hold one",
        ),
        ("rest:a,b", "no option 'b'; options are split at each comma, so a path cannot hold one"),
        ("lookahead:window=0", "drafter lookahead: window is 0; it must be at least 1"),
        ("lookahead:guesses=0", "drafter lookahead: guesses is 0; it must be at least 1"),
        ("lookahead:w=5", "no option 'w=5'; its options: window=, n=, guesses="),
        ("heads:fast", "no option 'fast'; its options: none"),
        ("blockwise:tokens=-1", "tokens is -1; it must be at least 0"),
        ("mix", "drafter mix needs parts; its options: parts=, nodes="),
        ("mix:nodes=9", "drafter mix needs parts"),
        ("mix:nodes=1,heads+ngram", "nodes is 1, the root alone"),
        ("mix:nodes=few,heads+ngram", "nodes is 'few'; it must be a whole number"),
        ("mix:least=-1,heads+ngram", "least is -1.0; it must be at least 0"),
        ("mix:least=0.5,heads+lookahead", "least is for a mix with ngram; add +ngram"),
        ("mix:ngram", "'ngram' is one drafter; join several by +, as in mix:heads+ngram"),
        ("mix:ngram+ngram", "names a drafter twice; name each once"),
        ("mix:heads+oracle", "there is no drafter 'oracle'"),
        ("mix:heads+ngram:n=0", "drafter ngram: n is 0"),
        ("mix:heads+mix:ngram", "'ngram' is one drafter"),
    ],
)
def test_wrong_draft_options_are_rejected(spec: str, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        parse(spec)


@pytest.mark.parametrize(
    ("has_heads", "options", "said"),
    [
        (False, {}, "the heads are None"),
        (False, {"drafter": "heads"}, "the heads are None"),
        (False, {"drafter": "mix:heads+ngram"}, "the heads are None"),
        (False, {"drafter": 7}, "7 is no drafter"),
        (True, {"drafter": "mix:blockwise+ngram", "tree": "chain"}, "a tree can be chosen only for heads"),
        (True, {"drafter": "mix:heads+ngram", "draft": "sample", "do_sample": True}, "use draft topk"),
        (True, {"drafter": "blockwise:tokens=4"}, "tokens is 4, but there are 3 heads"),
    ],
)
def test_missing_and_superfluous_arguments_are_rejected(llama: Any, has_heads: bool, options: Any, said: str) -> None:
    heads = random_heads(llama) if has_heads else None
    with pytest.raises(RequestError, match=said):
        generate(llama, heads, torch.tensor([PROMPTS[0]]), max_new_tokens=3, **options)


def test_every_drafter_is_tried_here() -> None:
    assert {spec.partition(":")[0] for spec in GUESSERS.values()} == set(OF_ANY_MODEL)
