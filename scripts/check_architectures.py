"""Check which models can hold a tree: tiny random models of many architectures, or a model of yours.

    python scripts/check_architectures.py                               # the tables of docs/architectures.md
    python scripts/check_architectures.py --write docs/architectures.md --json architectures.json
    python scripts/check_architectures.py --only llama "phi3, longrope"
    python scripts/check_architectures.py --backbone org/model          # the self-test on a model of yours

Exit status 1 if a model does not behave as its table says.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel

from decode import steps
from decode.bench.methods import left_padded
from decode.loop import Step
from decode.tree_check import TreeCheck, check_tree_forward
from medusa import RequestError, Tree
from medusa.backbone import Backbone, require_tree_support
from medusa.files import write_json, write_text
from medusa.loading import DTYPES, LoadOptions, load_backbone
from script_tools import markdown_table, run_script, script_parser
from tiny_models import REFUSED, SUPPORTED, VOCAB, random_heads, tiny_model

# Wide, because random heads guess badly: the next of 61 tokens is among 40 guesses two times in three.
TREE = Tree.top_k([40, 4])
PROMPTS, NEW = (9, 4, 6), 30  # tokens: three rows of a ragged batch; all end far beyond the window
CHECKED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SUPPORTED_COLUMNS = ["model", "class", "attention", *CHECKED, "control", "greedy text", "tau"]
REFUSED_COLUMNS = ["model", "class", "refused because", "the self-test alone"]
BEGIN, END = "<!-- tables: begin (scripts/check_architectures.py --write) -->", "<!-- tables: end -->"


@dataclass
class Row:
    """What was found about one architecture."""

    name: str
    model: str = ""
    checks: dict[str, dict[str, TreeCheck]] = field(default_factory=dict)
    """The self-test by attention implementation and dtype; only those that the model offers."""
    same: bool | None = None
    """Whether greedy text is that of `model.generate`, alone and in a ragged batch; `None` for refused models."""
    tau: float | None = None
    """Tokens a step of that text. At 1, no draft was accepted, and nothing was tested."""
    refusal: str | None = None
    """Why the model is refused by its structure."""

    @property
    def all_checks(self) -> list[TreeCheck]:
        return [check for by_dtype in self.checks.values() for check in by_dtype.values()]

    @property
    def caught(self) -> str:
        """What the self-test alone says about a refused model."""
        return self.all_checks[0].reason or "nothing" if self.all_checks else "not run"

    @property
    def as_expected(self) -> bool:
        if self.name in REFUSED:
            return self.refusal is not None and self.caught != "nothing"
        return bool(self.checks) and all(c.ok for c in self.all_checks) and bool(self.same) and (self.tau or 0) > 1

    def cells(self) -> list[str]:
        """The row of the table."""
        if self.name in REFUSED:
            return [self.name, self.model, self.refusal or "NOT REFUSED", re.split(": | [(]", self.caught)[0]]
        by_dtype = [[checks[dtype] for checks in self.checks.values()] for dtype in CHECKED]
        errors = [" / ".join(map(short, checks)) for checks in by_dtype]
        control = min(check.control for check in self.all_checks)
        text = "same" if self.same else "DIFFERS"
        return [self.name, self.model, " / ".join(self.checks), *errors, f"{control:.2f}", text, f"{self.tau:.2f}"]


def short(check: TreeCheck) -> str:
    """A check's error with one digit, marked if the check failed."""
    return ("" if check.ok else "FAILS ") + ("0" if check.error == 0 else f"{check.error:.0e}".replace("e-0", "e-"))


def check_supported(name: str) -> Row:
    """Run the self-test for every attention and dtype, and compare greedy text with `model.generate` in float32."""
    row = Row(name)
    for attention in ("sdpa", "eager"):
        for dtype_name, dtype in CHECKED.items():
            model = offered(name, dtype=dtype, attn_implementation=attention)
            if model is None:
                break
            require_tree_support(model)
            row.checks.setdefault(attention, {})[dtype_name] = check_tree_forward(model)
    model = tiny_model(name)  # with the attention that transformers chooses
    row.model = type(model).__name__
    assert model.config._attn_implementation == next(iter(row.checks)), "sdpa if it is offered, else eager"
    row.same, row.tau = compare_texts(model)
    return row


def check_refused(name: str) -> Row:
    """Find the reason that users see, and whether the self-test alone would have caught the model."""
    model = offered(name, attn_implementation="sdpa") or tiny_model(name)
    row = Row(name, type(model).__name__)
    try:
        require_tree_support(model)
    except RequestError as error:
        row.refusal = str(error).split(": ", 1)[1]
    if not model.config.is_encoder_decoder:  # these have no plain forward to compare with
        row.checks[model.config._attn_implementation] = {"float32": check_tree_forward(model)}
    return row


def offered(name: str, **settings: object) -> PreTrainedModel | None:
    """Make a tiny model; `None` if it does not offer the attention implementation."""
    try:
        return tiny_model(name, **settings)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        return None


def compare_texts(model: PreTrainedModel) -> tuple[bool, float]:
    """Whether random heads give the text of `model.generate`, for prompts alone and in a batch; and tokens a step."""
    backbone, generator = Backbone(model), torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    heads = random_heads(model, TREE.max_depth, std=0.3)
    prompts = [torch.randint(VOCAB, (1, length), generator=generator) for length in PROMPTS]
    options = {"max_new_tokens": NEW, "do_sample": False}
    plain = [model.generate(ids, **options)[0, ids.shape[1] :].tolist() for ids in prompts]
    runs = [list(steps(model, heads, ids, tree=TREE, **options)) for ids in prompts]
    same = all(written(run, 0) == text for run, text in zip(runs, plain, strict=True))
    if backbone.rope_boundary is None:  # longrope rotates all rows of a batch alike, so batches are refused
        batch = left_padded([ids[0].tolist() for ids in prompts], model.device)
        together = list(steps(model, heads, tree=TREE, **batch, **options))
        same &= all(written(together, row) == text for row, text in enumerate(plain))
    return same, len(PROMPTS) * NEW / sum(map(len, runs))


def written(run: Sequence[Step], row: int) -> list[int]:
    return [token for step in run for token in step.ids.get(row, [])]


def versions() -> str:
    return f"transformers {transformers.__version__} and torch {torch.__version__} on a CPU"


def markdown(rows: Sequence[Row]) -> str:
    """Both tables, and the versions that they were made with."""
    supported = markdown_table(SUPPORTED_COLUMNS, [row.cells() for row in rows if row.name not in REFUSED])
    refused = markdown_table(REFUSED_COLUMNS, [row.cells() for row in rows if row.name in REFUSED])
    return f"Run with {versions()}.\n\n### Supported\n\n{supported}\n\n### Refused\n\n{refused}"


def write_page(path: Path, rows: Sequence[Row]) -> None:
    """Put the tables between the page's markers; the rest of the page is written by hand."""
    if not path.is_file():
        raise RequestError(f"no such file: {path}")
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise RequestError(f"{path} lacks the lines {BEGIN!r} and {END!r} between which the tables go")
    write_text(path, f"{before}{BEGIN}\n\n{markdown(rows)}\n\n{END}{after}")


def check_backbone(args: argparse.Namespace) -> bool:
    """Run the self-test on the user's own model."""
    options = LoadOptions(args.dtype, args.device, args.attention, args.revision, args.trust_remote_code)
    model = load_backbone(args.backbone, options).model
    require_tree_support(model)
    check = check_tree_forward(model)
    how = f"{str(model.dtype).removeprefix('torch.')}, {model.config._attn_implementation}"
    print(f"{type(model).__name__} ({how}): {'can' if check.ok else 'cannot'} hold a tree")
    print(f"error {check.error:.1e}, at most {check.limit:.1e}; control {check.control:.2f}")
    if check.reason:
        print(check.reason)
    if args.json:
        write_json(args.json, asdict(check))
    return check.ok


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="check these rows only")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this Markdown file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine-readable results")
    parser.add_argument("--backbone", metavar="MODEL", help="check this model instead: demo, a folder or a Hub id")
    parser.add_argument("--dtype", choices=DTYPES, help="of --backbone (default: float32 on a CPU)")
    parser.add_argument("--device", help="for --backbone (default: a GPU if there is one)")
    parser.add_argument("--attention", choices=["sdpa", "eager"], help="of --backbone (default: sdpa if offered)")
    parser.add_argument("--revision", help="of --backbone: a branch or a commit")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with --backbone")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    if args.backbone:
        return 0 if check_backbone(args) else 1
    names = [*SUPPORTED, *REFUSED]
    if unknown := sorted(set(args.only or []) - set(names)):
        raise RequestError(f"--only {unknown[0]!r} is no row; choose from {', '.join(names)}")
    if args.only and args.write:
        raise RequestError("--write needs all rows; leave --only out")
    progress = track(args.only or names, "checking", console=Console(stderr=True), transient=True)
    rows = [check_refused(name) if name in REFUSED else check_supported(name) for name in progress]
    if args.write:
        write_page(args.write, rows)
    print(markdown(rows))
    if args.json:
        write_json(args.json, {"versions": versions(), "rows": [asdict(row) for row in rows]})
    if wrong := [row.name for row in rows if not row.as_expected]:
        print(f"not as expected: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    run_script(main)
