"""Writes very many texts as fast as the machine can: in a running batch, new texts take the places of ended ones.

The number of texts that are decoded together, the width, follows speed and memory. One text reads all weights for each
token, and so do many, so each doubling of the width makes tokens cheaper, until the texts' own keys and values cost
more than the weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter, thread_time

from accelerate.utils.memory import should_reduce_batch_size

from decode.cache import TreeCache, most_slots
from decode.compiled.region import Regions
from decode.loop import NOT_DEFINED, Stepper
from decode.ops.draws import QuickDraws
from decode.request import prepare
from decode.sequences import Request
from decode.serve.adaptive import Adapting
from decode.serve.batch import UNDEFINED, RunningBatch, must_be_alone
from decode.texts import TextGenerator, stepper_for
from medusa.errors import RunError
from medusa.memory import free_memory

FIRST_WIDTH, MOST = 32, 512
COMPILED_WIDTH = 64  # of compiled steps, as each width needs its own code; rows without a text cost little on a GPU
WORTHWHILE = 1.08  # a doubled width must write so many times the tokens a second
MEASURED = 12  # steps of each width
MEMORY = 0.5  # of the free memory, which keys and values may fill
PADDING = 1 / 4  # padding for each token of prompts that join together, at most
FREE_PADDING = 256  # tokens of padding that cost no more than reading prompts in two parts
LOOK_AHEAD = 8  # times as many jobs as join, among which prompts of about the same length are found
JOINING = 1 / 8  # of the texts, which join together, because reading one prompt takes about as long as a step


@dataclass(eq=False)
class Job:
    """A prompt to continue, the seed of its text, and what is called at its end with its tokens and the reason."""

    prompt: list[int]
    seed: int
    ended: Callable[[list[int], str], object]


class Width:
    """The number of texts at a time: it doubles as long as that makes the texts faster."""

    def __init__(self, given: int | None) -> None:
        """Begin with the `given` number, which then stays; `None`: with 32, and find the best one."""
        self.rows, self.settled = given or FIRST_WIDTH, given is not None
        self.most = given or MOST
        self.half, self.speed = self.rows, 0.0  # the width before the last doubling, and its tokens a second
        self.times: list[float] = []

    def limit(self, most: int) -> None:
        """Let memory hold at most so many texts."""
        self.most = min(self.most, max(most, 1))
        if self.rows > self.most:
            self.rows, self.half = self.most, min(self.half, self.most)
            self.times.clear()

    def add(self, rows: int, tokens: int, seconds: float) -> None:
        """Add the time of a step of so many rows."""
        if self.settled or not tokens or rows < self.rows * (1 - JOINING):
            return
        self.times.append(seconds / tokens)
        if len(self.times) < MEASURED:
            return
        self.weigh(1 / sorted(self.times)[MEASURED // 4])  # other programs only make steps slower
        self.times.clear()

    def weigh(self, speed: float) -> None:
        """Choose the next width, after this one has written so many tokens a second."""
        if speed < self.speed * WORTHWHILE:
            self.rows, self.settled = self.half, True
        elif self.rows == self.most:
            self.settled = True
        else:
            self.half, self.rows, self.speed = self.rows, min(2 * self.rows, self.most), speed


class BulkWriter:
    """Continues prompts with a generator, many at a time; each text depends on its prompt and seed alone."""

    def __init__(self, generator: TextGenerator, width: int | None = None) -> None:
        """Write with `generator`, so many texts at a time; `None`: as many as memory holds and speed asks for.

        Compiled steps have one width: the given one, or `COMPILED_WIDTH`, if there are as many jobs and memory."""
        self.generator = generator
        self.adapting = Adapting(generator.source)
        self.width = Width(1 if must_be_alone(generator.models) else width)
        self.memory: float | None = None  # bytes for keys, values and states; known once texts have joined
        self.costs = 0.0, 0.0  # bytes of a slot, and of the states of a text
        self.longest = 0  # tokens that a text may have, of the texts that the width respects
        self.batch = RunningBatch(self._stepper_for)
        self.running: dict[int, Job] = {}  # by the row of the batch

    def write(self, jobs: deque[Job], on_step: Callable[[Sequence[int]], object]) -> None:
        """Write the texts of all `jobs`; the end of a job may add another. `on_step` gets the lengths of running texts.

        Raise RunError for a model whose probabilities are not defined, and whatever a job's `ended` raises."""
        if self.generator.settings.compile and not self.width.settled:
            self.width = Width(min(COMPILED_WIDTH, max(len(jobs), 1)))
        clock = thread_time if self.generator.model.device.type == "cpu" else perf_counter
        try:
            while jobs or self.running:
                try:
                    while self._admit(jobs):
                        pass
                    start, rows = clock(), len(self.running)
                    step = self.batch.step()
                    self.width.add(rows, sum(map(len, step.ids.values())), clock() - start)
                except RuntimeError as error:
                    if self.width.rows == 1 or not should_reduce_batch_size(error):
                        raise
                    self.width.limit(self.width.rows // 2)
                    self._begin_again(jobs)
                    continue
                self._finish()
                on_step([len(self.batch.sequences.new_ids[row]) for row in self.running])
        finally:
            self.batch.clear()
            self.running.clear()

    def _stepper_for(self, requests: Sequence[Request]) -> Stepper:
        quick = [request._replace(draws=QuickDraws) for request in requests]
        generator, sizes = self.generator, (self.width.rows,)
        return self.adapting(
            stepper_for(generator.model, generator.source, quick, *generator.settings.how, sizes=sizes)
        )

    def _admit(self, jobs: deque[Job]) -> bool:
        """Let jobs join, as soon as some of them find room.

        Returns whether some have joined, so that others, with prompts of another length, may follow."""
        room = self.width.rows - len(self.running)
        few = room < min(len(jobs), ceil(self.width.rows * JOINING))
        if not jobs or (self.running and few):
            return False
        joining, generator = _alike(jobs, room), self.generator
        if self.memory is not None and not self._holds(joining):
            jobs.extendleft(reversed(joining))
            self._begin_again(jobs)
            return True
        room = min(room, self.width.rows - len(self.running))  # the limit may be new
        jobs.extendleft(reversed(joining[max(room, 0) :]))
        if not (joining := joining[: max(room, 0)]):
            return False
        kwargs = generator.settings.generate_kwargs(generator.tokenizer)
        prompts, seeds = [job.prompt for job in joining], [job.seed for job in joining]
        rows = min(self.width.rows, len(self.running) + len(joining) + len(jobs))
        try:
            for cache in self._caches:
                cache.reserve(rows)
            places = self.batch.join(prepare(generator.model, prompts, seeds, **kwargs))
        except BaseException:
            jobs.extendleft(reversed(joining))
            raise
        if not places:  # a step runs already, and texts can join after the next one
            jobs.extendleft(reversed(joining))
            return False
        self.running |= dict(zip(places, joining, strict=True))
        if self.memory is None:
            self._weigh_texts()
            width = self.width.rows
            if not self._holds([*joining, *jobs]) or (generator.settings.compile and self.width.rows < width):
                self._begin_again(jobs)  # compiled steps would have `width` rows
        return True

    def _begin_again(self, jobs: deque[Job]) -> None:
        """Give the running texts back to the jobs; their seeds give the same texts again."""
        self.batch.clear()
        Regions.of(self.generator.model).clear()  # which hold caches of the former width
        jobs.extendleft(reversed(self.running.values()))
        self.running.clear()

    @property
    def _caches(self) -> list[TreeCache]:
        """The caches of the running texts."""
        return [] if self.batch.stepper is None else self.batch.stepper.state.reader.caches

    def _weigh_texts(self) -> None:
        """Find out what texts cost, and how much memory they may fill: what they fill already, and a part of the rest.

        The memory of ended texts stays reserved for others."""
        buffers = [buffer for cache in self._caches for buffer in cache.buffers]
        states = [state for cache in self._caches for state in cache.states]
        of_slot = sum(buffer.nbytes / (buffer.shape[1] * buffer.shape[3]) for buffer in buffers)
        self.costs = of_slot, sum(state.nbytes / len(state) for state in states)
        held = sum(cache.num_bytes for cache in self._caches)
        self.memory = held + MEMORY * free_memory(self.generator.model.device)

    def _holds(self, jobs: Sequence[Job]) -> bool:
        """Limit the width to the texts that memory holds, if a text of `jobs` may become longer than all before.

        Returns whether the caches have no more rows than that. Later turns of a conversation have longer prompts."""
        assert self.memory is not None
        longest = max(len(job.prompt) for job in jobs) + self.generator.settings.max_new_tokens
        if longest <= self.longest:
            return True
        self.longest = longest + longest // 4 if self.longest else longest  # to spare: a limit may begin texts again
        (of_slot, of_states), held = self.costs, max((cache.capacity for cache in self._caches), default=0)
        slots = held if self.longest <= held else most_slots(self.longest)
        self.width.limit(int(self.memory / max(slots * of_slot + of_states, 1)))
        return all(buffer.shape[1] <= self.width.rows for cache in self._caches for buffer in cache.buffers)

    def _finish(self) -> None:
        """Give the texts that have ended to their jobs."""
        sequences = self.batch.sequences
        for row, job in list(self.running.items()):
            reason = sequences.finish_reason[row]
            if reason == UNDEFINED:
                raise RunError(NOT_DEFINED)
            if reason is not None:
                del self.running[row]
                job.ended(sequences.new_ids[row], reason)


def _alike(jobs: deque[Job], most: int) -> list[Job]:
    """Take the first job, and those of the next ones whose prompts are about as long, as these are read together.

    There are at most `most` of them, and fewer if their padding would take much time."""
    near = [jobs.popleft() for _ in range(min(len(jobs), LOOK_AHEAD * most))]
    length = len(near[0].prompt)
    chosen = sorted(near, key=lambda job: abs(len(job.prompt) - length))[:most]
    while _padding(chosen) > max(FREE_PADDING, PADDING * sum(len(job.prompt) for job in chosen)):
        chosen.pop()
    jobs.extendleft(reversed([job for job in near if job not in chosen]))
    return chosen


def _padding(jobs: Sequence[Job]) -> int:
    """The number of tokens by which the jobs' prompts are padded to the longest one."""
    longest = max(len(job.prompt) for job in jobs)
    return sum(longest - len(job.prompt) for job in jobs)
