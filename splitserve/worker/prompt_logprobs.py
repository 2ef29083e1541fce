"""The log-probabilities of a prompt's own tokens: what a chunk's logits say about the tokens that follow them.

Called by `prompts`, chunk by chunk, so that no more than a step's logits are ever held.
"""

from collections.abc import Sequence

import torch

from splitserve.worker import messages
from splitserve.worker.sampling import logprobs_of

MAX_SCORED_TOKENS = 256
"""Tokens of one step whose logits are all held: 50 to 250 MiB, and no step much longer than others."""


def score_chunk(
    logits: torch.Tensor, prompt_ids: Sequence[int], start: int, num_top: int
) -> list[messages.Logprobs] | None:
    """Logprobs of the prompt tokens that follow those of a chunk, whose `logits` (float32 `[tokens, vocab]`) begin
    after position `start`; the prompt's first token comes along with the first chunk. None if a row is not finite."""
    scored = [messages.Logprobs(prompt_ids[0], None, [], [])] if start == 0 else []
    for row, token_id in zip(logits.cpu(), prompt_ids[start + 1 :], strict=False):
        logprobs = logprobs_of(row, token_id, num_top)
        if logprobs is None:
            return None
        scored.append(logprobs)
    return scored
