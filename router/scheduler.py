"""Which queued request goes to which pair of workers: a pure decision over plain data.

Late binding: a request leaves the queue only when a decode worker has room for its whole prompt plus the first decoded
token, and a prefill worker that can reach it has token budget and blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.config import Routing


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode worker with what is promised but not yet visible in its reports already taken off."""

    worker: str
    available_blocks: int
    total_blocks: int
    block_size: int
    free_seqs: int
    max_model_len: int
    numerics: str


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill worker likewise. `waiting_tokens` are handed over and not yet computed.

    A prompt with more than `long_threshold` tokens left is long: while others wait it gets that many tokens of a step.
    `tokens_ahead` counts it with these alone, because a short prompt waits for no more.
    """

    worker: str
    available_blocks: int
    total_blocks: int
    block_size: int
    waiting_tokens: int
    tokens_ahead: int
    long_threshold: int
    max_waiting_tokens: int
    max_model_len: int
    reachable: frozenset[str]


@dataclass(frozen=True, slots=True)
class Demand:
    """What the next attempt of a request needs: its tokens so far, and where it would rather not go again."""

    num_tokens: int
    num_samples: int = 1
    avoid: frozenset[str] = frozenset()
    numerics: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: str
    decode: str


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def decode_blocks(num_tokens: int, num_samples: int, block_size: int) -> int:
    """Whole blocks of the tokens, which the samples share, and per sample one for the rest and its first decoded
    token."""
    return num_tokens // block_size + num_samples


def can_decode(view: DecodeView, demand: Demand) -> bool:
    """Room for the tokens so far and the first decoded one of every sample, now."""
    needed = decode_blocks(demand.num_tokens, demand.num_samples, view.block_size)
    return (
        needed <= view.available_blocks
        and demand.num_samples <= view.free_seqs
        and demand.num_tokens < view.max_model_len
    )


def can_prefill(view: PrefillView, num_tokens: int) -> bool:
    """Blocks for the whole prompt, and a queue short enough that waiting here beats waiting at the router.

    A long prompt fills the queue for other long ones only: short ones get a part of every step beside it.
    """
    if blocks_for(num_tokens, view.block_size) > view.available_blocks or num_tokens >= view.max_model_len:
        return False
    if view.waiting_tokens == 0 or view.waiting_tokens + num_tokens <= view.max_waiting_tokens:
        return True
    has_long, is_long = view.waiting_tokens > view.tokens_ahead, num_tokens > view.long_threshold
    ahead = view.tokens_ahead + min(num_tokens, view.long_threshold)
    return not (has_long and is_long) and ahead <= view.max_waiting_tokens


def could_place(demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]) -> bool:
    """Whether some pair that is here would have room for the request if it were idle."""
    return any(
        decode.worker in prefill.reachable
        and decode_blocks(demand.num_tokens, demand.num_samples, decode.block_size) <= decode.total_blocks
        and demand.num_tokens < decode.max_model_len
        and blocks_for(demand.num_tokens, prefill.block_size) <= prefill.total_blocks
        and demand.num_tokens < prefill.max_model_len
        for decode in decodes
        for prefill in prefills
    )


def max_prompt_tokens(total_blocks: int, block_size: int, max_model_len: int) -> int:
    """The largest prompt that an idle worker can take: at least one token of the context is left for output."""
    return min(total_blocks * block_size, max_model_len) - 1


def place(
    demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView], routing: Routing, turn: int
) -> Placement | None:
    """The pair for one request, or None while no pair has room.

    Workers of equal numerics come before all else, because only there is recomputation exact; then workers that the
    request has not failed on; then `routing`. `turn` counts placements and drives round robin.
    """
    pairs = [
        (prefill, decode)
        for decode in decodes
        if can_decode(decode, demand)
        for prefill in prefills
        if decode.worker in prefill.reachable and can_prefill(prefill, demand.num_tokens)
    ]
    if not pairs:
        return None
    prefill_order = _order([p.worker for p in prefills], turn)
    decode_order = _order([d.worker for d in decodes], turn)

    def cost(pair: tuple[PrefillView, DecodeView]) -> tuple[float, ...]:
        prefill, decode = pair
        preference = (
            float(bool(demand.numerics) and decode.numerics != demand.numerics),
            float(len({prefill.worker, decode.worker} & demand.avoid)),
        )
        turns = (float(decode_order(decode.worker)), float(prefill_order(prefill.worker)))
        if routing == "round_robin":
            return (*preference, *turns)
        used = 1 - decode.available_blocks / decode.total_blocks
        return (*preference, used, float(prefill.waiting_tokens), *turns)

    prefill, decode = min(pairs, key=cost)
    return Placement(prefill.worker, decode.worker)


def _order(workers: list[str], turn: int) -> Callable[[str], int]:
    """Each worker's distance from the one whose turn it is."""
    ranks = {worker: (index - turn) % len(workers) for index, worker in enumerate(workers)}
    return ranks.__getitem__
