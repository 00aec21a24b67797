"""Requests of the OpenAI API, read from JSON and checked (https://platform.openai.com/docs/api-reference).

A parameter that this server does not support is refused by name, unless its value requests nothing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from reprlib import repr as short
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from decode.settings import Settings
from medusa.records.record import Record, prompt_ids

MAX_CHOICES = 128  # texts of one request
UNSUPPORTED: dict[str, object] = {  # parameters of the API, with the values that request nothing
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "response_format": {"type": "text"},
}
IGNORED = {"user", "metadata", "store", "parallel_tool_calls", "service_tier"}  # no effect on the text


class ApiError(Exception):
    """A refusal or a failure, as the API reports it."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        """`param`: the parameter that is wrong."""
        super().__init__(message)
        self.status, self.param = status, param

    def to_json(self) -> dict[str, object]:
        """The error object of the API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


class StrictModel(BaseModel):
    """A model that converts no types: a string is not accepted for a number."""

    model_config = ConfigDict(strict=True)


class StreamOptions(StrictModel):
    """The object `stream_options`."""

    include_usage: bool | None = None
    """Whether a stream ends with the usage."""


class TextPart(StrictModel):
    """A part of the content of a message."""

    type: Literal["text"]
    text: str = ""


class Message(StrictModel):
    """One message of a chat."""

    role: str
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


WholeNumber = Annotated[int | None, Field(description="a whole number")]
Number = Annotated[float | None, Field(allow_inf_nan=False, description="a number")]


def _require_temperature(value: float | None) -> float | None:
    if value is not None and 0 < value < 1e-3:  # scores would overflow, and break later batches on a GPU
        raise ValueError("too small")
    return value


def _as_strings(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


class GenerationRequest(StrictModel):
    """The parameters that completions and chats share; null means the server's default.

    Error messages quote the field's description. `Settings` checks the ranges.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="the name of the model")
    max_tokens: WholeNumber = None
    max_completion_tokens: WholeNumber = None
    temperature: Annotated[Number, AfterValidator(_require_temperature)] = Field(
        None, description="a number, 0 or at least 0.001"
    )
    top_p: Number = None
    top_k: WholeNumber = None
    min_p: Number = None
    repetition_penalty: Number = Field(None, ge=0.01, description="a number of at least 0.01")
    ignore_eos: bool | None = Field(None, description="true or false")
    stop: Annotated[list[str] | None, BeforeValidator(_as_strings)] = Field(
        None, description="a string or a list of strings"
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="a whole number from 0 to 2**63 - 1")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description=f"a whole number from 1 to {MAX_CHOICES}")
    """Texts for each prompt."""
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions = Field(StreamOptions(), description='an object such as {"include_usage": true}')

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: dict[str, object]) -> dict[str, object]:
        """Drop null values, and unsupported parameters whose values request nothing.

        Raises:
            ApiError: the value of an unsupported parameter requests something."""
        given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
        for name in filter(given.__contains__, UNSUPPORTED):
            value, neutral = given.pop(name), UNSUPPORTED[name]
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):  # 0 == False, but requests 0
                raise ApiError(f"{name} is not supported by this server; leave it out", param=name)
        return given

    def settings(self, defaults: Settings) -> Settings:
        """The generation settings of the request; `defaults` are the server's.

        Raises:
            RequestError: a value is out of range, or values cannot be combined."""
        same_names = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos"}
        asked = self.model_dump(include=same_names, exclude_none=True)
        for limit in (self.max_tokens, self.max_completion_tokens):
            asked |= {} if limit is None else {"max_new_tokens": limit}
        asked |= {} if self.stop is None else {"stop": tuple(self.stop)}
        return replace(defaults, **asked)


def _as_list(prompt: object) -> object:
    """One prompt, or several, as a list of prompts."""
    several = isinstance(prompt, list) and not all(type(part) is int for part in prompt)
    return prompt if several else [prompt]


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Annotated[list[str | Annotated[list[int], Field(min_length=1)]], BeforeValidator(_as_list)] = Field(
        description="a text or a list of ids, or a list of these, and not empty"
    )

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """The ids of all prompts.

        Raises:
            RequestError: a text is empty."""
        return [
            prompt_ids(Record("prompt", text=part, is_prompt=True), tokenizer) if isinstance(part, str) else part
            for part in self.prompt
        ]


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(
        min_length=1, description='a list of {"role": a word, "content": a text}, and not empty'
    )

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """The ids of the conversation, as the chat template writes them.

        Raises:
            ApiError: there is no chat template, or the last message is the assistant's.
            RequestError: the template refuses the messages."""
        if tokenizer.chat_template is None:
            raise ApiError("this model has no chat template; use /v1/completions to continue a text", param="messages")
        if self.messages[-1].role == "assistant":
            raise ApiError("the last message is the assistant's; end with the user's message", param="messages")
        plain = [{"role": message.role, "content": message.text} for message in self.messages]
        return [prompt_ids(Record("messages", messages=plain), tokenizer)]


AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)


def parse(content: bytes, kind: type[AnyRequest]) -> AnyRequest:
    """Read and check the body of a request.

    Raises:
        ApiError: the body is not a JSON object, a parameter is unknown or unsupported, or a value has a wrong type."""
    try:
        body = json.loads(content)
    except ValueError as error:
        raise ApiError(f"the request is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise ApiError("the request must be a JSON object")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError(f"the request contains half a character ({error.object[error.start : error.end]!a})") from None
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(kind, body, error) from None


def _refusal(kind: type[GenerationRequest], body: dict[str, object], error: ValidationError) -> ApiError:
    """The first error in one line. Unknown parameters come before all other errors."""
    names = {found["type"]: str(found["loc"][0]) for found in reversed(error.errors())}
    if unknown := names.get("extra_forbidden"):
        known = ", ".join(sorted({*kind.model_fields, *UNSUPPORTED, *IGNORED}))
        return ApiError(f"{unknown} is not a parameter of this endpoint; its parameters are {known}", param=unknown)
    name = str(error.errors()[0]["loc"][0])
    value = f"is {short(body[name])}" if name in body else "is missing"
    return ApiError(f"{name} {value}; it must be {kind.model_fields[name].description}", param=name)
