"""From logits to tokens, without state.

Called in the step of prefill and decode workers alike. A token is a pure function of the row's logits, its parameters,
the tokens so far and (seed, sample index, output position), so a later attempt on another worker continues the same
text, and no other row of the batch matters: each row is computed by itself, vectorized over the vocabulary, where its
numbers stay in the processor's cache. (Batched operations are slower there, and may add up a row in another order when
it has other company.)

What is done to a row, in this order, which is that of transformers' processors:

1. `logit_bias` is added.
2. `repetition_penalty`: scores of tokens in prompt or output are divided by it if positive, else multiplied.
3. `presence_penalty`, once, and `frequency_penalty`, per occurrence, are subtracted from tokens of the output.
4. Before `min_tokens` output tokens, end-of-sequence and stop tokens are banned.
5. `temperature`; 0 takes the highest score, of equals the lowest id, and is done.
6. `top_k`, then `top_p` of what is left, then `min_p`. Tokens as likely as the last one let through are let through
   too, so nothing depends on how a sort breaks ties (transformers does so for top_k, and not for top_p).
7. One draw.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from splitserve.engine.history import TokenHistory
from splitserve.engine.sampling_params import SamplingParams

_BLOCK = 256  # tokens whose weights are added up before the draw looks inside

_Scores = npt.NDArray[np.float32]
_Cumulative = npt.NDArray[np.float64]

NO_HISTORY = TokenHistory((), 0)


@dataclass(frozen=True)
class SampleRow:
    """One row of logits: `sample_index` within the request, `position` in the sample's output over all attempts.

    Only penalties read `history`.
    """

    params: SamplingParams
    sample_index: int
    position: int
    history: TokenHistory = NO_HISTORY


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: frozenset[int]) -> list[int | None]:
    """Chooses one token per row of `logits` (float32 `[rows, vocab]`, left as it is).

    None marks a row from which nothing can be chosen: a NaN, a positive infinity, or no finite value. The caller ends
    that sequence; the other rows are as they would be without it.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not fit {len(rows)} rows")
    values = logits.detach().to(device="cpu", dtype=torch.float32).numpy()
    return [_sample_row(values[index], row, eos_token_ids) for index, row in enumerate(rows)]


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same on every machine for the same three integers."""
    digest = blake2b(struct.pack("<QQQ", seed, sample_index, position), digest_size=8, person=b"splitserve draw")
    return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53


def _sample_row(logits: _Scores, row: SampleRow, eos_token_ids: frozenset[int]) -> int | None:
    scores = adjusted(logits, row, eos_token_ids)
    best = int(scores.argmax())  # numpy promises the first of equals, and that NaN counts as the highest
    if not np.isfinite(scores[best]):
        return None
    if row.params.is_greedy:
        return best
    with np.errstate(over="ignore", under="ignore"):  # a score far below the best one weighs nothing
        weights = scores - scores[best]
        weights /= np.float32(row.params.temperature)
        np.exp(weights, out=weights)
    return _draw(weights, weight_floor(weights, row.params), uniform(row.params.seed, row.sample_index, row.position))


def adjusted(logits: _Scores, row: SampleRow, eos_token_ids: frozenset[int]) -> _Scores:
    """Steps 1 to 4: `logits` themselves where there is nothing to do, else a copy.

    Stop tokens outside of the vocabulary are ignored; other ids there are an IndexError.
    """
    params = row.params
    is_banning = row.position < params.min_tokens
    if not (params.logit_bias or params.has_penalties or is_banning):
        return logits
    scores = logits.copy()
    if params.logit_bias:
        ids, bias = params.bias_arrays
        scores[ids] += bias
    if params.has_penalties:
        _penalize(scores, params, row.history)
    if is_banning:
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        scores[[token_id for token_id in stops if 0 <= token_id < scores.size]] = -np.inf
    return scores


def _penalize(scores: _Scores, params: SamplingParams, history: TokenHistory) -> None:
    ids, num_outputs = history.counts()
    if params.repetition_penalty != 1.0:
        penalty = np.float32(params.repetition_penalty)
        seen = scores[ids]
        scores[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        is_output = num_outputs > 0
        amount = params.presence_penalty + params.frequency_penalty * num_outputs[is_output]
        scores[ids[is_output]] -= amount.astype(np.float32)


def weight_floor(weights: _Scores, params: SamplingParams) -> float:
    """The least weight that top_k, top_p and min_p let through; 0 where all tokens pass.

    `weights` are unnormalized probabilities whose maximum is 1.
    """
    floor = 0.0
    if 0 < params.top_k < weights.size:
        floor = float(np.partition(weights, -params.top_k)[-params.top_k])
    if params.top_p < 1.0:
        floor = max(floor, _nucleus_floor(_from(weights, floor), params.top_p))
    return max(floor, params.min_p)


def _nucleus_floor(weights: _Scores, top_p: float) -> float:
    """Weight of the last of the fewest most probable tokens that together reach `top_p` of all `weights`."""
    total = float(weights.sum(dtype=np.float64))
    # All tokens below this together cannot make up the share that the nucleus leaves, so none of them is in it: only
    # the others, rarely many, have to be sorted. The factor is for rounding.
    lowest = 0.99 * (1.0 - top_p) * total / weights.size
    descending = np.sort(_from(weights, lowest))[::-1]
    index = int(np.searchsorted(descending.cumsum(dtype=np.float64), top_p * total, side="left"))
    return float(descending[min(index, descending.size - 1)])


def _from(weights: _Scores, floor: float) -> _Scores:
    """The weights of at least `floor`, in order of ids. (By places: several times faster than by a mask.)"""
    return weights[np.flatnonzero(weights >= floor)] if floor > 0.0 else weights


def _draw(weights: _Scores, floor: float, number: float) -> int:
    """The token at the share `number` of all weights from `floor` up, in order of ids."""
    if floor > 0.0:
        kept = np.flatnonzero(weights >= floor)
        cumulative = weights[kept].cumsum(dtype=np.float64)
        return int(kept[_first_above(cumulative, number * cumulative[-1])])
    starts = np.arange(0, weights.size, _BLOCK)
    sums = np.add.reduceat(weights, starts).cumsum(dtype=np.float64)
    threshold = number * sums[-1]
    block = _first_above(sums, threshold)
    start = int(starts[block])
    before = sums[block - 1] if block > 0 else 0.0
    inside = weights[start : start + _BLOCK].cumsum(dtype=np.float64)
    return start + _first_above(inside, threshold - before)


def _first_above(cumulative: _Cumulative, threshold: float) -> int:
    """The first place whose cumulative weight exceeds `threshold`; rounding must not carry it past the last weight."""
    place = int(np.searchsorted(cumulative, threshold, side="right"))
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return min(place, last)
