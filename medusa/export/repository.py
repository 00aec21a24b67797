"""Repositories on the Hub: weights, config and provenance of heads, a model card, and code for plain transformers.

    config.json   medusa_lm_head.safetensors   provenance.json      the files that `medusa.checkpoints.folder` writes
    README.md                                                       the model card (`medusa.export.card`)
    custom_generate/generate.py, requirements.txt                   for `model.generate(custom_generate="org/heads")`

The code is made from the modules in `medusa/export/hub_code/`."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.checkpoints.folder import save
from medusa.errors import RequestError, RunError, first_line
from medusa.export.base import Export, Written
from medusa.export.card import Facts, is_hub_id, model_card, read_benchmark, without_folders
from medusa.export.hub_code import bundle
from medusa.export.hub_code.heads import why_unfit
from medusa.files import write_text
from medusa.loading import DEMO
from medusa.tree import load_tree

CARD, GENERATE, REQUIREMENTS = "README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"
NEEDS = "torch>=2.11\ntransformers>=5.17\nsafetensors>=0.4\n"
"""The content of `requirements.txt`, which transformers checks before it runs the code."""
DEFAULT_TREE = "eight"
"""The name of the tree for heads without a tree of their own. Its eight nodes cost little time on any machine."""


def write(export: Export) -> Written:
    """Write a Hub repository with code for plain transformers; RequestError if the code cannot run the heads."""
    heads, facts = export.heads, export.facts
    if unknown := why_unfit(vars(heads.config)):
        raise RequestError(
            f"--to hub: its code decodes with independent and cascaded heads, not with heads with {unknown}; "
            "publish them without code by heads.push_to_hub, for use with this package"
        )
    if Path(export.backbone) == DEMO.resolve():  # do not publish the path of this installation
        heads = replace(heads, config=replace(heads.config, base_model_name_or_path="demo"))
    written = write_repository(heads, export.folder, facts)
    where = facts.repo_id or str(export.place)
    return Written(
        serve=f'model.generate(**inputs, custom_generate="{where}", trust_remote_code=True, max_new_tokens=256)',
        lost="trees are static, rows of a batch are decoded one after the other, and steps are not compiled",
        heads=written,
        notes=[f"to publish it: hf upload {facts.repo_id or 'ORG/NAME'} {export.place}"]
        + ([] if heads.config.tree else ["these heads came without a tree; config.json now holds `eight`"])
        + ([] if facts.benchmark else ["the card says nothing about speed: measure it (--benchmark)"])
        + ([] if facts.license else ["the card names no licence (--license)"]),
    )


def write_repository(heads: Checkpoint, folder: Path, facts: Facts) -> Checkpoint:
    """Write a Hub repository of heads into `folder`, and return the heads as they were written.

    The files contain no paths of this machine. Heads without a tree get `DEFAULT_TREE`, cut to the depth that the heads
    reach. The decoding code is left out if it does not support these heads. RequestError: they were trained with an
    adapter, and do not name the merged model."""
    base, recipe = heads.config.base_model_name_or_path, (heads.provenance or {}).get("config") or {}
    if recipe.get("adapter") and base == recipe.get("backbone"):
        raise RequestError(
            f"these heads were trained with an adapter of {base}, and do not fit that model alone; publish the merged "
            "one, and name it by --backbone, or in Python as heads.config.base_model_name_or_path"
        )
    default = load_tree(DEFAULT_TREE, heads.config.num_heads).clip(heads.config.num_heads)
    config = replace(
        heads.config,
        base_model_name_or_path=base if is_hub_id(base) or base is None else Path(base).name,
        backbone=without_folders(heads.config.backbone),
        tree=heads.config.tree or default.to_json(),
    )
    written = Checkpoint(config, heads.tensors, without_folders(heads.provenance))
    save(written, folder)
    with_code = why_unfit(vars(config)) is None
    if with_code:
        write_text(folder / GENERATE, bundle())
        write_text(folder / REQUIREMENTS, NEEDS)
    write_text(folder / CARD, model_card(written, replace(facts, provenance=heads.provenance), with_code))
    return written


NO_ACCESS, TOO_MANY, SERVER_ERRORS = (401, 403, 404), 429, 500  # statuses of HTTP


class PushOptions(TypedDict, total=False):
    """The options of `MedusaHeads.push_to_hub`."""

    private: bool | None  # whether a new repository is private; by default according to the settings of the account
    token: str | bool | None  # the access token; by default that of `hf auth login`
    revision: str | None  # the branch, which is created if it does not exist; by default main
    commit_message: str | None  # by default the number and kind of the heads, and their backbone
    license: str | None  # the Hub's name of the licence for the model card, such as apache-2.0
    benchmark: str | Path | None  # results of `medusa benchmark --json` for these heads, for the model card


def push(heads: Checkpoint, repo_id: str, **options: Unpack[PushOptions]) -> str:
    """Publish heads in the repository `repo_id`, which is created if it does not exist; return the commit's address.

    Existing files with the same names, such as the model card, are replaced. Their old versions stay in the history.
    Raise RequestError if the token gives no access to the repository, or its name, the licence or the benchmark is
    wrong; RunError if the Hub cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError

    benchmark, revision = options.get("benchmark"), options.get("revision")
    facts = Facts(repo_id, options.get("license"), benchmark=None if benchmark is None else read_benchmark(benchmark))
    token = options.get("token")
    if isinstance(token, str) and token and not re.fullmatch("[!-~]+", token):  # an error of HTTP would quote it
        raise RequestError("the token has a space, a line end or a character that no token has; remove it")
    api = HfApi(token=token)
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = write_repository(heads, Path(folder), facts).config
            repo = api.create_repo(repo_id, private=options.get("private"), exist_ok=True).repo_id
            if revision is not None:
                api.create_branch(repo, branch=revision, exist_ok=True)
            of = config.base_model_name_or_path or "their backbone"
            message = options.get("commit_message") or f"{config.num_heads} {config.kind} heads for {of}"
            done = api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=message)
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError) as error:
        unasked = 0 if isinstance(error, HFValidationError) else NO_ACCESS[0]  # a wrong name, or no token
        status = getattr(getattr(error, "response", None), "status_code", unasked)
        reason = getattr(error, "server_message", None) or first_line(error)
        told = f"cannot push to {repo_id}: {' '.join(reason.split())}"
        if status == TOO_MANY or status >= SERVER_ERRORS:
            raise RunError(f"{told}; try again later") from None
        may = "; log in with `hf auth login`, or pass a token that may write there"
        raise RequestError(told + (may if status in NO_ACCESS else "")) from None
    except (HTTPError, OSError) as error:  # HTTPError is that of httpx or requests, depending on the version
        raise RunError(f"cannot push to {repo_id}: {first_line(error)}; is the Hub reachable from here?") from error
    return str(done.commit_url)
