"""A conversation with a backbone: what `medusa chat` continues."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.request import require_fitting
from decode.results import Result
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.records.record import Record, continuation_ids, prompt_ids


@dataclass
class Turn:
    """A message with the prompt that it makes, and the answer."""

    message: str
    prompt: list[int]
    result: Result | None = None
    text: str = ""


@dataclass
class Conversation:
    """All turns so far. Without a chat template, the messages and answers are one text, which is continued."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.system is not None and not self.has_template:
            raise RequestError("--system needs a chat template, and this backbone's tokenizer has none; leave it out")

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    def ask(self, message: str, *models: PreTrainedModel) -> Turn:
        """The turn for a message. `keep` adds the turn to the conversation when it is answered.

        Without a template, an empty message continues the text.

        Args:
            models: the models whose contexts must have room for the answer.

        Raises:
            RequestError: the message is empty, the template refuses the message, or a context is full."""
        if self.has_template and not message.strip():
            raise RequestError("the message is empty; write something")
        prompt = self._templated(message) if self.has_template else self._continued(message)
        for backbone in map(Backbone, models):
            require_fitting([prompt], backbone)
            if backbone.context is not None and len(prompt) >= backbone.context:
                raise RequestError(f"the context of {backbone.context} tokens is full; start again with /reset")
        return Turn(message, prompt)

    def keep(self, turn: Turn, result: Result, text: str) -> None:
        """Add a turn with its finished (or stopped) answer."""
        turn.result, turn.text = result, text
        self.turns.append(turn)

    def reset(self) -> None:
        """Forget all turns."""
        self.turns.clear()

    def _templated(self, message: str) -> list[int]:
        messages: list[dict[str, object]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages += [{"role": "user", "content": turn.message}, {"role": "assistant", "content": turn.text}]
        messages.append({"role": "user", "content": message})
        return prompt_ids(Record("this conversation", messages=messages), self.tokenizer)

    def _continued(self, message: str) -> list[int]:
        last = self.turns[-1] if self.turns else None
        if last is None or last.result is None or last.result.finish_reason == "eos":  # the message begins a new text
            return prompt_ids(Record("the text", text=message, is_prompt=True), self.tokenizer)
        ids = last.result.input_ids + last.result.new_ids
        space = "" if last.text[-1:].isspace() else " "
        return [*ids, *continuation_ids(ids, space + message, self.tokenizer)] if message else ids
