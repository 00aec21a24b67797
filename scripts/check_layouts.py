"""Read EAGLE-3 layers and block drafters that other projects' own code wrote, and compare our logits with theirs.

    python scripts/check_layouts.py --work runs/layouts
    python scripts/check_layouts.py --work runs/layouts --swap-halves

Each project gets an environment of its own from PyPI, without this package. A file of scripts/consumers makes random
layers for the embedded backbone there, saves them with that project's code, and runs its forward over texts, with the
further steps that it trains. Here the saved layers are read, and the logits of every step at every position must be
equal. `medusa verify` then draws tokens with each layer, in chosen and drawn trees. With --swap-halves, the halves of
some matrices change places before the layers are read, and the logits must differ. SpecForge is installed without its
dependencies, which need CUDA; its layers import without them. PyTorch for CPUs needs
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from check_consumers import KNOWN, Consumer, environment, file_name, require_program, swap_halves
from medusa import MedusaHeads
from medusa.backbone import Backbone
from medusa.errors import RequestError, RunError
from medusa.files import Json, require_writable_folder, write_json
from medusa.loading import DEMO, load_backbone, load_tokenizer
from medusa.records.sources import read_records
from medusa.vocabulary import lm_head_for
from script_tools import markdown_table, medusa, run_script, script_parser

PROJECTS = {name: Consumer(**about) for name, about in KNOWN["projects"].items()}
STEPS, TEXTS, VOCABULARY = 4, 3, 1024
LAYERS = (1, 3, 5)  # of the embedded backbone, counted as transformers' `hidden_states`


@dataclass(frozen=True)
class Layer:
    """A layer that a project writes: its name in the table, sizes other than the usual ones, the project's switches."""

    name: str
    project: str
    sizes: Json = field(default_factory=dict)
    switches: Json = field(default_factory=dict)
    model_type: str = "llama"
    algorithm: str = "eagle3"
    vocabulary: int = VOCABULARY

    @property
    def settings(self) -> Json:
        """What the project's code makes the layer or drafter from."""
        return {"norm_before_residual": False} | self.switches


WRITTEN = [Layer(**about) for about in KNOWN["layers"]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--work", required=True, type=Path, help="write layers and environments here")
    parser.add_argument("--only", nargs="+", choices=PROJECTS, default=list(PROJECTS), help="check these projects")
    parser.add_argument("--python", default=sys.executable, help="make environments with this Python (this one)")
    parser.add_argument("--draws", type=int, default=200_000, metavar="N", help="by each rule (default: %(default)s)")
    parser.add_argument("--swap-halves", action="store_true", help="damage the layers: all logits must differ")
    args = parser.parse_args(argv)
    if args.draws <= 0:
        raise RequestError("--draws must be greater than 0")
    require_program(args.python)
    require_writable_folder(args.work, option="--work")
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    model, tokenizer, rows, holds = load_backbone("demo").model, load_tokenizer("demo"), [], True
    texts = [tokenizer(str(record.text))["input_ids"] for record in read_records("demo")][:TEXTS]
    for layer in [layer for layer in WRITTEN if layer.project in args.only]:
        python = environment(work / "environments" / layer.project, PROJECTS[layer.project], args.python)
        folder = work / file_name(f"{layer.project}-{layer.name}")
        version, logits = written(layer, python, folder, texts)
        if args.swap_halves:
            swap_halves(folder)
        difference, largest = compared(folder, Backbone(model, LAYERS), texts, logits)
        verified = draw(folder, args.draws)
        holds &= (difference < 1e-5 * largest) != args.swap_halves and verified
        size = f"{difference:.0e} of {largest:.1f}"
        rows.append([version, layer.name, size, "yes" if verified else "NO"])
        print(rows[-1], file=sys.stderr, flush=True)
    print(markdown_table(["written by", "layer", "largest difference, of logits up to", f"{args.draws:,} draws"], rows))
    return int(not holds)


def written(layer: Layer, python: Path, folder: Path, texts: list[list[int]]) -> tuple[str, list[torch.Tensor]]:
    """Let a project write a layer into `folder`; return its version, and its logits [steps, T - 1, N] of each text."""
    job, out = folder.with_suffix(".job.json"), folder.with_suffix(".logits.safetensors")
    about: Json = {"backbone": str(DEMO), "output": str(folder), "texts": texts, "steps": STEPS, "layers": LAYERS}
    about |= {"vocabulary": layer.vocabulary, "layer": KNOWN["sizes"] | layer.sizes, "switches": layer.settings}
    write_json(job, about | {"model_type": layer.model_type, "algorithm": layer.algorithm})
    script = Path(__file__).with_name("consumers") / f"write_{layer.project}.py"
    done = subprocess.run([python, "-E", script, job, out], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{layer.project} wrote no layer: {done.stderr.strip().splitlines()[-1:]}")
    with safe_open(out, "pt") as file:
        version = file.metadata()["version"]
    found = load_file(out)
    return version, [found[str(number)] for number in range(len(texts))]


@torch.no_grad()
def compared(
    folder: Path, backbone: Backbone, texts: list[list[int]], logits: list[torch.Tensor]
) -> tuple[float, float]:
    """Return the largest difference between our logits and those of the project, and the largest of its logits.

    Step s after position p reads the text's tokens up to p + 1 + s, so the last positions of a text are left out."""
    heads = MedusaHeads.from_pretrained(folder)
    if heads.config.feature_layers != [*LAYERS]:
        raise RunError(f"{folder} was read with the layers {heads.config.feature_layers}")
    differences, largest = [], []
    for text, theirs in zip(texts, logits, strict=True):
        ids = torch.tensor([text])
        hidden = backbone.hidden_states(ids[:, :-STEPS], use_cache=False)
        inputs = heads.inputs(hidden, ids, backbone.embed, num_heads=STEPS)
        ours = heads.logits(heads.features(inputs, STEPS), lm_head_for(heads, backbone))[:, 0]
        count = min(ours.shape[1], theirs.shape[1])
        ours, theirs = ours[:, :count], theirs[:, :count]
        differences.append((ours - theirs).abs().max().item())
        largest.append(theirs.abs().max().item())
    return torch.tensor(differences).max().item(), max(largest)  # Python's `max` may pass over NaN


def draw(folder: Path, draws: int) -> bool:
    """Verify greedy text and `draws` samples by each acceptance rule with the layer in `folder`; return the verdict."""
    prompts = f"--prompts demo --max-prompts 2 --sampled-prompts 1 --max-new-tokens 32 --draws {draws}"
    try:
        medusa(f"verify {folder} --backbone demo --tree topk:3,2,1 {prompts} --threads 1 --quiet")
    except subprocess.CalledProcessError:
        return False
    return True


if __name__ == "__main__":
    run_script(main)
