"""Write a random EAGLE-3 layer or block drafter with speculators' own code, and its logits, for check_layouts.py.

It runs without this project's packages."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.model import SpeculatorModel
from transformers import AutoConfig, AutoModelForCausalLM

JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
torch.manual_seed(0)
backbone = AutoModelForCausalLM.from_pretrained(JOB["backbone"], dtype=torch.float32)
kept = torch.randperm(backbone.config.vocab_size)[: JOB["vocabulary"]].sort().values
reduced = {"t2d": torch.zeros(backbone.config.vocab_size, dtype=torch.bool).index_fill(0, kept, True)}
reduced["d2t"] = kept - torch.arange(len(kept))
if len(kept) == backbone.config.vocab_size:
    reduced = dict.fromkeys(reduced)
layer = AutoConfig.for_model(JOB["model_type"], **JOB["layer"])
drafter = (
    SpeculatorModel.registry[JOB["algorithm"]]
    .from_training_args(
        layer,
        **reduced,
        draft_vocab_size=len(kept),
        target_layer_ids=JOB["layers"],
        verifier_name_or_path=JOB["backbone"],
        ttt_steps=JOB["steps"],
        draft_attn_impl="eager",
        **JOB["switches"],
    )
    .float()
)
for name, parameter in drafter.named_parameters():
    if parameter.requires_grad:  # not the backbone's embeddings
        torch.nn.init.normal_(parameter, float("norm" in name), 0.3 if "norm" in name else parameter.shape[-1] ** -0.5)
drafter.eval().save_pretrained(JOB["output"])
seen: list[torch.Tensor] = []
drafter.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits[0]))


def block_logits(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Compute the logits [steps, T', N] of blocks whose first tokens are 1, 2, ... of a text [1, T]."""
    size, count = drafter.block_size, ids.shape[1] - drafter.block_size
    every = torch.ones_like(ids)
    features = {"input_ids": ids, "loss_mask": every, "document_ids": every - 1}
    last = hidden[..., -backbone.config.hidden_size :]  # for targets, which are not read here
    x, logits, *_, places = drafter._backbone_forward(
        hidden, verifier_last_hidden_states=last, max_anchors=count, **features
    )
    tokens = ids[0, places].view(count, size)
    before = tokens if drafter.config.sample_from_anchor else torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)
    if JOB["algorithm"] == "dspark":
        code = drafter.markov_head.prev_embeddings(before)
        edges = drafter.markov_head.block_bias(
            prev_token_ids=before, hidden_states=x.view(count, size, -1), prev_emb=code
        )
        logits = logits + edges.reshape(logits.shape)
    if JOB["algorithm"] == "dflash2":
        every_token = torch.arange(logits.shape[-1]).expand(logits.shape)
        logits = drafter.candidate_selector.score_candidates(logits, x, before.reshape(1, -1), every_token)
    return logits.view(count, size, -1)[1:, size - JOB["steps"] :].transpose(0, 1).contiguous()


logits = {}
with torch.no_grad():
    for number, ids in enumerate(JOB["texts"]):
        states = backbone(torch.tensor([ids]), output_hidden_states=True).hidden_states
        hidden = torch.cat([states[index] for index in JOB["layers"]], dim=-1)
        if JOB["algorithm"] != "eagle3":
            logits[str(number)] = block_logits(hidden, torch.tensor([ids]))
            continue
        following = torch.tensor([ids[1:]])
        drafter(
            hidden_states=hidden[:, :-1],
            input_ids=following,
            document_ids=torch.zeros_like(following),
            ttt_steps=JOB["steps"],
        )
        logits[str(number)] = torch.stack(seen)
        seen.clear()
save_file(logits, sys.argv[2], {"version": f"speculators {version('speculators')}"})
