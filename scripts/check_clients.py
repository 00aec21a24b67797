"""Check `medusa serve demo` with clients of others: the OpenAI package and lm-eval, and 64 requests at once.

    python -m venv clients && clients/bin/pip install openai 'lm_eval[api]' transformers
    python scripts/check_clients.py --python clients/bin/python
    python scripts/check_clients.py --python clients/bin/python --requests 16 --json clients.json

The server decodes with the shipped backbone and heads; its backbone gets a chat template, which the shipped one lacks.
transformers' own `generate` and forward give the texts and log-probabilities that the clients must receive. Without
openai and lm-eval here, --python names an environment that has them. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa.arguments import parse
from medusa.commands.options import Output
from medusa.errors import RequestError, RunError
from medusa.files import write_text
from medusa.options import Options, count, group, option
from medusa.records.sources import read_records
from script_tools import markdown_table, run_script, script_parser, write_jsonl

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
NEW = 24  # tokens of a generated text
ENDINGS = [" park.", " forest and slept.", " very happy.", " 7."]  # among which lm-eval chooses
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
target_delimiter: ""
"""
CHOICE = """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
GENERATION = f"""\
output_type: generate_until
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n\\n"], max_gen_toks: {NEW}}}
metric_list: [{{metric: exact_match}}]
"""


@dataclass
class Row:
    """One check, with the client that made it, whether it holds, and what was found."""

    client: str
    check: str
    ok: bool
    found: str


class ClientOptions(Options):
    python: str = option(sys.executable, "run the clients with this Python, which has openai and lm_eval", metavar="P")
    requests: int = count(64, "send N requests at once")
    prompts: int = count(12, "give lm-eval N prompts")
    batch_size: int = count(8, "let the server decode N texts at a time")
    output: Output = group(Output, "output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if shutil.which(self.python) is None:
            raise RequestError(f"--python is {self.python!r}, which is no program; name the Python of an environment")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(ClientOptions, script_parser(__doc__), argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_expected(folder, options)
        with served(demo_server(folder, options.batch_size)) as server:
            url = server.url
            rows = [*by_openai(options.python, folder, url), *by_lm_eval(options.python, folder, url), by_metrics(url)]
    options.output.write({"checks": [asdict(row) for row in rows]})
    cells = [[row.client, row.check, "yes" if row.ok else "NO", row.found] for row in rows]
    print(markdown_table(["client", "check", "holds", "found"], cells))
    return int(not all(row.ok for row in rows))


def write_expected(folder: Path, options: ClientOptions) -> None:
    """Write the backbone with a chat template, the tasks of lm-eval, and what transformers gives for each of them."""
    backbone = folder / "backbone"
    shutil.copytree(str(files("medusa") / "assets" / "backbone"), backbone)
    write_text(backbone / "chat_template.jinja", TEMPLATE)
    stock = Stock(backbone)
    prompts = [str(record.text) for record in read_records("demo")]
    choices = [stock.scored(prompt + " They were") for prompt in prompts[: options.prompts]]
    texts = [{"text": prompt, "answer": stock.written(prompt, NEW)} for prompt in prompts]
    tasks = folder / "tasks"
    for task, body, records in (("likelihood", CHOICE, choices), ("generation", GENERATION, texts[: options.prompts])):
        data = tasks / f"{task}.jsonl"
        write_text(data, "".join(json.dumps(record) + "\n" for record in records))
        write_text(tasks / f"{task}.yaml", TASK.format(name=task, data=data) + body)
    write_jsonl(folder / "choices.jsonl", "log_p", [record["log_p"] for record in choices])
    lengths = [4, 12, 24, 48, 96]
    asked = [(prompts[n % len(prompts)], lengths[n % len(lengths)]) for n in range(options.requests)]
    told = {pair: stock.written(*pair) for pair in dict.fromkeys(asked)}
    concurrent = [{"prompt": prompt, "tokens": tokens, "text": told[prompt, tokens]} for prompt, tokens in asked]
    write_text(folder / "expected.json", json.dumps({"texts": texts, "choices": choices, "concurrent": concurrent}))


class Stock:
    """A model as transformers runs it, without code of this project."""

    def __init__(self, folder: Path) -> None:
        """Load the model and the tokenizer in `folder`, on the CPU and in float32, as the server does."""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def written(self, prompt: str, tokens: int) -> str:
        """Return the greedy text of `generate` after a prompt, without special tokens."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        ids = self.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    @torch.inference_mode()
    def scored(self, text: str) -> dict[str, Any]:
        """Return a task of lm-eval: a text with endings, and the most probable ending by forwards of the model."""
        log_p = []
        for ending in ENDINGS:
            ids, context = (self.tokenizer(part)["input_ids"] for part in (text + ending, text))
            scores = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            own = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            log_p.append(float(own[len(context) - 1 :].sum()))
        return {"text": text, "choices": ENDINGS, "label": log_p.index(max(log_p)), "log_p": log_p}


class Served(NamedTuple):
    """A server in a process of its own."""

    address: tuple[str, int]  # host and port
    pid: int

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"


def demo_server(folder: Path, batch_size: int) -> list[str]:
    """The arguments of `medusa serve` for the backbone in `folder` and the demo heads."""
    words = f"demo --name demo --batch-size {batch_size} --device cpu --quiet --backbone".split()
    return [*words, str(folder / "backbone")]


@contextmanager
def served(arguments: Sequence[str], log: IO[str] | None = None) -> Iterator[Served]:
    """Run `medusa serve` with these arguments in a process of its own, at a free port.

    The server's standard error goes to the file `log`, by default to the script's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "medusa", "serve", *arguments, "--port", str(port)]
    process = subprocess.Popen(command, stderr=log)
    try:
        server = Served(("127.0.0.1", port), process.pid)
        while True:
            if process.poll() is not None:
                raise RunError(f"the server ended with status {process.returncode}")
            try:
                urllib.request.urlopen(f"{server.url}/health").close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def by_openai(python: str, folder: Path, url: str) -> list[Row]:
    """Run the checks of scripts/openai_checks.py in the clients' environment."""
    script = Path(__file__).with_name("openai_checks.py")
    done = subprocess.run([python, str(script), url, str(folder / "expected.json")], capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"the OpenAI client failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    return [Row(**json.loads(line)) for line in done.stdout.splitlines()]


def by_lm_eval(python: str, folder: Path, url: str) -> list[Row]:
    """Run both tasks of lm-eval, and compare its scores of each ending with those of transformers."""
    tasks, found = folder / "tasks", folder / "found"
    model = f"model=demo,base_url={url}/v1/completions,num_concurrent=4,max_length=512,add_bos_token=True"
    words = [
        "run",
        "--model",
        "local-completions",
        "--model_args",
        f"{model},tokenizer_backend=huggingface,tokenizer={folder / 'backbone'}",
    ]
    words += ["--tasks", "likelihood,generation", "--include_path", str(tasks), "--output_path", str(found)]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        [python, "-m", "lm_eval", *words, "--log_samples"], env=offline, capture_output=True, text=True, check=False
    )
    results = sorted(found.rglob("results_*.json"))
    if done.returncode or not results:
        raise RunError(f"lm-eval failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    scores = json.loads(results[-1].read_text())
    version = f"lm-eval {scores['lm_eval_version']}"
    equal = scores["results"]["generation"]["exact_match,none"]
    chosen = scores["results"]["likelihood"]["acc,none"]
    wanted = [json.loads(line)["log_p"] for line in (folder / "choices.jsonl").read_text().splitlines()]
    logged = [path.read_text().splitlines() for path in found.rglob("samples_likelihood_*")]
    samples = [json.loads(line) for lines in logged for line in lines]
    given = {one["doc_id"]: [float(answer[0]) for answer in one["filtered_resps"]] for one in samples}
    pairs = [pair for number, own in enumerate(wanted) for pair in zip(own, given[number], strict=True)]
    worst, texts = max(abs(one - other) for one, other in pairs), len(wanted)
    return [
        Row(version, "generation: the text of transformers", equal == 1, f"{equal:.0%} of {texts}"),
        Row(version, "loglikelihood: the ending that transformers prefers", chosen == 1, f"{chosen:.0%} of {texts}"),
        Row(version, "loglikelihood: difference", worst < 1e-3, f"at most {worst:.0e} in {len(pairs)} endings"),
    ]


def by_metrics(url: str) -> Row:
    """Read tau from /metrics."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = [line.rsplit(" ", 1) for line in reply.read().decode().splitlines()]
    total, steps = (
        next(float(value) for name, value in lines if name == f"medusa_step_tokens_{part}") for part in ("sum", "count")
    )
    return Row("HTTP", "/metrics: tau of all texts", total > steps, f"{total / steps:.2f} in {steps:.0f} steps")


if __name__ == "__main__":
    run_script(main)
