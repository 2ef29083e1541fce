"""Prompts that are computed on a worker, from their blocks to the first tokens: the same on a prefill worker, and on a
decode worker that computes prompts itself.

The flow of either role is a `PromptEngine`. It decides when a prompt begins, and what becomes of it between two chunks
and after the last one. A block enters the prefix cache as soon as all its tokens are computed, so the next prompt that
begins alike finds it even while this one is under way.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from splitserve.engine.batch import Segment
from splitserve.engine.block_keys import KeyChain
from splitserve.engine.history import TokenHistory
from splitserve.engine.sampling_params import SamplingParams
from splitserve.worker import messages, reports
from splitserve.worker.chunks import Chunk, PromptView, plan_chunks
from splitserve.worker.prompt_logprobs import MAX_SCORED_TOKENS, score_chunk
from splitserve.worker.role import EngineBase
from splitserve.worker.sampling import Draw, draw_tokens, sampling_params


@dataclass(slots=True)
class Prompt:
    """What an attempt begins with, being computed: K and V of its first `num_computed` tokens are in `blocks`, those of
    the first `num_cached` came from the prefix cache. There are blocks for all tokens."""

    attempt: str
    session: int
    start: messages.Start
    keys: KeyChain
    blocks: list[int]
    num_cached: int
    params: SamplingParams = field(init=False)
    token_ids: list[int] = field(init=False)
    num_computed: int = field(init=False)

    def __post_init__(self) -> None:
        self.params = sampling_params(self.start.limits)
        self.token_ids = self.start.token_ids
        self.num_computed = self.num_cached

    @property
    def samples(self) -> list[messages.Sample]:
        return self.start.samples

    @property
    def is_complete(self) -> bool:
        return self.num_computed == len(self.token_ids)

    @property
    def has_started(self) -> bool:
        """Something of it has been computed here; what came from the cache is no work done."""
        return self.num_computed > self.num_cached

    def view(self) -> PromptView:
        """As the scheduler sees it."""
        return PromptView(self.attempt, len(self.token_ids), self.num_computed, is_scored(self.start))

    def segment(self, chunk: Chunk) -> Segment:
        end = chunk.start + chunk.length
        return Segment(
            token_ids=self.token_ids[chunk.start : end],
            start=chunk.start,
            block_table=self.blocks,
            wants_logits=end == len(self.token_ids),
            wants_all_logits=is_scored(self.start),
        )


def is_scored(start: messages.Start) -> bool:
    """Whether the prompt's own logprobs are wanted."""
    return start.limits.prompt_logprobs is not None


class PromptEngine(EngineBase):
    """What engines have in common that compute prompts."""

    def _take_blocks(self, start: messages.Start, keys: KeyChain, num_blocks: int) -> tuple[list[int], int]:
        """That many blocks, cached ones first, and how many tokens need not be computed: never all of them, and none of
        a prompt whose logprobs are wanted, because a token that is not computed has no logits.

        The caller has found room for all blocks, which is more than enough for those that are not cached.
        """
        num_tokens = len(start.token_ids)
        cached = [] if is_scored(start) else self._pin_cached(keys)
        num_cached = len(cached) * self._layout.block_size
        is_whole_hit = num_cached == num_tokens
        if is_whole_hit:
            # The last token has to be computed for its logits. Its K and V come out the same, but a block that others
            # read or that is on its way to a decode worker is not written, so they go to a copy.
            last = cached.pop()
            self._allocator.release([last])
        fresh = self._allocator.allocate(num_blocks - len(cached))
        assert fresh is not None, "room is judged without hits"
        if is_whole_hit:
            num_cached -= 1
            if fresh[0] != last:  # else it was evicted: ours now, bytes and all
                self._runner.pool.copy_block(last, fresh[0])
        return cached + fresh, num_cached

    def _accept(self, prompt: Prompt) -> None:
        """Tells the router, after the load, so that it never sees the answer without the room that it took."""
        self.report_load()
        self._publish(reports.Accepted(prompt.session, prompt.attempt, num_cached_tokens=prompt.num_cached))
        if not is_scored(prompt.start):
            self._count_lookup(len(prompt.token_ids), prompt.num_cached)

    def _plan_chunks(self, prompts: Iterable[Prompt], token_budget: int) -> list[Chunk]:
        """Of prompts with tokens left, in order of arrival."""
        return plan_chunks(
            [prompt.view() for prompt in prompts],
            token_budget=token_budget,
            scored_budget=MAX_SCORED_TOKENS,
            threshold=min(self._context.config.long_prefill_threshold, max(token_budget // 2, 1)),
            block_size=self._layout.block_size,
        )

    def _take_chunk(self, prompt: Prompt, chunk: Chunk, logits: torch.Tensor) -> list[messages.Token] | None:
        """The chunk has been computed: publishes what it says of the prompt's own tokens, and with the last one draws
        and publishes the first token of every sample. Returns these, none before that; None where the logits are not
        finite, and nothing of the prompt is to be believed.
        """
        prompt.num_computed += chunk.length
        self._cache_computed(prompt, chunk)
        if is_scored(prompt.start) and not self._publish_prompt_logprobs(prompt, chunk, logits):
            return None
        return self._draw_first_tokens(prompt, logits[-1]) if prompt.is_complete else []

    def _cache_computed(self, prompt: Prompt, chunk: Chunk) -> None:
        """Offers the blocks that the chunk has completed to the prefix cache."""
        size = self._layout.block_size
        completed = slice(chunk.start // size, (chunk.start + chunk.length) // size)
        self._cache(prompt.blocks[completed], prompt.keys.complete[completed])

    def _publish_prompt_logprobs(self, prompt: Prompt, chunk: Chunk, logits: torch.Tensor) -> bool:
        """False where the logits are not finite."""
        num_top = prompt.start.limits.prompt_logprobs
        assert num_top is not None
        scored = score_chunk(logits, prompt.start.prompt_ids, chunk.start, num_top)
        if scored:
            start = chunk.start + 1 if chunk.start else 0
            self._publish(reports.PromptLogprobs(prompt.session, prompt.attempt, start, scored))
        return scored is not None

    def _draw_first_tokens(self, prompt: Prompt, logits: torch.Tensor) -> list[messages.Token] | None:
        """All samples draw from the same row, that of the last token."""
        history = TokenHistory(prompt.token_ids, len(prompt.start.prompt_ids))
        draws = [Draw(prompt.params, sample.index, history) for sample in prompt.samples]
        rows = logits.expand(len(draws), -1)
        tokens = draw_tokens(rows, draws, self._eos_token_ids, self._max_len)
        drawn = [token for token in tokens if token is not None]
        if len(drawn) < len(draws):
            return None
        num_computed = len(prompt.token_ids) - prompt.num_cached
        self._publish(reports.FirstTokens(prompt.session, prompt.attempt, drawn, num_computed))
        return drawn
