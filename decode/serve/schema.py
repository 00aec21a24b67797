"""Reads and checks the JSON requests of the OpenAI API (https://platform.openai.com/docs/api-reference).

A parameter that this server does not support is an error, unless its value switches the feature off."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from reprlib import repr as short
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from decode.serve.fields import ALIASES, IGNORED, UNLIMITED, UNSUPPORTED
from decode.settings import Settings
from medusa.files import Json
from medusa.records.messages import messages_of, tools_of
from medusa.records.record import Record, conversation_text, text_ids, tokens_of
from medusa.records.template import FIXED, source_of, variables_of

MAX_CHOICES = 128  # largest number of texts in one request
MAX_TOP = 20  # largest number of most probable tokens that are listed beside a token


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
    return_token_ids: bool = Field(False, description="true or false")  # as in vLLM
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions = Field(StreamOptions(), description='an object such as {"include_usage": true}')

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: dict[str, object]) -> dict[str, object]:
        """Remove nulls, ignored parameters, and unsupported ones that are off; raise `ApiError` if one is on."""
        named = {ALIASES.get(name, name): value for name, value in body.items() if value is not None}
        given = {name: value for name, value in named.items() if name not in IGNORED}
        for name in [name for name, value in UNLIMITED.items() if name in given and _same(given[name], value)]:
            del given[name]
        for name in [name for name in UNSUPPORTED if name in given and name not in cls.model_fields]:
            value = given.pop(name)
            if not any(_same(value, neutral) for neutral in UNSUPPORTED[name]):
                raise ApiError(f"{name} is not supported by this server; leave it out", param=name)
        return given

    @property
    def texts(self) -> int:
        """How many texts the answer has."""
        return self.n

    @property
    def scores(self) -> int | None:
        """How many most probable tokens to list beside each token; `None`: no log-probabilities."""
        return None

    @property
    def writes(self) -> bool:
        """Whether the answer has new tokens, and not only the scored prompt."""
        return True

    def settings(self, defaults: Settings) -> Settings:
        """Return `defaults` with the request's own parameters, or raise an error if they are out of range."""
        same_names = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos"}
        asked = self.model_dump(include=same_names, exclude_none=True)
        if asked.get("top_k") == -1:  # off, as in other servers
            asked["top_k"] = 0
        for name, limit in (("max_tokens", self.max_tokens), ("max_completion_tokens", self.max_completion_tokens)):
            if limit is not None and self.writes:
                if limit < 1:
                    raise ApiError(f"{name} is {limit}; it must be a whole number of at least 1", param=name)
                asked["max_new_tokens"] = limit
        if self.stop is not None:
            asked["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return replace(defaults, **asked)


def _same(value: object, neutral: object) -> bool:
    """Whether two JSON values are equal. 0 equals False in Python, but `logprobs: 0` asks for log-probabilities."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


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

    add_special_tokens: bool = Field(True, description="true or false")  # whether a BOS begins a prompt

    @property
    def texts(self) -> int:
        return len(self.prompt) * self.n

    @property
    def letters(self) -> int:
        """The number of characters of the longest text to continue."""
        return max((len(part) for part in self.prompt if isinstance(part, str)), default=0)

    def prompts(self, tokenizer: PreTrainedTokenizerBase, template_options: Json) -> list[list[int]]:
        """Return the token ids of each prompt; raises an `ApiError` if the text of a prompt is empty."""
        encode = text_ids if self.add_special_tokens else tokens_of
        found = [encode(part, tokenizer) if isinstance(part, str) else part for part in self.prompt]
        if not all(found) or "" in self.prompt:
            raise ApiError("prompt: the prompt is empty; give at least one token", param="prompt")
        return found

    def echoes(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the text with which the answer to each prompt begins: the prompt with `echo`, otherwise nothing."""
        if not self.echo:
            return [""] * len(self.prompt)
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        return [part if isinstance(part, str) else str(decode(part)) for part in self.prompt]


class ChatRequest(GenerationRequest):
    """The body of a request to /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(
        min_length=1, description='a list of {"role": a word, "content": a text}, and not empty'
    )
    tools: list[dict[str, Any]] | None = Field(None, description="a list of functions")
    tool_choice: Literal["auto", "none"] = Field("auto", description="auto or none; calls cannot be required")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description='an object such as {"enable_thinking": false}'
    )
    documents: list[dict[str, Any]] | None = Field(None, description="a list of objects")
    reasoning_effort: str | None = Field(None, description="a word such as low")
    add_generation_prompt: bool = Field(True, description="true or false")
    continue_final_message: bool = Field(False, description="true or false")
    logprobs: bool = Field(False, description="true or false")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP, description=f"a whole number from 0 to {MAX_TOP}, and needs logprobs: true"
    )

    @property
    def scores(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs: true; add it, or leave top_logprobs out", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def letters(self) -> int:
        """The number of characters of the texts in messages, tools and documents together."""
        count, left = 0, list[object]([self.messages, self.tools, self.documents])
        while left:
            part = left.pop()
            count += len(part) if isinstance(part, str) else 0
            left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return count

    @property
    def offered(self) -> list[Json] | None:
        """The tools that the model may call."""
        return tools_of(self.tools, "tools") if self.tool_choice == "auto" else None

    def prompts(self, tokenizer: PreTrainedTokenizerBase, template_options: Json) -> list[list[int]]:
        """Return a list with a single prompt: the token ids of the messages, formatted by the chat template.

        `template_options` are the server's; those of the request come first. Raise an `ApiError` if there is no
        template or the last message is not to be continued, and a `RequestError` if a message or the template fails."""
        if tokenizer.chat_template is None:
            raise ApiError("this model has no chat template; use /v1/completions to continue a text", param="messages")
        messages = messages_of(self.messages, "messages")
        if messages[-1]["role"] == "assistant" and not self.continue_final_message:
            way_out = "end with the user's message, or add continue_final_message: true"
            raise ApiError(f"the last message is the assistant's; {way_out}", param="messages")
        if self.continue_final_message and messages[-1]["role"] != "assistant":
            way_out = "end with the assistant's message, or leave it out"
            raise ApiError(f"continue_final_message continues an answer; {way_out}", param="continue_final_message")
        if taken := next((name for name in self.chat_template_kwargs if name in FIXED), None):
            raise ApiError(f"chat_template_kwargs has {taken}, which is no option of a template; leave it out")
        read = variables_of(source_of(tokenizer, self.offered))
        for name, given in (("tools", self.offered), ("documents", self.documents)):
            if given and read is not None and name not in read:
                raise ApiError(f"this model's chat template reads no {name}; leave them out", param=name)
        options = template_options | self.chat_template_kwargs
        if self.documents:
            options["documents"] = self.documents
        if self.reasoning_effort is not None and (read is None or "reasoning_effort" in read):
            options.setdefault("reasoning_effort", self.reasoning_effort)
        record = Record("messages", tools=self.offered, template_options=options)
        prompt, continued = self.add_generation_prompt, self.continue_final_message
        text = conversation_text(messages, record, tokenizer, prompt=prompt, continued=continued)
        return [tokens_of(text, tokenizer)]


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
    given = next((name for name in body if ALIASES.get(name, name) == names[0]), names[0])  # as the client wrote it
    value = f"is {short(body[given])}" if given in body else "is missing"
    raise ApiError(f"{given} {value}; it must be {kind.model_fields[names[0]].description}", param=given)
