"""Compare the speed of `medusa serve` with that of `medusa serve --plain`, by the number of clients.

    python scripts/load_speed.py                                        # the embedded model, 1 to 16 clients
    python scripts/load_speed.py --serve "org/heads --tree eight" --prompts questions.jsonl --clients 1,8 --chat

Both servers run side by side, each on one thread, and get the same requests in turns. Each client asks for a text as
soon as it has the last one, and texts differ in length, as those of users do. A speed is in tokens for each second of
CPU time of the server's process, HTTP included; a ratio is the median of the rounds. The first round does not count.
The exit status is 1 if a greedy text differs.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import NamedTuple

import psutil

from decode.bench.machine import machine
from load_clients import ask
from load_test import Server, served
from medusa.arguments import parse
from medusa.commands.options import Output
from medusa.errors import RequestError
from medusa.options import Options, count, group, option
from medusa.records.sources import read_records
from script_tools import markdown_table, run_script, script_parser

ALWAYS = "--threads 1 --device cpu --quiet"


class SpeedOptions(Options):
    serve: str = option("demo", "start the servers with these arguments of medusa serve", metavar="WORDS")
    prompts: str = option("demo", "ask with the prompts of this file, folder or Hub dataset", metavar="FILE")
    clients: str = option("1,2,4,8,16", "let so many clients ask at once", metavar="N,N,...")
    chat: bool = option(False, "ask by /v1/chat/completions, not /v1/completions")
    tokens: int = count(64, "ask for texts of N tokens on average: half to three halves of it")
    texts: int = count(2, "let each client ask for N texts in a round")
    rounds: int = count(6, "measure N rounds, after one that does not count")
    output: Output = group(Output, "output")

    @property
    def numbers(self) -> list[int]:
        """The numbers of clients."""
        numbers = self.clients.split(",")
        if not all(number.isdecimal() and int(number) for number in numbers):
            raise RequestError(f"--clients is {self.clients!r}; give whole numbers of at least 1, such as 1,8")
        return [int(number) for number in numbers]


class Burst(NamedTuple):
    """What a server wrote in one round."""

    texts: list[str]
    tokens: int
    cpu_seconds: float


@dataclass
class Row:
    """The figures of one number of clients: tokens in a second of CPU time, by round."""

    clients: int
    adaptive: list[float]
    plain: list[float]
    differ: int = 0  # texts that both servers wrote differently

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.adaptive, self.plain, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(SpeedOptions, script_parser(__doc__), argv)
    numbers, prompts = options.numbers, [record.question for record in read_records(options.prompts)]
    words = f"{options.serve} --name model --batch-size {max(numbers)} {ALWAYS}"
    rows: list[Row] = []
    with served(words) as adaptive, served(f"{words} --plain") as plain:
        for number in numbers:
            rows.append(measured(number, (adaptive, plain), prompts, options))
            print(f"{number} clients: {median(rows[-1].ratios):.2f}", file=sys.stderr)
    about = {name: getattr(options, name) for name in ("serve", "prompts", "chat", "tokens", "texts", "rounds")}
    counted = [vars(row) | {"ratios": row.ratios} for row in rows]
    options.output.write({"machine": asdict(machine()), "options": about, "rows": counted})
    cells = []
    for row in rows:
        speeds = [f"{median(speeds):.0f}" for speeds in (row.adaptive, row.plain)]
        spread = f"{min(row.ratios):.2f} to {max(row.ratios):.2f}"
        cells.append([row.clients, *speeds, f"{median(row.ratios):.2f}", spread, row.differ])
    print(markdown_table(["clients", "tokens/s", "--plain", "ratio", "rounds", "texts that differ"], cells))
    return int(any(row.differ for row in rows))


def measured(clients: int, servers: Sequence[Server], prompts: Sequence[str], options: SpeedOptions) -> Row:
    """Let so many clients ask both servers in turns."""
    row, asked = Row(clients, [], []), clients * options.texts
    for number in range(options.rounds + 1):
        chosen = [prompts[(number * asked + place) % len(prompts)] for place in range(asked)]
        order = 1 if number % 2 else -1
        ours, theirs = [burst(server, clients, chosen, options) for server in servers[::order]][::order]
        row.differ += sum(one != other for one, other in zip(ours.texts, theirs.texts, strict=True))
        if number:
            row.adaptive.append(ours.tokens / ours.cpu_seconds)
            row.plain.append(theirs.tokens / theirs.cpu_seconds)
    return row


def burst(server: Server, clients: int, prompts: Sequence[str], options: SpeedOptions) -> Burst:
    """Let so many clients ask for a text after each of the prompts, as fast as they get them."""
    left, answers = list(enumerate(prompts)), dict[int, tuple[str, int]]()
    address, process = server[0], psutil.Process(server[1].pid)

    def ask_on() -> None:
        while left:
            place, prompt = left.pop()
            asked = {"messages": [{"role": "user", "content": prompt}]} if options.chat else {"prompt": prompt}
            path = "/v1/chat/completions" if options.chat else "/v1/completions"
            length = random.Random(place).randint((options.tokens + 1) // 2, options.tokens * 3 // 2)
            status, answer = ask(address, asked | {"max_tokens": length, "ignore_eos": True}, path)
            assert status == 200, answer
            (choice,) = answer["choices"]
            text = choice["message"]["content"] if options.chat else choice["text"]
            answers[place] = text, answer["usage"]["completion_tokens"]

    before, threads = process.cpu_times(), [threading.Thread(target=ask_on) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = process.cpu_times()
    texts, tokens = zip(*(answers[place] for place in range(len(prompts))), strict=True)
    return Burst(list(texts), sum(tokens), after.user + after.system - before.user - before.system)


if __name__ == "__main__":
    run_script(main)
