"""The contract's own requests, made of OpenAI's: each prompt is one. Called by `routes`, for long ones on a thread.

A prompt moves: the request that it is taken from has it no longer, so that it is in memory once.
"""

from collections.abc import MutableSequence, Sequence

from router.openai.requests import (
    DEFAULT_MAX_TOKENS,
    RENAMED_ROLES,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from splitserve.service.errors import InvalidRequest, SplitserveError
from splitserve.v1 import inference_pb2 as pb

NOT_SUPPORTED = "NOT_SUPPORTED"
_UINT64 = 2**64
_IDS_AT_ONCE = 50_000
# The contract's names, where they differ.
_PARAMS = {"chat": "messages", "text": "prompt", "token_ids": "prompt"}

# By one name here and in the contract, and absent there where they are absent here.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "prompt_logprobs",
)


def of_completion(request: CompletionRequest, request_id: str) -> list[pb.GenerateRequest]:
    """One for each prompt. Raises InvalidRequest."""
    if request.best_of not in (None, 1):
        raise _not_supported("best_of")
    if request.suffix:
        raise _not_supported("suffix")
    params = _sampling(request)
    if request.max_tokens is None:
        params.max_tokens = DEFAULT_MAX_TOKENS
    if request.logprobs is not None:
        params.logprobs = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            params.prompt_logprobs = request.logprobs
    messages = []
    for prompt in request.prompt:
        message = _message(request, params, request_id)
        message.echo = request.echo or False
        if isinstance(prompt, str):
            message.text = prompt
        else:
            _add_ids(message.token_ids.ids, prompt)
            message.token_ids.SetInParent()
        messages.append(message)
    request.prompt.clear()
    return messages


def of_chat(request: ChatCompletionRequest, request_id: str) -> pb.GenerateRequest:
    """Raises InvalidRequest."""
    params = _sampling(request)
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise InvalidRequest(
                f"max_tokens is {request.max_tokens} and max_completion_tokens {request.max_completion_tokens}: both "
                "are names of one limit",
                field="max_tokens",
            )
        params.max_tokens = request.max_completion_tokens
    if request.logprobs:
        params.logprobs = request.top_logprobs or 0
    elif request.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    message = _message(request, params, request_id)
    _add_turns(message.chat, request.messages)
    return message


def of_tokenize(request: TokenizeRequest) -> pb.TokenizeRequest:
    """Raises InvalidRequest."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("one of prompt and messages is needed", field="prompt")
    message = pb.TokenizeRequest(model=request.model or "")
    if request.messages is not None:
        _add_turns(message.chat, request.messages)
    else:
        message.text = request.prompt or ""
    return message


def of_detokenize(request: DetokenizeRequest) -> pb.DetokenizeRequest:
    message = pb.DetokenizeRequest(model=request.model or "")
    _add_ids(message.token_ids, request.tokens)
    request.tokens.clear()
    return message


def contract_error(
    error: SplitserveError,
    request: CompletionRequest | ChatCompletionRequest | TokenizeRequest | DetokenizeRequest,
) -> SplitserveError:
    """`error` with the field at fault by its name in this API."""
    name = (error.field or "").removeprefix("sampling_params.")
    ours = _PARAMS.get(name, name)
    if isinstance(request, ChatCompletionRequest):
        if name == "max_tokens" and request.max_completion_tokens is not None:
            ours = "max_completion_tokens"
        elif name == "logprobs":  # a number there, here a switch and a number
            ours = "top_logprobs"
    elif isinstance(request, DetokenizeRequest) and name == "token_ids":
        ours = "tokens"
    error.field = ours or None
    if name and error.message.startswith(f"{name} "):
        error.message = ours + error.message.removeprefix(name)
    return error


def _add_turns(chat: pb.Chat, messages: list[ChatMessage]) -> None:
    for each in messages:
        chat.messages.add(role=RENAMED_ROLES.get(each.role, each.role), content=each.content)
    messages.clear()


def _add_ids(field: MutableSequence[int], ids: Sequence[int]) -> None:
    """Some at a time: it is a call into C, which lets nobody else run."""
    for start in range(0, len(ids), _IDS_AT_ONCE):
        field.extend(ids[start : start + _IDS_AT_ONCE])


def _message(
    request: CompletionRequest | ChatCompletionRequest, params: pb.SamplingParams, request_id: str
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        model=request.model or "",
        sampling_params=params,
        priority=request.priority or 0,
        timings=request.timings or False,
    )


def _sampling(request: CompletionRequest | ChatCompletionRequest) -> pb.SamplingParams:
    if request.tools:
        raise _not_supported("tools")
    if request.response_format is not None and request.response_format.type != "text":
        raise InvalidRequest(
            f"response_format of type {request.response_format.type[:50]!r} is not supported; only text is",
            field="response_format",
            reason=NOT_SUPPORTED,
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only allowed with stream", field="stream_options")
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    params = pb.SamplingParams(**given)
    if request.seed is not None:
        params.seed = request.seed % _UINT64
    params.stop.extend(request.stop or ())
    params.stop_token_ids.extend(request.stop_token_ids or ())
    params.logit_bias.update(request.logit_bias or {})
    return params


def _not_supported(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is not supported", field=name, reason=NOT_SUPPORTED)
