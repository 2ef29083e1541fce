"""A request as the router knows it, and the seam between the public edge and the cluster.

`validation` makes a `GenerationRequest`, `serving` submits it to a `Dispatcher` (`dispatcher` is the one) and
reads the `Generation` it gets back (`flow`). Nothing here knows gRPC, HTTP or a worker.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from router.stages import StageClock


@dataclass(frozen=True, slots=True)
class Sampling:
    """Every value is checked and resolved: nothing is optional and no default is left to a worker.

    `temperature` 0 is greedy; `top_k` 0 and logprobs of None are off. `max_tokens` is at least 1 and fits what the
    prompt leaves of the context. `stop` is the router's business; the token ids are the workers'.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int | None
    prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`request_id` is the client's own name, echoed and never a key; `deadline` is a time of the event loop's clock."""

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    priority: int
    deadline: float
    traceparent: str
    echo: str | None = None
    "The prompt's text, where the client wants the prompt before the output."
    shows_output: bool = True
    "Else it wants the prompt alone: the one token that workers make in any case is nothing to it."


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability, None where nothing predicts it, and (id, logprob) of the likeliest tokens there."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class TokenEvent(Struct, frozen=True, gc=False):
    """One output token; `position` counts the sample's output over all attempts, from 0 and without gaps."""

    sample: int
    position: int
    token_id: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    is_followed: bool = False
    "Another token event of the request comes at once: both may be shown together."


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The next tokens of the prompt, in order and each once; all of them come before the first output token."""

    tokens: tuple[TokenLogprobs, ...]


Event = TokenEvent | PromptLogprobs


class Generation(Protocol):
    """One admitted request's events. Ends after the one that carries a `finish_reason`, or raises SplitserveError."""

    @property
    def attempts(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def stop(self, sample: int) -> None:
        """This sample is over although the workers go on with it; others are not."""

    async def aclose(self) -> None:
        """Releases the workers at any stage; idempotent, and does not wait for them."""


class Dispatcher(Protocol):
    def submit(self, request: GenerationRequest, stages: StageClock) -> Generation:
        """Admits the request, or raises Overloaded or Unavailable at once. `stages` is in the first one."""


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """What an idle decode worker has room for."""

    num_blocks: int
    block_size: int
    max_num_seqs: int

    def max_samples(self, num_prompt_tokens: int) -> int:
        """With how many samples of one prompt it could begin: they share the prompt's whole blocks and have one more
        each."""
        return min(self.max_num_seqs, self.num_blocks - num_prompt_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """What the workers joined now could ever take. A limit of 0 means that no such worker has joined yet.

    `max_prompt_tokens_*` is the largest prompt that the roomiest worker of that role can hold when it is idle, and of
    prefill one that decode workers compute themselves, if that is larger;
    `decodes` are the decode workers.
    """

    ready: bool
    max_prompt_tokens_prefill: int
    max_prompt_tokens_decode: int
    max_model_len: int
    decodes: tuple[DecodeCapacity, ...] = ()
