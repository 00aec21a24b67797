"""What a checkpoint's generation_config.json says holds in every command, unless a line says otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from decode.compiled import region
from decode.generation_config import PLAIN
from decode.serve.app import CompletionApi
from decode.serve.worker import BatchWorker
from decode.settings import Settings
from decode.texts import TextGenerator
from medusa.commands.fit.probe import why_not_decoded
from medusa.errors import RequestError
from medusa.files import ASSETS
from medusa.loading import BackboneFiles, load_backbone
from tests.commands.place import PROMPTS, Outcome, Place, write_rows
from tests.commands.test_fit import PROBE, planned
from tests.helpers import LETTERS

NEW = 12


class Own(NamedTuple):
    """A checkpoint with options of its own, and the texts that `model.generate` writes with them, greedily."""

    folder: str
    model: Any
    texts: list[list[int]]
    free: list[list[int]]  # without these options
    stop: str


@pytest.fixture(scope="module")
def own(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Own:
    """The file also has everything that makes `model.generate` slow, or return something else."""
    folder = tmp_path_factory.mktemp("own") / "backbone"
    shutil.copytree(place.backbone, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, ends = AutoTokenizer.from_pretrained(folder), model.generation_config.eos_token_id

    def written(**given: Any) -> list[list[int]]:
        model.generation_config, found = GenerationConfig(eos_token_id=ends, **given), []
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            out = model.generate(ids, max_new_tokens=NEW, do_sample=False, tokenizer=tokenizer)
            found.append(out[0, len(prompt) :].tolist())
        return found

    free = written()
    held = {"repetition_penalty": 1.8, "suppress_tokens": [free[1][2]]}
    stop = LETTERS[written(**held)[2][4]]
    texts = written(**held, stop_strings=[stop])
    content = json.loads((folder / "generation_config.json").read_text())
    content |= {"do_sample": True, "temperature": 0.7, "top_k": 5, "num_return_sequences": 2, "use_cache": False}
    content |= held | {"stop_strings": [stop], "return_dict_in_generate": True, "output_scores": True, "max_length": 7}
    (folder / "generation_config.json").write_text(json.dumps(content))
    assert len({str(some) for some in (free, texts, written(**held))}) == 3, "no option is without power"
    return Own(str(folder), load_backbone(str(folder)).model, texts, free, stop)


@pytest.fixture
def run(place: Place, own: Own, tmp_path: Path, medusa: Callable[..., Outcome]) -> Callable[..., Any]:
    """Run a command with the checkpoint; gives its results and what it prints on standard error."""

    def run(command: str, *argv: Any, prompts: str = place.prompts, status: int = 0) -> tuple[Any, str]:
        path, heads = tmp_path / "out.json", () if command == "distill" else ("--heads", place.heads)
        models = ("--backbone", own.folder, *heads, "--prompts", prompts, "--json", path, "--max-new-tokens", NEW)
        done = medusa(command, *models, *argv)
        assert done.status == status, done.err
        return json.loads(path.read_text()) if status == 0 else None, done.err

    return run


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    """A file with the prompts between two that are too long."""
    texts = ["a" * 129, *PROMPTS, "b" * 130]
    return str(write_rows(tmp_path / "mixed.jsonl", [{"prompt": text, "category": text[:1]} for text in texts]))


def test_generate_and_its_ways_out(run: Callable[..., Any], own: Own, mixed: str) -> None:
    content, err = run("generate", "--skip-long", prompts=mixed)
    assert [result["new_ids"] for result in content["results"]] == own.texts
    assert [result["finish_reason"] for result in content["results"]].count("stop") >= 1
    assert not any(own.stop in result["text"] for result in content["results"]), "the text ends before it"
    sampling = "do_sample=True, temperature=0.7, top_k=5, num_return_sequences=2"
    flags = "(to sample, type --temperature 0.7 --top-k 5)"
    unused = f"options of generation_config.json that are not used: {sampling} {flags}"
    assert [line for line in err.splitlines() if "not used" in line] == [unused]
    assert content["settings"]["repetition_penalty"] == 1.8
    told = "2 of 5 prompts are left out, because they have more than 128 tokens; the first one is"
    assert f"{told} {mixed}:1\n" in err
    content, _ = run("generate", "--ignore-generation-config")
    assert [result["new_ids"] for result in content["results"]] == own.free


@pytest.mark.full
def test_plain_decoding_and_model_generate_agree_in_a_benchmark(run: Callable[..., Any], own: Own, mixed: str) -> None:
    content, _ = run("benchmark", "--rounds", "1", "--skip-long", prompts=mixed)
    found = content["methods"]
    assert found["medusa"]["equal_to_plain"] == found["transformers"]["equal_to_plain"] == 1.0
    assert found["plain"]["new_tokens"] == sum(map(len, own.texts))
    assert sorted(found["medusa"]["by_category"]) == sorted(text[0] for text in PROMPTS)


def test_verify_compares_with_the_options(run: Callable[..., Any], mixed: str) -> None:
    """Samples need room for two tokens after each prompt."""
    with Path(mixed).open("a") as file:
        file.write(json.dumps({"prompt": "a" * 127}) + "\n")
    more = ("--draws", "2000", "--sampled-prompts", "1")
    content, err = run("verify", *more, "--skip-long", prompts=mixed)
    assert content["greedy"]["equal"] == content["greedy"]["prompts"] == len(PROMPTS)
    assert content["passed"]
    assert "3 of 6 prompts are left out, because they have more than 126 tokens" in err
    assert "type --temperature" not in err, "verify has no such option"


def test_distill_writes_with_the_options(run: Callable[..., Any], own: Own, tmp_path: Path) -> None:
    run("distill", "--output", tmp_path / "own.jsonl", "--batch-size", "1")
    lines = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert [line["input_ids"][line["prompt_tokens"] :] for line in lines] == own.texts


def test_the_server_answers_with_the_options_unless_a_request_has_others(own: Own) -> None:
    testclient = pytest.importorskip("starlette.testclient", reason="needs the extra serve")
    tokenizer = AutoTokenizer.from_pretrained(own.folder)
    settings = Settings(max_new_tokens=NEW).of_checkpoint(own.model.generation_config)
    worker = BatchWorker(TextGenerator(own.model, settings, tokenizer), 3)
    worker.start(lambda: None)
    with testclient.TestClient(CompletionApi(worker, "own").app(["*"])) as client:

        def answers(**more: Any) -> list[str]:
            reply = client.post("/v1/completions", json={"prompt": PROMPTS} | more)
            assert reply.status_code == 200, reply.text
            return [choice["text"] for choice in reply.json()["choices"]]

        def shown(texts: list[list[int]]) -> list[str]:
            return [tokenizer.decode(ids, skip_special_tokens=True).partition(own.stop)[0] for ids in texts]

        assert answers() == shown(own.texts)
        unstopped = answers(stop=[])
        assert [text.partition(own.stop)[0] for text in unstopped] == answers()
        assert unstopped != answers()
        assert answers(repetition_penalty=1.0, top_k=-1) != answers(), "a request's own penalty counts"


@pytest.mark.parametrize("command", ["generate", "benchmark", "calibrate", "verify"])
@pytest.mark.usefixtures("no_loading")
def test_compiled_steps_are_refused_before_the_weights_are_loaded(run: Callable[..., Any], command: str) -> None:
    more = ("--max-new-tokens", "900") if command == "calibrate" else ()
    _, err = run(command, "--compile", *more, status=2)
    told = "--compile is not possible: generation_config.json of the model sets suppress_tokens=["
    assert told in err
    assert "--ignore-generation-config" in err
    assert len(err.splitlines()) == 1


def test_the_plan_of_fit_knows_that_steps_cannot_be_compiled(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the options of the checkpoint, and by one step that is compiled on trial; both before any text."""
    loaded, tried = load_backbone(own.folder), list[bool]()

    def compiled(step: Any, *how: Any) -> Any:
        tried.append(True)
        return failing if len(tried) > 1 else step

    def failing() -> None:
        raise TorchDynamoException("no way")

    monkeypatch.setattr(region, "compiled", compiled)
    reason = why_not_decoded(loaded, Settings())
    assert "sets suppress_tokens=[" in reason
    assert not tried
    ignoring = Settings(ignore_generation_config=True)
    assert why_not_decoded(loaded, ignoring) == ""
    loaded = load_backbone(own.folder)  # without the step that worked
    assert why_not_decoded(loaded, ignoring) == "torch.compile fails on LlamaForCausalLM (TorchDynamoException: no way)"
    with pytest.raises(RequestError, match=r"compile is not possible: .*suppress_tokens=\["):
        planned(replace(PROBE, not_compiled=reason), compile=True)


def test_fit_refuses_them_with_the_plan(own: Own, refused: Any) -> None:
    said = refused("fit", own.folder, "--prompts", ASSETS / "openings.jsonl", "--plan", "--compile")
    assert "--compile is not possible: generation_config.json of the model sets" in said


def test_the_generation_config_is_read_as_the_model_has_it(own: Own, place: Place, tmp_path: Path) -> None:
    """Also of an old checkpoint, which has these options in the file of the model's config."""
    old = tmp_path / "old"
    shutil.copytree(place.backbone, old)
    (old / "generation_config.json").unlink()
    config = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps(config | {"repetition_penalty": 1.3, "use_cache": False}))
    for folder, penalty in ((own.folder, 1.8), (str(old), 1.3), (place.backbone, None)):
        found = BackboneFiles(folder).generation_config
        assert found == load_backbone(folder).model.generation_config
        assert found.repetition_penalty == penalty
    assert PLAIN["use_cache"] is True
    (old / "generation_config.json").write_text('{"max_new_tokens": 0}')
    with pytest.raises(RequestError, match="max_new_tokens"):
        _ = BackboneFiles(str(old)).generation_config
