"""`medusa verify --server` on this project's own server, which drafts with heads: it must pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa.__main__ import main
from medusa.files import read_json
from tests.decode.serve.server_tools import PROMPTS, ask


@pytest.mark.full
def test_the_server_with_heads_passes(url: str, tmp_path: Path) -> None:
    prompts = [word for text in PROMPTS[:2] for word in ("--prompt", text)]
    how = ["--raw", "--max-new-tokens", "6", "--draws", "24", "--sampled-prompts", "1", "--json", str(tmp_path / "f")]
    assert main(["verify", "--server", url, "--reference", "demo", *prompts, *how]) == 0
    found = read_json(tmp_path / "f")
    assert found["limits"] == []
    assert [case["prompt"] is None for case in found["sampling"]["cases"]] == [False, False, True, True]


def test_ids_of_tokens_are_returned_where_they_are_asked_for(url: str, api: object) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "n": 2}
    plain, with_ids = (ask(url, "/v1/completions", body | more)[1] for more in ({}, {"return_token_ids": True}))
    assert "token_ids" not in plain["choices"][0]
    first, second = with_ids["choices"]
    assert first["token_ids"] == second["token_ids"]
    assert len(first["token_ids"]) == 4
    assert api.worker.tokenizer.decode(first["token_ids"]) == first["text"]  # type: ignore[attr-defined]
