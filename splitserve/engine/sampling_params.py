"""How one request's tokens are chosen: the values that the sampler and the stop rules read."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

GREEDY_BELOW = 1e-5  # temperatures under this divide logits beyond sense; they mean greedy


@dataclass(frozen=True)
class SamplingParams:
    """ValueError for values outside the ranges named in `__post_init__`."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] | frozenset[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many of the likeliest tokens are told with each; None: no logprobs at all

    def __post_init__(self) -> None:
        # Written so that NaN fails every one of them.
        checks = {
            "temperature": (0.0 <= self.temperature < math.inf, "a finite number from 0"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            "min_p": (0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "repetition_penalty": (0.0 < self.repetition_penalty < math.inf, "a finite number above 0"),
            "presence_penalty": (math.isfinite(self.presence_penalty), "a finite number"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "a finite number"),
            "logit_bias": (all(math.isfinite(bias) for _, bias in self.logit_bias), "finite numbers"),
            "seed": (0 <= self.seed < 2**64, "an unsigned 64-bit integer"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens ({self.max_tokens})"),
            "logprobs": (self.logprobs is None or self.logprobs >= 0, "at least 0"),
        }
        for name, (is_in_range, allowed) in checks.items():
            if not is_in_range:
                raise ValueError(f"{name} must be {allowed}, not {getattr(self, name)}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change what comes next."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def bias_arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """`logit_bias` as ids and values."""
        ids, values = zip(*self.logit_bias, strict=True) if self.logit_bias else ((), ())
        return np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)
