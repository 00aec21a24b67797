"""The ways in of the matrix test: each decodes one cell and gives the new tokens of its rows."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from decode import generate, medusa_generate, steps
from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext, DrafterFactory
from decode.drafters.retrieval.datastore import Piece, build
from decode.serve.app import CompletionApi
from decode.serve.worker import BatchWorker
from decode.settings import DecodingOptions, Settings
from decode.strategies.contrastive import Amateur
from decode.strategies.grammar import Grammars, lark_source
from decode.texts import TextGenerator
from fuzz_cases import Case
from fuzz_models import make_heads, noisy_copy
from medusa import MedusaHeads
from medusa.__main__ import main
from medusa.errors import RequestError
from medusa.loading import BackboneFiles, Loaded
from medusa.options import LoadOptions
from tests.helpers import LETTERS, VOCAB, left_padded, plain, tiny_model
from tests.matrix_axes import (
    EOS,
    NEW,
    NOT_OF_COMMANDS,
    ONE_CHOICE,
    PADS,
    PROMPTS,
    SEED,
    Collector,
    Contrast,
    Drafting,
    Option,
    after_grammar,
    filled_cache,
)
from tests.native_models import save_native

Rows = list[list[int]]
HEADS = {"num_heads": 3, "num_layers": 1, "fitted": 30}
LOAD = BackboneFiles.load  # of which the test keeps the results
INPUTS = ("attention_mask", "position_ids", "past_key_values")
IN_REQUESTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")
"""The fields of `Settings` that a request to the server may hold under the same name."""


class Place:
    """The models, heads and files of all cells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: dict[object, Any] = {}
        inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(LETTERS)}, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=LETTERS[EOS])
        self.model = self._saved("model", tiny_model("llama", num_hidden_layers=1, eos_token_id=EOS))
        self.draft = self._saved("draft", noisy_copy(self.model, 1))
        self.amateur = self._saved("amateur", tiny_model("llama", 1, num_hidden_layers=1, eos_token_id=EOS))
        self.text = plain(self.model, PROMPTS[0], max_new_tokens=3 * NEW)
        texts = [[*prompt, *plain(self.model, prompt, max_new_tokens=NEW)] for prompt in PROMPTS]
        about = {"backbone": "tiny", "tokenizer": None, "vocab_size": VOCAB}
        build(folder / "store", [Piece(str(text), text) for text in texts], lambda piece: piece.content, about)

    def _saved(self, name: str, model: PreTrainedModel) -> PreTrainedModel:
        model.save_pretrained(self.folder / name)
        self.tokenizer.save_pretrained(self.folder / name)
        return model

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    @cached_property
    def native(self) -> PreTrainedModel:
        """A model whose files hold an MTP layer."""
        save_native("deepseek_v3", self.folder / "native", eos_token_id=EOS)
        self.tokenizer.save_pretrained(self.folder / "native")
        return LOAD(BackboneFiles(str(self.folder / "native"))).model

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.model, self.tokenizer)

    def loaded(self, name: str, options: LoadOptions) -> Loaded:
        """Load a backbone like a command, but read its weights once; its settings of generation are the folder's."""
        weights = (Path(name) / "model.safetensors").resolve()
        loaded = self.once(weights, lambda: LOAD(BackboneFiles(name, options)))
        loaded.model.generation_config = GenerationConfig.from_pretrained(name)
        return loaded

    def backbone(self, drafting: Drafting, settings: dict[str, Any]) -> Path:
        """Give the folder of a model whose `generation_config.json` holds the settings; other files are links."""
        name = "native" if drafting.base == "mtp" else "model"

        def make() -> Path:
            _ = getattr(self, name)  # writes the files, if that was not done before
            copy = self.folder / f"{name} {len(self.kept)}"
            copy.mkdir()
            for path in (self.folder / name).iterdir():
                (copy / path.name).symlink_to(path)
            (copy / "generation_config.json").unlink()
            content = json.dumps({"eos_token_id": EOS} | settings)
            (copy / "generation_config.json").write_text(content, encoding="utf-8")
            return copy

        return self.once((name, str(settings)), make)

    def heads(self, drafting: Drafting) -> MedusaHeads | None:
        """Heads that are trained on the first prompt's text, so that some guesses are right."""
        if drafting.kind is None:
            return None
        settings = {"kind": drafting.kind, "lm_head": "own"} | HEADS | drafting.heads
        case = Case(3, "llama", "sdpa", {}, [], "heads", None, settings, "", "", {})
        return self.once(str(settings), lambda: make_heads(case, self.model, [PROMPTS[0] + self.text]))

    def spec(self, drafting: Drafting) -> str:
        return drafting.spec.format(draft=self.folder / "draft", store=self.folder / "store")

    def factory(self, drafting: Drafting, tree: Any, stop_drafting: float = 0.0) -> DrafterFactory:
        model = self.native if drafting.base == "mtp" else self.model
        context = DrafterContext(model, self.heads(drafting), tree, stop_drafting=stop_drafting)
        return drafter_factory(self.spec(drafting), context)


@dataclass
class Cell:
    """A drafter with some options by one way in."""

    place: Place
    drafting: Drafting
    options: tuple[Option, ...]
    way: str
    longest_step = 0  # of the way `steps`: the most tokens that one step wrote

    @property
    def model(self) -> PreTrainedModel:
        return self.place.native if self.drafting.base == "mtp" else self.place.model

    @property
    def prompts(self) -> Rows:
        return PROMPTS if "batch" in self.way else PROMPTS[:1]

    @cached_property
    def theirs(self) -> dict[str, Any]:
        """The arguments of `model.generate`, without prompts."""
        given: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
        for option in self.options:
            given |= option.theirs
        if self.drafting.drawn:
            given |= ONE_CHOICE | {name: given[name] for name in ("temperature",) if name in given}
        made: dict[str, Callable[[], Any]] = {
            "assistant_model": lambda: self.place.draft,
            "past_key_values": lambda: filled_cache(self.model),
            "inputs_embeds": lambda: self.model.get_input_embeddings()(torch.tensor(PROMPTS[:1])),
        }
        given = {name: made[name]() if name in made else value for name, value in given.items()}
        if given["do_sample"] and given.get("temperature") is None:
            given["temperature"] = 1.0
        if {"stop_strings", "token_healing"} & given.keys():
            given["tokenizer"] = self.place.tokenizer
        return {name: value for name, value in given.items() if value is not None or name == "eos_token_id"}

    @cached_property
    def ours(self) -> dict[str, Any]:
        """The arguments that only this package takes, without the drafter."""
        given: dict[str, Any] = {"draft": "sample"} if self.drafting.drawn else {}
        for option in self.options:
            given |= option.ours
        if "amateur" in given:
            given["amateur"] = self.place.amateur
        if "streamer" in given:
            given["streamer"] = Collector()
        if "grammar" in given:
            source = lark_source(given["grammar"])
            given["grammar"] = self.place.once(source, lambda: self.place.grammars.compiled(source))
        return given

    @property
    def drafter(self) -> dict[str, Any]:
        """The drafter as arguments of `decode.generate`."""
        drafting, tree = self.drafting, self.ours.get("tree", self.drafting.tree)
        spec: Any = self.place.spec(drafting)
        if drafting.base in ("model", "rest"):  # so that files are read once
            spec = self.place.once(drafting.spec, lambda: self.place.factory(drafting, None))
        return {"heads": self.place.heads(drafting), "drafter": spec} | ({} if tree is None else {"tree": tree})

    @property
    def inputs(self) -> dict[str, Any]:
        """The prompts, with the attention mask that every call of transformers should get."""
        padded = left_padded([[0] * PADS + PROMPTS[0]] if "attention_mask" in self.theirs else self.prompts)
        if "attention_mask" in self.theirs:
            padded["attention_mask"][:, :PADS] = 0
        return padded | {name: self.theirs[name] for name in INPUTS[1:] if name in self.theirs}

    # What `model.generate` writes

    @property
    def shape(self) -> str:
        """Cells with the same drafting model, options and shape have the same expected text."""
        return self.way if "batch" in self.way or self.way in ("command", "server") else "one prompt"

    def expected(self) -> Rows:
        """The texts of `model.generate`: of each row alone, or of the padded batch that `custom_generate` gets."""
        if self.way == "custom batch":
            return self._written(self.inputs)
        if self.way != "batch":
            return self._written(self.inputs)
        alone = [self._written({"input_ids": torch.tensor([prompt])}, row) for row, prompt in enumerate(PROMPTS)]
        rows = [row for rows in alone for row in rows]
        end = self.theirs.get("pad_token_id", self.theirs.get("eos_token_id", EOS))
        width, pad = max(map(len, rows)), end[0] if isinstance(end, list) else end
        return [row + [pad] * (width - len(row)) for row in rows]

    def _written(self, inputs: dict[str, Any], row: int = 0) -> Rows:
        left_out = {*INPUTS, *(NOT_OF_COMMANDS if self.way in ("command", "server") else ())}
        left_out |= {"suppress_tokens"} if "ignore_generation_config" in self.ours else set()
        kwargs = {name: value for name, value in self.theirs.items() if name not in left_out}
        if "amateur" in self.ours:
            kwargs["logits_processor"] = [Contrast(self.place.amateur)]
        if "grammar" in self.ours:
            length = inputs["input_ids"].shape[1]
            kwargs["prefix_allowed_tokens_fn"] = lambda _, ids: after_grammar(ids[length:].tolist())
        torch.manual_seed(SEED + row)
        out = self.model.generate(**inputs, **kwargs)  # type: ignore[operator]
        return getattr(out, "sequences", out)[:, inputs["input_ids"].shape[1] :].tolist()

    def shown(self, rows: Rows) -> Rows:
        """Give the rows as the way shows them: the command writes one text for a prompt, whatever its model's settings
        say; the server shows no special tokens, and the text before a stop string."""
        if self.way != "server":
            return rows[:1] if self.way == "command" else rows
        texts = ["".join(LETTERS[token] for token in row if token != EOS) for row in rows]
        for stop in self.theirs.get("stop_strings", ()):
            texts = [text.partition(stop)[0] for text in texts]
        return [[LETTERS.index(letter) for letter in text] for text in texts]

    # The ways in

    def decoded(self) -> Rows:
        """Decode the cell by its way; raise a `RequestError` if it is refused."""
        ways = {"command": self._command, "server": self._server, "steps": self._steps}
        ways |= {"custom": self._custom, "custom batch": self._custom}
        torch.manual_seed(SEED)
        with torch.compiler.set_stance("force_eager"):
            return ways.get(self.way, self._generate)()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `decode.generate` and `decode.steps`, without the drafter."""
        given = self.theirs | self.ours | self.inputs
        given.pop("tree", None)
        if self.way != "batch" and "attention_mask" not in self.theirs:
            del given["attention_mask"]
        if self.way == "batch" and given["do_sample"]:
            given["seeds"] = [SEED + row for row in range(len(PROMPTS) * given.get("num_return_sequences", 1))]
        return given

    def _generate(self) -> Rows:
        given = self.arguments
        if self.way == "config":
            fields = vars(GenerationConfig()).keys() & self.theirs.keys()
            given["generation_config"] = GenerationConfig(**{name: given.pop(name) for name in fields})
        return self._rows(generate(self.model, **self.drafter, **given))

    def _custom(self) -> Rows:
        ours = {f"medusa_{name}": value for name, value in (self.ours | self.drafter).items()}
        theirs = {name: value for name, value in self.theirs.items() if name not in INPUTS}
        call: Any = self.model.generate
        return self._rows(call(**self.inputs, custom_generate=medusa_generate, **ours, **theirs))

    def _rows(self, out: Any) -> Rows:
        if self.theirs.get("return_dict_in_generate"):
            for name in ("scores", "logits"):
                assert (getattr(out, name) is not None) == bool(self.theirs.get(f"output_{name}")), f"wrong {name}"
            out = out.sequences
        given = self.inputs["input_ids"]
        assert torch.equal(out[:, : given.shape[1]].unique(dim=0), given.unique(dim=0)), "the prompts have changed"
        rows = out[:, given.shape[1] :].tolist()
        if "streamer" in self.ours:
            assert self.ours["streamer"].new_ids == rows[0], "the streamer received another text"
        return rows

    def _steps(self) -> Rows:
        rows: Rows = [[] for _ in range(self.theirs.get("num_return_sequences", 1))]
        for step in steps(self.model, **self.drafter, **self.arguments):
            for row, ids in step.ids.items():
                rows[row] += ids
                self.longest_step = max(self.longest_step, len(ids))
        return rows

    @cached_property
    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields of `Settings` as the command and the server take them, and the rest of transformers' settings."""
        given = dict(self.theirs)
        settings = {"max_new_tokens": given.pop("max_new_tokens")}
        sampling = {name: given.pop(name) for name in ("temperature", "top_k", "top_p", "min_p") if name in given}
        if given["do_sample"]:
            settings |= {"temperature": 1.0} | {name: value for name, value in sampling.items() if value}
        if "repetition_penalty" in given:
            settings["repetition_penalty"] = given.pop("repetition_penalty")
        if "stop_strings" in given:
            settings["stop"] = tuple(given.pop("stop_strings"))
        if given.get("eos_token_id", EOS) is None:
            settings["ignore_eos"], given["eos_token_id"] = True, list(range(0, VOCAB, 4))
        named = (*DecodingOptions.__dataclass_fields__, "ignore_generation_config")
        own = {name: self.ours[name] for name in named if name in self.ours}
        return settings | own, {name: value for name, value in given.items() if name in vars(GenerationConfig())}

    def _command(self) -> Rows:
        place, (settings, rest) = self.place, self.settings
        words = ["--backbone", str(place.backbone(self.drafting, rest)), "--drafter", place.spec(self.drafting)]
        if (heads := place.heads(self.drafting)) is not None:
            words += ["--heads", place.once(id(heads), lambda: saved(heads, place.folder / f"heads {id(heads)}"))]
        words += [word for word in ("--tree", self.ours.get("tree", self.drafting.tree)) if self.drafter.get("tree")]
        for name, value in settings.items():
            flag = f"--{name.replace('_', '-')}"
            values = value if isinstance(value, tuple) else (value,)
            words += [flag] if value is True else [word for one in values for word in (flag, str(one))]
        if "amateur" in self.ours:
            words += ["--amateur", str(place.folder / "amateur")]
        if "grammar" in self.ours:
            (place.folder / "grammar").write_text(self.options[0].ours["grammar"], encoding="utf-8")
            words += ["--grammar", str(place.folder / "grammar")]
        out, text = place.folder / "out.json", "".join(LETTERS[token] for token in PROMPTS[0])
        told = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
            status = main(["generate", *words, "--prompt", text, "--json", str(out), "--seed", str(SEED)])
        if status == 2:
            raise RequestError(told.getvalue())
        assert status == 0, told.getvalue()
        return [result["new_ids"] for result in json.loads(out.read_text(encoding="utf-8"))["results"]]

    def _server(self) -> Rows:
        place, (settings, rest) = self.place, self.settings
        tree, prune = self.ours.get("tree", self.drafting.tree), settings.get("stop_drafting", 0.0)
        source = place.factory(self.drafting, tree, prune)
        body: dict[str, Any] = {"prompt": PROMPTS[0], "seed": SEED, "max_tokens": settings.pop("max_new_tokens")}
        body["n"] = rest.pop("num_return_sequences", 1)
        body |= {"stop": list(stop)} if (stop := settings.pop("stop", ())) else {}
        if not self.ours:  # otherwise the server's own settings need a temperature, too
            body |= {name: settings.pop(name) for name in IN_REQUESTS if name in settings}
        if "amateur" in self.ours:
            settings["amateur"] = Amateur.of(place.amateur)
        if "grammar" in self.ours:
            settings["grammar"] = self.ours["grammar"]
        kept = self.model.generation_config
        self.model.generation_config = GenerationConfig(**{"eos_token_id": EOS} | rest)
        asked = Settings(**settings).of_checkpoint(self.model.generation_config)
        generator = TextGenerator(self.model, asked, place.tokenizer, source)
        worker = BatchWorker(generator, 2)
        worker.start(lambda: None)
        try:
            answer = asyncio.run(post(CompletionApi(worker, "tiny").app(["here"]), body))
        finally:
            worker.stop()
            self.model.generation_config = kept
        if "error" in answer:
            raise RequestError(answer["error"]["message"])
        return [[LETTERS.index(letter) for letter in choice["text"]] for choice in answer["choices"]]


def saved(heads: MedusaHeads, folder: Path) -> str:
    heads.save_pretrained(folder)
    return str(folder)


async def post(app: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request to an ASGI application in this process; returns the JSON of its answer."""
    requests, parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}], [b""]

    async def receive() -> dict[str, Any]:
        if not requests:
            await asyncio.Event().wait()  # the client stays connected
        return requests.pop()

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "scheme": "http"}
    scope |= {"headers": [(b"host", b"here")], "query_string": b"", "root_path": "", "server": ("here", 80)}
    await app(scope, receive, send)
    return json.loads(b"".join(parts))
