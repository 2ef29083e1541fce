"""What goes into a call of the client library and what comes out of it. Plain data, shared by both clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict


class Message(TypedDict):
    """One turn of a chat. `role` is "system", "user" or "assistant"; what else is allowed is up to the model."""

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a chat that the router renders with the model's template."""


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen and when a sample ends; what is left out takes the model's own default.

    `temperature` 0 is greedy. `max_tokens` absent: until end-of-sequence or the end of the context; 0, with `echo` or
    `prompt_logprobs`: no output, the prompt alone. `seed` absent: drawn by the router and told in `Generation.seed`.
    `n` samples of one prompt, 1 unless given. `logprobs` and `prompt_logprobs`: how many of the likeliest tokens are
    told with each token of the output and of the prompt; 0 is its own logprob alone. docs/api.md lists the ranges; the
    router checks them.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    seed: int | None
    n: int | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    prompt_logprobs: int | None


class GenerateOptions(SamplingOptions, total=False):
    """Everything that `generate`, `stream`, `chat` and `stream_chat` take besides the prompt.

    `model`: the served model's name, empty for the one that is served. `request_id`: the caller's own name for the
    request, echoed and logged. `timings`: whether `Generation.timings` is told. `echo`: whether the prompt is told
    before the output; not for a chat. `timeout`: the deadline in seconds, for the whole answer; absent means the
    client's default. `priority`: higher goes first among queued requests. `metadata`: gRPC metadata, such as
    `traceparent`.
    """

    model: str
    request_id: str
    timings: bool
    echo: bool
    timeout: float | None
    priority: int
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's natural log-probability by the model's own logits, before temperature, penalties and bias.

    None for the first token of a prompt, which nothing predicts. `top` are the likeliest tokens in its place, by id,
    likeliest first.
    """

    token_id: int
    logprob: float | None
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new of sample `index` since its last chunk. `text` may be empty while a character is still incomplete.

    `logprobs` has an entry for each of `token_ids`, if asked for. Chunks about the prompt come first and bring nothing
    else: one with `prompt_text` and `prompt_token_ids`, if the request asked for `echo`, then those with
    `prompt_logprobs`, which together have an entry for each token of the prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0
    prompt_text: str = ""
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One of a prompt's answers.

    `finish_reason` is "stop", "length", "tool_calls" or "abort". `matched_stop` is the stop string or the stop token id
    that ended it, if one did. `logprobs` has an entry for each token, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    matched_stop: str | int | None
    completion_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the router saw the time go, from the request's arrival to the answer's end, over all attempts: the stages,
    in seconds, add up to all of it. docs/api.md says what each one covers.

    `transfer_bytes` of KV blocks were sent to decode workers.
    """

    tokenize_s: float
    queue_s: float
    prefill_s: float
    handoff_s: float
    decode_s: float
    transfer_bytes: int

    @property
    def total_s(self) -> float:
        return self.tokenize_s + self.queue_s + self.prefill_s + self.handoff_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete answer: `samples`, n of them in order of their index; `text` and what belongs to it are the first's.

    `completion_tokens` is the sum over all samples. `cached_tokens` of the prompt came from a prefix cache. `attempts`
    is 1 when nothing went wrong. `prompt_logprobs` has an entry for each token of the prompt, and `timings` is there,
    if asked for; `prompt_text` and `prompt_token_ids`, which are no part of `text`, with `echo`.
    """

    samples: tuple[Sample, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int
    attempts: int
    request_id: str
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    timings: Timings | None = None
    prompt_text: str = ""
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.samples[0].finish_reason

    @property
    def matched_stop(self) -> str | int | None:
        return self.samples[0].matched_stop

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.samples[0].logprobs


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model and the limits of a request, in tokens.

    `max_model_len` bounds prompt + output. `max_prompt_tokens` is what the workers of this moment can take, 0 while no
    pair of workers is ready. Without `has_chat_template` a chat cannot be rendered.
    """

    model: str
    revision: str
    vocab_size: int
    max_model_len: int
    max_prompt_tokens: int
    eos_token_ids: tuple[int, ...]
    ready: bool
    has_chat_template: bool
