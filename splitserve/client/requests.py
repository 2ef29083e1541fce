"""Builds the messages that both clients send. Pure functions.

Values are checked here only as far as the wire needs it (types, 32 bits, valid Unicode); ranges are the router's to
check, because only it knows the model. Either way the caller sees InvalidRequest naming the field.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from splitserve.client.types import GenerateOptions, Message, ModelInfo, Prompt, SamplingOptions
from splitserve.service.errors import InvalidRequest
from splitserve.service.unicode import lone_surrogate
from splitserve.v1 import inference_pb2

DEFAULT_TIMEOUT_S = 600.0
"""Deadline of a generation whose caller names none."""
LOOKUP_TIMEOUT_S = 30.0
"""Deadline of `model_info`, `tokenize` and `detokenize` where the caller names none."""

_T = TypeVar("_T")
_SAMPLING_NAMES = frozenset(SamplingOptions.__annotations__)
_OPTION_NAMES = _SAMPLING_NAMES | frozenset(GenerateOptions.__annotations__)


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One Generate call, ready to go out. `timeout_s` is its deadline."""

    request: inference_pb2.GenerateRequest
    timeout_s: float
    metadata: tuple[tuple[str, str], ...]

    @property
    def num_samples(self) -> int:
        """How many the answer has if the router accepts the request."""
        params = self.request.sampling_params
        return max(params.n, 1) if params.HasField("n") else 1


def generate_call(prompt: Prompt, options: GenerateOptions, default_timeout_s: float) -> GenerateCall:
    """Raises InvalidRequest for values that cannot travel and TypeError for an option that does not exist."""
    unknown = options.keys() - _OPTION_NAMES
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}; known are {', '.join(sorted(_OPTION_NAMES))}")
    request = inference_pb2.GenerateRequest(
        request_id=_checked("request_id", lambda: _utf8(options.get("request_id", ""))),
        model=_checked("model", lambda: _utf8(options.get("model", ""))),
        sampling_params=sampling_params({name: options[name] for name in _SAMPLING_NAMES & options.keys()}),  # type: ignore[literal-required]
    )
    _checked("priority", lambda: setattr(request, "priority", options.get("priority", 0)))
    _checked("timings", lambda: setattr(request, "timings", options.get("timings", False)))
    _checked("echo", lambda: setattr(request, "echo", options.get("echo", False)))
    _set_prompt(request, prompt)
    return GenerateCall(
        request=request,
        timeout_s=deadline(options.get("timeout"), default_timeout_s),
        metadata=tuple(options.get("metadata", {}).items()),
    )


def sampling_params(options: Mapping[str, Any]) -> inference_pb2.SamplingParams:
    """None stands for "not given", so that a caller can pass its own optional values through."""
    params = inference_pb2.SamplingParams()
    for name, value in options.items():
        if value is not None:
            _checked(name, partial(_set_sampling, params, name, value))
    return params


def tokenize_request(prompt: str | Sequence[Message], model: str) -> inference_pb2.TokenizeRequest:
    request = inference_pb2.TokenizeRequest(model=_checked("model", lambda: _utf8(model)))
    if isinstance(prompt, str):
        request.text = _checked("prompt", lambda: _utf8(prompt))
    else:
        request.chat.CopyFrom(_chat(prompt))
    return request


def detokenize_request(token_ids: Sequence[int], model: str) -> inference_pb2.DetokenizeRequest:
    name = _checked("model", lambda: _utf8(model))
    return _checked("token_ids", lambda: inference_pb2.DetokenizeRequest(model=name, token_ids=token_ids))


def deadline(timeout: float | None, default_s: float) -> float:
    if timeout is None:
        return default_s
    if not (timeout > 0 and math.isfinite(timeout)):
        raise InvalidRequest(f"timeout is {timeout}; it has to be a finite number of seconds above 0", field="timeout")
    return timeout


def model_info(response: inference_pb2.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        model=response.model,
        revision=response.revision,
        vocab_size=response.vocab_size,
        max_model_len=response.max_model_len,
        max_prompt_tokens=response.max_prompt_tokens,
        eos_token_ids=tuple(response.eos_token_ids),
        ready=response.ready,
        has_chat_template=response.has_chat_template,
    )


def _set_sampling(params: inference_pb2.SamplingParams, name: str, value: Any) -> None:
    if name == "logit_bias":
        params.logit_bias.update(value)
    elif name == "stop":
        params.stop.extend(_utf8(text) for text in ([value] if isinstance(value, str) else value))
    elif name == "stop_token_ids":
        params.stop_token_ids.extend(value)
    else:
        setattr(params, name, value)


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = _checked("prompt", lambda: _utf8(prompt))
    elif prompt is None:  # protobuf would take it for "no ids"
        raise InvalidRequest("prompt is None; it has to be text, token ids or messages", field="prompt")
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(_chat(cast(Sequence[Message], prompt)))
    else:
        ids = cast(Sequence[int], prompt)
        request.token_ids.CopyFrom(_checked("prompt", lambda: inference_pb2.TokenIds(ids=ids)))


def _chat(messages: Sequence[Message]) -> inference_pb2.Chat:
    def turn(message: Message) -> inference_pb2.ChatMessage:
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise TypeError("every message of a chat has exactly the keys role and content")
        return inference_pb2.ChatMessage(role=_utf8(message["role"]), content=_utf8(message["content"]))

    return _checked("messages", lambda: inference_pb2.Chat(messages=[turn(message) for message in messages]))


def _utf8(text: str) -> str:
    """Refuses what is no text or cannot be encoded; the encoder's own message would repeat the whole prompt."""
    if not isinstance(text, str):
        raise TypeError(f"expected text, got {type(text).__name__}")
    if (found := lone_surrogate(text)) is not None:
        raise ValueError(f"character {found[0]} is a lone surrogate ({found[1]})")
    return text


def _checked(field: str, build: Callable[[], _T]) -> _T:
    """Turns what protobuf says about a value that does not fit its field into InvalidRequest."""
    try:
        return build()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{field} cannot be sent: {error}", field=field) from None
