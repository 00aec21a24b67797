"""The audit of a server: does it write the text of a model? `medusa verify --server` (docs/decoding.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from decode.bench.losslessness.cases import FALSE_ALARM
from medusa.commands.audit.asked import Asked, Prompt, Setting, Text
from medusa.commands.audit.judged import Audit, Sampled, Texts, shown_faults
from medusa.commands.audit.options import AuditOptions
from medusa.commands.audit.reference import ModelReference, Reference
from medusa.commands.distill.client import Server
from medusa.commands.options import CommandOptions, Prompts
from medusa.errors import RequestError
from medusa.files import Json
from medusa.records.record import Record
from medusa.tables import print_table

SETTINGS = (Setting(1.0, 1.0), Setting(0.7, 0.9))
NEARLY_CERTAIN = 0.3  # nats: first tokens of less entropy say little about sampling
StartProgress = Callable[[str, int], Callable[..., None]]


@dataclass
class Auditor:
    """Asks a server, lets the reference judge what it answers, and collects what is found."""

    asked: Asked
    prompts: Sequence[Prompt]
    max_tokens: int
    draws: int
    sampled_prompts: int
    start: StartProgress
    note: Callable[[str], object]

    def audit(self, reference: Reference) -> Audit:
        """Run all three checks."""
        greedy, texts = [], []
        for way in ("alone", "together"):
            advance = self.start(f"texts {way}", len(self.prompts))
            texts.append(self.asked.texts(self.prompts, self.max_tokens, way == "together", advance))
            greedy.append(self._judged(way, texts[-1], reference))
        self._compare_counts(texts[0])
        changed = sum((one.text, one.ids) != (other.text, other.ids) for one, other in zip(*texts, strict=True))
        about: Json = {"server": self.asked.server.url, "model": self.asked.server.model}
        about |= {"dtype": reference.dtype, "prompts": len(self.prompts)}
        about |= {"max_new_tokens": self.max_tokens, "draws": self.draws}
        sampled = self._sampled(reference)
        limits = [*self.asked.limits, *reference.limits]
        return Audit(about, limits, reference.tolerance, greedy, changed, sampled)

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
        asked = [(self.prompts[number], setting) for number, setting in cases]
        advance = self.start("sampled first tokens", len(cases) * self.draws)
        texts = self.asked.samples(asked, self.draws, 1, advance)
        advance = self.start("judging first tokens", len(cases))
        found = []
        for (number, setting), some in zip(cases, texts, strict=True):
            fit, remark = reference.test(self.prompts[number], setting, Counter(text.first for text in some))
            found.append(Sampled(number, setting, fit, remark))
            advance()
        if isinstance(reference, ModelReference) and self.asked.with_ids:
            found += self._sampled_texts(asked, reference, {case.setting: case.remark for case in found})
        else:
            told = "only first tokens of samples are tested, as later ones need token ids and a model to judge them"
            self.asked.limits.append(told)
        return found

    def _sampled_texts(
        self, asked: Sequence[tuple[Prompt, Setting]], reference: ModelReference, remarks: dict[Setting, str]
    ) -> list[Sampled]:
        """Test as many tokens of sampled texts as there are first tokens, all texts of a setting together."""
        each = -(-self.draws // self.max_tokens)
        advance = self.start("sampled texts", len(asked) * each)
        texts = self.asked.samples(asked, each, self.max_tokens, advance)
        advance, found = self.start("judging sampled texts", len(asked) * each), []
        for setting in SETTINGS:
            chosen = [
                (prompt, text)
                for (prompt, known), some in zip(asked, texts, strict=True)
                if known == setting
                for text in some
            ]
            fit = reference.test_texts(chosen, setting, not remarks[setting], advance)
            found.append(Sampled(None, setting, fit, remarks[setting]))
        return found

    def _uncertain(self, reference: Reference) -> list[int]:
        """Choose the prompts to sample after: those with the most uncertain first tokens, if the reference knows."""
        numbers, count = range(len(self.prompts)), self.sampled_prompts
        values = [reference.entropy(prompt) for prompt in self.prompts]
        if max(values) < NEARLY_CERTAIN:
            told = "the first tokens after these prompts are nearly certain, so samples say little; choose others"
            self.note(f"note: {told}")
        return sorted(numbers, key=lambda number: -values[number])[:count]


def audit(command: CommandOptions, wanted: AuditOptions, given: Prompts, draws: int, sampled_prompts: int) -> int:
    """Run the audit that the options ask for, print and write what it found, and return the exit status."""
    server, output = Server(str(wanted.server), wanted.model), command.output
    max_tokens = command.settings.max_new_tokens
    if wanted.has_second_server:
        asked, prompts, reference = _with_server(wanted, given.read(), server, max_tokens, draws)
    else:
        asked, prompts, reference = _with_model(command, wanted, given, server)
    with output.progress_bars() as start:
        auditor = Auditor(asked, prompts, max_tokens, draws, sampled_prompts, start, output.note)
        found = auditor.audit(reference)
    found.about["reference"] = wanted.reference
    output.write(found.to_json())
    print_audit(output.console, found)
    return 0 if found.passed else 1


def _with_server(
    wanted: AuditOptions, records: Sequence[Record], server: Server, max_tokens: int, draws: int
) -> tuple[Asked, list[Prompt], Reference]:
    """Probe both servers; the prompts are text or token ids."""
    from medusa.commands.audit.second_server import ServerReference

    named = ("--reference", "--reference-model")
    second = Server(str(wanted.reference), wanted.reference_model, options=named)
    for record in records:
        if record.messages is not None and not record.is_prompt:
            told = f"{record.where} is a conversation, which a second server takes only through a template"
            raise RequestError(f"{told}; give the model to --reference, or prompts as text")
    prompts: list[Prompt] = [record.input_ids or record.question for record in records]
    asked, other = (Asked(one, None, wanted.concurrency) for one in (server, second))
    for one in (asked, other):
        one.probe(prompts[0])
    return asked, prompts, ServerReference(other, max_tokens, draws)


def _with_model(
    command: CommandOptions, wanted: AuditOptions, given: Prompts, server: Server
) -> tuple[Asked, list[Prompt], Reference]:
    """Load the reference and probe the server; the prompts are token ids."""
    from medusa.commands.models import open_models, require_tokenizer

    skip = given.skip_long
    room = command.settings.max_new_tokens if skip else 0
    opened = open_models(command, given.read(), skip_long=skip, room=room, samples=False)
    tokenizer = require_tokenizer(opened.loaded, "an audit")
    asked = Asked(server, tokenizer, wanted.concurrency)
    asked.probe(opened.prompts[0])
    eos = command.files.generation_config.eos_token_id
    ids = [tokenizer.eos_token_id] if eos is None else eos if isinstance(eos, list) else [eos]
    with command.output.stage("measuring the rounding of the reference"):
        known = [token for token in ids if token is not None]
        most = command.settings.max_new_tokens
        reference = ModelReference(opened.loaded.model, tokenizer, known, opened.prompts, most, server.context)
        return asked, list(opened.prompts), reference


def print_audit(console: Console, found: Audit) -> None:
    """Print what the server cannot do, the tables of both experiments, the first faults, and the verdict."""
    for limit in found.limits:
        console.print(f"server: {limit}", highlight=False, markup=False)
    greedy, sampled = found.greedy_rows(), found.sampled_rows()
    asked = ("greedy texts", "texts", "tokens", "near ties", "faults", "verdict")
    print_table(console, asked, greedy, found.tolerance, styles=_styles(greedy))
    console.print(f"texts that differ between both ways of asking: {found.changed}", highlight=False)
    told = f"samples, chi-square; correct servers fail in at most 1 of {1 / FALSE_ALARM:,.0f} audits"
    columns = ("first tokens", "sampling", "samples", "variation", "expected", "p-value", "verdict")
    print_table(console, columns, sampled, told, keys=2, styles=_styles(sampled))
    for line in shown_faults(found.greedy):
        console.print(f"fault: {line}", highlight=False, markup=False)
    if hint := found.hint:
        console.print(f"hint: {hint}", highlight=False, markup=False)
    model = found.about["reference"]
    passed, failed = f"passed: no difference from {model} was found", f"FAILED: this is not the text of {model}"
    console.print(passed if found.passed else failed, style="bold", highlight=False, markup=False)


def _styles(rows: Sequence[Sequence[str]]) -> list[str]:
    return ["red" if row[-1].startswith("FAULT") else "" for row in rows]
