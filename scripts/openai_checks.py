"""Checks of a server by the OpenAI package, for scripts/check_clients.py. It runs without this project's packages."""

from __future__ import annotations

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pydantic


class Toy(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=12)
    price: int = pydantic.Field(ge=0, le=99)
    is_red: bool


CLIENT = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=300)
EXPECTED = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
MESSAGES: list[Any] = [{"role": "system", "content": None}, {"role": "user", "content": "Tell me about a fox."}]
CHAT: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 20}


def report(check: str, ok: bool, found: object) -> None:
    told = {"client": f"openai {openai.__version__}", "check": check, "ok": bool(ok), "found": str(found)}
    print(json.dumps(told), flush=True)


def completions() -> None:
    texts, count = EXPECTED["texts"][:8], 0
    for one in texts:
        whole = CLIENT.completions.create(model="demo", prompt=one["text"], max_tokens=24)
        pieces = CLIENT.completions.create(model="demo", prompt=one["text"], max_tokens=24, stream=True)
        streamed = "".join(choice.text for chunk in pieces for choice in chunk.choices)
        count += whole.choices[0].text == streamed == one["answer"]
    report("completions, whole and streamed: the text of transformers", count == len(texts), f"{count} of {len(texts)}")


def chats() -> None:
    plain = CLIENT.chat.completions.create(**CHAT).choices[0].message.content
    pieces = CLIENT.chat.completions.create(**CHAT, stream=True)
    streamed = "".join(choice.delta.content or "" for chunk in pieces for choice in chunk.choices)
    harmless = {"reasoning_effort": "low", "safety_identifier": "x", "prompt_cache_key": "x", "modalities": ["text"]}
    harmless |= {"store": False, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto", "verbosity": "low"}
    more = CLIENT.chat.completions.create(**CHAT, **harmless).choices[0].message.content
    report("chat: streamed, and with parameters that change nothing", plain == streamed == more, "one text")


def log_probabilities() -> None:
    worst, tokens = 0.0, 0
    for one in EXPECTED["choices"]:
        for ending, wanted in zip(one["choices"], one["log_p"], strict=True):
            reply = CLIENT.completions.create(
                model="demo", prompt=one["text"] + ending, max_tokens=0, logprobs=1, echo=True
            )
            found = reply.choices[0].logprobs
            start = len(one["text"])
            places = zip(found.token_logprobs, found.text_offset, strict=True)
            own = [log_p for log_p, at in places if log_p is not None and at >= start]
            worst, tokens = max(worst, abs(sum(own) - wanted)), tokens + len(own)
    report("echo and logprobs: difference from transformers", worst < 1e-3, f"at most {worst:.0e} in {tokens} tokens")
    scored = CLIENT.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    best = all(one.logprob == one.top_logprobs[0].logprob and len(one.top_logprobs) == 3 for one in scored)
    report("chat with top_logprobs: the greedy token is the first", best and len(scored) == 20, f"{len(scored)} tokens")


def schemas() -> None:
    valid = 0
    for seed in range(24):
        sampling = {"temperature": 1.5 * (seed > 0), "seed": seed, "max_tokens": 120}
        found = CLIENT.chat.completions.parse(**CHAT | sampling, response_format=Toy).choices[0].message
        valid += isinstance(found.parsed, Toy)
    report("parse() with a JSON schema, temperatures 0 and 1.5: valid", valid == 24, f"{valid} of 24")


def at_once() -> None:
    """Requests of many lengths that arrive within a second; every seventh client leaves after its first chunk."""
    asked, rng = EXPECTED["concurrent"], random.Random(0)
    waits = [rng.random() for _ in asked]

    def one(number: int) -> str | None:
        time.sleep(waits[number])
        body: dict[str, Any] = {"model": "demo", "prompt": asked[number]["prompt"]}
        if number % 7 == 6:
            stream = CLIENT.completions.create(**body, max_tokens=400, stream=True, extra_body={"ignore_eos": True})
            next(iter(stream))
            stream.close()
            return None
        return CLIENT.completions.create(**body, max_tokens=asked[number]["tokens"]).choices[0].text

    start = time.monotonic()
    with ThreadPoolExecutor(len(asked)) as pool:
        texts = list(pool.map(one, range(len(asked))))
    took = time.monotonic() - start
    stayed = [number for number, text in enumerate(texts) if text is not None]
    equal = sum(texts[number] == asked[number]["text"] for number in stayed)
    left = len(asked) - len(stayed)
    found = f"{equal} of {len(stayed)}; {left} left; {took:.0f} s"
    report(f"{len(asked)} requests at once: each text as when alone", equal == len(stayed), found)


if __name__ == "__main__":
    for check in (completions, chats, log_probabilities, schemas, at_once):
        check()
