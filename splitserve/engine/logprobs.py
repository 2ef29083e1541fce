"""Log-probabilities of tokens, from the model's own logits: before temperature, penalties, bias or bans.

Called by both workers for generated tokens, and by the prefill worker for the prompt's. Pure functions of one row, so
company and chunks change nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's own log-probability and the likeliest tokens of the same row, likeliest first, of equals the lower id.

    Natural logarithms; minus infinity for a token that the model rules out.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


def token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs | None:
    """For a row of logits (float32 `[vocab]`, on the CPU). None where the row is no distribution (NaN, infinity)."""
    values = logits.numpy()
    highest = values.max()
    if not np.isfinite(highest):
        return None
    with np.errstate(over="ignore", under="ignore"):
        total = np.exp(values - highest).sum(dtype=np.float64)
    log_total = float(highest) + float(np.log(total))
    top_ids: list[int] = []
    if num_top > 0:
        least = np.partition(values, -num_top)[-num_top] if num_top < values.size else -np.inf
        candidates = np.flatnonzero(values >= least)
        top_ids = candidates[np.lexsort((candidates, -values[candidates]))][:num_top].tolist()
    return TokenLogprobs(
        logprob=float(values[token_id]) - log_total,
        top_ids=tuple(top_ids),
        top_logprobs=tuple(float(values[top_id]) - log_total for top_id in top_ids),
    )
