"""Training examples of a conversation: the tokens that the model wrote, after exactly the tokens that it was shown.

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\nhello<|im_end|>\\n
    |------------- shown: up to the generation prompt --------------|--- added ---|-- written --|

The model wrote the answer and its end-of-turn token. What else the chat template writes for the answer, such as an
empty thought, is context that heads do not learn. An answer is left out if its text does not continue the generation
prompt, or if the template changes what the model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from medusa.errors import RequestError
from medusa.files import Json
from medusa.records.messages import REASONING, WEIGHT, text_of
from medusa.records.record import Record, conversation_text, prompt_text, tokens_of
from medusa.records.template import THOUGHTS, opened_thought
from train.data.packing import Example

CHANGED = "answers that the chat template changes"
ELSEWHERE = "answers that do not continue the generation prompt"
OPENINGS = tuple(THOUGHTS)
SHOWN = 60  # characters of a text in a message


class LeftOutError(Exception):
    """Error for an answer from which heads cannot learn, with the reason (`CHANGED` or `ELSEWHERE`)."""

    def __init__(self, reason: str, explanation: str) -> None:
        super().__init__(explanation)
        self.reason = reason


class Written(NamedTuple):
    """The text of one answer, with the text that the model was shown before."""

    shown: str  # the conversation up to the generation prompt
    added: str  # what the template writes before the answer, although the model did not
    written: str  # the answer
    end: str  # the end-of-turn token, if the model wrote one

    @property
    def before(self) -> str:
        """The text before the answer."""
        return self.shown + self.added

    @property
    def text(self) -> str:
        """The text up to the end of the answer."""
        return self.before + self.written + self.end


def conversation(
    record: Record, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None
) -> tuple[list[Example], list[LeftOutError]]:
    """Turn the answers of a conversation into training examples, and return the answers that are left out.

    An answer whose tokens begin a later example counts in that example; otherwise it gets an example of its own. This
    happens if the template writes earlier answers in another way, for example without their thoughts. `options` are
    those of the chat template. Raise RequestError if there is no template or it rejects the messages."""

    def render(messages: list[Json]) -> str:
        return conversation_text(messages, record, tokenizer, options, prompt=False)

    messages, groups, left_out = record.messages or [], list[list[Written]](), list[LeftOutError]()
    everything, special = render(messages), _special_tokens(tokenizer)
    for turn in reversed(range(record.first_taught, len(messages))):
        if messages[turn]["role"] != "assistant" or messages[turn].get(WEIGHT) == 0:
            continue
        last = turn == len(messages) - 1
        try:
            shown = prompt_text(record, tokenizer, options, turn)
            whole = everything if last else render(messages[: turn + 1])
            found = _written(messages[: turn + 1], shown, whole, render, special, last and record.unfinished)
        except RequestError as error:  # the template accepts the conversation only as a whole
            left_out.append(LeftOutError(ELSEWHERE, str(error)))
            continue
        except LeftOutError as error:
            left_out.append(error)
            continue
        group = next((group for group in groups if group[0].text.startswith(found.text)), None)
        if group is None:
            groups.append(group := [])
        group.append(found)
    examples = [example for group in groups for example in _examples(group, tokenizer, record.where, left_out)]
    return examples[::-1], left_out[::-1]


def _examples(
    group: list[Written], tokenizer: PreTrainedTokenizerBase, where: str, left_out: list[LeftOutError]
) -> list[Example]:
    """Return the examples of answers whose texts are all the beginning of the first one's text, the longest first.

    Each part of the text is tokenised once, from the end of the answer before it: whole texts would take time that
    grows with the square of the number of turns. Special tokens keep the tokens on both their sides apart."""
    try:
        longest = _example(group[0], tokenizer, where)
    except LeftOutError as error:
        left_out.append(error)
        return _examples(group[1:], tokenizer, where, left_out) if group[1:] else []
    examples, start, count = [longest], 0, 0  # the end of the answer before, in characters and in tokens
    for found in group[:0:-1]:
        context, ids = (tokens_of(text[start:], tokenizer) for text in (found.before, found.text))
        if ids != longest.input_ids[count : count + len(ids)] or context != ids[: len(context)]:
            examples += _examples([found], tokenizer, where, left_out)
            continue
        longest.loss_mask[count + len(context) : count + len(ids)] = [True] * (len(ids) - len(context))
        if (end := found.end.lstrip()) and tokens_of(end, tokenizer) == ids[-1:]:
            start, count = len(found.text) - len(end), count + len(ids) - 1
    return examples


def _example(found: Written, tokenizer: PreTrainedTokenizerBase, where: str) -> Example:
    """Return the tokens of a conversation that ends with an answer, of which only the answer counts."""
    before, answer = found.before, found.written + found.end
    context, ids = tokens_of(before, tokenizer), tokens_of(before + answer, tokenizer)
    if ids[: len(context)] != context:  # a token would cross the border; the model continues the tokens of its prompt
        whole, ids = ids, context + tokens_of(answer, tokenizer)
        if tokenizer.decode(ids) != tokenizer.decode(whole):
            raise LeftOutError(ELSEWHERE, f"the tokens of {_short(answer)} do not continue those of {_tail(before)}")
    return Example(ids, [at >= len(context) for at in range(len(ids))], where)


def _written(
    messages: list[Json],
    shown: str,
    whole: str,
    render: Callable[[list[Json]], str],
    special: str,
    unfinished: bool,
) -> Written:
    """Find the answer of the last message in the text `whole` that the chat template, `render`, writes for all.

    `shown` is the prompt before it, and `special` a regular expression for special tokens. `unfinished`: the answer has
    no end. Raise LeftOutError if the model cannot have written this."""
    *before, message = messages
    head, tail = _around(before, whole, render)
    content, said = text_of(message), set(message) - {"role", "content", "name", WEIGHT}
    thought = opened_thought(shown)
    if thought is not None and content.startswith(thought[0]):  # the prompt holds the mark that the message repeats
        content = content.removeprefix(thought[0])
    if not whole.startswith(shown):
        # A generation prompt may hold what the template leaves out of history, such as the end of an empty thought.
        if said or thought is not None or head is None or whole != head + content + tail:
            there = f"the prompt ends with {_tail(shown)}, and the text of the answer with {_tail(whole)}"
            raise LeftOutError(ELSEWHERE, there)
        spaces = "" if shown[-1:].isspace() else head[len(head.rstrip(" ")) :]
        added, text = "", spaces + content
    else:
        text = whole[len(shown) :]
        if head is None or not text.endswith(tail):  # the answer ends in another way, such as a call of a tool
            ends = re.search(rf"(?:\s*(?:{special}))+\s*$", text)
            tail = ends[0] if ends else ""
        text = text.removesuffix(tail)
        added = head[len(shown) :] if head is not None and head.startswith(shown) else ""
        if not added.strip() or not text.startswith(added) or text.strip() == content.strip():
            added = ""  # spaces before an answer are the model's, of which servers send none
        text = text[len(added) :]
        if added.strip().startswith(OPENINGS) and text.lstrip().startswith(OPENINGS):
            added = ""  # the model has opened its thought itself, and was not shown an empty one
    text = _restored(message, content, text)
    end = re.match(rf"\s*(?:{special})", tail)
    if not unfinished:
        return Written(shown, added, text, end[0] if end else "")
    reasoning = str(message.get(REASONING[0], "")).strip()
    if reasoning and not content.strip() and not message.get("tool_calls"):  # the model did not end its thought
        text = text[: text.index(reasoning) + len(reasoning)]
    return Written(shown, added, text, "")


def _around(before: list[Json], whole: str, render: Callable[[list[Json]], str]) -> tuple[str | None, str]:
    """Return what the template writes before and after an answer to the messages `before`, as another answer shows.

    The first is `None` if the template does not write the other answer. `whole` is the text with the real answer."""
    mark = next(letter for letter in map(chr, range(0xE000, 0xE100)) if letter not in whole)  # a private-use character
    try:
        head, found, tail = render([*before, {"role": "assistant", "content": mark}]).partition(mark)
    except RequestError:  # the template accepts no such answer there
        return None, ""
    return (head, tail) if found else (None, "")


def _restored(message: Json, content: str, text: str) -> str:
    """Return the template's `text` of a message with the spaces at both ends that the template removed.

    `content` is the content of the message. Raise LeftOutError if the text does not hold all that the message holds, in
    the same order and with the same spaces."""
    thought, calls = message.get(REASONING[0]), message.get("tool_calls", ())
    start = 0 if thought is None else _after(thought, text, 0)
    behind = 0  # the call before
    for call in calls:
        ends = [behind]
        for part in _parts([call["function"]["name"], call["function"]["arguments"]]):
            places = [(text.find(form, behind), len(form)) for form in _forms(part)]
            if not (found := [at + length for at, length in places if at >= 0]):
                raise _changed(str(part), text)
            ends.append(min(found))
        behind = max(ends)
    core = content.strip()
    if calls:
        _after(core, text, start)
        return text
    before, after = text[: len(text.rstrip()) - len(core)], text[len(text.rstrip()) :]
    lead, trail = content[: content.find(core)], content[content.find(core) + len(core) :]
    if not text.rstrip().endswith(core) or len(before) < start or (thought is None and before.strip()):
        raise _changed(content, text)
    if lead and not before and core:
        before = lead
    if trail and not after:
        after = trail
    if not before.endswith(lead) or not after.startswith(trail) or (thought is None and lead and before != lead):
        raise _changed(content, text)
    if not core and thought is None and content not in ("", text):  # spaces alone, of which the template wrote others
        raise _changed(content, text)
    return before + core + after if core or thought is not None else content


def _after(part: str, text: str, start: int) -> int:
    """Return the place after `part` in a text, from `start`; raise LeftOutError if it is not there with its spaces."""
    core = part.strip()
    at = text.find(core, start)
    lead, trail = part[: part.find(core)], part[part.find(core) + len(core) :]
    if at < 0 or not text[:at].endswith(lead) or not text[at + len(core) :].startswith(trail):
        raise _changed(part, text)
    return at + len(core)


def _changed(part: str, text: str) -> LeftOutError:
    return LeftOutError(CHANGED, f"the message has {_short(part)}, and the template writes {_short(text)}")


def _parts(value: object) -> Iterator[str | float]:
    """Yield the names, texts, numbers and truth values of the arguments of a call."""
    if isinstance(value, str | int | float):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _parts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _parts(item)


def _forms(part: str | float) -> set[str]:
    """The forms in which a template may write a part: as it is, or in JSON."""
    forms = {json.dumps(part), json.dumps(part, ensure_ascii=False)}
    return {str(part), *((form[1:-1] for form in forms) if isinstance(part, str) else forms)}


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a regular expression for the special tokens, which end turns."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    names = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
    return "|".join(map(re.escape, names)) or "(?!)"


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")


def _tail(text: str) -> str:
    return repr(text if len(text) <= SHOWN else "…" + text[1 - SHOWN :])
