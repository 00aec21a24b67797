"""Models that peft wraps: texts are those of the adapter in use, and what only peft's `generate` does is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from decode import generate, medusa_generate
from medusa import RequestError
from tests.helpers import plain, random_heads, random_ids, tiny_model

PROMPT = random_ids(6)
INPUTS: dict[str, Any] = {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, 6, dtype=torch.long)}
OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def adapted() -> Any:
    """A model with two random adapters, of which `default` is in use."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model(), lora)
    model.add_adapter("two", lora)
    return model.eval()


@pytest.mark.parametrize("name", ["default", "two", None])
def test_the_adapter_in_use_writes_the_text(adapted: Any, name: str | None) -> None:
    heads = random_heads(tiny_model())
    if name is not None:
        adapted.set_adapter(name)
    with adapted.disable_adapter() if name is None else nullcontext():
        wanted = adapted.generate(**INPUTS, **OPTIONS)
        assert torch.equal(generate(adapted, heads, **INPUTS, **OPTIONS), wanted)
        own = adapted.generate(**INPUTS, **OPTIONS, custom_generate=medusa_generate, medusa_heads=heads)
        assert torch.equal(own, wanted)
    assert (wanted[0, 6:].tolist() == plain(tiny_model(), PROMPT, **OPTIONS)) == (name is None)


def test_adapters_of_one_call_are_refused(adapted: Any) -> None:
    """peft chooses them by hooks that end with its `generate`."""
    heads, both = random_heads(tiny_model()), {name: value.expand(2, -1) for name, value in INPUTS.items()}
    for inputs, names in ((INPUTS, ["two"]), (INPUTS, ["__base__"]), (both, ["two", "__base__"])):
        with pytest.raises(RequestError, match=r"adapter_names cannot be combined with heads; call model\.set_adapter"):
            generate(adapted, heads, **inputs, **OPTIONS, adapter_names=names)
        with pytest.raises(RequestError, match=r"adapter_names cannot be combined with heads; call model\.set_adapter"):
            adapted.generate(
                **inputs, **OPTIONS, adapter_names=names, custom_generate=medusa_generate, medusa_heads=heads
            )
    assert torch.equal(generate(adapted, heads, **INPUTS, **OPTIONS), adapted.generate(**INPUTS, **OPTIONS))


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_soft_prompts_are_refused(kind: Any) -> None:
    """They stand before the text, and only peft's `generate` puts them there."""
    model = get_peft_model(tiny_model(), kind(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    heads = random_heads(tiny_model())
    with pytest.raises(RequestError, match="peft puts a soft prompt before its text"):
        generate(model, heads, **INPUTS, **OPTIONS)
    with pytest.raises(RequestError, match="peft puts a soft prompt before its text"):
        model.generate(**INPUTS, **OPTIONS, custom_generate=medusa_generate, medusa_heads=heads)


def test_adapters_that_begin_in_the_middle_of_a_text_are_refused() -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=PROMPT[2:4])
    model, heads = get_peft_model(tiny_model(), lora).eval(), random_heads(tiny_model())
    with pytest.raises(RequestError, match="aLoRA"):
        generate(model, heads, **INPUTS, **OPTIONS)
    with pytest.raises(RequestError, match="adapter_names cannot be combined"):
        model.generate(**INPUTS, **OPTIONS, custom_generate=medusa_generate, medusa_heads=heads)
