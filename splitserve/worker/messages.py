"""What `commands`, from a worker's front to its engine, and `reports`, the other way, are both made of.

`session`, in both, names the router connection that a message belongs to: the front numbers its connections, so the
engine needs to know nothing about routers. Encoded and decoded by `link`.
"""

from typing import Literal

import msgspec

MAX_MESSAGE_BYTES = 64 << 20


class Sample(msgspec.Struct, frozen=True):
    """One sample of a request: its index, stable over attempts, and what earlier attempts already produced."""

    index: int
    output_ids: list[int]


class Limits(msgspec.Struct, frozen=True):
    """How to sample and when to stop: the limits of the request, not of the attempt."""

    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    logprobs: int | None
    prompt_logprobs: int | None


class Start(msgspec.Struct, frozen=True):
    """What an attempt continues from. Prompt and outputs stay apart, because limits count outputs only."""

    prompt_ids: list[int]
    samples: list[Sample]
    limits: Limits

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far, those of its one sample included; several samples have none of their own yet."""
        return self.prompt_ids + self.samples[0].output_ids


class Logprobs(msgspec.Struct, frozen=True):
    """A token's log-probability, None where nothing predicts it, and those of the likeliest tokens in its place."""

    token_id: int
    logprob: float | None
    top_ids: list[int]
    top_logprobs: list[float]


FinishReason = Literal["", "stop", "length"]


class Token(msgspec.Struct, frozen=True):
    """One generated token; `position` counts the sample's outputs over all attempts, `finish_reason` is "" while it
    runs."""

    sample: int
    position: int
    token_id: int
    finish_reason: FinishReason = ""
    attempt: str = ""
    logprobs: Logprobs | None = None


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything on the local socket: the tag is the class name."""
