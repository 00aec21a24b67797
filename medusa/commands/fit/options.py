"""The options of `medusa fit`, and the heads that they choose, from a table in the package."""

from __future__ import annotations

import os
from argparse import BooleanOptionalAction
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from decode.settings import IGNORES
from medusa.commands.effects import require_of_kind, require_revisions
from medusa.commands.options import Output, Prompts, RuntimeOptions
from medusa.commands.prompting import raw_option, template_option
from medusa.errors import RequestError, choose_one_of
from medusa.files import ASSETS, Json, require_writable_folder
from medusa.heads import KINDS, kinds_where
from medusa.options import REQUIRED, LoadOptions, Options, count, group, option
from medusa.places import require_backbone

PURPOSES = ("transformers", "vllm", "sglang")
STATE = "fit.json"  # in the output folder: the request, the plan and the results of finished stages
REPORT, RESULTS = "report.html", "benchmark.json"  # of the benchmark


class FitOptions(Options):
    """Options of `medusa fit`."""

    shown = "model prompts output for minutes kind start plan overwrite max-new-tokens device dtype json"
    model: str = option(
        REQUIRED,
        "speed up this model: a folder, a GGUF file, a Hub id, or demo (shipped)",
        metavar="MODEL",
        positional=True,
        brief="speed up this model: a folder, a GGUF file, a Hub id, or demo",
        exists=require_backbone,
    )
    prompts: Prompts = group(Prompts, "prompts", without=("prompt", "skip_long"), prompts=REQUIRED)
    out: str | None = option(
        None,
        "write heads, report and all files of the run to DIR (default: NAME-heads)",
        metavar="DIR",
        name="output",
        brief="write all results to DIR (default: NAME-heads)",
    )
    purpose: str = option(
        "transformers",
        f"make heads for {', '.join(PURPOSES[:-1])} or {PURPOSES[-1]}",
        metavar="SERVER",
        name="for",
        brief="make heads for transformers, vllm or sglang",
    )
    minutes: float | None = option(
        None,
        "generate text and train for about M minutes in total (default: one answer per prompt; 4 to 480 minutes)",
        "above 0",
        lambda value: 0 < value < float("inf"),
        "M",
        type=float,
        brief="generate text and train for M minutes (default: see --plan)",
    )
    kind: str | None = option(
        None,
        f"train heads of this kind: {', '.join(KINDS)} (default: markov; eagle for vllm and sglang)",
        metavar="NAME",
        brief="train heads of this kind (default: markov; eagle for vllm and sglang)",
    )
    compare: bool = option(False, "train heads of several kinds, and keep the fastest")
    start: str | None = option(
        None,
        "continue these heads, such as those of the base model of a fine-tune: a folder or Hub id",
        metavar="HEADS",
        brief="continue these heads, such as those of the base model",
    )
    compile: bool | None = option(
        None,
        "find the tree and measure the speedup with compiled steps; --no-compile: with eager ones (default: compiled "
        "on a CUDA GPU)",
        action=BooleanOptionalAction,
    )
    plan: bool = option(False, "print the cost in time, memory and disk, and stop")
    server: str | None = option(
        None, "let this OpenAI-compatible server (vLLM, SGLang, ...), which runs MODEL, write the text", metavar="URL"
    )
    server_model: str | None = option(
        None, "use this model of the server (default: the only model that it serves)", metavar="NAME"
    )
    overwrite: bool = option(False, "delete an earlier fit in DIR and start again")
    raw: bool | None = raw_option()
    template_option: tuple[str, ...] = template_option()
    tokens: int = count(
        256,
        "generate at most N tokens of text per answer",
        name="max_new_tokens",
        brief="generate at most N tokens per answer",
    )
    ignore_eos: bool = option(False, "continue answers after the end-of-text token, for models that end them at once")
    ignore_generation_config: bool = option(False, IGNORES)
    load: LoadOptions = group(LoadOptions, "loading")
    runtime: RuntimeOptions = group(RuntimeOptions, "runtime")
    output: Output = group(Output, "output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.purpose in ("ollama", "llama.cpp"):
            way = "llama.cpp loads the heads of --for vllm, after medusa export HEADS --to llama.cpp"
            raise RequestError(f"--for is {self.purpose!r}; {way}" + "; Ollama loads none" * (self.purpose == "ollama"))
        if self.purpose not in PURPOSES:
            raise RequestError(f"--for is {self.purpose!r}; {choose_one_of(self.purpose, PURPOSES)}")
        if self.kind is not None and self.kind not in KINDS:
            known = kinds_where(lambda kind: not kind.comes_with_model)
            if self.kind not in known:
                raise RequestError(f"--kind is {self.kind!r}; {choose_one_of(self.kind, known)}")
        if self.server_model and not self.server:
            raise RequestError("--server-model names a model of --server; add --server URL, or leave it out")
        if self.kind is not None and self.compare:
            raise RequestError("--compare trains several kinds, and --kind names one; leave one out")
        if self.start is not None and (self.compare or self.kind is not None):
            given = "--compare" if self.compare else "--kind"
            raise RequestError(f"--start continues heads of one kind, which {given} would change; leave {given} out")
        if self.purpose != "transformers" and (self.compare or self.kind not in (None, "eagle", "dflash")):
            given = "--compare" if self.compare else f"--kind {self.kind}"
            raise RequestError(
                f"--for {self.purpose} needs heads of kind eagle or dflash, and {given} asks for others; leave --kind "
                "and --compare out"
            )
        require_revisions(self.model, self.load.revision)
        if not self.plan:
            require_writable_folder(self.folder, option="--output")
            require_of_kind("output", self.folder, "a folder of medusa fit", STATE)
            if self.start is not None and Path(self.start).resolve().is_relative_to(self.folder.resolve()):
                raise RequestError(f"--output {self.folder} holds the heads of --start; choose another --output")

    @property
    def folder(self) -> Path:
        """The folder of the run, which holds the heads at the end."""
        name = Path(os.path.abspath(self.model)).name.removesuffix(".gguf")
        return Path(self.out if self.out is not None else f"{name}-heads")

    def output_to(self, path: Path | None) -> Output:
        """The output options of a stage's command, which writes its results to the file `path`."""
        return replace(self.output, json=None if path is None else str(path), command_line="")

    def request(self, prompts: str) -> Json:
        """Return what a continued run must have in common with the run that it continues; `prompts`: their digest."""
        names = ("purpose", "minutes", "kind", "compare", "tokens", "ignore_eos", "raw")
        about = {name: getattr(self, name) for name in names}
        # Runs of earlier versions do not have these.
        about["start"], about["server"] = self.start, bool(self.server) or None
        about["server_model"] = self.server_model
        about["template_option"] = list(self.template_option) or None
        about["ignore_generation_config"] = self.ignore_generation_config or None
        load = {name: getattr(self.load, name) for name in ("dtype", "device", "attention", "revision", "quantization")}
        return {"model": self.model, "prompts": prompts, "seed": self.runtime.seed} | about | load


class HeadsChoice(NamedTuple):
    """Heads to train: their name, their section `heads` in a recipe, and the reason for the choice."""

    name: str
    heads: Json
    reason: str


def choose_heads(options: FitOptions, sizes: tuple[int, int] = (0, 0)) -> list[HeadsChoice]:
    """Choose the heads to train; the result has one element, or several with --compare.

    Heads of --start must have the model's hidden size and vocabulary size (`sizes`) and suit the server of --for; else
    RequestError is raised."""
    import yaml

    table = yaml.safe_load((ASSETS / "kinds.yaml").read_text(encoding="utf-8"))
    if options.compare:
        reason = "--compare: the fastest after calibration is kept"
        return [HeadsChoice(kind, {"kind": kind}, reason) for kind in table["compare"]]
    if options.kind is not None and (options.purpose == "transformers" or options.kind == "dflash"):
        return [HeadsChoice(options.kind, {"kind": options.kind}, "--kind asks for it")]
    row = table["transformers" if options.purpose == "transformers" else "servers"]
    if options.start is not None:
        from medusa.checkpoints.folder import load
        from train.config import HeadsConfig
        from train.heads import startable

        served: Json = {}
        if options.purpose != "transformers" and load(options.start).config.kind != "dflash":
            served = {**row["heads"], "lm_head": None}  # any LM head will do
        heads = {"start": options.start, **served}
        held = startable(options.start, HeadsConfig(**heads), *sizes, option="--start").config
        name = held.backbone.get("name") or "another model"
        return [HeadsChoice(held.kind, heads, f"--start continues {options.start}, trained for {name}")]
    return [HeadsChoice(row["heads"]["kind"], row["heads"], row["reason"])]
