"""What clients get in the OpenAI API. Encoded by msgspec: a chunk of a stream costs about a microsecond.

`answers` fills them; `/openapi.json` shows them.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from router.request import FinishReason

# In place of a logprob that JSON cannot say; the value that OpenAI has for "very unlikely".
LOWEST_LOGPROB = -9999.0


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    """Tokens; each prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(Struct):
    """Seconds of the prompt that took longest, which add up to its whole time; the other numbers are sums."""

    tokenize_s: float
    queue_s: float
    prefill_s: float
    handoff_s: float
    decode_s: float
    transfer_bytes: int
    cached_tokens: int
    attempts: int


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """`token` is `bytes` as text, or spelled out where they are a part of a character."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(Struct):
    logprob: float
    decoded_token: str


# For each token of the prompt, by token id: its own, and the likeliest ones in its place. The first has none.
PromptLogprobTable = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct):
    """Lists of equal length, an entry for each token; offsets are in characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """With its `finish_reason`, of a chat too, comes the seed in force: the prompt's own, for all of its samples."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    prompt_logprobs: PromptLogprobTable | UnsetType = UNSET


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"


class ChatReply(Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatReply
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    seed: int
    stop_reason: str | int | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobTable | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(Struct):
    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType = UNSET
    seed: int | UnsetType = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobTable | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class Model(Struct):
    id: str
    created: int
    revision: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "splitserve"


class ModelList(Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokens(Struct):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(Struct):
    prompt: str


class Error(Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Struct):
    error: Error
