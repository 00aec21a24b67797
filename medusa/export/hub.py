"""A repository for the Hub that plain transformers decodes with (`medusa.export.repository`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from medusa.errors import RequestError
from medusa.export.base import Export, Written
from medusa.export.facts import Facts
from medusa.export.repository import why_no_code, write_repository
from medusa.loading import DEMO

NAME = "hub"


def write(export: Export) -> Written:
    heads, facts = export.heads, export.facts or Facts()
    unknown = why_no_code(heads.config)
    if unknown is not None:
        raise RequestError(
            f"--to {NAME}: the code that it ships knows independent and cascaded heads, not heads with {unknown}; "
            "publish them without it by heads.push_to_hub, for use with this package"
        )
    if Path(export.backbone) == DEMO.resolve():  # a folder of this installation
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
