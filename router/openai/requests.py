"""What clients send in the OpenAI API, as far as its shape goes; `validation` judges the values.

`routes` declares these types, so they are what `/openapi.json` shows: ranges, too, which `sampling` judges for both
edges. `messages` makes the contract's own request of one: an option is read here, given its meaning there, and checked
in the same place as over gRPC.
"""

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from router import sampling
from splitserve.models.chat_template import ROLES
from splitserve.service.unicode import lone_surrogate

_INT32 = 2**31
_INT64 = 2**63
_UINT64 = 2**64

# What the wire can hold; what makes sense is decided with the true numbers by `validation`.
Int32 = Annotated[int, Field(ge=-_INT32, lt=_INT32)]
Int64 = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
Seed = Annotated[int, Field(ge=-_INT64, lt=_UINT64)]
Json = dict[str, Any]

# Newer names that templates do not know.
RENAMED_ROLES = {"developer": "system"}

# OpenAI's own, of text completions; a chat goes on to the end of its answer.
DEFAULT_MAX_TOKENS = 16


# Far more than any context holds or any client asks at once. A body is read and judged on the event loop: larger ones
# would hold up everybody's tokens.
MAX_PROMPTS = 256
MAX_PROMPT_IDS = 2_000_000
MAX_MESSAGES = 10_000

_TOKEN_ID = re.compile(r"-?(0|[1-9][0-9]{0,17})")
INVALID_UNICODE = "invalid_unicode"


def _unicode(text: str) -> str:
    """JSON can hold what is no text: half of a surrogate pair."""
    if (found := lone_surrogate(text)) is not None:
        raise PydanticCustomError(
            INVALID_UNICODE, "is no valid Unicode: a lone surrogate {character}", {"character": found[1]}
        )
    return text


def _all_unicode(texts: Iterable[str]) -> list[str]:
    return [_unicode(text) for text in texts]


Text = Annotated[str, AfterValidator(_unicode)]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_INT64 <= value < _INT64


def _read_prompts(value: object) -> list[str] | list[list[int]]:
    """One or several prompts, each a text or token ids."""
    if isinstance(value, str):
        return [_unicode(value)]
    if isinstance(value, list) and value:
        _check_size(value)
        if all(isinstance(each, str) for each in value):
            return _all_unicode(value)
        if all(map(_is_id, value)):
            return [value]
        if all(isinstance(each, list) and all(map(_is_id, each)) for each in value):
            return value
    raise ValueError("must be a string, token ids or a list of either, and no list may be empty")


def _check_size(value: list[object]) -> None:
    """Before anything is done for each of its elements."""
    if isinstance(value[0], str | list) and len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    num_ids = sum(len(each) for each in value if isinstance(each, list)) if isinstance(value[0], list) else len(value)
    if num_ids > MAX_PROMPT_IDS:
        raise ValueError(f"has {num_ids} token ids; at most {MAX_PROMPT_IDS} are allowed")


def _read_stop(value: object) -> list[str]:
    if isinstance(value, str):
        return [_unicode(value)]
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return _all_unicode(value)
    raise ValueError("must be a string or a list of strings")


def _read_content(value: object) -> str:
    """A message's text; in the API's other form it comes as a list of parts."""
    if isinstance(value, str):
        return _unicode(value)
    if isinstance(value, list):
        if all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in value
        ):
            return _unicode("".join(part["text"] for part in value))
        raise ValueError("must have parts of type text only: this model reads nothing else")
    raise ValueError("must be a string or a list of text parts")


def _read_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object from token ids to numbers")
    if len(value) > sampling.MAX_BIASED_TOKENS:
        raise ValueError(f"has {len(value)} entries; at most {sampling.MAX_BIASED_TOKENS} are allowed")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not (isinstance(key, str) and _TOKEN_ID.fullmatch(key)):
            raise ValueError(f"names {key[:50]!r}, which is no token id")
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise ValueError(f"of token {key} must be a number")
        try:
            bias[int(key)] = float(number)
        except OverflowError:
            raise ValueError(f"of token {key} is out of range") from None
    return bias


def _given(read: Callable[[Any], Any]) -> BeforeValidator:
    """Null is absent, as in all of this API."""
    return BeforeValidator(lambda value: None if value is None else read(value))


def _between(least: float, most: float | None = None, description: str | None = None) -> Any:
    """An option that may be absent, with its range in words of JSON schema; nothing is refused by it."""
    shown: Json = {"minimum": least} if most is None else {"minimum": least, "maximum": most}
    return Field(None, description=description, json_schema_extra=shown)


_TEXT, _STOP = (
    {"type": "string", "minLength": 1},
    {"type": "string", "minLength": 1, "maxLength": sampling.MAX_STOP_CHARS},
)
_STRING, _ID = {"type": "string"}, {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
_NULL = {"type": "null"}


def _schema(*choices: Json, **more: object) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(choices), **more})


Prompts = Annotated[
    Any,
    BeforeValidator(_read_prompts),
    _schema(
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ),
]
Stop = Annotated[
    Any,
    _given(_read_stop),
    _schema(_STOP, {"type": "array", "items": _STOP, "maxItems": sampling.MAX_STOP_STRINGS}, _NULL),
]
Content = Annotated[
    Any,
    BeforeValidator(_read_content),
    _schema(
        _STRING,
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": _STRING},
                "required": ["type", "text"],
            },
        },
    ),
]
Bias = Annotated[
    Any,
    _given(_read_bias),
    _schema(
        {
            "type": "object",
            "additionalProperties": {
                "type": "number",
                "minimum": -sampling.MAX_BIAS,
                "maximum": sampling.MAX_BIAS,
            },
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,17})$"},
            "maxProperties": sampling.MAX_BIASED_TOKENS,
        },
        _NULL,
    ),
]


Role = Annotated[Text, WithJsonSchema({"type": "string", "enum": [*ROLES, *RENAMED_ROLES]})]


_MAX_TOKENS = "Most output tokens of each choice; 0 only with echo or prompt_logprobs: the prompt alone."


class _Strict(BaseModel):
    """No value is bent into shape, and no option that nobody reads is taken."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Without effect: nothing is padded.")


class ChatMessage(_Strict):
    role: Role
    content: Content
    name: Text | None = Field(None, description="Without effect: chat templates do not know it.")
    tool_call_id: Text | None = Field(None, description="Without effect.")
    # What a client has that sends an answer back as it got it; null there, and only so here.
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Text


class _Sampled(_Strict):
    """What chat and text completions share. Defaults are in docs/api.md."""

    model: Text | None = Field(None, description="The served model's name; absent is the one that is served.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = _between(1, sampling.MAX_SAMPLES, "Samples of each prompt.")
    max_tokens: Int32 | None = _between(0, description=_MAX_TOKENS)
    temperature: float | None = _between(0, sampling.MAX_TEMPERATURE)
    top_p: float | None = Field(None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    frequency_penalty: float | None = _between(-sampling.MAX_PENALTY, sampling.MAX_PENALTY)
    presence_penalty: float | None = _between(-sampling.MAX_PENALTY, sampling.MAX_PENALTY)
    logit_bias: Bias = None
    stop: Stop = None
    seed: Seed | None = None
    user: Text | None = Field(None, description="Without effect.")
    # Beyond OpenAI's own, by vLLM's names.
    top_k: Int32 | None = _between(sampling.ALL_TOKENS)
    min_p: float | None = _between(0, 1)
    repetition_penalty: float | None = _between(sampling.MIN_REPETITION_PENALTY, sampling.MAX_REPETITION_PENALTY)
    min_tokens: Int32 | None = _between(0)
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Int32 | None = _between(0, sampling.MAX_LOGPROBS)
    priority: Int32 | None = None
    timings: bool | None = Field(None, description="Whether the reply is to say where the time went.")
    request_id: Text | None = Field(None, description="Your own name for the request, for the logs.")
    # Until they exist they are refused by name.
    response_format: ResponseFormat | None = Field(None, description="Only of type text.")
    tools: list[Any] | None = Field(None, description="Not supported: refused unless empty.")
    tool_choice: Literal["none", "auto"] | None = Field(None, description="Without effect while there are no tools.")


class CompletionRequest(_Sampled):
    prompt: Prompts
    max_tokens: Int32 | None = Field(DEFAULT_MAX_TOKENS, description=_MAX_TOKENS, json_schema_extra={"minimum": 0})
    logprobs: Int32 | None = _between(0, sampling.MAX_LOGPROBS, "So many of the likeliest tokens with each token.")
    echo: bool | None = None
    best_of: Int32 | None = Field(None, description="Not supported: refused unless 1.")
    suffix: Text | None = Field(None, description="Not supported: refused unless empty.")


class ChatCompletionRequest(_Sampled):
    messages: Messages
    max_completion_tokens: Int32 | None = _between(0, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Int32 | None = _between(
        0, sampling.MAX_LOGPROBS, "So many of the likeliest tokens with each; needs logprobs."
    )
    # What clients send of their own accord, and what changes nothing here.
    metadata: Json | None = Field(None, description="Without effect.")
    store: bool | None = Field(None, description="Without effect: nothing is stored.")
    service_tier: Text | None = Field(None, description="Without effect.")
    parallel_tool_calls: bool | None = Field(None, description="Without effect while there are no tools.")


class TokenizeRequest(_Strict):
    """One of `prompt` and `messages`."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None


class DetokenizeRequest(_Strict):
    model: Text | None = None
    tokens: Annotated[list[Int64], Field(max_length=MAX_PROMPT_IDS)]
