"""Check which models can verify a token tree: tiny random models of many architectures, or one given model.

    python scripts/check_architectures.py                               # the tables of docs/architectures.md
    python scripts/check_architectures.py --write docs/architectures.md --json architectures.json
    python scripts/check_architectures.py --only llama "phi3, longrope"
    python scripts/check_architectures.py --backbone org/model          # the self-test on this model

The exit status is 1 if a model does not behave as its table says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import fill

import torch
import transformers
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel

from decode.bench.methods import medusa_method
from decode.settings import Settings
from decode.tree_check import TreeCheck, check_tree_forward
from medusa import RequestError, Tree
from medusa.arguments import parse
from medusa.backbone import Backbone, require_tree_support
from medusa.commands.options import Output
from medusa.files import write_text
from medusa.loading import load_backbone
from medusa.options import LoadOptions, Options, group, option
from script_tools import markdown_table, run_script, script_parser
from tiny_models import MULTIMODAL, RECURRENT, REFUSED, SUPPORTED, VOCAB, random_heads, tiny_model

# Wide, because random heads guess badly: of 61 tokens, the next one is among 30 guesses every second time.
TREE = Tree.top_k([30, 3])
PROMPTS, NEW = (1, 2, 5, 12, 40), 16  # tokens of the prompts, and new tokens, which go far beyond a sliding window
ATTENTIONS = ("sdpa", "eager")
CHECKED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SUPPORTED_COLUMNS = ["model", "float32", "16 bits", "control", "tau"]
REFUSED_COLUMNS = ["model", "class", "refused because", "the self-test alone"]
VERSIONS = f"transformers {transformers.__version__} and torch {torch.__version__} on a CPU"
BEGIN, END = "<!-- tables: begin (scripts/check_architectures.py --write) -->", "<!-- tables: end -->"


@dataclass
class Row:
    """The findings about one architecture, which form a row of a table."""

    name: str
    model: str = ""
    checks: dict[str, dict[str, TreeCheck]] = field(default_factory=dict)
    """The self-test by attention implementation, if the model offers it, and by dtype."""
    same: dict[str, bool] = field(default_factory=dict)
    """Whether the greedy texts equal those of `model.generate`, by attention implementation."""
    tau: float | None = None  # tokens per step of these texts; at 1, no draft was accepted, so nothing was tested
    refusal: str | None = None  # why `require_tree_support` refuses the model

    @property
    def all_checks(self) -> list[TreeCheck]:
        return [check for by_dtype in self.checks.values() for check in by_dtype.values()]

    @property
    def caught(self) -> str:
        """The error that the self-test alone finds in a refused model."""
        return self.all_checks[0].reason or "nothing" if self.all_checks else "not run"

    @property
    def as_expected(self) -> bool:
        """Whether the findings are those of a supported or a refused architecture."""
        if self.name in REFUSED:
            return self.refusal is not None and self.caught != "nothing"
        equal = bool(self.checks) and self.same == dict.fromkeys(self.checks, True)
        return equal and all(check.ok for check in self.all_checks) and (self.tau or 0) > 1

    def cells(self) -> list[str]:
        """Return the cells of this row in its table."""
        if self.name in REFUSED:
            return [self.name, self.model, self.refusal or "NOT REFUSED", re.split(": | [(]", self.caught)[0]]
        columns = (("float32",), ("bfloat16", "float16"))
        errors = [short([checks[dtype] for dtype in dtypes for checks in self.checks.values()]) for dtypes in columns]
        control = min(check.control for check in self.all_checks)
        text = "" if all(self.same.values()) else " DIFFERS"
        return [self.name, *errors, f"{control:.2f}", f"{self.tau:.2f}{text}"]


def short(checks: Sequence[TreeCheck]) -> str:
    """Format the largest error of some self-tests with one digit; a failed self-test is marked."""
    error = max(check.error for check in checks)
    mark = "" if all(check.ok for check in checks) else "FAILS "
    return mark + ("0" if error == 0 else f"{error:.0e}".replace("e-0", "e-"))


def check_supported(name: str) -> Row:
    """Run the self-test for each attention implementation and dtype, and compare greedy text with `model.generate`."""
    row = Row(name)
    for attention in ATTENTIONS:
        for dtype_name, dtype in CHECKED.items():
            if (model := offered(name, dtype=dtype, attn_implementation=attention)) is None:
                break
            require_tree_support(model)
            row.checks.setdefault(attention, {})[dtype_name] = check_tree_forward(model)
            if dtype == torch.float32:
                row.model = type(model).__name__
                row.same[attention], row.tau = compare_texts(model)
    return row


def check_refused(name: str) -> Row:
    """Record why the model is refused, and whether the self-test alone would find an error."""
    model = offered(name, attn_implementation="sdpa") or tiny_model(name)
    row = Row(name, type(model).__name__)
    try:
        require_tree_support(model)
    except RequestError as error:
        row.refusal = str(error).split(": ", 1)[1]
    if not model.config.is_encoder_decoder:  # an encoder-decoder has no plain forward to compare with
        row.checks[model.config._attn_implementation] = {"float32": check_tree_forward(model)}
    return row


def offered(name: str, **settings: object) -> PreTrainedModel | None:
    """Make a tiny model, or return `None` if it does not offer the attention implementation in `settings`."""
    try:
        return tiny_model(name, **settings)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        return None


def compare_texts(model: PreTrainedModel) -> tuple[bool, float]:
    """Return whether random heads write the greedy texts of `model.generate`, alone and in a ragged batch; and tau."""
    settings, generator = Settings(max_new_tokens=NEW), torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    ours = medusa_method(model, random_heads(model, TREE.max_depth, std=0.3), settings, tree=TREE)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in PROMPTS]
    expected = [generated(model, ids) for ids in prompts]
    alone = [ours([ids])[0] for ids in prompts]
    same = [result.new_ids for result in alone] == expected
    if Backbone(model).rope_boundary is None:  # longrope rotates all rows of a batch alike, so batches are refused
        same &= [result.new_ids for result in ours(prompts)] == expected
    return same, len(PROMPTS) * NEW / sum(len(result.step_lengths) for result in alone)


def generated(model: PreTrainedModel, ids: list[int]) -> list[int]:
    """Return the new tokens that transformers' own `model.generate` writes after the prompt `ids`."""
    prompt = torch.tensor([ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)
    return out[0, len(ids) :].tolist()


def markdown(rows: Sequence[Row], brief: bool = False) -> str:
    """Format the findings, with the versions that they were made with; `brief` names the supported models only."""
    found = [row for row in rows if row.name not in {*RECURRENT, *REFUSED}]
    supported = summary(found) if brief else markdown_table(SUPPORTED_COLUMNS, [row.cells() for row in found])
    recurrent = markdown_table(SUPPORTED_COLUMNS, [row.cells() for row in rows if row.name in RECURRENT])
    refused = markdown_table(REFUSED_COLUMNS, [row.cells() for row in rows if row.name in REFUSED])
    sections = {"Supported": supported, "With recurrent layers": recurrent, "Refused": refused}
    return "\n\n".join([f"Run with {VERSIONS}.", *(f"### {title}\n\n{text}" for title, text in sections.items())])


def summary(rows: Sequence[Row]) -> str:
    """Name the supported models, and give the worst of their figures; a model that failed is marked."""
    names = "; ".join(row.name if row.as_expected else f"{row.name} (FAILS)" for row in rows)
    good = [row for row in rows if row.as_expected]
    if not good:
        return f"{names}."
    half = [checks[dtype] for row in good for checks in row.checks.values() for dtype in ("bfloat16", "float16")]
    errors = short([checks["float32"] for row in good for checks in row.checks.values()]), short(half)
    control = min(check.control for row in good for check in row.all_checks)
    figures = (
        f"Largest error: {errors[0]} in float32, {errors[1]} in 16 bits. Smallest control: {control:.2f}. "
        f"Smallest tau: {min(row.tau or 0 for row in good):.2f}."
    )
    return f"{fill(names, 120, break_long_words=False, break_on_hyphens=False)}.\n\n{figures}"


def write_page(path: Path, rows: Sequence[Row]) -> None:
    """Replace the tables between the page's markers; the rest of the page stays."""
    if not path.is_file():
        raise RequestError(f"no such file: {path}")
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise RequestError(f"{path} lacks the lines {BEGIN!r} and {END!r} between which the tables go")
    write_text(path, f"{before}{BEGIN}\n\n{markdown(rows, brief=True)}\n\n{END}{after}")


class CheckOptions(Options):
    """Options of check_architectures.py."""

    only: tuple[str, ...] | None = option(None, "check only these rows", metavar="NAME", nargs="+")
    write: str | None = option(None, "put the findings into this Markdown file", metavar="PAGE")
    backbone: str | None = option(None, "check this model instead: demo, a folder or a Hub id", metavar="MODEL")
    load: LoadOptions = group(LoadOptions, "loading of --backbone")
    output: Output = group(Output, "output", only=("json",))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(CheckOptions, script_parser(__doc__), argv)
    transformers.logging.set_verbosity_error()
    if options.backbone:
        model = load_backbone(options.backbone, options.load).model
        require_tree_support(model)
        check = check_tree_forward(model)
        how = f"{str(model.dtype).removeprefix('torch.')}, {model.config._attn_implementation}"
        print(f"{type(model).__name__} ({how}): {'can' if check.ok else 'cannot'} hold a tree")
        print(f"error {check.error:.1e}, at most {check.limit:.1e}; control {check.control:.2f}")
        if check.reason:
            print(check.reason)
        options.output.write(asdict(check))
        return 0 if check.ok else 1
    names = [*SUPPORTED, *MULTIMODAL, *RECURRENT, *REFUSED]
    if unknown := sorted(set(options.only or []) - set(names)):
        raise RequestError(f"--only {unknown[0]!r} is no row; choose from {', '.join(names)}")
    if options.only and options.write:
        raise RequestError("--write needs all rows; leave --only out")
    progress = track(options.only or names, "checking", console=Console(stderr=True), transient=True)
    rows = [check_refused(name) if name in REFUSED else check_supported(name) for name in progress]
    if options.write:
        write_page(Path(options.write), rows)
    print(markdown(rows))
    options.output.write({"versions": VERSIONS, "rows": [asdict(row) for row in rows]})
    if wrong := [row.name for row in rows if not row.as_expected]:
        print(f"not as expected: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    run_script(main)
