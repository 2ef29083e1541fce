"""Whom the workers let in, as tables; and that the router thinks of a worker's room as the worker does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker import scheduler as decode
from prefill_worker import scheduler as prefill
from router.scheduler import (
    DecodeView,
    Demand,
    PrefillView,
    can_decode,
    can_prefill,
    could_place,
    max_decode_tokens,
    max_prefill_tokens,
)
from splitserve.service.reasons import Reason
from splitserve.worker.admission import Refusal, Room, blocks_for

B = 16
ROOM = Room(available_blocks=6, total_blocks=8, block_size=B, max_model_len=10 * B)


def admit(
    num_tokens: int, num_samples: int = 1, room: Room = ROOM, *, num_seqs: int = 2, max_num_seqs: int = 5
) -> Refusal | None:
    return decode.admit(num_tokens, num_samples, room, num_seqs=num_seqs, max_num_seqs=max_num_seqs)


@pytest.mark.parametrize(
    ("num_tokens", "num_samples", "refusal"),
    [
        (1, 1, None),
        (6 * B - 1, 1, None),  # the first decoded token takes the last slot
        (6 * B, 1, (Reason.NO_ROOM, "7 blocks needed, 6 available")),  # C43: it has a block to itself
        (8 * B - 1, 1, (Reason.NO_ROOM, "8 blocks needed, 6 available")),
        (8 * B, 1, (Reason.TOO_LARGE, "128 tokens need 9 blocks: the pool has 8")),
        (10 * B - 1, 1, (Reason.TOO_LARGE, "159 tokens need 10 blocks: the pool has 8")),
        (10 * B, 1, (Reason.TOO_LARGE, "160 tokens leave no room for output: the context is 160")),
        # Samples share whole blocks and have one each of their own.
        (4 * B - 1, 3, None),
        (4 * B, 2, None),
        (4 * B, 3, (Reason.NO_ROOM, "7 blocks needed, 6 available")),
        (6 * B, 3, (Reason.TOO_LARGE, "96 tokens need 9 blocks: the pool has 8")),
        (1, 4, (Reason.NO_ROOM, "2 sequences run or are reserved already")),
        # What can never be is said first: the router would come again.
        (1, 6, (Reason.TOO_LARGE, "6 samples, and at most 5 run at once")),
        (2 * B, 6, (Reason.TOO_LARGE, "6 samples, and at most 5 run at once")),
    ],
)
def test_decode_takes_what_does_not_fit(num_tokens: int, num_samples: int, refusal: tuple[Reason, str] | None) -> None:
    assert admit(num_tokens, num_samples) == (None if refusal is None else Refusal(*refusal))


@pytest.mark.parametrize(
    ("num_tokens", "refusal"),
    [
        (1, None),
        (6 * B, None),  # decode has a block more to find
        (6 * B + 1, (Reason.NO_ROOM, "7 blocks needed, 6 available")),
        (8 * B, (Reason.NO_ROOM, "8 blocks needed, 6 available")),
        (8 * B + 1, (Reason.TOO_LARGE, "129 tokens need 9 blocks: the pool has 8")),
        (10 * B, (Reason.TOO_LARGE, "160 tokens leave no room for output: the context is 160")),
    ],
)
def test_prefill_takes_what_does_not_fit(num_tokens: int, refusal: tuple[Reason, str] | None) -> None:
    assert prefill.admit(num_tokens, ROOM) == (None if refusal is None else Refusal(*refusal))


@given(
    num_tokens=st.integers(1, 40),
    num_samples=st.integers(1, 4),
    available=st.integers(0, 8),
    extra=st.integers(0, 3),
    num_seqs=st.integers(0, 4),
    max_num_seqs=st.integers(1, 5),
    max_model_len=st.integers(2, 40),
)
def test_router_sends_what_the_worker_refuses(
    num_tokens: int,
    num_samples: int,
    available: int,
    extra: int,
    num_seqs: int,
    max_num_seqs: int,
    max_model_len: int,
) -> None:
    """Or keeps what it would take; and never takes "not now" for "never"."""
    room = Room(available, max(available + extra, 1), 4, max_model_len)
    in_decode = DecodeView("d", available, room.total_blocks, 4, num_seqs, max_num_seqs, max_model_len, "n")
    in_prefill = PrefillView(
        "p", available, room.total_blocks, 4, waiting_tokens=0, tokens_ahead=0, long_threshold=8,
        max_waiting_tokens=100, max_model_len=max_model_len, numerics="n",
        reachable=frozenset({"d"}),
    )  # fmt: skip
    demand = Demand(num_tokens, num_samples)
    by_decode = admit(num_tokens, num_samples, room, num_seqs=num_seqs, max_num_seqs=max_num_seqs)
    by_prefill = prefill.admit(num_tokens, room)
    assert can_decode(in_decode, demand) == (by_decode is None)
    assert can_prefill(in_prefill, num_tokens) == (by_prefill is None)
    never = any(refusal is not None and refusal.reason is Reason.TOO_LARGE for refusal in (by_decode, by_prefill))
    assert could_place(demand, [in_prefill], [in_decode]) == (not never)


@given(total_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 4, 16]), max_model_len=st.integers(2, 200))
def test_largest_prompt_is_refused_or_not_the_largest(total_blocks: int, block_size: int, max_model_len: int) -> None:
    room = Room(total_blocks, total_blocks, block_size, max_model_len)
    for largest, is_taken in (
        (max_decode_tokens(total_blocks, block_size, max_model_len), lambda n: admit(n, room=room) is None),
        (max_prefill_tokens(total_blocks, block_size, max_model_len), lambda n: prefill.admit(n, room) is None),
    ):
        assert largest == 0 or is_taken(largest)
        assert not is_taken(largest + 1)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (B - 1, 1), (B, 1), (B + 1, 2), (2 * B, 2)])
def test_blocks_are_miscounted(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, B) == blocks
