"""`medusa verify --server`: servers with planted faults must be caught, and correct ones must pass."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa.files import read_json, write_json
from tests.commands.fake_server import FakeServer, Reply, serving
from tests.commands.place import Outcome, Place, write_rows

SHARPENED = 2  # random models have nearly uniform distributions, of which every token is rare
PROMPTS = ["abc", "hgfedcba", "d", "hello", "zzyyxxwwvvuuttss"]
TOKENS = 12


class Writer:
    """A correct server of a model: plain forwards, and draws by the inverse of the distribution's sum.

    Subclasses plant a fault."""

    strict = False  # whether it takes only OpenAI's own parameters and text, and returns no ids

    def __init__(self, place: Place) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(place.backbone).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(place.backbone)
        self.eos, self.random = place.eos, torch.Generator().manual_seed(1)
        self.lock, self.running = threading.Lock(), list[list[int]]()
        self.logits = cache(self.compute)
        self.decoded = cache(lambda *new: self.tokenizer.decode(new, skip_special_tokens=True))

    @torch.inference_mode()
    def compute(self, ids: tuple[int, ...]) -> Tensor:
        return self.model(torch.tensor([ids])).logits[0, -1].double()

    def reply(self, number: int, body: dict[str, Any]) -> Reply:
        """Answer a request, as `FakeServer.trouble`."""
        extra = {*body} - {"model", "prompt", "max_tokens", "temperature", "top_p", "n"}
        if self.strict and (extra or not isinstance(body["prompt"], str)):
            return 400, {}, json.dumps({"error": f"unknown {extra}"})
        prompt = body["prompt"]
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        self.running.append(ids)
        if body["max_tokens"] > 1:
            time.sleep(0.05)  # until requests that were sent together are all here
        beside = max(map(len, self.running))
        with self.lock:
            choices = [self.choice(ids, body, text, beside) for text in self.texts(ids, body, beside)]
            usage = {"prompt_tokens": len(ids), "completion_tokens": self.written * len(choices)}
        self.running.remove(ids)
        return 200, {}, json.dumps({"choices": choices, "usage": usage})

    def choice(self, ids: list[int], body: dict[str, Any], new: list[int], beside: int) -> dict[str, Any]:
        ended = new[-1:] == [self.eos]
        self.written = len(new)
        made = {"text": self.decoded(*new), "finish_reason": "stop" if ended else "length"}
        return made if self.strict else made | {"token_ids": new}

    def texts(self, ids: list[int], body: dict[str, Any], beside: int) -> list[list[int]]:
        count = body.get("n", 1)
        if body["temperature"] > 0:
            return self.samples(ids, body, count)
        new: list[int] = []
        while len(new) < body["max_tokens"] and new[-1:] != [self.eos]:
            new.append(self.greedy(ids, new, beside))
        return [new] * count

    @torch.inference_mode()
    def samples(self, ids: list[int], body: dict[str, Any], count: int) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in range(count)]
        for step in range(body["max_tokens"]):
            logits = self.logits(tuple(ids))[None]  # all texts begin alike
            if step:
                logits = self.model(torch.tensor([[*ids, *new] for new in texts])).logits[:, -1].double()
            sums = self.distribution(logits, body, step).cumsum(-1).expand(count, -1).contiguous()
            drawn = torch.searchsorted(sums, self.numbers(count)[:, None] * sums[:, -1:], right=True)
            for new, token in zip(texts, drawn[:, 0].tolist(), strict=True):
                new.append(token)
        return [new[: new.index(self.eos) + 1] if self.eos in new else new for new in texts]

    def numbers(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.random, dtype=torch.float64)

    def greedy(self, ids: list[int], new: list[int], beside: int) -> int:
        return int(self.logits((*ids, *new)).argmax())

    def distribution(self, logits: Tensor, body: dict[str, Any], step: int) -> Tensor:
        """Return the probabilities [B, V] of the token `step` of B texts."""
        p, order = (logits / body["temperature"]).softmax(-1).sort(descending=True)
        count = (p.cumsum(-1) - p < body.get("top_p", 1.0)).sum(-1, keepdim=True)
        p = p.where(torch.arange(p.shape[1]) < self.kept(count), 0.0)
        return torch.zeros_like(p).scatter(1, order, p / p.sum(-1, keepdim=True))

    def kept(self, count: Tensor) -> Tensor:
        """Return how many tokens top-p keeps, where `count` [B, 1] is right."""
        return count


class Strict(Writer):
    strict = True


class WrongToken(Writer):
    """Every eighth token is the least probable one."""

    def greedy(self, ids: list[int], new: list[int], beside: int) -> int:
        logits = self.logits((*ids, *new))
        return int(logits.argmin() if len(new) % 8 == 7 else logits.argmax())


class StrictWrongToken(WrongToken):
    strict = True


class EarlyEnd(Writer):
    """Texts end after six tokens."""

    def greedy(self, ids: list[int], new: list[int], beside: int) -> int:
        return self.eos if len(new) == 6 else super().greedy(ids, new, beside)


class Cut(Writer):
    """Texts lose their ends, and the limit of tokens is said to be the reason."""

    def choice(self, ids: list[int], body: dict[str, Any], new: list[int], beside: int) -> dict[str, Any]:
        if body["temperature"] == 0 and new[-1:] != [self.eos]:
            new = new[:5]
        return super().choice(ids, body, new, beside)


class StrictCut(Cut):
    strict = True


class NoTemperature(Writer):
    def distribution(self, logits: Tensor, body: dict[str, Any], step: int) -> Tensor:
        return super().distribution(logits, body | {"temperature": 1.0}, step)


class DraftsTooOften(Writer):
    """From the second token on, the best guess of a draft is accepted unseen six times in ten."""

    def distribution(self, logits: Tensor, body: dict[str, Any], step: int) -> Tensor:
        p = super().distribution(logits, body, step)
        sure = torch.zeros_like(p).scatter(1, p.argmax(-1, keepdim=True), 1.0)
        return torch.lerp(p, sure, 0.6) if step else p


class SharedNumber(Writer):
    """All texts of a batch are drawn with one random number."""

    def numbers(self, count: int) -> Tensor:
        return super().numbers(1).expand(count)


class OneTokenLess(Writer):
    """Top-p leaves out the token that crosses the border."""

    def kept(self, count: Tensor) -> Tensor:
        return count.where(count == self.model.config.vocab_size, (count - 1).clamp_min(1))


class OneTokenMore(Writer):
    def kept(self, count: Tensor) -> Tensor:
        return count + 1


class Padded(Writer):
    """A short prompt beside a longer one is padded at its left without a mask."""

    def greedy(self, ids: list[int], new: list[int], beside: int) -> int:
        return super().greedy([0] * (beside - len(ids)) + ids, new, beside)


@pytest.fixture(scope="module")
def sharp(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The small backbone with distributions like those of a trained model."""
    folder = str(tmp_path_factory.mktemp("sharp"))
    model = AutoModelForCausalLM.from_pretrained(place.backbone)
    model.lm_head.weight.data *= SHARPENED
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place.backbone).save_pretrained(folder)
    return place._replace(backbone=folder)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as running:
        yield running


@pytest.fixture
def audit(
    server: FakeServer,
    sharp: Place,
    tmp_path: Any,
    medusa: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[Outcome, Any]]:
    """Audit a server of the small model; gives what the command did and its --json."""
    monkeypatch.setattr("medusa.commands.audit.reference.MEASURED", 1)
    monkeypatch.setattr("medusa.commands.audit.asked.TOGETHER", 128)  # texts of a request: few requests

    def run(writer: Writer, *more: Any, reference: str = sharp.backbone) -> tuple[Outcome, Any]:
        server.trouble = writer.reply  # type: ignore[assignment]
        prompts, figures = write_rows(tmp_path / "p.jsonl", [{"prompt": text} for text in PROMPTS]), tmp_path / "f.json"
        how = ("--max-new-tokens", TOKENS, "--draws", 200, "--sampled-prompts", 2, "--json", figures, *more)
        done = medusa("verify", "--server", server.url, "--reference", reference, "--prompts", prompts, *how)
        return done, read_json(figures) if done.status < 2 else None

    return run


@pytest.mark.parametrize("writer", [Writer, Strict], ids=lambda kind: kind.__name__)
def test_a_correct_server_passes(audit: Callable[..., Any], sharp: Place, writer: type[Writer]) -> None:
    done, found = audit(writer(sharp))
    assert done.status == 0, done.out
    assert found["passed"]
    assert found["greedy"]["alone"]["tokens"] > 30
    assert ("it takes no token ids" in done.out) == writer.strict


def test_a_server_with_a_shorter_context_may_end_its_texts_there(
    audit: Callable[..., Any], sharp: Place, server: FakeServer
) -> None:
    class Short(Writer):
        def texts(self, ids: list[int], body: dict[str, Any], beside: int) -> list[list[int]]:
            return super().texts(ids, body | {"max_tokens": min(body["max_tokens"], 16 - len(ids))}, beside)

    done, _ = audit(Short(sharp), "--draws", 50)
    assert done.status == 1, "the server does not tell its context"
    server.context = 16
    done, found = audit(Short(sharp), "--draws", 50)
    assert done.status == 0, done.out
    assert found["greedy"]["alone"]["tokens"] > 30


def test_an_empty_text_is_no_text_of_the_model(audit: Callable[..., Any], sharp: Place) -> None:
    """Also from a server that tells neither the ids nor the number of tokens."""

    class Silent(Strict):
        def reply(self, number: int, body: dict[str, Any]) -> Reply:
            status, headers, content = super().reply(number, body)
            told = json.loads(content)
            if "choices" in told and body["max_tokens"] > 1:
                told = {"choices": [choice | {"text": ""} for choice in told["choices"]]}
            return status, headers, json.dumps(told)

    done, found = audit(Silent(sharp), "--draws", 50)
    assert done.status == 1, done.out
    assert "the end of the text" in {one["written"] for one in found["greedy"]["alone"]["deviations"]}


def test_options_of_the_checkpoint_do_not_disturb_the_reference(
    audit: Callable[..., Any], sharp: Place, tmp_path: Any
) -> None:
    """Stop strings need a tokenizer, for example."""
    shutil.copytree(sharp.backbone, tmp_path / "other")
    file = tmp_path / "other" / "generation_config.json"
    theirs = {"stop_strings": ["."], "penalty_alpha": 0.6, "dola_layers": "low"}
    write_json(file, (read_json(file) if file.exists() else {}) | theirs)
    done, _ = audit(Writer(sharp), "--draws", 50, reference=str(tmp_path / "other"))
    assert done.status == 0, done.out


def failed_cases(found: Any) -> list[dict[str, Any]]:
    """The temperature of each failed test of samples, and whether it is of first tokens."""
    sampling = found["sampling"]
    return [
        {"setting": f"{case['temperature']:g}", "first": case["prompt"] is not None}
        for case in sampling["cases"]
        if case["p_value"] < sampling["smallest_allowed_p_value"]
    ]


@pytest.mark.parametrize(
    ("writer", "caught", "draws"),
    [
        (WrongToken, {"alone", "together"}, 50),
        pytest.param(StrictWrongToken, {"alone", "together"}, 50, marks=pytest.mark.full),
        (EarlyEnd, {"alone", "together"}, 50),
        (Cut, {"alone", "together"}, 50),
        (StrictCut, {"alone", "together"}, 50),
        (Padded, {"together"}, 50),
        (NoTemperature, {"0.7"}, 400),
        (SharedNumber, {"1"}, 300),
        (OneTokenLess, {"0.7"}, 1200),
        pytest.param(OneTokenMore, {"0.7"}, 1000, marks=pytest.mark.full),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_faults_are_caught(
    audit: Callable[..., Any], sharp: Place, writer: type[Writer], caught: set[str], draws: int
) -> None:
    done, found = audit(writer(sharp), "--draws", draws)
    assert done.status == 1, done.out
    ways = {
        way for way in ("alone", "together") if any(not one["is_tie"] for one in found["greedy"][way]["deviations"])
    }
    settings = {case["setting"] for case in failed_cases(found)}
    if writer is SharedNumber:  # where one token is nearly certain, a shared number changes little
        settings -= {"0.7"}
    assert ways | settings == caught
    if writer is WrongToken:  # the comparison goes on from the server's own text, so a fault is counted once
        assert len(found["greedy"]["alone"]["deviations"]) >= 3
        for one in found["greedy"]["alone"]["deviations"]:
            assert one["position"] % 8 == 7
            assert one["gap"] > one["tolerance"]


def test_drafts_that_are_accepted_too_often_are_caught_in_later_tokens(audit: Callable[..., Any], sharp: Place) -> None:
    """First tokens cannot show it. At a lower temperature most tokens are nearly certain, drafted or not."""
    done, found = audit(DraftsTooOften(sharp), "--draws", 500)
    assert done.status == 1, done.out
    failed = failed_cases(found)
    assert {"setting": "1", "first": False} in failed
    assert not any(case["first"] for case in failed)


@pytest.fixture
def second() -> Iterator[FakeServer]:
    with serving() as running:
        yield running


def test_two_servers(audit: Callable[..., Any], sharp: Place, second: FakeServer) -> None:
    second.trouble = Writer(sharp).reply  # type: ignore[assignment]
    done, found = audit(Writer(sharp), reference=second.url)
    assert found["passed"], done.out
    for writer, draws in ((NoTemperature, 500), (WrongToken, 50)):
        done, _ = audit(writer(sharp), "--draws", draws, reference=second.url)
        assert done.status == 1
    assert re.search("prompt [0-9], token 8: ", done.out)
    assert "the reference scores no given texts" in done.out


def test_wrong_requests(refused: Callable[..., str], place: Place, server: FakeServer) -> None:
    both = ("verify", "--server", server.url, "--reference", place.backbone)
    assert "add --reference MODEL" in refused("verify", "--server", server.url, "--prompt", "abc")
    assert "add --server URL" in refused("verify", place.heads, "--reference", place.backbone, "--prompt", "abc")
    assert "--heads has no effect with --server" in refused(*both, "--heads", place.heads, "--prompt", "abc")
    assert "--batch-size has no effect with --server" in refused(*both, "--batch-size", "4", "--prompt", "abc")
    second = ("verify", "--server", server.url, "--reference", server.url, "--prompt", "abc")
    assert "--dtype has no effect with --server" in refused(*second, "--dtype", "bfloat16")
    assert "no prompts" in refused(*both)
    server.trouble = lambda number, body: (404, {}, "no such route")
    assert "completes no text (HTTP 404" in refused(*both, "--prompt", "abc")
    assert "no OpenAI-compatible server at http://127.0.0.1:9" in refused(
        "verify", "--server", "http://127.0.0.1:9", "--reference", place.backbone, "--prompt", "abc"
    )
