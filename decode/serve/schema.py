"""Reads and checks the JSON requests of the OpenAI API (https://platform.openai.com/docs/api-reference).

A parameter that this server does not support is an error, unless its value switches the feature off."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from reprlib import repr as short
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from decode.settings import Settings
from medusa.records.record import Record, prompt_ids

MAX_CHOICES = 128  # largest number of texts in one request
MAX_TOP = 20  # largest number of most probable tokens that are listed beside a token
UNSUPPORTED: dict[str, object] = {  # unsupported parameters of the API, with the values that leave them off
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
    "function_call": "none",
    "modalities": ["text"],
}
IGNORED = {  # accepted, because they cannot change the text of this server
    "metadata",
    "parallel_tool_calls",
    "prediction",  # a guess at the text, which only makes it faster
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}


class ApiError(Exception):
    """An error that the API reports to the client: an invalid request, or a failure of the server."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param  # the HTTP status, and the name of the wrong parameter

    def to_json(self) -> dict[str, object]:
        """Return the error object of the OpenAI API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


class StrictModel(BaseModel):
    """Base class of all objects in a request. Types are not converted: a number given as a string is an error."""

    model_config = ConfigDict(strict=True)


class StreamOptions(StrictModel):
    """The object `stream_options` of a request."""

    include_usage: bool | None = None  # whether the stream ends with the token counts


class TextPart(StrictModel):
    """A text part of a chat message. The `content` of such a message is a list of parts."""

    type: Literal["text"]
    text: str = ""


class Message(StrictModel):
    """One message of a chat request."""

    role: str
    content: str | list[TextPart] | None = None  # `None`, as clients send it after a call of a tool: an empty text

    @property
    def text(self) -> str:
        """The text of the message, all its parts joined."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


WholeNumber = Annotated[int | None, Field(description="a whole number")]
Number = Annotated[float | None, Field(allow_inf_nan=False, description="a number")]


def _not_tiny(value: float | None) -> float | None:
    if value is not None and 0 < value < 1e-3:  # scores would overflow, which breaks later batches on a GPU
        raise ValueError("too small")
    return value


class JsonSchema(StrictModel):
    """The object `json_schema` of a `response_format`. Its name and description change nothing."""

    model_config = ConfigDict(strict=True, populate_by_name=True)
    content: dict[str, object] = Field(alias="schema")


class ResponseFormat(StrictModel):
    """The object `response_format` of a request."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _require_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema")
        return self

    @property
    def schema_asked(self) -> object:
        """The JSON schema that the text must follow; `None` for free text."""
        if self.json_schema is not None:
            return self.json_schema.content
        return {"type": "object"} if self.type == "json_object" else None


class GenerationRequest(StrictModel):
    """The parameters that completion requests and chat requests share. Null means the server's default.

    Error messages quote the invalid field's description. Ranges that are not declared here are checked by `Settings`.
    """

    model_config = ConfigDict(extra="forbid")
    model: str | None = Field(None, description="the name of the model")
    max_tokens: WholeNumber = None
    max_completion_tokens: WholeNumber = None
    temperature: Annotated[Number, AfterValidator(_not_tiny)] = Field(None, description="a number, 0 or at least 0.001")
    top_p: Number = None
    top_k: WholeNumber = None
    min_p: Number = None
    repetition_penalty: Number = Field(None, ge=0.01, description="a number of at least 0.01")
    ignore_eos: bool | None = Field(None, description="true or false")
    stop: str | list[str] | None = Field(None, description="a string or a list of strings")
    seed: int | None = Field(None, ge=0, lt=2**63, description="a whole number from 0 to 2**63 - 1")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description=f"a whole number from 1 to {MAX_CHOICES}")  # texts per prompt
    response_format: ResponseFormat | None = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": '
        "{...}}}",
    )
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions = Field(StreamOptions(), description='an object such as {"include_usage": true}')

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: dict[str, object]) -> dict[str, object]:
        """Remove nulls, ignored parameters, and unsupported ones that are off; raise `ApiError` if one is on."""
        given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
        for name in [name for name in UNSUPPORTED if name in given and name not in cls.model_fields]:
            value, neutral = given.pop(name), UNSUPPORTED[name]
            # 0 == False in Python, but `logprobs: 0` asks for log probabilities.
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
                raise ApiError(f"{name} is not supported by this server; leave it out", param=name)
        return given

    @property
    def scores(self) -> int | None:
        """How many most probable tokens to list beside each token; `None`: no log-probabilities."""
        return None

    @property
    def writes(self) -> bool:
        """Whether the answer has new tokens, and not only the scored prompt."""
        return True

    def settings(self, defaults: Settings) -> Settings:
        """Return `defaults` with the request's own parameters, or raise a `RequestError` if they are out of range."""
        same_names = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos"}
        asked = self.model_dump(include=same_names, exclude_none=True)
        if asked.get("top_k") == -1:  # off, as in other servers
            asked["top_k"] = 0
        for limit in (self.max_tokens, self.max_completion_tokens):
            asked |= {} if limit is None or not self.writes else {"max_new_tokens": limit}
        if self.stop is not None:
            asked["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return replace(defaults, **asked)


def _as_list(prompt: object) -> object:
    """Put a single prompt (a text or a list of token ids) into a list. A list of prompts is returned unchanged."""
    several = isinstance(prompt, list) and not all(type(part) is int for part in prompt)
    return prompt if several else [prompt]


class CompletionRequest(GenerationRequest):
    """The body of a request to /v1/completions."""

    prompt: Annotated[list[str | Annotated[list[int], Field(min_length=1)]], BeforeValidator(_as_list)] = Field(
        description="a text or a list of ids, or a list of these, and not empty"
    )

    logprobs: Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        None, ge=0, le=MAX_TOP, description=f"a whole number from 0 to {MAX_TOP}"
    )
    echo: bool = Field(False, description="true or false")  # whether a text begins with its prompt

    @property
    def scores(self) -> int | None:
        return self.logprobs

    @property
    def writes(self) -> bool:
        return not (self.echo and self.max_tokens == 0)

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return the token ids of each prompt; raises a `RequestError` if the text of a prompt is empty."""
        return [
            prompt_ids(Record("prompt", text=part), tokenizer) if isinstance(part, str) else part
            for part in self.prompt
        ]

    def echoes(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the text with which the answer to each prompt begins: the prompt with `echo`, otherwise nothing."""
        if not self.echo:
            return [""] * len(self.prompt)
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        return [part if isinstance(part, str) else str(decode(part)) for part in self.prompt]


class ChatRequest(GenerationRequest):
    """The body of a request to /v1/chat/completions."""

    messages: list[Message] = Field(
        min_length=1, description='a list of {"role": a word, "content": a text}, and not empty'
    )
    logprobs: bool = Field(False, description="true or false")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP, description=f"a whole number from 0 to {MAX_TOP}, and needs logprobs: true"
    )

    @property
    def scores(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs: true; add it, or leave top_logprobs out", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return a list with a single prompt: the token ids of the messages, formatted by the chat template.

        Raise an `ApiError` if there is no template or the last message is the assistant's, and a `RequestError` if the
        template fails."""
        if tokenizer.chat_template is None:
            raise ApiError("this model has no chat template; use /v1/completions to continue a text", param="messages")
        if self.messages[-1].role == "assistant":
            raise ApiError("the last message is the assistant's; end with the user's message", param="messages")
        plain: list[dict[str, object]] = [{"role": one.role, "content": one.text} for one in self.messages]
        return [prompt_ids(Record("messages", messages=plain), tokenizer)]


AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)


def parse(content: bytes, kind: type[AnyRequest]) -> AnyRequest:
    """Parse the body of a request into the class `kind`, or raise an `ApiError` that names the first mistake."""
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError(f"the request contains half a character ({error.object[error.start : error.end]!a})") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise ApiError("the request must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        names = [str(found["loc"][0]) for found in error.errors()]
    unknown = [name for name in names if name not in kind.model_fields]
    if unknown:
        known = ", ".join(sorted({*kind.model_fields, *UNSUPPORTED, *IGNORED}))
        told = f"{unknown[0]} is not a parameter of this endpoint; its parameters are {known}"
        raise ApiError(told, param=unknown[0])
    value = f"is {short(body[names[0]])}" if names[0] in body else "is missing"
    raise ApiError(f"{names[0]} {value}; it must be {kind.model_fields[names[0]].description}", param=names[0])
