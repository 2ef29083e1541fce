"""Whether an attempt fits a worker: what both roles' schedulers decide alike, over plain data.

What can never fit is told apart from what does not fit now: the router refuses the request, or looks further.
"""

from dataclasses import dataclass

from splitserve.service.reasons import Reason


@dataclass(frozen=True, slots=True)
class Room:
    """What a worker has at this moment. `available_blocks` are free, or held by the prefix cache alone."""

    available_blocks: int
    total_blocks: int
    block_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an attempt does not begin here."""

    reason: Reason
    message: str


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks for all of the tokens."""
    return -(-num_tokens // block_size)


def decode_blocks(num_tokens: int, num_samples: int, block_size: int) -> int:
    """Whole blocks of the tokens, which the samples share, and per sample one for the rest and its first decoded
    token."""
    return num_tokens // block_size + num_samples


def never_fits(num_tokens: int, num_blocks: int, room: Room) -> Refusal | None:
    """For an attempt that begins with `num_blocks`: a worker that is idle would have to refuse it as well."""
    if num_tokens >= room.max_model_len:
        problem = f"{num_tokens} tokens leave no room for output: the context is {room.max_model_len}"
        return Refusal(Reason.TOO_LARGE, problem)
    if num_blocks > room.total_blocks:
        problem = f"{num_tokens} tokens need {num_blocks} blocks: the pool has {room.total_blocks}"
        return Refusal(Reason.TOO_LARGE, problem)
    return None


def lacks_blocks(num_blocks: int, room: Room) -> Refusal | None:
    """Judged without the hits that the attempt may have: a hit takes its block from what is available, too."""
    if num_blocks > room.available_blocks:
        return Refusal(Reason.NO_ROOM, f"{num_blocks} blocks needed, {room.available_blocks} available")
    return None
