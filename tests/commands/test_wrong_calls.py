"""More than 300 wrong command lines: each prints one line, ends with status 2, loads no backbone and changes no file.

Commands share their options: `generate` has all lines of these, and every other command one line of each kind.

A line is `arguments -> part of the message`. All lines of a command follow the arguments in `VALID`, a request that
would work; argparse takes the last of two equal options, so that a line replaces a valid value by a wrong one. Inputs
that do not exist are tried in test_missing_inputs.py.
"""

from __future__ import annotations

import functools
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from typing import Any

import huggingface_hub
import pytest

from medusa.__main__ import build_parser, main
from medusa.places import hub_is_reachable
from tests.commands.place import Place

MODELS = "--backbone backbone --heads heads"
VALID = {
    "generate": f"generate {MODELS} --prompt abc",
    "chat": f"chat {MODELS}",
    "serve": f"serve {MODELS} --port 8765",
    "evaluate": f"evaluate {MODELS} --data prompts.jsonl",
    "calibrate": f"calibrate {MODELS} --prompts prompts.jsonl --max-new-tokens 1000",
    "benchmark": f"benchmark {MODELS} --prompts prompts.jsonl",
    "verify": f"verify {MODELS} --prompts prompts.jsonl",
    "distill": "distill --backbone backbone --prompts prompts.jsonl --output new.jsonl",
    "export": "export --heads heads --to original-v1 --output new --backbone backbone",
    "datastore": "datastore build --backbone backbone --data prompts.jsonl --output new",
    "train": "train recipe.yaml",
    "info": "info heads",
    "demo": "demo --output new",
    "fit": "fit backbone --prompts prompts.jsonl --output new",
}

LOADING = """
--backbone /no/such/folder -> /no/such/folder
--backbone full -> full
--backbone notes.txt -> notes.txt
--backbone no/model -> no/model
--device abacus -> abacus
--device cuda:99 -> cuda:99
--dtype float8 -> float8
--attention flash -> flash
--revision -> revision
--dtype bflot16 -> (did you mean bfloat16?)
--device cdua -> did you mean cuda?
"""
HEADS = """
--heads full -> full
--heads notes.txt -> notes.txt
--heads broken -> broken
--heads torn -> torn/config.json
"""
SAMPLING = """
--temperature -1 -> temperature is -1
--temperature warm -> 'warm'
--temperature nan -> temperature is nan
--top-k -3 -> top-k is -3
--top-k 1.5 -> '1.5'
--top-p 0 -> top-p is 0
--top-p 2 -> top-p is 2
--min-p 1.5 -> min-p is 1.5
--repetition-penalty 0 -> repetition-penalty is 0
--max-new-tokens 0 -> max-new-tokens is 0
--max-new-tokens many -> 'many' is no such number; it must be a whole number of at least 1
--stop '' -> stop string is empty
"""
RUNTIME = """
--seed -1 -> seed is -1
--seed x -> it must be a whole number from 0 to 4294967295
--threads 0 -> threads is 0
--json /no/such/folder/x.json -> /no/such/folder/x.json
--json full -> full
--jsno x.json -> did you mean --json
"""
DRAFTING = """
--tree oak -> 'oak'
--tree cain -> did you mean chain
--tree topk:0 -> width
--tree topk:x -> topk:x
--tree chain:9 -> 9 deep but there are 3 heads
--tree dynamic:x -> dynamic
--tree notes.txt -> notes.txt
--tree loose.json -> has no parent
--tree twice.json -> twice
--tree wide.json -> guess 62 of a head, but the vocabulary is 61
--tree topk:200,100 -> nodes
--tree mc_sim_7b_36 -> did you mean mc_sim_7b_63?
"""
ACCEPTING = """
--acceptance hopeful -> greedy, rejection, typical
--acceptance typical -> temperature above 0
--acceptance topk -> topk:2
--acceptance topk:0 -> at least 1
--acceptance topk:many -> at least 1, as in topk:2
--acceptance distance:-1 -> at least 0, as in distance:2
--acceptance greedy:3 -> acceptance is 'greedy:3'; choose one of greedy, rejection
--acceptance topk:2 --draft sample -> temperature above 0
--acceptance distance:2 --stop-drafting 0.1 --tree dynamic:8 -> depend on the batch
--draft guess -> draft is 'guess'; choose one of topk, sample
--draft sample -> temperature above 0
--temperature 1 --acceptance greedy -> greedy
--temperature 1 --acceptance topk:2 -> draws nothing
--temperature 1 --draft sample --acceptance typical -> typical
--temperature 1 --acceptance typical --epsilon 1.5 -> epsilon is 1.5
--temperature 1 --acceptance typical --delta -1 -> delta is -1
--stop-drafting -1 --tree dynamic:8 -> stop-drafting is -1
--stop-drafting 0.1 --tree chain -> dynamic:N
--stop-drafting 0.1 --tree dynamic:8 --compile -> leave one out
--acceptance distance:3 --compile -> cannot be compiled
--temperature 1 --draft sample --tree dynamic:8 -> use draft topk
"""
DRAFTERS = """
--drafter oracle -> 'oracle'
--drafter ngram:size=3 -> size=3
--drafter ngram:n=x -> n is 'x'
--drafter ngram --tree chain -> leave it out
--drafter ngram --compile -> cannot be compiled
--drafter rest:full -> full
--drafter blockwise:tokens=99 -> tokens is 99
--drafter mix:heads -> +
--drafter model:./nodir -> ./nodir
--drafter model:demo -> 4096 tokens
--drafter ngram --temperature 1 --draft sample -> use --draft topk
--drafter mtp -> has no MTP layers
--drafter mtp:0 -> tokens is 0; it must be at least 1
--drafter ngram --stop-drafting 0.1 -> dynamic trees of heads
--drafter ngram:token=3 -> did you mean tokens?
--drafter ngrm -> (did you mean ngram?)
--drafter blockwise --tree chain -> leave it out
--drafter mix:heads+ngram --compile -> cannot be compiled
--drafter mix:heads+ngram --temperature 1 --draft sample -> use --draft topk
"""
CONTRASTING = """
--amateur demo -> 4096 tokens
--amateur demo --compile -> --compile
--contrast-alpha 0.2 -> add --amateur
--amateur backbone --contrast-alpha 2 -> contrast-alpha is 2
--amateur backbone --contrast-beta -1 -> contrast-beta is -1
--amateur backbone --amateur-temperature 0 -> amateur-temperature is 0
"""
RECORDS = """
{} /no/such/file.jsonl -> /no/such/file.jsonl
{} empty.jsonl -> empty.jsonl is empty
{} bad.jsonl -> bad.jsonl:2: not JSON
{} other.jsonl -> other.jsonl:1: none of
{} latin.txt -> latin.txt:2: not UTF-8
{} bare -> bare holds no data
{} bad.parquet -> bad.parquet is damaged
{} object.json -> object.json must hold a JSON array
{} table.csv -> table.csv
"""
PROMPTS = RECORDS.format(*["--prompts"] * 9)
DATA = RECORDS.format(*["--data"] * 9)
SHARED = """
--json full -> full
--jsno x.json -> did you mean --json
"""
BATCH = """
--batch-size 0 -> batch-size is 0
--batch-size 1.5 -> '1.5'
"""

LINES = {
    "generate": LOADING
    + HEADS
    + SAMPLING
    + RUNTIME
    + DRAFTING
    + ACCEPTING
    + DRAFTERS
    + CONTRASTING
    + PROMPTS
    + BATCH
    + """
--prompt '' -> prompt is empty
--max-prompts 0 -> max-prompts is 0
--max-prompts 2 -> --max-prompts
--split test -> --split
--prompts prompts.jsonl --split test -> --split
--top-p 0.9 -> --temperature
--top-k 5 -> --temperature
--min-p 0.1 -> --temperature
--record full -> are not features
--record notes.txt -> --record notes.txt is a file
--strategy beam -> leave out --heads
--strategy sample -> temperature above 0
--strategy greedy --temperature 1 -> leave one out
--num-beams 3 -> add --strategy
--num-beams 0 --strategy beam -> num-beams is 0
--length-penalty 0 -> belongs to beam search
--max-queued 0 --strategy best-first-beam -> max-queued is 0
--prompts long.jsonl -> 129 tokens
--strategy beems -> (did you mean beam?)
--json /proc/x.json -> nothing can be written in /proc
--max-newtokens 3 -> unknown option --max-newtokens; did you mean --max-new-tokens?
--zzz -> unknown option --zzz; see medusa generate --help
-x -> -x
""",
    "chat": """
--temperature -1 -> temperature is -1
--tree oak -> 'oak'
--host 0.0.0.0 -> --web
--port 9000 -> --web
--web --port 0 -> port is 0
--web --port 70000 -> port is 70000
--web --host no.such.host.invalid -> no.such.host.invalid
--web --json x.json -> --json
--json full -> full
""",
    "serve": """
--port 0 -> port is 0
--port http -> 'http'
--host no.such.host.invalid -> no.such.host.invalid
--host 192.0.2.1 -> cannot listen at 192.0.2.1
--plain --no-adapt -> --no-adapt always drafts, and --plain never does; leave one of them out
--cors localhost -> --cors is 'localhost'; give an origin such as http
--batch-size 0 -> batch-size is 0
--temperature -1 -> temperature is -1
--tree oak -> 'oak'
--amateur demo -> --amateur
""",
    "evaluate": SHARED
    + DATA
    + """
--max-new-tokens 0 -> max-new-tokens is 0
--max-prompts 0 -> max-prompts is 0
--temperature 1 -> --temperature
--split test -> --split
--drafter ngram -> 'ngram', which has no heads
--drafter mtp -> not those of heads; leave out --drafter
""",
    "calibrate": SHARED
    + """
--rounds 0 -> rounds is 0
--drafter ngram -> 'ngram', which has no heads
--plot x.xyz -> x.xyz
--plot full -> full
--plot /no/such/folder/x.png -> /no/such/folder/x.png
--split test -> --split
--tree chain -> --tree
--plot x -> is no picture
--plot no/x.png -> there is no folder no
--plot x.png --json x.png -> --json and --plot both write x.png
--plot /proc/x.png -> nothing can be written in /proc
--max-new-tokens 9 -> 3 prompts with --max-new-tokens 9 give at most 27
""",
    "benchmark": SHARED
    + """
--tree oak -> 'oak'
--drafter oracle -> 'oracle'
--drafter ngram --compile -> cannot be compiled
--rounds 0 -> rounds is 0
--drafter ngram --drafter ngram -> given twice
--temperatures x -> temperatures
--temperatures -1 -> temperatures
--temperature 1 --draft sample --lossy -> use draft 'topk'
--report x.pdf -> x.pdf
--report notes.txt -> notes.txt
--report notes.txt --overwrite -> is not a report
--report full --overwrite -> is not a report
--report /no/such/folder/r.html -> /no/such/folder/r.html
--report old.html -> --overwrite
--compare notes.txt -> notes.txt
--compare old.json -> old.json
--top-p 0.9 -> --temperature
--split test -> --split
--prompt-lookup -> --prompt-lookup has another name now: --against prompt-lookup
--draft-model demo -> --draft-model has another name now: --against model:demo
--draft-model -> --against model:B
--against demo -> --against is 'demo'; give model:B, with a draft model B, or prompt-lookup
--against model: -> --against is 'model:'
--against model:demo -> the draft model demo has 4096 tokens
--against prompt-lookup --against prompt-lookup -> one is given twice
--against prompt-lookup --batch-size 2 -> one prompt at a time, and --batch-size is 2
--against prompt-lookup --amateur backbone -> cannot be combined with --amateur
--report x.html --json x.html -> --json and --report both write x.html
--report /proc/x -> nothing can be written in /proc
--report notes.txt/x -> notes.txt is a file
--epsilon 0.2 -> --epsilon 0.2 needs typical acceptance
--temperature 1 --delta 0.2 -> --delta 0.2 needs typical acceptance
--temperature 1 --draft sample --temperatures 0,1 -> with 'greedy' use draft 'topk'
--tree dynamic:16 --stop-drafting 0.1 --lossy -> depend on the batch; use typical
--top-p 0.9 --temperatures 0 -> --top-p has no effect
""",
    "verify": SHARED
    + """
--tree oak -> 'oak'
--draws 0 -> draws is 0
--sampled-prompts 0 -> sampled-prompts is 0
--epsilon 2 -> epsilon is 2
--report /no/such/folder/r.html -> /no/such/folder/r.html
--report full -> full
--report old.html -> --overwrite
--batch-size 0 -> batch-size is 0
--temperature 1 -> --temperature
--split test -> --split
--report verify.pdf -> --report verify.pdf: the report is an HTML page
--report x.html --json ./x.html -> both write
--report /proc/x.html -> nothing can be written in /proc
""",
    "distill": SHARED
    + """
--temperature -1 -> temperature is -1
--batch-size 0 -> batch-size is 0
--tree chain -> --tree works only with --heads
--server localhost:8000 -> give a URL such as
--server http://127.0.0.1:9 -> no OpenAI-compatible server
--server http://127.0.0.1:9 --heads heads -> --heads speed up decoding on this machine
--self-talk 2 -> one of --prompts FILE, --self-talk N and --questions N
--questions 2 -> one of --prompts FILE, --self-talk N and --questions N
--output full -> full
--output /no/such/folder/own.jsonl -> /no/such/folder/own.jsonl
--output /proc/own.jsonl -> /proc/own.jsonl
--output prompts.jsonl -> prompts.jsonl
--self-talk 0 -> self-talk is 0
--self-talk-seeds prompts.jsonl -> --self-talk
--max-turns 0 -> max-turns is 0
--concurrency 4 -> --server
--concurrency 0 --server http://localhost:1 -> concurrency is 0
--model x -> --server
--split test -> --split
--min-p 0.1 -> --min-p has no effect
""",
    "export": """
--heads full -> full
--heads broken -> broken
--heads notes.txt -> notes.txt
--to vlm -> did you mean vllm
--to '' -> --to
--dtype float8 -> float8
--output full -> full exists already
--output notes.txt -> notes.txt
--output notes.txt --overwrite -> notes.txt
--output full --overwrite -> is not an export
--output heads --overwrite -> is an input
--output backbone --overwrite -> is an input
--output . --overwrite -> .
--output notes.txt/new -> notes.txt/new
--output /proc/new -> /proc/new
--license mit -> --license is for the model card
--benchmark old.json -> --benchmark is for the model card
--repo-id a/b -> --repo-id is for the model card
--to hub --benchmark notes.txt -> notes.txt is not JSON
--to hub --benchmark old.json -> old.json is no benchmark
--to hub --benchmark full -> full
--to hub --benchmark thin.json -> thin.json
--to hub --license 'Apache 2' -> 'Apache 2'
--to hub --repo-id heads -> 'heads'
--to hub --backbone demo -> --backbone demo
--to sglang -> eagle
--to tensorrt-llm --backbone demo -> --to tensorrt-llm does not work: TensorRT-LLM has deleted the engines
--to modelopt --backbone demo -> --to modelopt does not work: TensorRT-LLM has deleted
--to ollama --backbone demo -> llama.cpp, on which it is built, does: --to llama.cpp
--json full -> full
--revison x -> did you mean --revision
""",
    "datastore": """
--backbone bare -> bare
--suffix .cobol --data full -> .cobol
--max-bytes 9 -> --max-bytes works only with --suffix
--max-bytes 0 --suffix .txt -> max-bytes is 0
--suffix .txt --data ./nodir -> nodir
--suffix .jsonl --split test -> --split
--suffix .jsonl --document-separator x -> --document-separator has no effect
--split test -> --split
--output full -> full
--output notes.txt -> notes.txt
--output notes.txt --overwrite -> notes.txt
--output notes.txt/new -> notes.txt/new
--output /proc/new -> /proc/new
--json full -> full
""",
    "train": """
heads.num=0 -> heads.num is 0
heads.nun=3 -> did you mean heads.num
heads.num -> key=value
=3 -> key=value
backbone=full -> full
backbone= -> backbone is missing
data=empty.jsonl -> empty.jsonl is empty
data=bad.jsonl -> bad.jsonl
data.long_documents=shred -> split, truncate, drop
data.path=[1] -> data.path
eval_data=./none.jsonl -> none.jsonl
dtype=float8 -> float8
device=abacus -> abacus
training.learning_rate=-1 -> training.learning_rate
training.report_to=wandb -> wandb
training.optim=adma -> adma
training.eval_strategy=steps -> add `eval_data: FILE` to the recipe
training.eval_tree=oak -> needs evaluation data
training.eval_tree=oak eval_data=prompts.jsonl -> no tree 'oak'
training.eval_steps=5 -> needs evaluation data
data.split=test -> leave out data.split
data.subset=main -> leave out data.subset
output_dir=notes.txt -> output_dir notes.txt is a file; choose a folder
output_dir=notes.txt/new -> notes.txt is a file; choose another place
output_dir=/proc/x -> output_dir /proc/x: nothing can be written in /proc
output_dir=heads -> --overwrite
--resume -> nothing to resume
--resume --overwrite -> give one of them
--ids -> --inspect
--inspect 0 -> inspect is 0
--inspect --plan -> --plan
--json full -> full
--threds 2 -> did you mean --threads
quantization=3bit -> quantization
adapter.rank=0 -> adapter.rank
cache_features=maybe -> cache_features
data.path=prompts.jsonl data.shuffle_buffer=0 -> data.shuffle_buffer is 0
data.path=prompts.jsonl data.streaming=perhaps -> data.streaming
cache_features=true features_dir=notes.txt -> features_dir notes.txt is a file
""",
    "info": """
--json full -> full
--backbone demo -> --backbone
""",
    "fit": """
--json full -> full
--prompts notes.txt -> at least 60
--max-prompts 3 -> at least 60
--max-prompts 0 -> max-prompts is 0
--split test -> --split
--for ollama -> llama.cpp loads the heads of --for vllm
--for vlm -> did you mean vllm?
--for vllm --kind hydra -> leave --kind and --compare out
--for sglang --compare -> leave --kind and --compare out
--kind medsua -> did you mean medusa?
--kind hydra --compare -> leave one out
--minutes 0 -> minutes is 0
--minutes nan -> minutes is nan
--minutes long -> 'long'
--max-new-tokens 0 -> max-new-tokens is 0
--output full -> is not a folder of medusa fit
--output notes.txt -> notes.txt is a file
--output /proc/x -> /proc/x
--device abacus -> abacus
--dtype float8 -> float8
--revision main -> --revision
extra -> extra
--nonsense -> --nonsense
""",
    "demo": """
--minutes 0 -> minutes
--minutes soon -> 'soon'
--max-new-tokens 0 -> max-new-tokens is 0
--revision main -> --revision
--output full -> full
--output notes.txt -> notes.txt
--backbone org/model -> --backbone
""",
}
ALONE = """
nonsense -> nonsense
generat --prompt abc -> generate
info full -> full
info notes.txt -> notes.txt
info broken -> broken
train -> RECIPE
train medsua1 -> did you mean medusa1
train configs/medusa1.yaml -> did you mean medusa1
train full -> full
train notes.txt -> must hold a mapping
train broken.yaml -> broken.yaml is not YAML
generate -> --heads H
serve --backbone demo -> there are no heads; give --heads H
generate --heads heads --backbone backbone -> --prompts FILE or --prompt TEXT
generate --backbone backbone --prompt abc -> --heads H
evaluate --backbone backbone --heads heads -> data
evaluate --backbone backbone --data prompts.jsonl -> HEADS is missing
evaluate --backbone backbone --data prompts.jsonl --drafter mtp -> has no MTP layer
calibrate --backbone backbone --drafter mtp:0 -> tokens is 0
benchmark --backbone backbone --prompts prompts.jsonl -> --heads
benchmark heads --backbone backbone -> --prompts FILE
verify heads --backbone backbone -> --prompts FILE
distill --backbone backbone --output new.jsonl -> one of --prompts FILE, --self-talk N and --questions N
distill --backbone demo --questions 2 --output new.jsonl -> --questions need --temperature
distill --backbone demo --questions 2 --temperature 1 --raw --output new.jsonl -> --raw turns off
distill --backbone demo --questions 2 --temperature 1 --max-turns 2 --output new.jsonl -> --max-turns is for
distill --backbone demo --questions 2 --temperature 1 --output new.jsonl -> needs a chat template, and demo has none
distill --backbone backbone --prompts prompts.jsonl -> output
distill --output new.jsonl --prompts prompts.jsonl -> backbone
export --to hub --output new -> heads
export --heads demo --to original-v1 --output new --backbone backbone -> hidden size 32 and 61 tokens
export --heads heads --output new -> to
export --heads heads --to hub -> output
export --heads heads --to tgi --output new -> --backbone
datastore --backbone backbone --data prompts.jsonl --output new -> build
datastore drop --backbone backbone --data prompts.jsonl --output new -> drop
datastore build --data prompts.jsonl --output new -> backbone
datastore build --backbone backbone --output new -> data
generate --backbone backbone --prompt abc --strategy beam --drafter ngram -> leave out --drafter
generate --backbone backbone --prompt abc --strategy beam --plain -> leave out --plain
generate --backbone backbone --prompt abc --strategy beam --amateur demo -> leave out --amateur
generate --backbone backbone --prompt abc --strategy beam --temperature 1 -> leave out --temperature
generate --backbone backbone --prompt abc --strategy beam --top-k 3 -> leave out --top-k
generate --backbone backbone --prompt abc --strategy beam --stop a -> leave out --stop
generate --backbone backbone --prompt abc --strategy best-first-beam --temperature 1 -> leave out --temperature
generate --backbone backbone --prompt abc --strategy beam --max-queued 9 -> belongs to --strategy best-first-beam
generate --backbone backbone --prompt abc --strategy best-first-beam --batch-size 2 -> one prompt at a time
generate a --backbone backbone --strategy best-first-beam --num-beams 5 --max-queued 4 -> at least --num-beams, 5
generate --backbone backbone --prompt abc --drafter heads -> drafter heads needs --heads H
generate --plain --prompt a -> --backbone is missing; add --backbone B
generate --drafter ngram --prompt a -> --backbone is missing; add --backbone B
generate demo a --revision main -> demo is shipped with this package; leave out --revision
generate a --backbone backbone --plain --revision main -> backbone is a folder
genrate demo -> there is no command 'genrate'; choose one of fit, demo
genrate heads -> (did you mean generate?)
benchmark --backbone backbone --prompts prompts.jsonl --drafter ngram --drafter heads -> needs --heads H
benchmark demo a -> unexpected argument 'a'
calibrate -> HEADS is missing
info -> HEADS is missing
info demo demo -> unexpected argument 'demo'
chat --backbone backbone -> there are no heads; give --heads H or --drafter ngram, or --plain
chat --backbone backbone --web --plain -> there are no heads
chat --heads demo demo -> unexpected argument 'demo'
datastore biuld --data x --output y -> (did you mean build?)
distill --backbone demo --self-talk 1 --output x --revision a -> demo is shipped
"""


def lines(text: str) -> list[tuple[str, str]]:
    """Return the command lines of a block, with the part of the message that each must hold."""
    parts = (line.partition(" -> ") for line in text.strip().splitlines() if line)
    return [(command, told) for command, _, told in parts]


CALLS = {command: lines(text) for command, text in LINES.items()} | {"": lines(ALONE)}


def test_there_are_at_least_300_wrong_calls_and_none_twice() -> None:
    names = [f"{command} {line}" for command, calls in CALLS.items() for line, _ in calls]
    assert len(names) == len(set(names)) >= 300


@pytest.mark.usefixtures("at_home")
def test_a_datastore_survives_a_build_from_data_that_cannot_be_read(tmp_path: Path) -> None:
    build = shlex.split(f"{VALID['datastore']} --output {tmp_path}/store")
    assert main(build) == 0
    before = content(tmp_path)
    assert main([*build, "--data", "other.jsonl", "--overwrite"]) == 2
    assert content(tmp_path) == before


@pytest.fixture(scope="module")
def home(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a user, with models and files of all forms, and nothing that a command may change."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("backbone", "heads", "prompts"):
        target = Path(getattr(place, name))
        (folder / target.name).symlink_to(target)
    for name in ("full", "bare", "broken"):
        (folder / name).mkdir()
    shutil.copytree(place.heads, folder / "torn")
    texts = {
        "full/keep.txt": "work of years\n",
        "bare/readme": "no data\n",
        "broken/medusa_lm_head.safetensors": "garbage",
        "broken/config.json": "{}",
        "torn/config.json": "{",
        "notes.txt": "some words\n",
        "old.html": "<p>an old report</p>",
        "old.json": '{"results": []}',
        "thin.json": json.dumps(THIN),
        "recipe.yaml": "backbone: backbone\ndata: prompts.jsonl\noutput_dir: out\n",
        "broken.yaml": "a: [1",
        "empty.jsonl": "",
        "bad.jsonl": '{"prompt": "a"}\n{"prompt": "b"\n',
        "other.jsonl": '{"story": "b"}\n',
        "long.jsonl": json.dumps({"prompt": "b" * 129}),
        "bad.parquet": "garbage",
        "object.json": '{"prompt": "a"}',
        "table.csv": "a,b\n",
        "loose.json": '{"paths": [[0, 0]]}',
        "twice.json": '{"paths": [[0], [0]]}',
        "wide.json": '{"paths": [[61]]}',
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin.txt").write_bytes("a\ncafé".encode("latin-1"))
    return folder


@pytest.fixture
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(home)
    hub_is_reachable.cache_clear()
    yield
    hub_is_reachable.cache_clear()  # other tests may have a network


RATE = {"median": 1.0, "min": 1.0, "max": 1.0}
THIN: dict[str, Any] = {
    "machine": {},
    "settings": {"heads": "heads", "drafter": "heads"},
    "methods": {"transformers": {"tokens_per_second": RATE}, "medusa": {"tokens_per_second": RATE}},
}
"""A benchmark of heads that lacks most figures of a model card."""


def content(*folders: Path) -> dict[str, tuple[int, int]]:
    """Return the paths in the folders, with the sizes and times of the files."""
    found = {str(path): path.stat() for folder in folders for path in folder.rglob("*")}
    return {path: (at.st_size, at.st_mtime_ns) if S_ISREG(at.st_mode) else (0, 0) for path, at in found.items()}


@pytest.fixture(scope="module")
def one_parser_for_each_command() -> Iterator[None]:
    """Make the parser of a command once for all of its lines: this takes longer than everything else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medusa.__main__.build_parser", functools.cache(build_parser))
        yield


@pytest.mark.usefixtures("no_loading", "at_home", "one_parser_for_each_command")
@pytest.mark.parametrize("command", CALLS)
def test_a_wrong_call_is_one_line_with_status_2(command: str, home: Path, place: Place, medusa: Any) -> None:
    """A refused call changes nothing."""
    folders = (home, Path(place.heads).parent)
    before, wrong = content(*folders), []
    for line, told in CALLS[command]:
        done = medusa(*shlex.split(f"{VALID.get(command, '')} {line}"))
        in_one_line = (done.status, done.out, done.err.count("\n")) == (2, "", 1) and done.err.startswith("medusa")
        if not in_one_line or told not in done.err or content(*folders) != before:
            wrong.append((line, told, done))
    assert not wrong
