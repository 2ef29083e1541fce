"""Flags that more than one command has. Only the ones about a connection can also come from the environment."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

from cyclopts import Parameter

from splitserve.client.channel import DEFAULT_TARGET, TARGET_VARIABLE
from splitserve.client.requests import DEFAULT_TIMEOUT_S
from splitserve.client.types import GenerateOptions
from splitserve.service.config import Duration


@dataclass(frozen=True, kw_only=True)
class Connection:
    """Where the router is, and how long to wait for it."""

    target: Annotated[str, Parameter(env_var=TARGET_VARIABLE)] = DEFAULT_TARGET
    "Router's gRPC address, host:port."
    timeout: Annotated[Duration, Parameter(env_var="SPLITSERVE_TIMEOUT")] = DEFAULT_TIMEOUT_S
    "Deadline of one answer, such as 30s; a plain number is seconds."


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. What is left out takes the model's own default."""

    temperature: float | None = None
    "0 is greedy."
    top_p: float | None = None
    "Choose among the likeliest tokens that together have this probability."
    top_k: int | None = None
    "Choose among this many likeliest tokens; 0 is off."
    min_p: float | None = None
    "Leave out tokens below this share of the likeliest one's probability."
    repetition_penalty: float | None = None
    "Above 1: tokens of prompt and answer become less likely."
    presence_penalty: float | None = None
    "Above 0: tokens that the answer has become less likely."
    frequency_penalty: float | None = None
    "Above 0: tokens become less likely each time the answer has them."
    logit_bias: list[tuple[int, float]] | None = None
    "Token id and what is added to its logit, such as 50 -100, which bans it; repeatable."
    min_tokens: int | None = None
    "Do not end before this many tokens."
    stop: list[str] | None = None
    "End at this text; repeatable."
    stop_token_ids: list[int] | None = None
    "End at this token; repeatable."
    ignore_eos: bool = False
    "Go on past the model's own end."
    seed: int | None = None
    "Fix the random draws; the seed in force is in the statistics."
    logprobs: int | None = None
    "Tell each token's logprob on stderr, and this many of the likeliest tokens in its place."
    prompt_logprobs: int | None = None
    "The same for each token of the prompt."
    model: str = ""
    "Served model's name; empty for the one that is served."
    priority: int = 0
    "Higher goes first among queued requests."

    def options(self, max_tokens: int, connection: Connection) -> GenerateOptions:
        values: dict[str, Any] = asdict(self) | {"max_tokens": max_tokens, "timeout": connection.timeout}
        values["logit_bias"] = dict(self.logit_bias or ())
        return cast(GenerateOptions, values)
