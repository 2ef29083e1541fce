"""Which tokens of which prompts the next step computes: a pure decision over plain data, the same on a prefill worker
and on a decode worker that computes prompts itself.

A prompt with more than the *threshold* left to compute is long. While others wait it gets no more than a share of each
step, so it cannot starve them; the oldest long one always gets that share, so they cannot starve it either. Prompts
whose own logprobs are wanted (*scored*) share a part of the step by the same rules, because their logits take memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptView:
    """An admitted prompt as the scheduler sees it. Tokens [0, num_computed) have their KV in the pool."""

    attempt: str
    num_tokens: int
    num_computed: int
    is_scored: bool = False

    @property
    def num_left(self) -> int:
        return self.num_tokens - self.num_computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of one prompt."""

    attempt: str
    start: int
    length: int


def tokens_ahead(prompts: Sequence[PromptView], threshold: int) -> int:
    """What a short prompt that comes now has to wait for: all of the short ones and one share of each long one."""
    return sum(min(prompt.num_left, threshold) for prompt in prompts)


def plan_chunks(
    prompts: Sequence[PromptView], *, token_budget: int, scored_budget: int, threshold: int, block_size: int
) -> list[Chunk]:
    """Fills one step of at most `token_budget` tokens, at most `scored_budget` of them of scored prompts, from
    `prompts`, each with tokens left, in order of arrival.

    The step is full whenever so many tokens may be computed. The oldest long prompt is sure of `threshold` tokens. All
    else goes by size, then arrival, where sizes within a factor of two are equals and so are all short prompts; what
    does not fit into what is left is passed by what does: a whole prompt, or as much of a scored one as there may be.
    With `threshold` at most half of the budget, the oldest short prompt always fits. So whatever comes later, any
    prompt ends within the sum of ceil(num_left / threshold) over the prompts up to it, where a scored one counts with
    at most half of `scored_budget` for its threshold; and a short one, with no scored one up to it, within as many
    steps as there are prompts up to it.
    """
    scored = [prompt for prompt in prompts if prompt.is_scored]
    allowed = {prompt.attempt: prompt.num_left for prompt in prompts}
    if scored:
        share = min(threshold, max(scored_budget // 2, 1))
        lengths = {chunk.attempt: chunk.length for chunk in _fill(scored, allowed, scored_budget, share, block_size)}
        allowed |= {prompt.attempt: lengths.get(prompt.attempt, 0) for prompt in scored}
    return _fill(
        [prompt for prompt in prompts if allowed[prompt.attempt]], allowed, token_budget, threshold, block_size
    )


def _fill(
    prompts: Sequence[PromptView], allowed: Mapping[str, int], budget: int, threshold: int, block_size: int
) -> list[Chunk]:
    """Up to `budget` tokens, of each prompt as many as it is `allowed`: at least one, at most all that are left."""
    assured = next((prompt for prompt in prompts if prompt.num_left > threshold), None)
    share = min(threshold, allowed[assured.attempt]) if assured else 0
    left = budget - share
    chunks: dict[str, Chunk] = {}
    passed = []
    for prompt in sorted(prompts, key=lambda prompt: _size_class(prompt.num_left, threshold)):
        room = left + (share if prompt is assured else 0)
        length = allowed[prompt.attempt]
        if length <= room:
            chunks[prompt.attempt] = Chunk(prompt.attempt, prompt.num_computed, length)
            left = room - length
        else:
            passed.append(prompt)
    for index, prompt in enumerate(passed):
        room = left + (share if prompt is assured else 0)
        length = room
        if prompt is not assured and index + 1 < len(passed):
            # Whole blocks leave at once; what follows can use the tokens as well.
            length = _cut_to_block(prompt.num_computed, room, block_size)
        if length > 0:
            chunks[prompt.attempt] = Chunk(prompt.attempt, prompt.num_computed, length)
        left = room - length
    return [chunks[prompt.attempt] for prompt in prompts if prompt.attempt in chunks]


def _size_class(num_left: int, threshold: int) -> int:
    """0 for short prompts, then one class for each doubling."""
    return ((num_left - 1) // threshold).bit_length()


def _cut_to_block(start: int, length: int, block_size: int) -> int:
    return max((start + length) // block_size * block_size - start, 0)
