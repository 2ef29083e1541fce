"""Which prompts a prefill worker takes: a pure decision over plain data. What of them the next step computes is
`splitserve/worker/chunks.py`'s."""

from splitserve.worker.admission import Refusal, Room, blocks_for, lacks_blocks, never_fits


def admit(num_tokens: int, room: Room) -> Refusal | None:
    """Why a prompt is not taken, if so: only one with blocks for all of its tokens, because that always finishes."""
    num_blocks = blocks_for(num_tokens, room.block_size)
    return never_fits(num_tokens, num_blocks, room) or lacks_blocks(num_blocks, room)
