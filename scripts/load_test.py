"""Check `medusa serve demo` under load: clients that join and leave, send nonsense and stop reading.

    python scripts/load_test.py                                  # 32 clients for ten minutes
    python scripts/load_test.py --minutes 1 --clients 8 --json load.json

Each text must be the one that is written alone: greedy texts by transformers' `generate`, samples by the idle server.
The server's memory at the end may be 5 % above its memory after the warm-up, the first tenth of the time; in runs of
less than five minutes the memory is only shown, because it still grows to its size. The exit status is 1 if a text
differs, no text was compared, a client meets an error, the server prints one, a text still runs at the end, or the
memory grows more.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import IO

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from load_clients import Client, Found, Wanted, ask
from medusa.arguments import parse
from medusa.commands.options import Output
from medusa.errors import RunError
from medusa.files import ASSETS, Json
from medusa.interruptions import interruptible
from medusa.options import Options, count, group, option, positive
from medusa.records.sources import read_records
from script_tools import markdown_table, run_script, script_parser

GROWTH = 1.05  # the memory at the end may be so many times that after the warm-up
JUDGED_MINUTES = 5.0  # in shorter runs the memory is not judged
PRINTED = (" ", "serve: ", "WARNING:  Invalid HTTP")  # beginnings of lines that are no error, or a part of one
LENGTHS = (3, 12, 24, 60, 120)  # new tokens
Server = tuple[tuple[str, int], subprocess.Popen[bytes]]  # its address, and its process


class LoadOptions(Options):
    minutes: float = positive(10.0, "send requests for M minutes", "M")
    clients: int = count(32, "let N clients send requests at once")
    batch_size: int = count(8, "let the server decode N texts at a time")
    requests: int = count(40, "choose from N different requests")
    seed: int = option(0, "seed of the requests", metavar="S")
    output: Output = group(Output, "output")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(LoadOptions, script_parser(__doc__), argv)
    prompts = [str(record.text) for record in read_records("demo")]
    words = f"demo --name demo --batch-size {options.batch_size} --device cpu --quiet"
    with TemporaryFile("w+", encoding="utf-8") as log, served(words, log) as (address, process):
        pool = requests(prompts, options.requests, options.seed, stock(), address)
        memory = psutil.Process(process.pid).memory_info
        result = load(address, pool, options, lambda: memory().rss)
        result |= {"texts_left": texts_left(address)}
        log.seek(0)
        printed = Counter(line for line in log.read().splitlines() if line and not line.startswith(PRINTED))
        result["errors"] |= {f"printed by the server: {line}"[:200]: number for line, number in printed.items()}
    grown = result["memory_mb"]["at_the_end"] > GROWTH * result["memory_mb"]["after_the_warm_up"]
    checks = {"errors": result["errors"], "texts left at the end": result["texts_left"]}
    checks["more memory than after the warm-up"] = grown and options.minutes >= JUDGED_MINUTES
    checks["no text was compared"] = not result["texts"]
    failed = [name for name, wrong in checks.items() if wrong]
    options.output.write(result)
    told = {name: value for name, value in result.items() if not isinstance(value, dict)}
    for name in ("requests", "refused", "errors", "memory_mb"):
        told |= {f"{name}: {kind}": number for kind, number in result[name].items()}
    print(markdown_table(["figure", "value"], told.items()))
    if failed:
        print("load_test: failed: " + ", ".join(failed), file=sys.stderr)
    return int(bool(failed))


@contextmanager
def served(words: str, log: IO[str] | None = None) -> Iterator[Server]:
    """Run `medusa serve` with these words at a free port; yield its address and its process.

    Its messages go to the file `log`, by default to the script's standard error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    command = [sys.executable, "-m", "medusa", "serve", *words.split(), "--port", str(address[1])]
    process = subprocess.Popen(command, stderr=log)
    try:
        with interruptible(lambda: ""):  # else SIGTERM would leave the server behind
            while True:
                if process.poll() is not None:
                    raise RunError(f"the server ended with status {process.returncode}")
                with suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"http://{address[0]}:{address[1]}/health").close()
                    break
                time.sleep(0.2)
            yield address, process
    finally:
        process.terminate()
        process.wait(30)


def stock() -> Callable[[str, int], str]:
    """Return transformers' own `generate` of the served model: it turns a prompt into a greedy text of N tokens."""
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "backbone", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "backbone")

    def written(prompt: str, tokens: int) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return written


def requests(
    prompts: Sequence[str], number: int, seed: int, written: Callable[[str, int], str], address: tuple[str, int]
) -> list[Wanted]:
    """Make different requests with the texts that they get alone: greedy ones by `written`, samples by the server."""
    rng, pool = random.Random(seed), list[Wanted]()
    for index in range(number):
        prompt, length = " ".join(rng.choice(prompts).split()[: rng.randrange(3, 30)]), rng.choice(LENGTHS)
        body = {"prompt": prompt, "max_tokens": length}
        if index % 3:
            pool.append(Wanted(body, written(prompt, length)))
        else:
            body |= {"temperature": rng.choice([0.7, 1.0]), "seed": index}
            pool.append(Wanted(body, ask(address, body)[1]["choices"][0]["text"]))
    return pool


def load(address: tuple[str, int], pool: Sequence[Wanted], options: LoadOptions, memory: Callable[[], int]) -> Json:
    """Let clients send requests for some minutes; returns what they found, and the server's memory in megabytes."""
    found, start = Found(), time.monotonic()
    end, sizes = start + 60 * options.minutes, {"at_the_start": memory()}
    clients = [Client(address, pool, found, options.seed + number) for number in range(options.clients)]
    threads = [threading.Thread(target=client.run, args=(lambda: time.monotonic() < end,)) for client in clients]
    for thread in threads:
        thread.daemon = True  # an interrupted test ends at once
        thread.start()
    time.sleep(6 * options.minutes)
    sizes["after_the_warm_up"] = largest = memory()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.5)
        largest = max(largest, memory())
    sizes |= {"at_the_end": memory(), "largest": largest}
    return {
        "seconds": round(time.monotonic() - start),
        "clients": options.clients,
        "all_requests": found.requests.total(),
        "texts": found.compared["texts"],
        "beginnings": found.compared["beginnings"],
        "requests": dict(found.requests.most_common()),
        "refused": dict(sorted(found.refused.items())),
        "errors": dict(found.errors.most_common()),
        "memory_mb": {name: round(size / 1e6, 1) for name, size in sizes.items()},
    }


def texts_left(address: tuple[str, int]) -> int:
    """Return how many texts still run or wait some seconds after the last clients have left."""
    for _ in range(20):
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/metrics") as reply:
            lines = [line.split(" ") for line in reply.read().decode().splitlines()]
        left = sum(float(line[1]) for line in lines if line[0] in ("medusa_running_texts", "medusa_waiting_texts"))
        if not left:
            break
        time.sleep(0.5)
    return int(left)


if __name__ == "__main__":
    run_script(main)
