"""The parameters of `medusa distill --server`: the server decodes with every setting of the local engine."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from decode.settings import Settings
from medusa.__main__ import main
from medusa.commands.distill.engines import HERE, SENT, server_parameters
from medusa.errors import RequestError
from tests.commands.fake_server import serving
from tests.commands.test_cli import Place


def parameters(own: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return server_parameters(Settings(**settings), GenerationConfig(**own))


@pytest.mark.parametrize(
    ("own", "settings", "sent"),
    [
        ({}, {}, {}),
        ({}, {"temperature": 0.7}, {}),
        ({}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, {"top_p": 0.9, "top_k": 5, "min_p": 0.1}),
        ({}, {"stop": ("a", "b"), "ignore_eos": True}, {"stop": ["a", "b"], "ignore_eos": True}),
        ({}, {"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"repetition_penalty": 1.1, "stop_strings": "x"}, {}, {"repetition_penalty": 1.1, "stop": ["x"]}),
        # A server's defaults are the checkpoint's, so what turns them off must be sent.
        ({"repetition_penalty": 1.1, "top_k": 9}, {"ignore_generation_config": True}, {"repetition_penalty": 1.0}),
        ({"stop_strings": ["x"]}, {"ignore_generation_config": True}, {"stop": []}),
        ({"top_k": 9, "top_p": 0.8, "min_p": 0.1}, {"temperature": 1.0}, {"top_k": -1, "top_p": 1.0, "min_p": 0.0}),
        ({"remove_invalid_values": True, "renormalize_logits": True, "min_length": 0}, {}, {}),
        ({"suppress_tokens": [1]}, {"ignore_generation_config": True}, {}),
    ],
)
def test_a_server_is_asked_for_every_setting(own: Any, settings: Any, sent: dict[str, Any]) -> None:
    wanted = {"max_tokens": 256, "temperature": settings.get("temperature", 0.0)} | sent
    assert parameters(own, **settings) == wanted


def test_settings_for_which_no_server_can_be_asked_are_named() -> None:
    """Every setting of the local engine is sent, refused, or read before: none is dropped without a word."""
    read_here = {"max_new_tokens", "temperature", "stop", "ignore_generation_config", "amateur", "grammar"}
    assert {known.name for known in fields(Settings)} == {*SENT, *HERE} | read_here
    others = {"acceptance": "typical", "draft": "sample", "stop_drafting": 0.1, "epsilon": 0.2, "delta": 0.2}
    for name, value in (others | {"compile": True}).items():
        with pytest.raises(RequestError, match=f"--{name.replace('_', '-')} is for decoding on this machine"):
            parameters({}, temperature=1.0, **{name: value})
    for name in ("no_repeat_ngram_size", "suppress_tokens", "min_new_tokens", "forced_eos_token_id"):
        with pytest.raises(RequestError, match=f"sets {name}=.*--ignore-generation-config, or leave out --server"):
            parameters({name: [3] if name == "suppress_tokens" else 3})


def test_a_server_is_not_asked_for_what_it_cannot_do(place: Place, tmp_path: Path, capsys: Any) -> None:
    backbone = tmp_path / "backbone"
    shutil.copytree(place.backbone, backbone)
    GenerationConfig(suppress_tokens=[3]).save_pretrained(backbone)
    with serving() as server:
        argv = ["distill", "--backbone", backbone, "--prompts", place.prompts, "--output", tmp_path / "o.jsonl"]
        assert main([*map(str, argv), "--server", server.url]) == 2
        assert "generation_config.json of the model sets suppress_tokens=" in capsys.readouterr().err
        assert not server.asked
