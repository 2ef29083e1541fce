"""Which prompt tokens the next prefill step computes: a pure decision over plain data."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptView:
    """An admitted prompt as the scheduler sees it. Tokens [0, num_computed) have their KV in the pool."""

    attempt: str
    num_tokens: int
    num_computed: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of one prompt."""

    attempt: str
    start: int
    length: int


def plan_step(prompts: Sequence[PromptView], token_budget: int) -> list[Chunk]:
    """Fills one step of at most `token_budget` tokens in order of arrival; several prompts may share it."""
    chunks = []
    for prompt in prompts:
        if token_budget == 0:
            break
        length = min(prompt.num_tokens - prompt.num_computed, token_budget)
        chunks.append(Chunk(prompt.attempt, prompt.num_computed, length))
        token_budget -= length
    return chunks
