"""A conversation as text, written by the tokenizer's own chat template, and what a template can read.

Templates are programs. What one can read is found by trying it on short conversations, not by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from medusa.errors import RequestError, did_you_mean, first_line
from medusa.files import Json
from medusa.records.messages import REASONING, arguments_text, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<|START_THINKING|>": "<|END_THINKING|>"}
THOUGHTS |= {"<seed:think>": "</seed:think>", "<thinking>": "</thinking>", "<reasoning>": "</reasoning>"}
"""The marks before and after a thought."""
GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token"}
GIVEN |= {"sep_token", "cls_token", "mask_token", "raise_exception", "strftime_now", "range", "namespace"}
"""Names in a template that are no options: what transformers gives to every template, and functions of Jinja."""
FIXED: tuple[str, ...] = ("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "tokenize")
FIXED += ("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict")
FIXED += ("tokenizer_kwargs", "return_assistant_tokens_mask", "sanitize_control_tokens")
"""Arguments of transformers' `apply_chat_template` that are no options of a template."""
PROBE, SECOND = "Zq1xv", "Zq2yw"


class Traits(NamedTuple):
    """What a chat template can read."""

    text: bool  # a content that is a text
    parts: bool  # a content that is a list of text parts
    argument_objects: bool  # arguments of tool calls as objects; otherwise as JSON text
    developer: bool  # the role `developer`, which newer OpenAI clients send instead of `system`


def write(
    messages: Sequence[Json],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Json] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    prompt: bool = True,
    continued: bool = False,
) -> str:
    """Return the text of a conversation, as the tokenizer's chat template writes it with the template's `options`.

    `prompt`: end with the generation prompt. `continued`: instead, end within the last message. Messages have the form
    of `messages_of`. Raise RequestError if the template rejects the conversation."""
    template = source_of(tokenizer, tools)
    fit = traits(template, tuple(sorted((k, str(v)) for k, v in tokenizer.special_tokens_map.items())))
    settings: dict[str, Any] = dict(options or {}) | {"tools": list(tools) if tools else None, "tokenize": False}
    settings |= {"add_generation_prompt": prompt and not continued, "continue_final_message": continued}
    try:
        return str(tokenizer.apply_chat_template([_fitted(message, fit) for message in messages], **settings))
    except Exception as error:  # templates raise errors of any type
        roles = ", ".join(str(message["role"]) for message in messages)
        wanted = "many templates want user and assistant in turn, and some no system message"
        raise RequestError(
            f"the chat template refuses the messages ({first_line(error)}); their roles are {roles}: change or leave "
            f"out this record ({wanted})"
        ) from None


def source_of(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Json] | None = None) -> str:
    """Return the source of the chat template; some tokenizers have one for conversations with tools."""
    return str(tokenizer.get_chat_template(None, list(tools) if tools else None))


def _fitted(message: Json, fit: Traits) -> Json:
    """Return a message in the form that a template with these traits reads."""
    content = message["content"]
    if isinstance(content, list) and not fit.parts:
        content = text_of(message)
    elif isinstance(content, str) and not fit.text:
        content = [{"type": "text", "text": content}]
    changed: Json = {"content": content}
    if thought := message.get(REASONING[0]):
        changed["thinking"] = thought  # the name in templates of gpt-oss
    if message["role"] == "developer" and not fit.developer:
        changed["role"] = "system"
    if message.get("tool_calls") and not fit.argument_objects:
        changed["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": arguments_text(call)}}
            for call in message["tool_calls"]
        ]
    return message | changed


@lru_cache(maxsize=64)
def traits(template: str, special_tokens: tuple[tuple[str, str], ...]) -> Traits:
    """Try what a template can read, on conversations of one question, with and without a call of a tool."""

    def tried(*messages: Json) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            given: Any = {"chat_template": template, "add_generation_prompt": True} | dict(special_tokens)
            return str(render_jinja_template([list(messages)], **given)[0][0])
        except Exception:  # a template may raise anything for what it cannot read
            return ""

    text = tried({"role": "user", "content": PROBE})
    parts = tried({"role": "user", "content": [{"type": "text", "text": word} for word in (PROBE, SECOND)]})
    reads_parts = PROBE in parts and SECOND in parts and not re.search("""['"]type['"]""", parts)

    def called(arguments: Json | str) -> str:
        call = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": arguments}}
        question = text_or_parts(PROBE)
        return tried(
            {"role": "user", "content": question},
            {"role": "assistant", "content": text_or_parts(""), "tool_calls": [call]},
        )

    def text_or_parts(words: str) -> str | list[Json]:
        return [{"type": "text", "text": words}] if reads_parts and PROBE not in text else words

    objects = called({SECOND: 1})
    as_python = f"'{SECOND}'" in objects  # how Python writes an object, which no model was trained on
    return Traits(
        text=PROBE in text or not reads_parts,
        parts=reads_parts,
        argument_objects=bool(objects and not as_python) or not called(json.dumps({SECOND: 1})),
        developer="developer" in template,
    )


def template_options(given: Sequence[str]) -> dict[str, Any]:
    """Parse options of a chat template, each as NAME=VALUE; a value is JSON or, if it is not, a text.

    Raise RequestError for another form, or for a name that is no option of a template."""
    found: dict[str, Any] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier() or name in FIXED:
            reason = "; that name is taken" if name in FIXED else ""
            raise RequestError(f"--template-option is {word!r}; give NAME=VALUE, as in enable_thinking=false{reason}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return found


def require_options(
    options: Collection[str],
    tokenizer: PreTrainedTokenizerBase | None,
    backbone: str,
    named: str = "--template-option {}",
) -> None:
    """Raise RequestError if the chat template of `backbone` does not read one of the `options`, so it has no effect.

    `named`: how the user names an option."""
    if not options:
        return
    if tokenizer is None or tokenizer.chat_template is None:
        name = next(iter(options))
        raise RequestError(f"{named.format(name)} needs a chat template, and {backbone} has none; leave it out")
    source = _whole_source(tokenizer)
    for name in options:
        if not re.search(rf"\b{re.escape(name)}\b", source):
            known = template_switches(tokenizer)
            reads = f"reads {', '.join(known)}" if known else "reads no options"
            near = did_you_mean(name, known)
            raise RequestError(f"{named.format(name)}: the chat template of {backbone} {reads}{near}")


def _whole_source(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the source of all chat templates of a tokenizer."""
    template = tokenizer.chat_template
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)


@lru_cache(maxsize=64)
def variables_of(source: str) -> frozenset[str] | None:
    """Return the names that a chat template reads and does not define; `None` if it has a tag that we cannot read."""
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.meta import find_undeclared_variables

    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)  # a tag of transformers
    try:
        return frozenset(find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)))
    except TemplateSyntaxError:
        return None


def template_switches(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the names of the options that the chat template reads, such as `enable_thinking`, in order."""
    plain = _whole_source(tokenizer)
    found = variables_of(plain) or frozenset()
    own = {name for name in found if re.search(rf"set\s+{name}\b", plain)}  # unless they have a default for an option
    own -= {name for name in own if re.search(rf"\b{name}\s+is\s+(not\s+)?defined|\b{name}\s*\|\s*default", plain)}
    return sorted(name for name in found - GIVEN - own if not name.endswith("_token"))


def marks_of_template(text: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the first special token in a text that the chat template writes itself; `None` if there is none."""
    if tokenizer.chat_template is None:
        return None
    source = source_of(tokenizer)
    names = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    found = [name for name in names if name in text and name in source and name not in THOUGHTS]
    return min(found, key=text.index, default=None)


def opened_thought(prompt: str) -> tuple[str, str] | None:
    """Return how a prompt opens a thought, with the spaces after the mark, and the mark that ends the thought.

    Return `None` if the prompt ends outside a thought."""
    ending = prompt.rstrip()
    found = next((begin for begin in THOUGHTS if ending.endswith(begin)), None)
    return None if found is None else (prompt[prompt.rindex(found) :], THOUGHTS[found])


def is_endless(prompt: str, answer: str) -> bool:
    """Whether an answer, with its special tokens, ends within a thought that the prompt or the answer has opened."""
    text = prompt.rstrip()[-max(map(len, THOUGHTS)) :] + answer
    return any(text.rfind(begin) > text.rfind(close) for begin, close in THOUGHTS.items())
