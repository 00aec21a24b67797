"""Heads on the Hub: a repository's files and card, and exact decoding with plain transformers.

The tests send nothing to the Hub. Repositories are local folders, or a cache in the layout of the Hub's library.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, TextIteratorStreamer

from decode import generate, steps
from medusa import MedusaHeads, RequestError, Tree
from medusa.__main__ import main
from medusa.checkpoints.stored import CONFIG, PROVENANCE, WEIGHTS
from medusa.errors import RunError
from medusa.export import MARK
from medusa.export.card import Facts, is_hub_id, model_card, read_benchmark, without_folders
from medusa.export.hub_code import bundle
from medusa.export.hub_code.decoding import keep, tree_forward
from medusa.export.hub_code.heads import CandidateTree
from medusa.export.repository import CARD, GENERATE, REQUIREMENTS, push, write_repository
from medusa.fingerprint import fingerprint
from medusa.loading import DEMO as DEMO_BACKBONE
from medusa.loading import load_backbone
from tests.helpers import (
    VOCAB,
    left_padded,
    parts_of,
    path_logits,
    plain,
    random_heads,
    random_ids,
    random_tree,
    tiny_model,
)
from tests.train.processes import forked

# Every token stands at depth 1, so that each step accepts at least one; below that, guesses are right now and then.
WIDE = (
    [[rank] for rank in range(VOCAB)] + [[a, b] for a in range(6) for b in range(6)] + [[0, 0, 0], [0, 1, 0], [1, 0, 2]]
)
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module", autouse=True)
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a temporary cache for remote code, as transformers would write into the user's cache."""
    cache = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        patch.setattr(sys, "path", list(sys.path))
        yield


def repository(heads: MedusaHeads, folder: Path, tree: list[list[int]] | None = None) -> str:
    heads.config.tree = tree or WIDE
    write_repository(heads.checkpoint(), folder, Facts())
    return str(folder)


@pytest.fixture(scope="module")
def exported(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A repository of random heads for `llama`."""
    return repository(random_heads(llama, 3), tmp_path_factory.mktemp("exported") / "heads")


def by_hub(model: Any, folder: str, ids: Any, **kwargs: Any) -> torch.Tensor:
    ids = torch.as_tensor(ids if isinstance(ids, torch.Tensor) else [ids])
    out: torch.Tensor = model.generate(ids, custom_generate=folder, trust_remote_code=True, **kwargs)
    return out


# ------------------------------------------------------------------------------------------------- the shipped decoder


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma3_text"),
        *(
            pytest.param(family, marks=pytest.mark.full)
            for family in ("llama4_text", "gpt2", "mistral", "gemma2", "cohere")
        ),
    ],
)
def test_ids_equal_the_packages_and_plain_decoding(family: str, tmp_path: Path) -> None:
    """Models with windows, chunks, learned positions and scaled logits, on texts longer than the windows.

    One model tries all settings of decoding."""
    model = tiny_model(family)
    heads = random_heads(model, 3)
    folder = repository(heads, tmp_path / "heads")
    prompt = random_ids(13, seed=1)
    given: list[dict[str, Any]] = [SAMPLED, {"do_sample": False, "repetition_penalty": 1.4}]
    for settings in ({"do_sample": False}, *given[: 2 * (family == "llama")]):
        settings, lengths = {"max_new_tokens": 12} | settings, list[int]()
        torch.manual_seed(7)
        ours = [step.ids[0] for step in steps(model, heads, torch.tensor([prompt]), **settings)]
        torch.manual_seed(7)
        out = by_hub(model, folder, prompt, medusa_step_lengths=lengths, **settings)
        assert out[0, 13:].tolist() == [token for ids in ours for token in ids]
        assert lengths == [len(ids) for ids in ours]
        assert len(lengths) <= 6, "each step accepts something"
        torch.manual_seed(7)
        assert out[0, 13:].tolist() == plain(model, prompt, **settings)


@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text"])
def test_a_tree_forward_equals_plain_forwards(family: str) -> None:
    """Paths are longer than a window, so a node's ancestors leave the window; kept nodes follow dropped ones."""
    model = tiny_model(family)
    tree = Tree.from_paths([*random_tree(12, seed=3, max_depth=4).rank_paths, *[[7] * d for d in range(1, 8)]])
    shipped = CandidateTree(tree.rank_paths, model.device)
    assert shipped.depth == tree.depth.tolist()
    assert torch.equal(shipped.ancestors, tree.ancestors)
    text, nodes = random_ids(9, seed=1), random_ids(tree.num_nodes, seed=2)
    with torch.no_grad():
        cache = DynamicCache()
        model(input_ids=torch.tensor([text]), past_key_values=cache)
        for _ in range(2):
            found = tree_forward(model, cache, nodes, shipped, len(text))[0]
            torch.testing.assert_close(found, path_logits(model, text, nodes, tree), atol=2e-5, rtol=1e-4)
            path = [node for node in tree.paths[-1].tolist() if node >= 0]
            keep(cache, len(text), path)
            text = text + [nodes[node] for node in path]
            assert cache.get_seq_length() == len(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"block": "mlp", "expansion": 2.0, "num_layers": 2},
        {"kind": "cascade", "block": "mlp", "lm_head": "shared"},
        pytest.param({"num_layers": 2, "lm_head": "shared"}, marks=pytest.mark.full),
        pytest.param({"kind": "cascade", "num_layers": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_guesses_of_every_kind_equal_the_packages(settings: dict[str, Any], llama: Any, tmp_path: Path) -> None:
    """The text does not depend on guesses, but step lengths equal the package's only with equal guesses."""
    heads = random_heads(llama, 3, **settings)
    tree = [[rank] for rank in range(20)] + [[a, b] for a in range(6) for b in range(5)] + [[0, 0, 0], [1, 0, 0]]
    folder = repository(heads, tmp_path / "heads", tree)
    prompt, found = random_ids(9), list[int]()
    by_hub(llama, folder, prompt, max_new_tokens=16, do_sample=False, medusa_step_lengths=found)
    ours = steps(llama, heads, torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    assert found == [len(step.ids[0]) for step in ours]
    assert len(set(found)) > 1, "some guesses are right and some wrong"


def test_ragged_rows_several_sequences_and_the_result_type(llama: Any, tmp_path: Path) -> None:
    heads = random_heads(llama, 3)
    folder = repository(heads, tmp_path / "heads")
    prompts = [random_ids(count, seed=count) for count in (4, 11, 7)]
    inputs = left_padded(prompts)
    eos = plain(llama, prompts[1], max_new_tokens=12)[6]  # one row ends early
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": eos, "pad_token_id": 3}
    theirs = llama.generate(
        **inputs, custom_generate=folder, trust_remote_code=True, return_dict_in_generate=True, **settings
    )
    assert torch.equal(theirs.sequences, generate(llama, heads, **inputs, **settings))
    torch.manual_seed(1)
    copies = by_hub(llama, folder, prompts[0], max_new_tokens=6, num_return_sequences=2, **SAMPLED)
    assert copies.shape == (2, 10)
    torch.manual_seed(1)  # one after the other, from one stream
    one_by_one = [by_hub(llama, folder, prompts[0], max_new_tokens=6, **SAMPLED) for _ in range(2)]
    assert torch.equal(copies, torch.cat(one_by_one))


def test_stop_strings_streamer_and_allowed_tokens(llama: Any, tokenizer: Any, exported: str) -> None:
    """Options that transformers does not pass to custom decoding methods work here."""
    folder, prompt = exported, random_ids(6, seed=4)
    text = tokenizer.decode(plain(llama, prompt, max_new_tokens=16))
    stop = text[9:11]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5)
    settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    out = by_hub(llama, folder, prompt, stop_strings=stop, tokenizer=tokenizer, streamer=streamer, **settings)
    kept = text[: text.index(stop) + 2]
    assert tokenizer.decode(out[0, 6:]) == kept == "".join(streamer)
    config = GenerationConfig(stop_strings=[stop], **settings)
    assert torch.equal(by_hub(llama, folder, prompt, generation_config=config, tokenizer=tokenizer), out)
    assert config.stop_strings == [stop], "the caller's own is left alone"
    own = tiny_model("llama")
    own.load_state_dict(llama.state_dict())
    own.generation_config.stop_strings = [stop]  # as from its generation_config.json
    assert torch.equal(by_hub(own, folder, prompt, tokenizer=tokenizer, **settings), out)
    assert by_hub(own, folder, prompt, stop_strings=None, **settings).shape[1] == 22
    odd = by_hub(llama, folder, prompt, prefix_allowed_tokens_fn=lambda row, ids: range(1, VOCAB, 2), **settings)
    assert (odd[0, 6:] % 2 == 1).all()


def test_nothing_is_put_on_the_model(tmp_path: Path) -> None:
    """So a copy of the model that is made meanwhile is a clean model. Zero token types pass, as in the package."""
    model, prompt, found = tiny_model("gemma3"), random_ids(6), list[object]()
    model.get_decoder().layers[0].mlp.register_forward_hook(lambda *_: found.append(parts_of(model)))
    parts = parts_of(model)
    folder = repository(random_heads(model, 3), tmp_path / "heads")

    def look(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        found.append(parts_of(model))
        return torch.zeros(1, dtype=torch.bool)

    types = {"token_type_ids": torch.zeros(1, 6, dtype=torch.long)}
    out = by_hub(model, folder, prompt, max_new_tokens=6, do_sample=False, stopping_criteria=[look], **types)
    assert len(found) > 6
    assert all(each == parts for each in found)
    assert out[0, 6:].tolist() == plain(model, prompt, max_new_tokens=6)


def test_a_text_stops_at_the_end_of_the_context(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    heads = random_heads(model, 3)
    folder = repository(heads, tmp_path / "heads")
    end = model.config.max_position_embeddings
    prompt = random_ids(end - 10)
    out = by_hub(model, folder, prompt, max_new_tokens=50, do_sample=False)
    assert out.shape[1] == end
    assert torch.equal(out, generate(model, heads, torch.tensor([prompt]), max_new_tokens=50, do_sample=False))


def test_heads_are_loaded_from_the_given_folder(llama: Any, tmp_path: Path) -> None:
    """Folders with the same name share the code's module, but not the heads."""
    prompt, found = random_ids(9, seed=2), {}
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    trees: dict[str, list[list[int]]] = {"a": WIDE, "b": [[0]]}
    for place, tree in trees.items():
        repository(random_heads(llama, 3), tmp_path / place / "heads", tree)
    for place in ("a", "b", "a"):
        lengths: list[int] = []
        by_hub(llama, str(tmp_path / place / "heads"), prompt, medusa_step_lengths=lengths, **settings)
        assert found.setdefault(place, lengths) == lengths
    assert min(found["a"][:-1]) > 1
    assert found["b"] != found["a"]
    for option in ({"medusa_heads": str(tmp_path / "a" / "heads")}, {"medusa_tree": WIDE}):
        lengths = []
        by_hub(llama, str(tmp_path / "b" / "heads"), prompt, medusa_step_lengths=lengths, **option, **settings)
        assert lengths == found["a"]
    repository(random_heads(llama, 2), tmp_path / "b" / "heads" / "new", [[0], [0, 0]])
    for name in (CONFIG, WEIGHTS):  # trained anew, in place
        (tmp_path / "b" / "heads" / "new" / name).replace(tmp_path / "b" / "heads" / name)
    with pytest.raises(ValueError, match="the tree is 3 deep, and there are 2 heads"):
        by_hub(llama, str(tmp_path / "b" / "heads"), prompt, medusa_tree=[[0], [0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "beam search cannot be combined"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores is not available"),
        ({"medusa_heads": "/no/such/place"}, "no heads at /no/such/place"),
        ({"medusa_tree": [[0, 0]]}, "has no parent"),
        ({"stop_strings": ["x"]}, "need the tokenizer"),
        ({"cache_implementation": "static"}, "cache_implementation 'static' is not available"),
        ({"assistant_model": object()}, "assistant_model cannot be combined"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "a prompt is empty"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 3, 32)}, "no prompt"),
        ({"token_type_ids": torch.ones(1, 5, dtype=torch.long)}, "token_type_ids"),
        ({"mm_encoder_outputs": {"image": object()}}, "mm_encoder_outputs is not supported"),
        ({"streamer": object(), "num_return_sequences": 2, "do_sample": True}, "one prompt at a time"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_requests_raise_a_one_line_error(options: dict[str, Any], words: str, llama: Any, exported: str) -> None:
    inputs = {"input_ids": torch.tensor([random_ids(5)]), "max_new_tokens": 4} | options
    with pytest.raises(ValueError, match=words) as error:
        llama.generate(**inputs, custom_generate=exported, trust_remote_code=True)
    assert "\n" not in str(error.value)


def test_a_model_that_projects_its_hidden_states(tmp_path: Path) -> None:
    """OPT-350m: its LM head reads half of the hidden size."""
    model = tiny_model("opt", word_embed_proj_dim=16)
    write_repository(random_heads(model, 2).checkpoint(), tmp_path, Facts())
    found = by_hub(model, str(tmp_path), random_ids(5), max_new_tokens=8)
    assert found[0, 5:].tolist() == plain(model, random_ids(5), max_new_tokens=8, do_sample=False)


def test_models_without_tree_support_are_rejected(exported: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = exported
    with pytest.raises(ValueError, match="its layers keep states, which only the package medusa lets branch"):
        by_hub(tiny_model("mamba"), folder, [1, 2, 3], max_new_tokens=4)
    with pytest.raises(ValueError, match="have hidden_size 32, the model"):
        by_hub(tiny_model("llama", hidden_size=48), folder, [1, 2, 3], max_new_tokens=4)
    cache = DynamicCache()
    training = tiny_model("llama")
    training(torch.tensor([[1, 2]]), past_key_values=cache)
    with pytest.raises(ValueError, match="hold text already"):
        by_hub(training, folder, [1, 2, 3], past_key_values=cache, max_new_tokens=4)
    training.train()
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        by_hub(training, folder, [1, 2, 3], max_new_tokens=4)
    wrong = tiny_model("llama")
    forward = wrong.forward
    monkeypatch.setattr(wrong, "forward", lambda *args, **kwargs: forward(*args, **kwargs | {"attention_mask": None}))
    with pytest.raises(ValueError, match="does not follow our masks"):
        by_hub(wrong, folder, [1, 2, 3], max_new_tokens=4)


def test_a_text_beyond_the_longrope_boundary_is_rejected(tmp_path: Path) -> None:
    model = tiny_model("phi3, longrope")
    boundary = model.config.rope_parameters["original_max_position_embeddings"]
    folder = repository(random_heads(model, 2), tmp_path / "heads", [[0], [1], [0, 0]])
    prompt = random_ids(boundary - 6)
    out = by_hub(model, folder, prompt, max_new_tokens=6, do_sample=False)
    assert out[0, -6:].tolist() == plain(model, prompt, max_new_tokens=6)
    with pytest.raises(ValueError, match=f"after {boundary} tokens"):
        by_hub(model, folder, prompt, max_new_tokens=7, do_sample=False)


# ------------------------------------------------------------------------------------------- without anything of ours


def alone(jobs: list[dict[str, Any]], results: Path) -> None:
    """Write the texts and step lengths of `jobs`, with plain transformers only."""
    real = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] in ("medusa", "train", "decode"):
            raise ImportError(f"{name} must not be needed")
        return real(name, *args, **kwargs)

    for name in list(sys.modules):
        if name.split(".")[0] in ("medusa", "train", "decode"):
            del sys.modules[name]
    builtins.__import__ = guarded
    found = []
    for job in jobs:
        model = AutoModelForCausalLM.from_pretrained(job["backbone"], dtype="float32")
        for settings in job["settings"]:
            torch.manual_seed(3)
            lengths: list[int] = []
            out = by_hub(model, job["heads"], job["prompt"], **settings, max_new_tokens=12, medusa_step_lengths=lengths)
            found.append([out[0, len(job["prompt"]) :].tolist(), lengths])
    assert not {"medusa", "train", "decode"} & set(sys.modules)
    results.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def demo_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with independent heads for the embedded backbone, made of the package's, which cannot be exported.

    Without what the blocks were trained to know of the root, they are right now and then."""
    folder = tmp_path_factory.mktemp("demo heads")
    shipped = MedusaHeads.from_pretrained("demo")
    heads = MedusaHeads.from_config(replace(shipped.config, kind="medusa", rank=None, tree=None))
    heads.load_state_dict({name: value for name, value in shipped.state_dict().items() if name.startswith("blocks")})
    heads.save_pretrained(folder, {"command": "a test"})
    return str(folder)


@pytest.mark.full
def test_repositories_run_without_the_packages(
    demo_heads: str, tmp_path: Path, request: pytest.FixtureRequest, full: bool
) -> None:
    """Heads for the embedded backbone, and with `--full` the original's own heads for stories260K, exported by command.

    In a copy of this process that forgets the packages."""
    pairs = [("demo", str(DEMO_BACKBONE), demo_heads, [0, 403, 378])]
    try:
        models = request.getfixturevalue("shared") / "models" if full else pytest.skip("one repository is enough")
        original = str(models / "stories260K-medusa5-original")
        pairs.append((str(models / "stories260K"), str(models / "stories260K"), original, [1, 403, 407, 261]))
    except pytest.skip.Exception:
        pass  # the embedded one is enough where nothing else lies
    settings: list[dict[str, Any]] = [{"do_sample": False}, SAMPLED]
    jobs, expected = [], []
    for index, (name, folder, heads, prompt) in enumerate(pairs):
        output = str(tmp_path / f"export{index}")
        words = ["export", "--heads", heads, "--to", "hub", "--output", output, "--backbone", name]
        assert main([*words, "--quiet"]) == 0
        jobs.append({"backbone": folder, "heads": output, "prompt": prompt, "settings": settings})
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        ours = MedusaHeads.from_pretrained(output, dtype=torch.float32)
        for chosen in settings:
            torch.manual_seed(3)
            found = [s.ids[0] for s in steps(model, ours, torch.tensor([prompt]), max_new_tokens=12, **chosen)]
            expected.append([[token for ids in found for token in ids], [len(ids) for ids in found]])
    process = forked(lambda: alone(jobs, tmp_path / "results"), tmp_path / "errors")
    assert os.waitpid(process, 0)[1] == 0, (tmp_path / "errors").read_text()
    assert json.loads((tmp_path / "results").read_text()) == expected
    assert all(max(lengths) > 1 for _, lengths in expected), "heads that fit are right now and then"


def test_hub_code_imports_only_three_packages(tmp_path: Path) -> None:
    """transformers checks every import of such a file and asks the user to install missing packages."""
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    (tmp_path / "generate.py").write_text(bundle())
    assert not get_relative_imports(tmp_path / "generate.py")
    standard = set(sys.stdlib_module_names)
    assert set(get_imports(tmp_path / "generate.py")) - standard == {"torch", "transformers", "safetensors"}


# -------------------------------------------------------------------------------------------------- to and from the Hub


def in_cache(repo_id: str, folder: Path, cache: Path) -> None:
    """Put `folder` into a cache as the Hub's library does: files by commit, and a ref that names the commit."""
    place = cache / f"models--{repo_id.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    (place / "snapshots").mkdir()
    folder.rename(place / "snapshots" / COMMIT)


def test_heads_of_a_hub_id(llama: Any, tmp_path: Path) -> None:
    heads = random_heads(llama, 3)
    repository(heads, tmp_path / "heads")
    in_cache("org/some-heads.v1", tmp_path / "heads", tmp_path / "cache")
    local: dict[str, Any] = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    for revision in (None, "main", COMMIT):
        again = MedusaHeads.from_pretrained("org/some-heads.v1", revision=revision, **local)
        assert torch.equal(again.lm_heads, heads.lm_heads)
    with pytest.raises(RequestError, match=r"no heads at org/some-heads\.v1"):
        MedusaHeads.from_pretrained("org/some-heads.v1", revision="other", **local)
    # And for plain transformers: code and weights of one commit.
    prompt, lengths = random_ids(9, seed=2), []
    out = by_hub(
        llama, "org/some-heads.v1", prompt, max_new_tokens=16, do_sample=False, medusa_step_lengths=lengths, **local
    )
    assert out[0, 9:].tolist() == plain(llama, prompt, max_new_tokens=16)
    assert min(lengths[:-1]) > 1


class FakeHub:
    """The part of HfApi that pushing uses; it records calls and uploads."""

    def __init__(self, refuses: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.files: dict[str, bytes] = {}
        self.refuses = refuses

    def __call__(self, token: Any = None) -> FakeHub:
        self.calls.append(("token", {"token": token}))
        return self

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        if self.refuses is not None:
            raise self.refuses
        self.calls.append(("create_repo", {"repo_id": repo_id} | options))
        return SimpleNamespace(repo_id=repo_id)

    def create_branch(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_branch", {"repo_id": repo_id} | options))

    def upload_folder(self, *, folder_path: str, **options: Any) -> Any:
        folder = Path(folder_path)
        self.files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.calls.append(("upload_folder", options))
        return SimpleNamespace(commit_url="https://huggingface.co/org/heads/commit/1")


def test_push(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = random_heads(llama, 3, base_model_name_or_path="org/model")
    heads.save_pretrained(tmp_path / "saved", provenance={"command": "medusa train /home/me/x.yaml", "config": {}})
    heads = MedusaHeads.from_pretrained(tmp_path / "saved")
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    url = heads.push_to_hub("org/heads", private=True, token="t", revision="v2", license="mit")
    assert url == "https://huggingface.co/org/heads/commit/1"
    message = {"commit_message": "3 medusa heads for org/model"}
    assert hub.calls == [
        ("token", {"token": "t"}),
        ("create_repo", {"repo_id": "org/heads", "private": True, "exist_ok": True}),
        ("create_branch", {"repo_id": "org/heads", "branch": "v2", "exist_ok": True}),
        ("upload_folder", {"repo_id": "org/heads", "revision": "v2"} | message),
    ]
    assert set(hub.files) == {CONFIG, WEIGHTS, PROVENANCE, CARD, GENERATE, REQUIREMENTS}
    assert hub.files[GENERATE].decode() == bundle()
    assert json.loads(hub.files[PROVENANCE])["command"] == "medusa train x.yaml"
    card = hub.files[CARD].decode()
    assert 'custom_generate="org/heads"' in card
    assert "base_model: org/model\n" in card
    assert heads.config.tree is None, "these heads themselves are left alone"

    heads.push_to_hub("org/heads", commit_message="as said")
    assert [name for name, _ in hub.calls[4:]] == ["token", "create_repo", "upload_folder"]
    assert hub.calls[-1][1]["commit_message"] == "as said"


def test_heads_of_an_adapter_are_not_pushed_for_the_model_without_it(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = random_heads(llama, 3, base_model_name_or_path="org/model")
    heads.provenance = {"config": {"backbone": "org/model", "adapter": {"rank": 8}}}
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    with pytest.raises(RequestError, match="trained with an adapter of org/model, and do not fit that model alone"):
        heads.push_to_hub("org/heads")
    heads.config.base_model_name_or_path = "org/merged"
    heads.push_to_hub("org/heads")
    assert "base_model: org/merged\n" in hub.files[CARD].decode()


def test_unsupported_heads_are_pushed_without_code(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    push(random_heads(llama, 2, kind="hydra").checkpoint(), "org/heads")
    assert set(hub.files) == {CONFIG, WEIGHTS, CARD}
    card = hub.files[CARD].decode()
    assert "custom_generate" not in card
    assert "library_name: medusa-heads" in card


def test_a_failed_push_raises_a_one_line_error(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = random_heads(llama, 2)
    nobody_listens = functools.partial(huggingface_hub.HfApi, endpoint="http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub(refuses=HFValidationError("bad name")))
    with pytest.raises(RequestError, match=r"bad name$"):
        heads.push_to_hub("org/heads")
    for status, error, words in (
        (403, RequestError, "may not write; log in with `hf auth login`"),
        (402, RequestError, "may not write$"),
        (503, RunError, "may not write; try again later"),
        (429, RunError, "may not write; try again later"),
    ):
        response = SimpleNamespace(status_code=status, headers={}, request=None, url="")
        refusal = HfHubHTTPError("Error", response=response, server_message="may not write")
        monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub(refuses=refusal))
        with pytest.raises(error, match=words):
            heads.push_to_hub("org/heads")
    monkeypatch.setattr(huggingface_hub, "HfApi", nobody_listens)
    with pytest.raises(RunError, match=r"refused; is the Hub reachable from here\?"):
        heads.push_to_hub("org/heads", token="none")


def test_arguments_that_would_be_ignored_are_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped `private` would publish heads; a token with a line end would stand in an error of HTTP."""
    heads, hub = random_heads(llama, 2), FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    for name, hint in (("privat", "did you mean private"), ("create_pr", "choose from private, token")):
        wrong: dict[str, Any] = {name: True}
        with pytest.raises(RequestError, match=f"push_to_hub has no argument {name}; {hint}"):
            heads.push_to_hub("org/heads", **wrong)
    for token in ("hf_SECRET\n", "hf_ SECRET", "hf_SECRETü"):
        with pytest.raises(RequestError, match="the token has a space, a line end or a character") as refused:
            heads.push_to_hub("org/heads", token=token)
        assert "SECRET" not in str(refused.value)
    assert not hub.calls, "nothing was asked"


# ------------------------------------------------------------------------------------------------------- the card


def metadata(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


BENCHMARK: dict[str, Any] = {
    "machine": {"processor": "Some CPU x 8", "gpu": None, "threads": 4, "dtype": "float32", "torch": "2.13.0"},
    "settings": {
        "prompts": 50,
        "max_new_tokens": 128,
        "temperature": 0.0,
        "acceptance": "greedy",
        "backbone": "org/model",
        "heads": "/home/me/runs/heads",
        "drafter": "heads",
        "nodes": 8,
        "rounds": 3,
        "batch_size": 1,
        "date": "2026-05-01T10:00:00+00:00",
    },
    "methods": {
        name: {
            "tokens_per_second": {"median": rate, "min": rate - 1, "max": rate + 1},
            "tau": tau,
            "speedup_vs_generate": speedup,
            "speedup_vs_generate_interval": interval,
            "equal_to_plain": 0.98,
            "accepted_by_depth": depths,
        }
        for name, rate, tau, speedup, interval, depths in (
            ("transformers", 30.0, 1.0, 1.0, None, []),
            ("medusa", 60.5, 2.4567, 2.0167, [1.9, 2.1], [0.8, 0.6]),
        )
    },
}


METHODS: dict[str, Any] = BENCHMARK["methods"]


def test_card_shows_the_measurements(llama: Any) -> None:
    heads = random_heads(llama, 3, base_model_name_or_path="org/model")
    made = {
        "command": "medusa train /home/me/x.yaml",
        "config": {"data": {"path": "org/text", "split": "train"}, "training": {"max_steps": 9, "save_steps": 3}},
        "data": {"documents": 12, "tokens": 3456},
        "result": {"steps": 9, "head1_top1": 0.75, "head2_top1": 0.5},
    }
    holds = {"processor": "Some CPU x 8", "gpu": None, "threads": 4, "batch_size": 1, "temperature": 0.0}
    points = [
        {"nodes": 1, "paths": [], "tau": 1.0, "step_ms": 2.0, "dynamic": False},
        {"nodes": 4, "paths": [[0], [1], [0, 0]], "tau": 2.0, "step_ms": 2.5, "dynamic": False},
    ]
    calibration = {"points": points, "chosen": 1, "temperatures": [1.0], "holds_for": holds, "texts": {}}
    facts = Facts("me/heads", "apache-2.0", made, [calibration], BENCHMARK)
    card = model_card(heads.checkpoint(), facts, with_code=True)
    assert metadata(card) == {
        "base_model": "org/model",
        "datasets": "org/text",
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["medusa", "speculative-decoding", "custom_generate"],
    }
    for line in (
        "| data | from org/text, split train, documents 12, tokens 3,456 |",
        "| recipe | max steps 9 |",
        "| command | `medusa train x.yaml` |",
        "head 1 75.0%, head 2 50.0%",
        "| **these heads** | 60.5 (59.5 to 61.5) | 2.46 | 2.02 (95 %: 1.90 to 2.10) |",
        "temperature 0, acceptance greedy, nodes 8, backbone org/model, heads heads, on 2026-05-01.",
        "Some CPU x 8, threads 4, dtype float32, torch 2.13.0",
        "Texts equal to plain decoding, token for token: 98.0% of the prompts.",
        "1 80.0%, 2 60.0%",
        "| Some CPU x 8, threads 4 | 1, temperature 0 | 4 nodes, static | 2.00 | 2.50, plain 2.00 | 1.60 |",
        "`apache-2.0`, as given by the publisher.",
    ):
        assert line in card
    assert "/home" not in card


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"benchmark": BENCHMARK | {"settings": {"heads": "h"}}}, "the benchmark: settings.prompts is missing"),
        (
            {"benchmark": BENCHMARK | {"methods": METHODS | {"medusa": METHODS["medusa"] | {"tau": None}}}},
            "the benchmark: methods.medusa.tau is None",
        ),
        (
            {"benchmark": BENCHMARK | {"methods": METHODS | {"plain": {"tau": 1.0}}}},
            "the benchmark: methods.plain.tokens_per_second is missing",
        ),
        ({"calibrations": [{"points": [], "chosen": 0}]}, "calibration.json, entry 1: holds_for is missing"),
        ({"provenance": {"result": {"head1_top1": "high"}}}, "result.head1_top1 is 'high', no number"),
        ({"provenance": {"config": "x"}}, "provenance.json: config is 'x'"),
        ({"provenance": {"tree": {"expected_tau": 2.0, "nodes": 8}}}, "provenance.json: tree.texts is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_figure_of_the_card_is_named(llama: Any, facts: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=re.escape(told)):
        model_card(random_heads(llama, 3).checkpoint(), Facts(**facts), with_code=True)


def test_card_lists_unknown_values(llama: Any) -> None:
    card = model_card(random_heads(llama, 3).checkpoint(), Facts(), with_code=True)
    assert metadata(card).keys() == {"library_name", "pipeline_tag", "tags"}
    for sentence in (
        "Not known: the heads came without a record of their training.",
        "Not measured: no benchmark came with these heads.",
        "The publisher has not named a licence.",
    ):
        assert sentence in card
    for claim in ("tokens/s", "faster", "speedup", "Calibrated trees", "None"):
        assert claim not in card


def test_card_marks_lossy_figures(llama: Any) -> None:
    bench = json.loads(json.dumps(BENCHMARK))
    bench["settings"] |= {"acceptance": "typical", "temperature": 0.7}
    card = model_card(random_heads(llama, 3).checkpoint(), Facts(benchmark=bench), with_code=True)
    assert "`typical` is lossy" in card
    assert "token for token" not in card


def test_local_folders_are_left_out() -> None:
    told = {"path": "/home/me/own.jsonl", "words": ["medusa train /a/b.yaml backbone=/data/m data=~/d/x.jsonl 1/2"]}
    kept = {"path": "own.jsonl", "words": ["medusa train b.yaml backbone=m data=x.jsonl 1/2"]}
    assert without_folders(told) == kept
    spaced = "medusa train 'backbone=/home/me/my models/llama' data=x.jsonl output_dir='~/my runs/out'"
    told = {"command": spaced, "path": "file:///home/me/x.jsonl", "/home/me/d.jsonl": 3, "list": ["a:/home/me/x"]}
    kept = {"command": "medusa train backbone=llama data=x.jsonl output_dir=out", "path": "x.jsonl"}
    assert without_folders(told) == kept | {"d.jsonl": 3, "list": ["a:x"]}
    same = {"id": "org/model", "url": "https://huggingface.co/org/model", "relative": "runs/heads", "number": 1.5}
    assert without_folders(same) == same


def test_hub_ids_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/model-7B.v1")
    for name in (None, "demo", "/org/model", "runs/model", "data/own.jsonl", "a/b/c"):
        assert not is_hub_id(name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": {}}, "measured no heads"),
        ({"machine": None}, "is no benchmark"),
        ({"settings": {"heads": None}}, "measured no heads"),
        ({"settings": {"heads": "h", "drafter": "ngram"}}, "measured drafter 'ngram' first"),
    ],
    ids=str,
)
def test_invalid_benchmark_files_are_rejected(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(BENCHMARK | change))
    with pytest.raises(RequestError, match=words):
        read_benchmark(tmp_path / "bench.json")


# ------------------------------------------------------------------------------------------------------ the command


def export(*words: str) -> int:
    return main(["export", "--to", "hub", *words])


def test_export_for_the_shipped_backbone(demo_heads: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(BENCHMARK))
    place = tmp_path / "out"
    words = ["--heads", demo_heads, "--output", str(place), "--benchmark", str(tmp_path / "bench.json")]
    assert export(*words, "--license", "cdla-sharing-1.0", "--repo-id", "me/heads") == 0
    out = capsys.readouterr()
    assert f"measured /home/me/runs/heads, not {demo_heads}" in out.err
    assert 'custom_generate="me/heads"' in out.out
    files = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    assert files == {MARK, CONFIG, WEIGHTS, PROVENANCE, CARD, GENERATE, REQUIREMENTS}
    config = json.loads((place / CONFIG).read_text())
    assert config["base_model_name_or_path"] == "demo"
    assert str(DEMO_BACKBONE) not in (place / CONFIG).read_text()
    assert metadata((place / CARD).read_text())["license"] == "cdla-sharing-1.0"


def test_export_accepts_only_calibrations_of_the_same_heads(llama: Any, tmp_path: Path) -> None:
    from decode.bench.calibration.stored import heads_fingerprint

    heads = random_heads(llama, 2, base_model_name_or_path="org/model")
    heads.save_pretrained(tmp_path / "heads")
    points = [{"nodes": 1, "paths": [], "tau": 1.0, "step_ms": 2.0, "dynamic": False}]
    content = [
        {
            "points": points,
            "chosen": 0,
            "temperatures": [1.0],
            "texts": {"texts": 32, "steps": 500},
            "holds_for": {"processor": cpu, "dtype": "float32", "batch_size": 1, "temperature": 0.0, "heads": of},
        }
        for cpu, of in (("CPU of these", heads_fingerprint(heads)), ("CPU of others", "0" * 16))
    ]
    (tmp_path / "heads" / "calibration.json").write_text(json.dumps(content))
    assert export("--heads", str(tmp_path / "heads"), "--output", str(tmp_path / "out"), "--quiet") == 0
    card = (tmp_path / "out" / CARD).read_text()
    assert "CPU of these" in card
    assert "CPU of others" not in card


@pytest.fixture(scope="module")
def backbones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone, heads that record its fingerprint, and three other backbones."""
    folder = tmp_path_factory.mktemp("backbones")
    own = tiny_model("llama", seed=1)
    own.save_pretrained(folder / "own")
    tiny_model("llama", seed=1).to(torch.bfloat16).save_pretrained(folder / "rounded")
    tiny_model("llama", seed=2).save_pretrained(folder / "other")
    tiny_model("llama", seed=1, hidden_size=16).save_pretrained(folder / "smaller")
    known = fingerprint(own, "org/model")
    random_heads(own, 2, base_model_name_or_path="org/model", backbone=known).save_pretrained(folder / "heads")
    return folder


@pytest.mark.parametrize("name", ["own", "rounded"])
def test_a_copy_of_the_backbone_may_be_named(
    name: str, backbones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("a model was loaded"))
    words = ["--heads", str(backbones / "heads"), "--output", str(tmp_path / "out")]
    assert export(*words, "--backbone", str(backbones / name)) == 0
    assert "check" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("other", "has other weights than the backbone of these heads, org/model"),
        ("smaller", "has hidden size 16 and 61 tokens, and these heads need hidden size 32 and 61 tokens"),
    ],
)
def test_the_card_names_no_other_backbone(
    name: str, told: str, backbones: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["--heads", str(backbones / "heads"), "--output", str(tmp_path / "out")]
    assert export(*words, "--backbone", str(backbones / name)) == 2
    error = capsys.readouterr().err
    assert f"--backbone {backbones / name} {told}; leave --backbone out, or name a copy of org/model" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_backbone_that_is_elsewhere_is_noted_as_not_compared(
    backbones: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["--heads", str(backbones / "heads"), "--output", str(tmp_path / "out"), "--overwrite"]
    assert export(*words, "--backbone", "org/elsewhere") == 0
    assert "org/elsewhere is not on this machine, so this export does not check" in capsys.readouterr().out
    assert export(*words, "--backbone", "org/model") == 0
    assert "does not check" not in capsys.readouterr().out, "the heads themselves record this name"


def test_an_adapter_is_another_backbone_than_its_base(backbones: Path, tmp_path: Path) -> None:
    adapter, own = tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(backbones / "own")
    get_peft_model(own, LoraConfig(init_lora_weights=False)).save_pretrained(adapter)
    known = fingerprint(load_backbone(str(adapter)).model, "org/adapted")
    random_heads(tiny_model("llama", seed=1), 2, backbone=known).save_pretrained(tmp_path / "heads")
    words = ["--output", str(tmp_path / "out"), "--backbone", str(adapter)]
    assert export(*words, "--heads", str(backbones / "heads")) == 2
    assert export(*words, "--heads", str(tmp_path / "heads")) == 0


@pytest.mark.parametrize(
    "settings",
    [{"kind": "hydra"}, {"kind": "markov"}, {"kind": "eagle"}, {"prefix_layers": 1}, {"vocabulary": 40}],
    ids=str,
)
def test_unsupported_heads_are_not_exported(
    settings: dict[str, Any], llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    heads = random_heads(llama, 2, base_model_name_or_path="org/model", **settings)
    heads.save_pretrained(tmp_path / "heads")
    assert export("--heads", str(tmp_path / "heads"), "--output", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert "decodes with independent and cascaded heads, not with heads with" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
