"""The prompts that this worker computes itself, from `Reserve` until they are computed or given up.

Called by the flow, on the engine thread. No transfer has a part in them: their blocks are in use from the start, and go
back at once.
"""

from collections.abc import Iterator

from decode_worker.scheduler import LocalView
from decode_worker.state import LocalPrompt
from splitserve.engine.allocator import BlockAllocator


class LocalPrompts:
    """Owns the prompts, the oldest first, and frees those that are given up."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._by_attempt: dict[str, LocalPrompt] = {}

    def __len__(self) -> int:
        return len(self._by_attempt)

    def __iter__(self) -> Iterator[LocalPrompt]:
        return iter(list(self._by_attempt.values()))

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._by_attempt

    def __getitem__(self, attempt: str) -> LocalPrompt:
        return self._by_attempt[attempt]

    def add(self, prompt: LocalPrompt) -> None:
        self._by_attempt[prompt.attempt] = prompt

    def remove(self, prompt: LocalPrompt) -> None:
        """Its blocks are somebody else's business from now on."""
        del self._by_attempt[prompt.attempt]

    def close(self, attempt: str) -> None:
        """Gives the attempt's prompt up, if it has one."""
        prompt = self._by_attempt.pop(attempt, None)
        if prompt is not None:
            self._allocator.release(prompt.blocks)

    # Views

    def attempts_of(self, session: int) -> set[str]:
        return {prompt.attempt for prompt in self if prompt.session == session}

    def expired(self, now: float) -> list[LocalPrompt]:
        return [prompt for prompt in self if now > prompt.deadline]

    @property
    def num_seqs(self) -> int:
        """How many sequences they are to become."""
        return sum(len(prompt.samples) for prompt in self)

    def views(self) -> list[LocalView]:
        return [LocalView(prompt.attempt) for prompt in self]
