"""The audit of a server: does it write the text of a model? `medusa verify --server` (docs/decoding.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from decode.bench.losslessness.cases import FALSE_ALARM
from medusa.commands.audit.asked import Asked, Prompt, Setting, Text
from medusa.commands.audit.judged import Audit, Sampled, Texts, shown_faults
from medusa.commands.distill.client import Server
from medusa.errors import RequestError
from medusa.tables import print_table

if TYPE_CHECKING:
    from medusa.commands.audit.reference import Reference
    from medusa.commands.verify import VerifyOptions

SETTINGS = (Setting(1.0, 1.0), Setting(0.7, 0.9))
DRAWS = 2000  # sampled first tokens for each prompt and setting
NEARLY_CERTAIN = 0.3  # nats: first tokens of less entropy say little about sampling
StartProgress = Callable[[str, int], Callable[..., None]]


@dataclass
class Auditor:
    """Asks a server, lets the reference judge what it answers, and collects what is found."""

    options: VerifyOptions
    asked: Asked
    prompts: Sequence[Prompt]
    start: StartProgress

    @property
    def draws(self) -> int:
        return self.options.draws or DRAWS

    @property
    def max_tokens(self) -> int:
        return self.options.settings.max_new_tokens

    def audit(self, reference: Reference) -> Audit:
        """Run all three checks."""
        greedy, texts = [], []
        for way in ("alone", "together"):
            advance = self.start(f"texts {way}", len(self.prompts))
            texts.append(self.asked.texts(self.prompts, self.max_tokens, way == "together", advance))
            greedy.append(self._judged(way, texts[-1], reference))
        self._compare_counts(texts[0])
        changed = sum((one.text, one.ids) != (other.text, other.ids) for one, other in zip(*texts, strict=True))
        options = self.options
        about = {"server": self.asked.server.url, "model": self.asked.server.model, "reference": options.reference}
        about |= {"max_new_tokens": self.max_tokens, "prompts": len(self.prompts), "draws": self.draws}
        about["dtype"] = reference.dtype
        sampled = self._sampled(reference)
        return Audit(about, self.asked.limits, reference.tolerance, greedy, changed, sampled)

    def _judged(self, way: str, texts: Sequence[Text], reference: Reference) -> Texts:
        found, advance = Texts(way, len(texts)), self.start(f"judging texts {way}", len(texts))
        for number, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True)):
            tokens, deviations = reference.judge(number, prompt, text)
            found.tokens += tokens
            found.deviations += deviations
            advance()
        return found

    def _compare_counts(self, texts: Sequence[Text]) -> None:
        """Tell if the server counts other prompt tokens than were sent, as with a second BOS token."""
        for number, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True)):
            if isinstance(prompt, list) and text.prompt_tokens not in (None, len(prompt)):
                told = f"it counts {text.prompt_tokens} tokens in prompt {number + 1}, which has {len(prompt)}"
                self.asked.limits.append(told + ": does it add or drop a BOS token?")
                return

    def _sampled(self, reference: Reference) -> list[Sampled]:
        chosen = self._uncertain(reference)
        cases = [(number, setting) for number in chosen for setting in SETTINGS]
        advance = self.start("sampled tokens", len(cases) * self.draws)
        counts = self.asked.first_tokens([(self.prompts[n], setting) for n, setting in cases], self.draws, advance)
        advance = self.start("judging samples", len(cases))
        found = []
        for (number, setting), counted in zip(cases, counts, strict=True):
            fit, remark = reference.test(self.prompts[number], setting, counted)
            found.append(Sampled(number, setting, fit, remark))
            advance()
        return found

    def _uncertain(self, reference: Reference) -> list[int]:
        """Choose the prompts to sample after: those with the most uncertain first tokens, if the reference knows."""
        numbers, count = range(len(self.prompts)), self.options.sampled_prompts
        entropy: Callable[[Prompt], float] | None = getattr(reference, "entropy", None)
        if entropy is None:
            return list(numbers[:count])
        values = [entropy(prompt) for prompt in self.prompts]
        if max(values) < NEARLY_CERTAIN:
            told = "the first tokens after these prompts are nearly certain, so samples say little; choose others"
            self.options.output.note(f"note: {told}")
        return sorted(numbers, key=lambda number: -values[number])[:count]


def audit(options: VerifyOptions) -> int:
    """Run the audit that the options ask for, print and write what it found, and return the exit status."""
    server, output = Server(str(options.server), options.model), options.output
    prepare = _with_server if options.has_second_server else _with_model
    asked, prompts, reference = prepare(options, server)
    with output.progress_bars() as start:
        found = Auditor(options, asked, prompts, start).audit(reference)
    output.write(found.to_json())
    print_audit(output.console, found)
    return 0 if found.passed else 1


def _with_server(options: VerifyOptions, server: Server) -> tuple[Asked, list[Prompt], Reference]:
    """Probe both servers; the prompts are text or token ids."""
    from medusa.commands.audit.reference import ServerReference

    named = ("--reference", "--reference-model")
    second = Server(str(options.reference), options.reference_model, options=named)
    records = options.prompts.read()
    for record in records:
        if record.messages is not None and not record.is_prompt:
            told = f"{record.where} is a conversation, which a second server takes only through a template"
            raise RequestError(f"{told}; give the model to --reference, or prompts as text")
    prompts: list[Prompt] = [record.input_ids or record.question for record in records]
    asked, other = (Asked(one, None, options.concurrency) for one in (server, second))
    for one in (asked, other):
        one.probe(prompts[0])
    return asked, prompts, ServerReference(other, options.settings.max_new_tokens, options.draws or DRAWS)


def _with_model(options: VerifyOptions, server: Server) -> tuple[Asked, list[Prompt], Reference]:
    """Load the reference and probe the server; the prompts are token ids."""
    from medusa.commands.audit.reference import ModelReference
    from medusa.commands.models import open_models, require_tokenizer

    files, skip = options.files, options.prompts.skip_long
    room = options.settings.max_new_tokens if skip else 0
    opened = open_models(options, options.prompts.read(), skip_long=skip, room=room, samples=False)
    tokenizer = require_tokenizer(opened.loaded, "an audit")
    asked = Asked(server, tokenizer, options.concurrency)
    asked.probe(opened.prompts[0])
    eos = files.generation_config.eos_token_id
    ids = [tokenizer.eos_token_id] if eos is None else eos if isinstance(eos, list) else [eos]
    with options.output.stage("measuring the rounding of the reference"):
        known = [token for token in ids if token is not None]
        return asked, list(opened.prompts), ModelReference(opened.loaded.model, tokenizer, known, opened.prompts)


def print_audit(console: Console, found: Audit) -> None:
    """Print what the server cannot do, the tables of both experiments, the first faults, and the verdict."""
    for limit in found.limits:
        console.print(f"server: {limit}", highlight=False, markup=False)
    greedy, sampled = found.greedy_rows(), found.sampled_rows()
    columns = ("greedy texts", "texts", "tokens", "near ties", "faults", "verdict")
    print_table(console, columns, greedy, found.tolerance, styles=_styles(greedy))
    console.print(f"texts that differ between both ways of asking: {found.changed}", highlight=False)
    told = f"first tokens, chi-square; correct servers fail in at most 1 of {1 / FALSE_ALARM:,.0f} audits"
    columns = ("prompt", "temperature", "top-p", "samples", "variation", "expected", "p-value", "verdict")
    print_table(console, columns, sampled, told, keys=3, styles=_styles(sampled))
    for line in shown_faults(found.greedy):
        console.print(f"fault: {line}", highlight=False, markup=False)
    if hint := found.hint:
        console.print(f"hint: {hint}", highlight=False, markup=False)
    model = found.about["reference"]
    passed, failed = f"passed: the server writes the text of {model}", f"FAILED: this is not the text of {model}"
    console.print(passed if found.passed else failed, style="bold", highlight=False, markup=False)


def _styles(rows: Sequence[Sequence[str]]) -> list[str]:
    return ["red" if row[-1].startswith("FAULT") else "" for row in rows]
