"""Checks and resolves sampling parameters: pure functions from the client's message to `Sampling`.

`validation` calls `with_usable_defaults` when the router starts, and for each request `read_sampling` before it
tokenizes, so that a bad value costs nothing, and `check_samples` and `fit_to_room` after.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import structlog

from router.request import DecodeCapacity, Sampling
from splitserve.models.description import ModelDescription
from splitserve.service.errors import InvalidRequest
from splitserve.v1 import inference_pb2 as pb

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAX_TEMPERATURE = 100.0
# Below this a temperature acts as greedy, where dividing logits by it would overflow.
GREEDY_TEMPERATURE = 1e-5
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
# Outside of these a penalty only makes noise; far below them scores overflow.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_LOGPROBS = 20
# A drawn seed stays below 2^53, so that it survives a JSON client on its way back.
DRAWN_SEED_BITS = 53

MAX_SAMPLES = 128

MAX_TOKENS_TOO_LARGE = "MAX_TOKENS_TOO_LARGE"
TOO_MANY_SAMPLES = "TOO_MANY_SAMPLES"

NumberName = Literal["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
LogprobsName = Literal["logprobs", "prompt_logprobs"]

ALL_TOKENS = -1
_ALLOWED_TOP_K = "at least 1, or 0 or -1 for all tokens"
_DEFAULTS: tuple[NumberName, ...] = ("temperature", "top_p", "min_p", "repetition_penalty")


def with_usable_defaults(model: ModelDescription) -> ModelDescription:
    """The model without those of its own sampling defaults that no request may have; each is told in the log.

    A request that leaves a value out has not asked for it, so it gets the API's default instead of a refusal.
    """
    problems: dict[str, str] = {}
    for name in _DEFAULTS:
        value = getattr(model, f"default_{name}")
        if value is not None and (allowed := _number_problem(name, value)) is not None:
            problems[name] = allowed
    if model.default_top_k is not None and model.default_top_k < ALL_TOKENS:
        problems["top_k"] = _ALLOWED_TOP_K
    for key, allowed in problems.items():
        log.warning(
            "the model's own sampling default is ignored",
            file=str(model.directory / "generation_config.json"),
            name=key,
            value=getattr(model, f"default_{key}"),
            allowed=allowed,
        )
    unusable: dict[str, Any] = {f"default_{key}": None for key in problems}
    return replace(model, **unusable)


def read_sampling(
    params: pb.SamplingParams, model: ModelDescription, context_len: int, *, has_echo: bool = False
) -> Sampling:
    """Everything that can be judged without the prompt. `max_tokens` is as asked, or all of the context.

    Defaults are those of the OpenAI API, overlaid by the model's own. Raises InvalidRequest.
    """
    least, allowed = 1, "at least 1, or 0 with echo or prompt_logprobs"
    if has_echo or params.HasField("prompt_logprobs"):
        least, allowed = 0, "at least 0"
    if params.HasField("max_tokens") and params.max_tokens < least:
        raise _out_of_range("max_tokens", params.max_tokens, allowed)
    if params.min_tokens < 0:
        raise _out_of_range("min_tokens", params.min_tokens, "at least 0")
    temperature = _number(params, "temperature", model.default_temperature, 1.0)
    return Sampling(
        temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
        top_p=_number(params, "top_p", model.default_top_p, 1.0),
        top_k=_top_k(params, model),
        min_p=_number(params, "min_p", model.default_min_p, 0.0),
        seed=params.seed if params.HasField("seed") else secrets.randbits(DRAWN_SEED_BITS),
        max_tokens=params.max_tokens if params.HasField("max_tokens") else context_len,
        min_tokens=params.min_tokens,
        stop=_stop_strings(params.stop),
        stop_token_ids=_stop_token_ids(params.stop_token_ids, model.vocab_size),
        ignore_eos=params.ignore_eos,
        n=_num_samples(params),
        repetition_penalty=_number(params, "repetition_penalty", model.default_repetition_penalty, 1.0),
        presence_penalty=_number(params, "presence_penalty", None, 0.0),
        frequency_penalty=_number(params, "frequency_penalty", None, 0.0),
        logit_bias=_logit_bias(params.logit_bias, model.vocab_size),
        logprobs=_logprobs(params, "logprobs"),
        prompt_logprobs=_logprobs(params, "prompt_logprobs"),
    )


def fit_to_room(sampling: Sampling, *, asked: bool, num_prompt_tokens: int, largest: int, limited_by: str) -> Sampling:
    """Gives `max_tokens` its final value: as `asked` if that fits what the prompt leaves of the `largest` sequence that
    `limited_by` allows, else all of the room; 1 where 0 was asked, because workers make one token in any case.

    Raises InvalidRequest where what was asked does not fit.
    """
    room = largest - num_prompt_tokens
    if asked and sampling.max_tokens > room:
        raise InvalidRequest(
            f"max_tokens is {sampling.max_tokens}; the prompt has {num_prompt_tokens} tokens and {limited_by} "
            f"{largest} tokens, so at most {room} can be generated",
            field="sampling_params.max_tokens",
            reason=MAX_TOKENS_TOO_LARGE,
        )
    max_tokens = sampling.max_tokens if asked else room
    if sampling.min_tokens > max_tokens:
        raise _out_of_range("min_tokens", sampling.min_tokens, f"at most max_tokens, which is {max_tokens}")
    return replace(sampling, max_tokens=max(max_tokens, 1))


def check_samples(sampling: Sampling, num_prompt_tokens: int, decodes: Sequence[DecodeCapacity]) -> None:
    """Raises InvalidRequest where no decode worker could ever begin with all samples of the prompt at once."""
    most = max((decode.max_samples(num_prompt_tokens) for decode in decodes), default=sampling.n)
    if sampling.n > max(most, 1):  # one sample is a matter of the prompt's length
        raise InvalidRequest(
            f"n is {sampling.n}; the prompt has {num_prompt_tokens} tokens, and beside them the decode workers "
            f"can hold at most {max(most, 1)} samples",
            field="sampling_params.n",
            reason=TOO_MANY_SAMPLES,
        )


def _num_samples(params: pb.SamplingParams) -> int:
    if not params.HasField("n"):
        return 1
    if not 1 <= params.n <= MAX_SAMPLES:
        raise _out_of_range("n", params.n, f"between 1 and {MAX_SAMPLES}")
    return params.n


def _number(params: pb.SamplingParams, name: NumberName, model_default: float | None, default: float) -> float:
    if not params.HasField(name):
        return default if model_default is None else model_default
    value: float = getattr(params, name)
    if (allowed := _number_problem(name, value)) is not None:
        raise _out_of_range(name, value, allowed)
    return value


def _number_problem(name: NumberName, value: float) -> str | None:
    """What the value would have to be, where it is something else."""
    is_in_range, allowed = {
        "temperature": (0 <= value <= MAX_TEMPERATURE, f"between 0 and {MAX_TEMPERATURE:g}"),
        "top_p": (0 < value <= 1, "above 0 and at most 1"),
        "min_p": (0 <= value <= 1, "between 0 and 1"),
        "repetition_penalty": (
            MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY,
            f"between {MIN_REPETITION_PENALTY:g} and {MAX_REPETITION_PENALTY:g}",
        ),
        "presence_penalty": _within(value, MAX_PENALTY),
        "frequency_penalty": _within(value, MAX_PENALTY),
    }[name]  # a NaN is in no range
    return None if is_in_range else allowed


def _within(value: float, bound: float) -> tuple[bool, str]:
    return -bound <= value <= bound, f"between {-bound:g} and {bound:g}"


def _logprobs(params: pb.SamplingParams, name: LogprobsName) -> int | None:
    if not params.HasField(name):
        return None
    count: int = getattr(params, name)
    if not 0 <= count <= MAX_LOGPROBS:
        raise _out_of_range(name, count, f"between 0 and {MAX_LOGPROBS}")
    return count


def _logit_bias(bias: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_BIASED_TOKENS:
        raise _invalid("logit_bias", f"logit_bias has {len(bias)} tokens; at most {MAX_BIASED_TOKENS} are allowed")
    for token_id, value in bias.items():
        if not 0 <= token_id < vocab_size:
            raise _invalid(
                "logit_bias", f"logit_bias names token {token_id}; the model's vocabulary is 0 to {vocab_size - 1}"
            )
        is_in_range, allowed = _within(value, MAX_BIAS)
        if not is_in_range:
            raise _invalid("logit_bias", f"logit_bias[{token_id}] is {value}; it must be {allowed}")
    return tuple(sorted(bias.items()))


def _top_k(params: pb.SamplingParams, model: ModelDescription) -> int:
    top_k = params.top_k if params.HasField("top_k") else (model.default_top_k or 0)
    if top_k < ALL_TOKENS:
        raise _out_of_range("top_k", top_k, _ALLOWED_TOP_K)
    return min(max(top_k, 0), model.vocab_size)


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise _invalid("stop", f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
    for index, string in enumerate(stop):
        if not string:
            raise _invalid("stop", f"stop[{index}] is empty")
        if len(string) > MAX_STOP_CHARS:
            raise _invalid("stop", f"stop[{index}] has {len(string)} characters; at most {MAX_STOP_CHARS} are allowed")
    return tuple(dict.fromkeys(stop))


def _stop_token_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise _invalid("stop_token_ids", f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed")
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise _invalid(
                "stop_token_ids",
                f"stop_token_ids[{index}] is {token_id}; the model's vocabulary is 0 to {vocab_size - 1}",
            )
    return tuple(dict.fromkeys(ids))


def _invalid(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, field=f"sampling_params.{name}")


def _out_of_range(name: str, value: float, allowed: str) -> InvalidRequest:
    return _invalid(name, f"{name} is {value}; it must be {allowed}")
