"""A short probe of a model: checks that it can hold a tree, answers a few prompts, and times forwards and steps."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch

from decode.bench.methods import plain_method
from decode.compiled.stepper import why_not_compiled
from decode.loop import Timer
from decode.ops.draws import QuickDraws
from decode.request import prepare
from decode.serve.bulk import FIRST_WIDTH, MEMORY, BulkWriter, Job
from decode.settings import Settings
from decode.texts import TextGenerator, stepper_for
from decode.tree_check import require_tree_forward
from medusa.backbone import Backbone
from medusa.commands.cpu import Tuned
from medusa.commands.distill.tasks import Task
from medusa.errors import NotCompilableError
from medusa.loading import Loaded
from medusa.memory import bytes_of, free_memory
from medusa.options import dtype_name

ANSWERED = 32  # prompts that the probe answers, at most
ANSWERING, LONGEST = 20.0, 60.0  # seconds for which it answers them, and until half of the answers have ended
READ = 8  # prompts that are read together, to time it
ROWS, LENGTH = 4, 256  # of a batch whose reading is timed, as in training
STEPS = 3  # that are timed


@dataclass(frozen=True)
class Probe:
    """What a probe found: the model's size, the lengths of texts, and seconds for forwards and steps."""

    parameters: int
    model_bytes: int
    hidden_size: int
    vocab_size: int
    context: int | None
    device: str
    turns: float  # answers to a prompt or conversation, on average
    prompt_tokens: float  # before an answer, on average
    longest_prompt: int  # at most
    answer_tokens: float  # of an answer, on average
    read_seconds: float  # to read one token as part of a batch, as in training
    prompt_seconds: float  # to read one token of a prompt
    step_seconds: float  # to write one token in one row: a plain decoding step
    width: int  # prompts that are answered at a time
    wide_step_seconds: float  # to write one token in each of `width` rows
    cache_bytes: int  # of a token in the KV cache
    layers: int = 0  # of the model
    not_compiled: str = ""  # why steps of the model cannot be compiled, if anything is known against it
    dtype: str = ""  # of the model
    bfloat16: float = 0.0  # how many times as fast bfloat16 makes steps as float32; 0: not measured
    training_threads: int = 0  # of the CPU, that make large forwards fastest; 0: not measured

    def writing_seconds(self, texts: int, most: int) -> float:
        """The seconds to answer so many prompts or conversations, with up to `most` tokens an answer.

        A step takes a time for the weights and one for each row. At the end, fewer and fewer rows are left."""
        answers, width = texts * self.turns, min(self.width, texts)
        row = (self.wide_step_seconds - self.step_seconds) / max(self.width - 1, 1)
        steps = answers * self.answer_tokens / width + (most - self.answer_tokens) / 2
        reading = answers * self.prompt_tokens * self.prompt_seconds
        return reading + steps * (self.step_seconds - row) + answers * self.answer_tokens * row


@torch.inference_mode()
def probe(tuned: Tuned, tasks: Sequence[Task], settings: Settings) -> Probe:
    """Check that a model can hold a tree, do some of the `tasks` with `settings`, and time it, in seconds.

    Raise RequestError if the model does not support trees."""
    loaded = tuned.loaded
    require_tree_forward(loaded.model)
    backbone = Backbone(loaded.model)
    generator = TextGenerator(loaded.model, settings.of_checkpoint(loaded.model.generation_config), loaded.tokenizer)
    prompts, turns = [task.prompt([], loaded.tokenizer) for task in tasks], [task.turns for task in tasks]
    prompt_seconds, cached = _reading(generator, sorted(prompts, key=len)[len(prompts) // 2 :][:READ])
    answer = _answer_tokens(generator, prompts[:: max(1, len(prompts) // ANSWERED)][:ANSWERED])
    # Later questions follow the answers before them.
    both = zip(prompts, turns, strict=True)
    before = [len(prompt) + turn * answer for prompt, count in both for turn in range(count)]
    mean, longest = sum(before) / len(before), int(max(before))
    held = int(mean + answer)  # tokens of the longest texts that are being written, as many as are read of each text
    step_seconds, width = _step(generator, 1, held), BulkWriter(generator).width
    width.limit(int(MEMORY * free_memory(backbone.device) / (2 * held * cached)))
    wide = {1: step_seconds}
    while not width.settled:
        wide[width.rows] = _step(generator, width.rows, held)
        width.weigh(width.rows / wide[width.rows])
    return Probe(
        parameters=loaded.model.num_parameters(),
        model_bytes=bytes_of(loaded.model),
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        context=backbone.context,
        device=backbone.device.type,
        turns=len(before) / len(tasks),
        prompt_tokens=mean,
        longest_prompt=longest,
        answer_tokens=answer,
        read_seconds=_training_forward(backbone, tuned.training_threads),
        prompt_seconds=prompt_seconds,
        step_seconds=step_seconds,
        width=width.rows,
        wide_step_seconds=wide[width.rows],
        cache_bytes=cached,
        layers=backbone.num_layers,
        not_compiled=why_not_compiled(backbone),
        dtype=dtype_name(loaded.model.dtype),
        bfloat16=tuned.bfloat16,
        training_threads=tuned.training_threads,
    )


def why_not_decoded(loaded: Loaded, settings: Settings) -> str:
    """Compile a plain decoding step with `settings`, and run it; return why this is not possible, "" if it is."""
    try:
        settings = replace(settings, max_new_tokens=2, ignore_eos=True, stop=(), compile=True)
        plain_method(loaded.model, settings.of_checkpoint(loaded.model.generation_config))([[loaded.bos_token_id or 0]])
    except NotCompilableError as error:
        return error.reason
    return ""


def _reading(generator: TextGenerator, prompts: Sequence[Sequence[int]]) -> tuple[float, int]:
    """The seconds to read one token of prompts that are read together, and the bytes that it takes in a cache."""
    seconds, kwargs = [], generator.settings.generate_kwargs(generator.tokenizer)
    for _ in range(2):
        start = perf_counter()
        requests = prepare(generator.model, prompts, range(len(prompts)), **kwargs)
        stepper = stepper_for(generator.model, None, requests, *generator.settings.how)
        stepper.start()
        seconds.append(perf_counter() - start)
    cache = stepper.state.reader.cache
    return min(seconds) / sum(map(len, prompts)), cache.num_bytes // (cache.capacity * len(prompts))


def _answer_tokens(generator: TextGenerator, prompts: Sequence[Sequence[int]]) -> float:
    """The tokens of an answer, on average; if time does not allow all answers, estimated from those that have ended.

    With less than half of them, the estimate was up to a third too high for answers that end late."""
    ended, running, begun = list[int](), list[int](), perf_counter()

    def on_step(lengths: Sequence[int]) -> None:
        running[:] = lengths
        if perf_counter() - begun > (ANSWERING if 2 * len(ended) >= len(prompts) else LONGEST):
            raise _EnoughError

    jobs = deque(Job(list(prompt), seed, lambda new, _: ended.append(len(new))) for seed, prompt in enumerate(prompts))
    with contextlib.suppress(_EnoughError):
        BulkWriter(generator, FIRST_WIDTH).write(jobs, on_step)
    most = generator.settings.max_new_tokens
    if not ended:
        return most
    # As if each token ended an answer with the same probability.
    mean = (sum(ended) + sum(running)) / len(ended)
    return sum(ended) / len(ended) if not running else mean * (1 - (1 - 1 / max(mean, 1)) ** most)


class _EnoughError(Exception):
    """Ends the answers of a probe."""


def _step(generator: TextGenerator, rows: int, length: int) -> float:
    """The seconds of a plain step of so many rows, whose texts have `length` tokens; what they are does not matter."""
    settings = replace(generator.settings, max_new_tokens=max(length, STEPS + 2), ignore_eos=True, stop=())
    kwargs = settings.generate_kwargs(generator.tokenizer)
    requests = prepare(generator.model, [[1]] * rows, range(rows), **kwargs)
    quick = [request._replace(draws=QuickDraws) for request in requests]
    stepper = stepper_for(generator.model, None, quick, *settings.how)
    stepper.start()
    for cache in stepper.state.reader.caches:
        cache.open(length)
        cache.append(length)
        cache.keep([length] * rows)
    times = []
    for _ in range(STEPS + 1):
        start = perf_counter()
        stepper.step(Timer())
        times.append(perf_counter() - start)
    return median(times[1:])


def _training_forward(backbone: Backbone, threads: int) -> float:
    """The seconds to read one token as part of a batch of random tokens, with so many CPU threads; 0: as now."""
    generator, times, before = torch.Generator().manual_seed(0), [], torch.get_num_threads()
    torch.set_num_threads(threads or before)
    length = min(LENGTH, backbone.context or LENGTH)
    for _ in range(2):
        ids = torch.randint(backbone.vocab_size, (ROWS, length), generator=generator).to(backbone.device)
        start = perf_counter()
        backbone.hidden_states(ids)[0, -1, -1].item()  # waits until the device has computed it
        times.append(perf_counter() - start)
    torch.set_num_threads(before)
    return min(times) / ids.numel()
