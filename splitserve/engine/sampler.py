"""From logits to tokens, without state.

Called in the step of prefill and decode workers alike. A draw is a pure function of (seed, sample index, output
position), so a later attempt on another worker continues the same text, and no other row of the batch matters.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

GREEDY_BELOW = 1e-5  # temperatures under this divide logits beyond sense; they mean greedy

_NUM_CANDIDATES = 1024  # a top-p nucleus is nearly always among so many most probable tokens: no full sort

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. ValueError for values outside the ranges named in `__post_init__`."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] | frozenset[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # Written so that NaN fails every one of them.
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a finite number from 0, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be from 0 to 1, not {self.min_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, not {self.top_k}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be an unsigned 64-bit integer, not {self.seed}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), not {self.min_tokens}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class SampleRow:
    """One row of logits: `sample_index` within the request, `position` in the sample's output over all attempts."""

    params: SamplingParams
    sample_index: int
    position: int


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: frozenset[int]) -> list[int | None]:
    """Chooses one token per row of `logits` (float32 `[rows, vocab]`, left as it is).

    None marks a row from which nothing can be chosen: a NaN, a positive infinity, or no finite value. The caller ends
    that sequence; the other rows are as they would be without it.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not fit {len(rows)} rows")
    values = logits.detach().to(device="cpu", dtype=torch.float32).numpy()
    return [_sample_row(values[index], row, eos_token_ids) for index, row in enumerate(rows)]


def _sample_row(logits: npt.NDArray[np.float32], row: SampleRow, eos_token_ids: frozenset[int]) -> int | None:
    banned = _banned_tokens(row, eos_token_ids, logits.size)
    if banned:
        logits = logits.copy()
        logits[banned] = -np.inf
    highest = logits.max()  # NaN if any value is
    if not np.isfinite(highest):
        return None
    if row.params.is_greedy:
        return int(logits.argmax())  # numpy promises the first, so the lowest id of equals
    weights = np.exp((logits.astype(np.float64) - float(highest)) / row.params.temperature)
    cumulative = _keep(weights, row.params).cumsum()
    threshold = uniform(row.params.seed, row.sample_index, row.position) * cumulative[-1]
    # First token whose cumulative weight exceeds the threshold; rounding must not carry it past the last kept one.
    chosen = int(np.searchsorted(cumulative, threshold, side="right"))
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return min(chosen, last)


def _banned_tokens(row: SampleRow, eos_token_ids: frozenset[int], vocab_size: int) -> list[int]:
    params = row.params
    if row.position >= params.min_tokens:
        return []
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    return [token for token in stops if 0 <= token < vocab_size]


def _keep(weights: _Floats, params: SamplingParams) -> _Floats:
    """Zeroes what min_p, top_k and top_p exclude, in this order; tokens equal to the last kept one stay.

    `weights` are unnormalized probabilities whose maximum is 1.
    """
    floor = params.min_p
    if 0 < params.top_k < weights.size:
        floor = max(floor, float(np.partition(weights, -params.top_k)[-params.top_k]))
    if floor > 0.0:
        weights = np.where(weights >= floor, weights, 0.0)
    if params.top_p < 1.0:
        weights = np.where(weights >= _nucleus_floor(weights, params.top_p), weights, 0.0)
    return weights


def _nucleus_floor(weights: _Floats, top_p: float) -> float:
    """Weight of the last of the fewest most probable tokens that together reach `top_p`."""
    needed = top_p * float(weights.sum())
    if weights.size > _NUM_CANDIDATES:
        candidates = np.sort(np.partition(weights, -_NUM_CANDIDATES)[-_NUM_CANDIDATES:])[::-1]
        if float(candidates.sum()) < needed:
            candidates = np.sort(weights)[::-1]
    else:
        candidates = np.sort(weights)[::-1]
    index = int(np.searchsorted(candidates.cumsum(), needed, side="left"))
    return float(candidates[min(index, candidates.size - 1)])


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same on every machine for the same three integers."""
    digest = blake2b(struct.pack("<QQQ", seed, sample_index, position), digest_size=8, person=b"splitserve draw")
    return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53
