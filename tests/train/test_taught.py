"""A property of training on conversations: whatever is taught was written by the model, after what it was shown.

A pretended model continues the prompts that transformers renders, a pretended server returns its answers as messages,
and the examples made of these messages are compared with what the model wrote."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

from chat_families import TEMPLATES, TOOLS, family_tokenizer
from medusa.records.record import parse_record
from tests.train.test_chat import show
from train.data.reader import to_examples

ENDS = {"Llama 3.1": "<|eot_id|>", "Gemma 2": "<end_of_turn>", "Gemma 3": "<end_of_turn>", "Gemma 4": "<turn|>"}
ENDS |= {"Mistral v0.3": "</s>", "Mistral Small 3": "</s>", "gpt-oss": "<|return|>", "Vicuna": "</s>", "OLMo 2": "</s>"}
ENDS |= dict.fromkeys(("DeepSeek R1", "DeepSeek V3.1"), "<｜end▁of▁sentence｜>")
ENDS |= {"Phi-4-mini": "<|end|>", "Granite 3.3": "<|end_of_text|>", "GLM-4.5": "<|user|>"}
ENDS |= {"Command R": "<|END_OF_TURN_TOKEN|>", "Idefics 3": "<end_of_utterance>"}
THINK = ("<think>\n", "\n</think>\n\n")
THOUGHTS = {"GLM-4.5": ("\n<think>", "</think>\n")}
THOUGHTS["gpt-oss"] = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
ALWAYS = {"gpt-oss": "<|channel|>final<|message|>", "GLM-4.5": "\n<think></think>\n"}
PARSED = ("Qwen3", "Qwen3.5", "GLM-4.5", "gpt-oss", "DeepSeek R1", "DeepSeek V3.1", "SmolLM3")
"""Families whose servers return thoughts as reasoning."""
NO_SYSTEM, SPACED, PARTS = ("Gemma 2",), ("Mistral v0.3", "Vicuna", "Idefics 3"), ("Idefics 3",)
SWITCHES: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True}, {"thinking": True})
WORDS = ["yes", "Three.", "café", "\n", "  ", "<b>", "<think", "1+2", "{", "'", "\t-", "assistant"]


class Turn(NamedTuple):
    shown: str
    written: str
    ended: bool


def talk(
    family: str, options: dict[str, Any], parses: bool, random: random.Random
) -> tuple[dict[str, Any], list[Turn]]:
    """Let a pretended model answer one to three questions; return the record, and what was shown and written."""
    tokenizer, messages, turns = family_tokenizer(family), list[dict[str, Any]](), list[Turn]()
    tools = TOOLS if random.random() < 0.3 else None
    if family not in NO_SYSTEM and random.random() < 0.5:
        messages.append({"role": "system", "content": "Be kind."})
    ended = True
    for turn in range(last := random.choice((1, 2, 3))):
        messages.append({"role": "user", "content": said(random).strip() or "So?"})
        given = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
        shown = tokenizer.apply_chat_template(
            given if family in PARTS else messages, tools=tools, add_generation_prompt=True, tokenize=False, **options
        )
        text, thought = said(random), None
        text = text if text.strip() else "Yes."
        before, after = THOUGHTS.get(family, THINK)
        if opened := shown.rstrip().endswith("<think>"):
            before = before[len(shown) - shown.rindex("<think>") :]
        if (opened or random.random() < 0.3) and (family in PARSED or not parses):
            thought = said(random).strip() or "Well"
        if thought is not None:
            text = text.lstrip() or "Yes."
        written = text if thought is None else before + thought + after + text
        if family in ALWAYS and thought is None:  # these models write marks even without a thought
            written = "\n" + text if shown.endswith("</think>") else ALWAYS[family] + text
        if family in SPACED and not written[:1].isspace():
            written = " " + written  # of which servers remove the space
        ended = turn < last - 1 or random.random() < 0.7
        if not ended:
            written, text = written[:-1], text[:-1]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": written.removeprefix(" ") if family in SPACED else written,
        }
        if family in ALWAYS or (parses and family in PARSED):
            message["content"] = text
            if thought is not None:  # parsers keep all newlines, or strip them; then more of them would be lost
                message |= {"reasoning": thought, "content": text}
                if family not in ALWAYS and random.random() < 0.5:
                    message |= {"reasoning": f"\n{thought}\n", "content": f"\n\n{text}"}
        messages.append(message)
        turns.append(Turn(shown, written, ended))
    row = {"messages": messages, "finish_reason": "stop" if ended else "length", "chat_template_kwargs": options}
    return row | ({"tools": tools} if tools else {}), turns


def said(random: random.Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 4)))


@pytest.mark.parametrize("family", list(TEMPLATES))
def test_whatever_is_taught_was_written_by_the_model(family: str) -> None:
    tokenizer, taught, end = family_tokenizer(family), 0, ENDS.get(family, "<|im_end|>")
    draw, answers = random.Random(family), 0
    for number in range(16):
        row, turns = talk(family, SWITCHES[number % len(SWITCHES)], parses=number % 2 == 0, random=draw)
        examples, _ = to_examples(parse_record(row, "here"), tokenizer)
        answers += len(turns)
        for example in examples:
            before, *rest = show(tokenizer, example.input_ids, example.loss_mask).split("«")
            for region in rest:
                words, after = region.split("»")
                shown = [turn for turn in turns if before.startswith(turn.shown)]
                assert shown, f"no model was shown {before!r}"
                turn = shown[-1]  # the longest of the prompts that the text begins with
                whole = turn.written + (end if turn.ended else "")
                assert words in whole, f"the model wrote {whole!r}"
                if before == turn.shown:
                    assert whole.startswith(words)
                assert turn.ended or not words.endswith(end)
                before, taught = before + words + after, taught + 1
    expected = 0 if family == "DeepSeek R1" else 0.4
    assert taught >= expected * answers, f"only {taught} of {answers} answers are taught, so this shows little"
