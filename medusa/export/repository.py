"""Heads as a repository of the Hub: weights, config, provenance, a model card, and code for plain transformers.

    config.json   medusa_lm_head.safetensors   provenance.json      as `medusa.checkpoints.load` writes and reads them
    README.md                                                       the model card (`medusa.export.card`)
    custom_generate/generate.py, requirements.txt                   for `model.generate(custom_generate="org/heads")`

The code is `medusa/export/hub_generate.py`, word for word.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa.checkpoints.load import save_heads
from medusa.errors import RequestError, RunError
from medusa.export.card import Facts, is_hub_id, model_card, read_benchmark, without_folders
from medusa.files import write_text
from medusa.heads.independent import MedusaHeads
from medusa.tree import load_tree

CODE = Path(__file__).with_name("hub_generate.py")
CARD, GENERATE, REQUIREMENTS = "README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"
NEEDS = "torch>=2.11\ntransformers>=5.17\nsafetensors>=0.4\n"  # what transformers looks at before it runs the code


def why_no_code(heads: MedusaHeads) -> str | None:
    """What of these heads `custom_generate/generate.py` does not know; `None`: it can decode with them."""
    config = heads.config
    if config.kind not in ("medusa", "cascade"):
        return f"kind {config.kind}"
    if config.prefix_layers:
        return f"{config.prefix_layers} prefix layers"
    return f"a vocabulary of {config.vocabulary} tokens" if config.vocabulary is not None else None


def write_repository(heads: MedusaHeads, folder: Path, facts: Facts) -> MedusaHeads:
    """Fill `folder` with all that the repository holds; the code where it knows such heads.

    No folder of this machine is named in it. Heads without a tree get `eight`, as far as they reach.

    Returns:
        The heads as they were written.
    """
    heads = copy.copy(heads)  # with a config of its own; the weights are the same
    base = heads.config.base_model_name_or_path
    heads.config = replace(
        heads.config,
        base_model_name_or_path=base if is_hub_id(base) or base is None else Path(base).name,
        backbone=without_folders(heads.config.backbone),
        tree=heads.config.tree or [list(path) for path in default_tree(heads.config.num_heads)],
    )
    provenance = heads.provenance if facts.provenance is None else facts.provenance
    facts = replace(facts, provenance=provenance)
    save_heads(heads, folder, without_folders(provenance))
    with_code = why_no_code(heads) is None
    if with_code:
        (folder / GENERATE).parent.mkdir()
        shutil.copyfile(CODE, folder / GENERATE)
        write_text(folder / REQUIREMENTS, NEEDS)
    write_text(folder / CARD, model_card(heads, facts, with_code))
    return heads


def default_tree(num_heads: int) -> list[tuple[int, ...]]:
    """For heads about which nothing was measured: eight nodes, which no machine minds much."""
    return load_tree("eight", num_heads).clip(num_heads).rank_paths


def push(
    heads: MedusaHeads,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    license: str | None = None,
    benchmark: str | Path | None = None,
) -> str:
    """Publish heads as `repo_id`, which is made where it is not there yet; returns the commit's address.

    Args:
        private: of a new repository; by default as the account says.
        token: by default that of `hf auth login`.
        revision: a branch, made where it is not there yet; by default main.
        commit_message: by default one that says what these heads are.
        license: the Hub's name of it, for the card.
        benchmark: what `medusa benchmark --json` wrote about these heads, for the card.

    Files of the same names there are replaced, the card, too (git keeps the old ones).

    Raises:
        RequestError: no such repository for this token, or a name, licence or benchmark that is none.
        RunError: the Hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError

    facts = Facts(repo_id=repo_id, license=license, benchmark=None if benchmark is None else read_benchmark(benchmark))
    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            written = write_repository(heads, Path(folder), facts)
            config = written.config
            done: Any = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message
                or f"{config.num_heads} {config.kind} heads for {config.base_model_name_or_path or 'their backbone'}",
            )
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError) as error:
        raise RequestError(
            f"cannot push to {repo_id}: {_reason(error)}; log in with `hf auth login`, or pass a token that may write "
            "there"
        ) from None
    except (HTTPError, OSError) as error:  # HTTPError: of the library that the Hub's own stands on, whichever it is
        raise RunError(f"cannot push to {repo_id}: {_reason(error)}; is the Hub reachable from here?") from error
    return str(done.commit_url)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
