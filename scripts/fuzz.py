"""Compare decoding with `model.generate` on random models, drafters, prompts and options, token by token, in float64.

    python scripts/fuzz.py --minutes 2 --seed 1         # minutes of CPU time
    python scripts/fuzz.py --cases 100 --seed 1
    python scripts/fuzz.py --seed 1 --case 17           # one case again

Each case is drawn from the seed and its number. Texts are greedy or samples. Samples either have only one token to
choose from (top_k 1), or both sides draw with the same seed. Compiled steps run without a compiler. A failure is
printed with the command that repeats it, and with a smaller case that fails in the same way. The exit status is 1 if a
text differs, if decoding raises another error than a RequestError, or if fewer than half of the cases were compared."""

from __future__ import annotations

import itertools
import re
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from decode import generate, medusa_generate, steps
from fuzz_cases import Case, Numbers, draw_case
from fuzz_models import arguments, make_drafter, make_model
from medusa.errors import RequestError, RunError
from script_tools import markdown_table, run_script, script_parser
from tiny_models import VOCAB

OURS = ("compile", "stop_drafting")  # options that `model.generate` does not have
SCORES = ("scores", "logits")
TOLERANCE = 1e-4  # of scores, which transformers rounds to float32
FAILED = ("differs", "raises")
ATTEMPTS = 60  # cases that are tried to make a failing case smaller


@dataclass
class Texts:
    """The new tokens of each row; on request also the scores of its tokens, and the length of each row's steps."""

    rows: list[Numbers]
    scores: dict[str, list[list[Tensor]]] = field(default_factory=dict)  # for each of SCORES, row and token: [V]
    step_lengths: list[int] = field(default_factory=list)


@dataclass
class Outcome:
    """What came of a case: `equal`, `differs`, `raises`, `refused`, or `no reference` if `model.generate` raises."""

    kind: str
    detail: str = ""
    tokens: int = 0
    step_lengths: Sequence[int] = ()


def reference(case: Case, model: PreTrainedModel) -> Texts:
    """Write the texts of `model.generate`, for one row at a time and without padding."""
    options = {name: value for name, value in case.options.items() if name not in (*OURS, "copies")}
    texts = Texts([])
    for row, prompt in enumerate(case.rows):
        ids = torch.tensor([prompt])
        torch.manual_seed(case.options.get("sampled", {}).get("seed", 0) + row)
        out = cast(Any, model).generate(ids, attention_mask=torch.ones_like(ids), **arguments(options, row))
        texts.rows.append(getattr(out, "sequences", out)[0, len(prompt) :].tolist())
        for name in SCORES:
            if (scores := getattr(out, name, None)) is not None:
                texts.scores.setdefault(name, []).append([score[0] for score in scores])
    return texts


def decoded(case: Case, model: PreTrainedModel, parts: dict[str, Any]) -> Texts:
    """Decode the texts of a case by its door, with prompts padded on the left; `parts`: heads, tree and drafter."""
    width, pad = max(map(len, case.prompts)), case.seed % VOCAB
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in case.prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in case.prompts])
    options = arguments(case.options)
    parts = parts | {name: options.pop(name) for name in OURS if name in options}
    sampling = case.options.get("sampled", {})
    if "draft" in sampling:
        parts["draft"] = sampling["draft"]
    torch.manual_seed(sampling.get("seed", 0))
    if "seed" in sampling and len(case.rows) > 1:
        options["seeds"] = [sampling["seed"] + row for row in range(len(case.rows))]
    if case.form == "config":
        own = {name: options.pop(name) for name in list(options) if hasattr(model.generation_config, name)}
        options["generation_config"] = GenerationConfig(**own)
    if case.form == "mask" or case.door == "custom_generate" or not mask.all():
        options["attention_mask"] = mask.bool() if case.form == "mask" else mask
    if case.door == "steps":
        texts = Texts([[] for _ in case.rows])
        for step in steps(model, parts.pop("heads", None), ids, **parts, **options):
            for row, new in step.ids.items():
                texts.rows[row] += new
                texts.step_lengths.append(step.lengths[row])
        return texts
    if case.door == "generate":
        out = generate(model, inputs=ids, **parts, **options)
    else:
        named = {f"medusa_{name}": value for name, value in parts.items()}
        out = cast(Any, model).generate(ids, custom_generate=medusa_generate, **named, **options)
    sequences = getattr(out, "sequences", out)
    copies = case.options.get("copies", 1)
    assert torch.equal(sequences[:, :width], ids.repeat_interleave(copies, 0)), "the prompts have changed"
    scores = {name: found for name in SCORES if (found := getattr(out, name, None)) is not None}
    by_row = {name: [[at[row] for at in found] for row in range(len(sequences))] for name, found in scores.items()}
    return Texts(sequences[:, width:].tolist(), by_row)


def difference(case: Case, expected: Texts, found: Texts, model_eos: int | list[int] | None = None) -> str:
    """Say where `found` differs from `expected`; empty if nothing does. `steps` writes no padding and no scores.

    Texts are padded with the first end token, of the case or else of the model (`model_eos`)."""
    eos = case.options.get("eos_token_id", model_eos)
    pad = eos[0] if isinstance(eos, list) else eos
    width = max(map(len, expected.rows))
    for row, (wanted, written) in enumerate(zip(expected.rows, found.rows, strict=True)):
        rest = [] if case.door == "steps" else written[len(wanted) :]
        ours = written[: len(written) - len(rest)]
        if ours != wanted:
            at = next((at for at, pair in enumerate(zip(wanted, ours, strict=False)) if pair[0] != pair[1]), len(ours))
            return f"row {row}, token {at}: {ours[at : at + 3]} instead of {wanted[at : at + 3]}"
        if case.door != "steps" and (len(written) != width or any(token != (pad or 0) for token in rest)):
            return f"row {row} is padded with {rest}"
        for name in () if case.door == "steps" else expected.scores:
            if name not in found.scores or len(found.scores[name][row]) != width:
                return f"row {row}: no {name} for each of {width} tokens"
            pairs = zip(expected.scores[name][row], found.scores[name][row], strict=False)
            for at, (theirs, mine) in enumerate(pairs):
                if not torch.allclose(theirs.double(), mine.double(), rtol=TOLERANCE, atol=TOLERANCE):
                    return f"row {row}, token {at}: other {name}"
    return ""


def judge(case: Case) -> Outcome:
    """Decode a case and compare the texts with those of `model.generate`."""
    model = make_model(case)
    try:
        expected = reference(case, model)
    except Exception as error:  # transformers refuses options with errors of many types
        return Outcome("no reference", f"{type(error).__name__}: {error}")
    try:
        with tempfile.TemporaryDirectory() as folder, torch.compiler.set_stance("force_eager"):
            found = decoded(case, model, make_drafter(case, model, expected.rows, Path(folder)))
        if where := difference(case, expected, found, model.generation_config.eos_token_id):
            return Outcome("differs", where)
    except RequestError as error:
        return Outcome("refused", str(error))
    except Exception as error:  # any other error is a failure, which must not end the run
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("raises", f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")
    return Outcome("equal", "", sum(map(len, expected.rows)), found.step_lengths)


def smaller(case: Case) -> Iterator[Case]:
    """Yield cases that are smaller than `case`, each in one way."""
    for name in case.options:
        if name not in ("max_new_tokens", "max_length"):
            yield replace(case, options={key: value for key, value in case.options.items() if key != name})
    for row, prompt in enumerate(case.prompts):
        if len(case.prompts) > 1:
            yield replace(case, prompts=case.prompts[:row] + case.prompts[row + 1 :])
        if len(prompt) > 1:
            yield replace(case, prompts=[*case.prompts[:row], prompt[len(prompt) // 2 :], *case.prompts[row + 1 :]])
    if case.form != "plain":
        yield replace(case, form="plain")
    if case.model:
        yield replace(case, model={})


def shrunk(case: Case, kind: str) -> Case:
    """Make a failing case smaller as long as it still fails with an outcome of this `kind`."""
    tried = itertools.count()
    while less := next((c for c in smaller(case) if next(tried) < ATTEMPTS and judge(c).kind == kind), None):
        case = less
    return case


def summary(done: Sequence[tuple[Case, Outcome]], seed: int) -> str:
    """Format what was compared: cases and tokens by drafter, tree and family; tau of the door `steps`; refusals."""
    kinds = Counter(outcome.kind for _, outcome in done)
    parts = [f"seed {seed}: {len(done)} cases, {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}"]
    for title, of in (("drafter", "kind"), ("tree", "shape"), ("decoded by", "door"), ("attention", "attention")):
        groups: dict[str, list[Outcome]] = defaultdict(list)
        for case, outcome in done:
            groups[getattr(case, of)].append(outcome)
        rows = []
        for name, outcomes in sorted(groups.items()):
            lengths = [length for outcome in outcomes for length in outcome.step_lengths]
            tau = f"{sum(lengths) / len(lengths):.2f}" if lengths else "-"
            right = sum(outcome.kind == "equal" for outcome in outcomes)
            rows.append([name, len(outcomes), right, sum(outcome.tokens for outcome in outcomes), tau])
        parts.append(markdown_table([title, "cases", "equal", "tokens", "tau"], rows))
    equal = [case for case, outcome in done if outcome.kind == "equal"]
    families, options = Counter(case.family for case in equal), Counter(name for case in equal for name in case.options)
    lines = []
    for title, counts in (("family", families), ("option", options)):
        lines.append(f"equal, by {title}: " + "; ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    for kind in ("refused", "no reference"):
        reasons = Counter(re.sub(r"\d+", "N", outcome.detail)[:100] for _, outcome in done if outcome.kind == kind)
        lines += [f"{kind}, {count}: {reason}" for reason, count in reasons.most_common()]
    return "\n\n".join([*parts, "\n".join(lines)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="draw the cases from this seed (default: 0)")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--minutes", type=float, metavar="M", help="run for M minutes of CPU time (default: 2)")
    amount.add_argument("--cases", type=int, metavar="N", help="run the first N cases")
    amount.add_argument("--case", type=int, metavar="N", help="run the case N alone, and show it")
    args = parser.parse_args(argv)
    for name in ("minutes", "cases"):
        if (value := getattr(args, name)) is not None and not value > 0:
            raise RequestError(f"--{name} is {value}; it must be above 0")
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="transformers")
    torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
    numbers = [args.case] if args.case is not None else range(args.cases) if args.cases else itertools.count()
    end = time.process_time() + 60 * (args.minutes or 2)
    done: list[tuple[Case, Outcome]] = []
    try:
        for number in numbers:
            case = draw_case(args.seed, number)
            outcome = judge(case)
            done.append((case, outcome))
            if args.case is not None:
                print(f"{case}\n{outcome.kind}: {outcome.detail or outcome.tokens}")
            if outcome.kind in FAILED:
                print(f"{outcome.kind}: {outcome.detail}\npython scripts/fuzz.py --seed {args.seed} --case {number}")
                print(f"a smaller case: {shrunk(case, outcome.kind)}", flush=True)
            if isinstance(numbers, itertools.count) and time.process_time() > end:
                break
    finally:  # also after Ctrl-C
        print(summary(done, args.seed))
    kinds = [outcome.kind for _, outcome in done]
    if set(FAILED) & set(kinds):
        return 1
    if args.case is None and 2 * kinds.count("equal") < len(kinds):
        raise RunError(f"only {kinds.count('equal')} of {len(kinds)} cases were compared; see why the others were not")
    return 0


if __name__ == "__main__":
    run_script(main)
