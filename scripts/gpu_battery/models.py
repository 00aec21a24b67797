"""Stages that train: a backbone on Python sources, and heads of each kind on the text it writes."""

from __future__ import annotations

import itertools
import random
import sysconfig
import time
from pathlib import Path

from transformers import AutoTokenizer

import make_backbone
from medusa.files import write_json
from medusa.records.sources import DOCUMENT_SEPARATOR
from script_tools import write_jsonl
from scripts.gpu_battery.run import Run

SHORTEST = 500  # characters of a source that is used
PROMPT = 400  # characters of a source that a prompt is cut from


def backbone(run: Run) -> None:
    """Train a backbone on Python files of this machine, and write prompts from files that it did not train on."""
    folders = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    files = sorted({path for folder in folders for path in folder.rglob("*.py")})
    random.Random(0).shuffle(files)
    texts, taken, limit = [], 0, run.scale.source_bytes
    for path in files:
        if taken >= limit:
            break
        text = path.read_text(encoding="utf-8", errors="ignore") if path.is_file() else ""
        text = text.replace(DOCUMENT_SEPARATOR, "").strip()
        text = text[: min(20_000, limit // 100)]
        if len(text) > SHORTEST:
            texts.append(text)
            taken += len(text)
    if len(texts) < 40:
        raise RuntimeError(f"this machine has only {len(texts)} Python sources; training needs at least 40")
    held_out, seen = texts[::20], [text for index, text in enumerate(texts) if index % 20]
    for name, part in (("train", seen), ("eval", held_out[:20])):
        (run.output / f"{name}.txt").write_text(f"\n{DOCUMENT_SEPARATOR}\n".join(part) + "\n", encoding="utf-8")
    argv = ["--data", run.output / "train.txt", "--eval", run.output / "eval.txt", "--output", run.backbone]
    argv += ["--overwrite", "--device", run.device, *run.scale.backbone.split()]
    start = time.monotonic()
    make_backbone.main(list(map(str, argv)))
    size = (run.backbone / "model.safetensors").stat().st_size / 1e6
    run.keep(seconds=round(time.monotonic() - start), source_mb=sum(map(len, seen)) / 1e6, megabytes=size)
    tokenizer = AutoTokenizer.from_pretrained(run.backbone)
    openings = itertools.islice(itertools.cycle(seen), run.scale.texts)
    for path, texts in ((run.openings, openings), (run.prompts, held_out[: run.scale.prompts])):
        encoded = tokenizer([text[:PROMPT] for text in texts])["input_ids"]
        write_jsonl(path, "input_ids", (ids[: run.scale.prompt_tokens] for ids in encoded))


def text(run: Run) -> None:
    """Let the backbone generate text to train heads on."""
    argv = ["--backbone", run.backbone, "--prompts", run.openings, "--output", run.own, *run.scale.text.split()]
    argv += ["--device", run.device, "--dtype", run.dtype_name, "--quiet"]
    argv += ["--overwrite"] * (not run.goes_on)
    start = time.monotonic()
    run.medusa("distill", *argv)
    with run.own.open(encoding="utf-8") as file:
        run.keep(texts=sum(1 for _ in file), writing_seconds=round(time.monotonic() - start))


def train(run: Run, kind: str) -> None:
    """Train heads of one kind on the backbone's text."""
    config = {
        "backbone": str(run.backbone),
        "data": {"path": str(run.own), "sequence_length": run.scale.sequence_length},
        "output_dir": str(run.heads / kind),
        "heads": {"num": 4, "kind": kind},
        "device": run.device,
        "training": run.scale.training | {"save_strategy": "no", "logging_steps": 50, "bf16": run.on_gpu},
    }
    recipe = run.own.with_name(f"{kind}.yaml")
    write_json(recipe, config)  # JSON is YAML
    start = time.monotonic()
    result = run.medusa("train", recipe, "--overwrite", "--quiet", result=run.stage.replace(" ", "_"))
    seconds = round(time.monotonic() - start)
    run.keep(kind=kind, steps=result.get("steps"), loss=result.get("loss"), training_seconds=seconds)
