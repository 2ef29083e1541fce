"""Placement as a table: who gets a request although it has no room, and who gets it although another fits better."""

from dataclasses import replace
from typing import Any

import pytest

from router.scheduler import (
    DecodeView,
    Demand,
    Placement,
    PrefillView,
    can_decode,
    can_prefill,
    could_place,
    keep_room,
    max_decode_tokens,
    max_prefill_tokens,
    place,
)

B = 16

D0 = DecodeView(
    worker="d0",
    available_blocks=10,
    total_blocks=10,
    block_size=B,
    num_seqs=0,
    max_num_seqs=4,
    max_model_len=1000,
    numerics="n",
)
D1 = replace(D0, worker="d1")
P0 = PrefillView(
    worker="p0",
    available_blocks=10,
    total_blocks=10,
    block_size=B,
    waiting_tokens=0,
    tokens_ahead=0,
    long_threshold=25,
    max_waiting_tokens=100,
    max_model_len=1000,
    numerics="n",
    reachable=frozenset({"d0", "d1"}),
)
P1 = replace(P0, worker="p1")
SMALL = Demand(20)


def where(
    demand: Demand, prefills: list[PrefillView], decodes: list[DecodeView], routing: str = "least_loaded", turn: int = 0
) -> tuple[str, str] | None:
    placement = place(demand, prefills, decodes, "round_robin" if routing == "round_robin" else "least_loaded", turn)
    return None if placement is None else (placement.prefill, placement.decode)


@pytest.mark.parametrize(
    ("change", "demand", "fits"),
    [
        ({"available_blocks": 2}, Demand(2 * B - 1), True),
        ({"available_blocks": 2}, Demand(2 * B), False),  # no slot for the first decoded token
        ({"available_blocks": 0}, Demand(1), False),
        ({"available_blocks": -3}, Demand(1), False),
        ({"num_seqs": 3}, Demand(20), True),
        ({"num_seqs": 4}, Demand(20), False),
        ({"num_seqs": 5}, Demand(20), False),
        ({"max_model_len": 21}, Demand(20), True),
        ({"max_model_len": 20}, Demand(20), False),
        # Samples share whole blocks; each has one of its own for the rest and its first decoded token.
        ({"available_blocks": 5}, Demand(2 * B + 1, num_samples=3), True),
        ({"available_blocks": 5}, Demand(2 * B, num_samples=3), True),
        ({"available_blocks": 4}, Demand(2 * B, num_samples=3), False),
        ({"num_seqs": 1}, Demand(20, num_samples=3), True),
        ({"num_seqs": 2}, Demand(20, num_samples=3), False),
        # After a preemption: one block more for each sequence there, and alone it always fits.
        ({"available_blocks": 5, "num_seqs": 3}, Demand(20, was_preempted=True), True),
        ({"available_blocks": 4, "num_seqs": 3}, Demand(20, was_preempted=True), False),
        ({"available_blocks": 2, "num_seqs": 0}, Demand(20, was_preempted=True), True),
    ],
)
def test_decode_worker_without_room_is_chosen(change: dict[str, int], demand: Demand, fits: bool) -> None:
    full = replace(D0, **change)  # type: ignore[arg-type]
    assert where(demand, [P0], [full]) == (("p0", "d0") if fits else None)
    assert where(demand, [P0], [full, D1]) is not None


@pytest.mark.parametrize(
    ("change", "num_tokens", "fits"),
    [
        ({"available_blocks": 2}, 2 * B, True),  # prefill keeps no slot for a decoded token
        ({"available_blocks": 2}, 2 * B + 1, False),
        ({"available_blocks": -1}, 1, False),
        ({"waiting_tokens": 80, "tokens_ahead": 80}, 20, True),
        ({"waiting_tokens": 81, "tokens_ahead": 81}, 20, False),
        ({"waiting_tokens": 0, "max_waiting_tokens": 10}, 20, True),  # an idle one takes any prompt that it can hold
        ({"waiting_tokens": 1, "tokens_ahead": 1, "max_waiting_tokens": 10}, 20, False),
        # C47: a giant prompt counts with its share for a short one, and a giant one counts so among short ones.
        ({"waiting_tokens": 5000, "tokens_ahead": 80}, 20, True),
        ({"waiting_tokens": 5000, "tokens_ahead": 81}, 20, False),
        ({"waiting_tokens": 75, "tokens_ahead": 75}, 150, True),
        ({"waiting_tokens": 76, "tokens_ahead": 76}, 150, False),
        # A second long one counts whole.
        ({"waiting_tokens": 5000, "tokens_ahead": 25}, 75, True),
        ({"waiting_tokens": 5000, "tokens_ahead": 25}, 76, False),
        ({"waiting_tokens": 25, "tokens_ahead": 25}, 150, True),
        ({"max_model_len": 21}, 20, True),
        ({"max_model_len": 20}, 20, False),
    ],
)
def test_prefill_worker_without_room_is_chosen(change: dict[str, int], num_tokens: int, fits: bool) -> None:
    full = replace(P0, **change)  # type: ignore[arg-type]
    assert can_prefill(full, num_tokens) is fits
    assert where(Demand(num_tokens), [full], [D0]) == (("p0", "d0") if fits else None)
    assert where(Demand(num_tokens), [full, P1], [D0]) is not None


def test_pair_that_cannot_exchange_blocks_is_chosen() -> None:
    assert where(SMALL, [replace(P0, reachable=frozenset())], [D0]) is None
    assert where(SMALL, [replace(P0, reachable=frozenset({"d1"}))], [D0]) is None
    # Only the fuller one of two can be reached.
    near_full = replace(D1, available_blocks=3)
    assert where(SMALL, [replace(P0, reachable=frozenset({"d1"}))], [D0, near_full]) == ("p0", "d1")
    # Each prefill worker reaches another decode worker: the pairs are not mixed.
    prefills = [replace(P0, reachable=frozenset({"d1"})), replace(P1, reachable=frozenset({"d0"}))]
    assert where(SMALL, prefills, [D0, near_full]) == ("p1", "d0")


@pytest.mark.parametrize(
    ("prefill", "decode", "demand", "could"),
    [
        ({}, {}, Demand(10 * B - 1), True),
        ({}, {}, Demand(10 * B), False),  # no slot for the first decoded token on decode
        ({"total_blocks": 9, "available_blocks": 9}, {}, Demand(9 * B), True),
        ({"total_blocks": 9, "available_blocks": 9}, {}, Demand(9 * B + 1), False),
        ({"max_model_len": 21}, {}, Demand(20), True),
        ({"max_model_len": 20}, {}, Demand(20), False),
        ({}, {"max_model_len": 21}, Demand(20), True),
        ({}, {"max_model_len": 20}, Demand(20), False),
        ({"reachable": frozenset()}, {}, Demand(20), False),
        ({"available_blocks": 0, "waiting_tokens": 999}, {"available_blocks": 0, "num_seqs": 4}, Demand(20), True),
        ({}, {}, Demand(8 * B, num_samples=2), True),
        ({}, {}, Demand(8 * B, num_samples=3), False),
        ({}, {"max_num_seqs": 2}, Demand(20, num_samples=2), True),
        ({}, {"max_num_seqs": 1}, Demand(20, num_samples=2), False),
        ({}, {"num_seqs": 4}, Demand(9 * B, was_preempted=True), True),
    ],
)
def test_busy_and_impossible_are_confused(
    prefill: dict[str, Any], decode: dict[str, Any], demand: Demand, could: bool
) -> None:
    """What an idle pair could take is waited for; what none could is not."""
    prefills, decodes = [replace(P0, **prefill)], [replace(D0, **decode)]
    assert could_place(demand, prefills, decodes) is could
    assert could_place(demand, [], decodes) is False
    assert could_place(demand, prefills, []) is False
    if not could:
        assert where(demand, prefills, decodes) is None


def test_room_kept_for_one_is_given_to_another() -> None:
    """The pair that lacks least counts as taken; what is beyond it, there and elsewhere, is still given."""
    head, roomy = Demand(8 * B - 1), replace(D1, available_blocks=7)
    busy = [replace(D0, available_blocks=5), roomy]
    kept_prefills, kept_decodes = keep_room(head, [P0], busy)
    assert kept_decodes == [busy[0], replace(roomy, available_blocks=-1, num_seqs=1)]
    assert kept_prefills == [replace(P0, available_blocks=2, waiting_tokens=127, tokens_ahead=25)]
    assert where(SMALL, kept_prefills, kept_decodes) == ("p0", "d0")
    assert where(SMALL, *keep_room(head, [P0], [roomy])) is None
    # Prefill is what it waits for, and decode has room for both.
    wide = replace(D0, total_blocks=20, available_blocks=11)
    giant_there = replace(P0, waiting_tokens=5000, tokens_ahead=25, total_blocks=30, available_blocks=30)
    assert where(head, [giant_there], [wide]) is None
    assert where(SMALL, *keep_room(head, [giant_there], [wide])) == ("p0", "d0")
    assert where(SMALL, *keep_room(head, [giant_there], [replace(wide, available_blocks=9)])) is None
    assert where(SMALL, *keep_room(head, [replace(giant_there, available_blocks=9)], [wide])) is None
    assert where(SMALL, *keep_room(head, [replace(P0, waiting_tokens=60, tokens_ahead=60)], [wide])) is None


def test_room_is_kept_where_it_can_never_suffice() -> None:
    head = Demand(9 * B)
    unreachable = replace(D1, worker="d2")
    small = replace(D0, total_blocks=9, available_blocks=9)
    wide = replace(D1, available_blocks=1)
    assert keep_room(head, [P0], [unreachable, small, wide])[1][:2] == [unreachable, small]
    assert keep_room(head, [P0], [unreachable, small]) == ([P0], [unreachable, small])
    assert keep_room(head, [], [wide]) == ([], [wide])


def test_room_kept_after_a_preemption_is_too_small_to_stay() -> None:
    """Else a stream of small ones takes the spare blocks, and with each of them one more would be needed."""
    busy = replace(D0, available_blocks=7, num_seqs=2)
    assert keep_room(Demand(4 * B, was_preempted=True), [P0], [busy])[1][0].available_blocks == 0
    assert keep_room(Demand(4 * B), [P0], [busy])[1][0].available_blocks == 2


@pytest.mark.parametrize(
    ("one", "other", "no_less"),
    [
        (Demand(5), Demand(5), True),
        (Demand(6), Demand(5), True),
        (Demand(4), Demand(5), False),
        (Demand(9, num_samples=1), Demand(5, num_samples=2), False),
        (Demand(9, num_samples=3), Demand(5, num_samples=2), True),
        (Demand(9), Demand(5, was_preempted=True), False),
        (Demand(9, was_preempted=True), Demand(5), True),
    ],
)
def test_request_that_would_find_room_is_not_looked_at(one: Demand, other: Demand, no_less: bool) -> None:
    assert one.needs_no_less(other) is no_less
    for blocks in range(10):
        for waiting in (0, 50, 90):
            prefill = replace(P0, waiting_tokens=waiting, tokens_ahead=waiting)
            decode = replace(D0, available_blocks=blocks, num_seqs=2)
            if no_less and where(other, [prefill], [decode]) is None:
                assert where(one, [prefill], [decode]) is None


def test_limits_of_two_pairs_are_mixed() -> None:
    """p0 is large and reaches the small d0 only, p1 is small and reaches the large d1: no pair is large."""
    prefills = [replace(P0, reachable=frozenset({"d0"})), replace(P1, total_blocks=2, reachable=frozenset({"d1"}))]
    decodes = [replace(D0, total_blocks=2), D1]
    assert not could_place(Demand(100), prefills, decodes)
    assert could_place(Demand(20), prefills, decodes)


def test_nobody_is_asked_or_one_role_is_missing() -> None:
    assert where(SMALL, [], []) is None
    assert where(SMALL, [P0], []) is None
    assert where(SMALL, [], [D0]) is None


def test_attempt_goes_on_where_recomputation_is_not_exact() -> None:
    """Equal numerics come before avoidance and before load; other numerics before not running at all."""
    other = replace(D0, numerics="other")
    busy = replace(D1, available_blocks=3)
    assert where(SMALL, [P0], [other, busy]) == ("p0", "d0")
    assert where(Demand(20, numerics="n"), [P0], [other, busy]) == ("p0", "d1")
    assert where(Demand(20, avoid=frozenset({"d1"}), numerics="n"), [P0], [other, busy]) == ("p0", "d1")
    assert where(Demand(20, numerics="n"), [P0], [other]) == ("p0", "d0")
    assert where(Demand(20, numerics="n"), [P0], [other], "round_robin") == ("p0", "d0")
    assert where(Demand(20, numerics="n"), [P0], [other, busy], "round_robin") == ("p0", "d1")


def test_worker_that_failed_the_request_is_asked_again_first() -> None:
    """Avoided however idle, on both sides; but better than nobody."""
    busy_d1, busy_p1 = replace(D1, available_blocks=3), replace(P1, waiting_tokens=50)
    prefills, decodes = [P0, busy_p1], [D0, busy_d1]
    for routing in ("least_loaded", "round_robin"):
        assert where(Demand(20, avoid=frozenset({"d0"})), prefills, decodes, routing) == ("p0", "d1")
        assert where(Demand(20, avoid=frozenset({"p0"})), prefills, decodes, routing) == ("p1", "d0")
        assert where(Demand(20, avoid=frozenset({"p0", "d0"})), prefills, decodes, routing) == ("p1", "d1")
        assert where(Demand(20, avoid=frozenset({"p0", "d0"})), [P0], [D0], routing) == ("p0", "d0")
        # One of the two is avoided when both cannot be.
        assert where(Demand(20, avoid=frozenset({"p0", "d0"})), prefills, [D0], routing) == ("p1", "d0")


def test_round_robin_stays_on_one_worker() -> None:
    prefills, decodes = [P0, P1], [D0, D1]
    chosen = [where(SMALL, prefills, decodes, "round_robin", turn) for turn in range(4)]
    assert chosen == [("p0", "d0"), ("p1", "d1"), ("p0", "d0"), ("p1", "d1")]
    # Load does not matter to it, room does.
    loaded = [replace(D0, available_blocks=2), D1]
    assert where(SMALL, prefills, loaded, "round_robin") == ("p0", "d0")
    assert where(SMALL, prefills, [replace(D0, available_blocks=1), D1], "round_robin") == ("p0", "d1")


def test_least_loaded_chooses_a_busier_worker() -> None:
    assert where(SMALL, [P0], [replace(D0, available_blocks=9), D1]) == ("p0", "d1")
    # Loaded means the used part of its own pool, not blocks.
    large = replace(D0, available_blocks=30, total_blocks=100)
    assert where(SMALL, [P0], [large, replace(D1, available_blocks=9)]) == ("p0", "d1")
    assert where(SMALL, [replace(P0, waiting_tokens=10), P1], [D0]) == ("p1", "d0")
    # The decode worker's load comes first, because a sequence stays there longest.
    assert where(
        SMALL,
        [replace(P0, reachable=frozenset({"d0"})), replace(P1, reachable=frozenset({"d1"}), waiting_tokens=50)],
        [replace(D0, available_blocks=9), D1],
    ) == ("p1", "d1")


def test_equally_loaded_workers_do_not_take_turns() -> None:
    chosen = [where(SMALL, [P0, P1], [D0, D1], turn=turn) for turn in range(2)]
    assert chosen == [("p0", "d0"), ("p1", "d1")]


def test_placement_names_the_wrong_sides() -> None:
    assert place(SMALL, [P0], [D0], "least_loaded", 0) == Placement(prefill="p0", decode="d0")


def test_largest_prompt_leaves_no_room_for_output() -> None:
    assert max_decode_tokens(10, B, 1000) == 10 * B - 1
    assert max_decode_tokens(100, B, 1000) == max_prefill_tokens(100, B, 1000) == 999


def test_prompt_that_just_fills_the_prefill_pool_is_refused() -> None:
    """C44: the first token needs no block there; what the limits name is placed on idle workers, and no token more."""
    largest = max_prefill_tokens(10, B, 1000)
    assert largest == 10 * B
    prefill = replace(P0, available_blocks=10, total_blocks=10, max_model_len=1000)
    assert [can_prefill(prefill, tokens) for tokens in (largest, largest + 1)] == [True, False]
    decode = replace(D0, available_blocks=10, total_blocks=10, max_model_len=1000)
    at_most = max_decode_tokens(10, B, 1000)
    assert [can_decode(decode, Demand(tokens)) for tokens in (at_most, at_most + 1)] == [True, False]
