"""What a complete transfer becomes, first tokens that are what was asked for and one sequence per sample, as does a
prompt that was computed here; and what another transfer of a reservation may begin with.

Called by the flow, on the engine thread, once the blocks are the engine's.
"""

from decode_worker.state import LocalPrompt, Reservation, Sequence
from kvtransfer import events
from splitserve.engine.allocator import BlockAllocator
from splitserve.engine.pool import KVPool
from splitserve.worker import messages
from splitserve.worker.payload import decode_finish
from splitserve.worker.sampling import start_problem


def first_tokens(reservation: Reservation, event: events.TransferComplete, vocab_size: int) -> list[messages.Token]:
    """One per sample, in order.

    Raises ValueError when the blocks are those of other tokens, or the tokens are not the next ones, and msgspec's
    errors for bytes that are no tokens at all.
    """
    if event.keys != reservation.keys.all_keys(reservation.token_ids):
        raise ValueError("its blocks belong to other tokens")
    tokens = decode_finish(event.payload)
    expected = [(sample.index, len(sample.output_ids)) for sample in reservation.samples]
    if [(token.sample, token.position) for token in tokens] != expected:
        raise ValueError("it holds tokens of other samples or positions")
    if any(not 0 <= token.token_id < vocab_size for token in tokens):
        raise ValueError("it holds a token outside of the vocabulary")
    return tokens


def split(begun: Reservation | LocalPrompt, pool: KVPool, allocator: BlockAllocator) -> list[Sequence]:
    """One sequence per sample: whole blocks are shared, the partial last one is copied for each."""
    first, *others = begun.own_blocks
    has_partial_block = len(begun.token_ids) % pool.layout.block_size > 0
    for own in others:
        allocator.share(begun.full_blocks)
        if has_partial_block:
            pool.copy_block(first, own)
    return [
        Sequence(
            attempt=begun.attempt,
            session=begun.session,
            params=begun.params,
            sample=sample.index,
            num_prompt=len(begun.start.prompt_ids),
            token_ids=list(begun.token_ids),
            keys=begun.keys.fork(),
            blocks=[*begun.full_blocks, own],
            traceparent=begun.traceparent,
        )
        for sample, own in zip(begun.samples, begun.own_blocks, strict=True)
    ]


def renewal_problem(before: messages.Start, after: messages.Start, vocab_size: int) -> str | None:
    """Why a reservation made for `before` cannot go on from `after`, if so."""
    if refusal := start_problem(after, vocab_size):
        return refusal.message
    if len(after.samples) != len(before.samples):
        return "another number of samples"
    for old, new in zip(before.samples, after.samples, strict=True):
        if new.index != old.index or new.output_ids[: len(old.output_ids)] != old.output_ids:
            return f"sample {new.index} does not continue sample {old.index}"
    return None
