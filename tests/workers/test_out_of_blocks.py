"""A decode pool that is too small for what was promised: who gives way, who goes on, and that everybody ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from tests.cluster.harness import wait_for
from tests.reference import greedy
from tests.workers.pair import Pair, limits
from tests.workers.test_hand_off import B, prompt_of

MakePair = Callable[..., Pair]
Tiny = Callable[[str], Path]


@dataclass
class Request:
    """What the test's router knows of one request; `attempts` holds all of its attempts, the last one running."""

    prompt: list[int]
    attempts: list[str] = field(default_factory=list)

    def outputs(self, pair: Pair) -> list[int]:
        return [token.token_id for attempt in self.attempts for token in pair.tokens(attempt)]

    def is_over(self, pair: Pair) -> bool:
        """Whether the last attempt was refused, revoked or preempted, so that another one is due."""
        last = self.attempts[-1]
        return any(report.attempt == last for report in pair.decode.said(reports.Refused)) or bool(pair.endings(last))


def play_router(pair: Pair, requests: list[Request], max_tokens: int) -> None:
    """Reserves and prefills in order of arrival, and again whoever lost an attempt, until all have finished."""
    handed: set[str] = set()

    def attempt(request: Request) -> None:
        outputs = request.outputs(pair) if request.attempts else []
        request.attempts.append(pair.reserve(request.prompt, outputs, max_tokens=max_tokens))

    def move() -> bool:
        unfinished = [r for r in requests if not (r.attempts and pair.is_finished(r.attempts[-1]))]
        for request in unfinished:
            if not request.attempts or request.is_over(pair):
                if request.attempts:
                    pair.prefill.inbox.put(commands.Release(request.attempts[-1], "over"))
                attempt(request)
            last = request.attempts[-1]
            if last not in handed and pair.ticket(last) is not None:
                handed.add(last)
                so_far = [token.token_id for a in request.attempts[:-1] for token in pair.tokens(a)]
                pair.prefill_attempt(last, request.prompt, so_far, max_tokens=max_tokens)
        return not unfinished

    pair.until(move)


@pytest.mark.parametrize("reverse", [False, True], ids=["a-first", "b-first"])
@pytest.mark.parametrize("num_blocks", [7, 9, 10])
def test_parked_blocks_are_what_the_other_one_waits_for(
    num_blocks: int, reverse: bool, make_pair: MakePair, tiny: Tiny
) -> None:
    """C43: A needs 4 + 1 blocks, B 3 + 1, and both grow; they never fit together, or fit until they grow."""
    pair = make_pair(decode_blocks=num_blocks)
    lengths = [3 * B, 4 * B] if reverse else [4 * B, 3 * B]
    requests = [Request(prompt_of(length)) for length in lengths]
    play_router(pair, requests, max_tokens=2 * B)
    for request in requests:
        assert request.outputs(pair) == greedy(tiny("llama"), request.prompt, 2 * B)
    # Who came first was never stopped.
    assert len(requests[0].attempts) == 1
    pair.assert_drained()


def test_first_decoded_token_has_no_block(make_pair: MakePair) -> None:
    """C43: admission counts it: 4 whole blocks fit a pool of 4 but are refused, 4 whole ones less a token are not."""
    pair = make_pair(decode_blocks=4)
    pair.reserve(prompt_of(4 * B))
    pair.until(lambda: bool(pair.decode.said(reports.Refused)))
    assert pair.decode.said(reports.Refused)[0].reason is Reason.TOO_LARGE
    # The first token takes the last slot; the second, which ends it by length, needs none.
    assert len(pair.generate([prompt_of(4 * B - 1)], max_tokens=9)[0]) == 2
    pair.assert_drained()


def test_oldest_sequence_waits_for_a_reservation_for_ever(make_pair: MakePair, tiny: Tiny) -> None:
    """Only reservations hold what it needs: they are taken back, the engine rests until they are, and it goes on."""
    pair = make_pair(decode_blocks=7)
    prompt = prompt_of(2 * B)
    oldest = pair.begin(prompt, max_tokens=3 * B)
    pair.until(lambda: len(pair.tokens(oldest)) == 2)
    parked = [pair.reserve(prompt_of(B, seed)) for seed in range(2)]
    pair.until(lambda: all(map(pair.ticket, parked)))
    assert pair.decode.allocator.available == 0
    pair.until(lambda: len(pair.tokens(oldest)) == B + 1)
    while not pair.endings(parked[1]):
        rested = not pair.decode.engine.step()
    assert rested
    assert not pair.decode.engine.step()
    assert [ending.reason for ending in pair.endings(parked[1])] == [Reason.PREEMPTED]
    assert pair.endings(parked[0]) == []
    pair.until(lambda: pair.is_finished(oldest))
    assert [token.token_id for token in pair.tokens(oldest)] == greedy(tiny("llama"), prompt, 3 * B)
    pair.decode.inbox.put(commands.Release(parked[0], "test"))
    pair.assert_drained()


def test_more_give_way_than_is_needed(make_pair: MakePair) -> None:
    """The youngest of three brings two blocks, enough for both others."""
    pair = make_pair(decode_blocks=7)
    attempts = [pair.reserve(prompt_of(B, seed), max_tokens=B + 4) for seed in range(3)]
    for seed, attempt in enumerate(attempts):
        pair.prefill_attempt(attempt, prompt_of(B, seed), max_tokens=B + 4)

    def all_run() -> bool:
        """Prefill alone is turned: all three begin to decode in the same step."""
        pair.prefill.loop.turn(wait_s=0.001)
        while not pair.decode.inbox.empty():
            pair.decode.loop._dispatch(pair.decode.inbox.get())
        return len(pair.decode.engine._running) == 3

    wait_for("three running sequences", all_run)
    pair.until(lambda: all(map(pair.is_finished, attempts[:2])))
    assert [[ending.reason for ending in pair.endings(attempt)] for attempt in attempts] == [[], [], [Reason.PREEMPTED]]
    pair.assert_drained()


def test_sample_of_the_oldest_attempt_gives_way(make_pair: MakePair) -> None:
    """Three samples hold the first and the third place; the one that came after them is the youngest."""
    pair = make_pair(decode_blocks=8)
    start = messages.Start(prompt_of(B), [messages.Sample(index, []) for index in range(3)], limits(max_tokens=B + 4))
    pair.decode.inbox.put(commands.Reserve(1, "trio", start, 60.0))
    pair.until(lambda: pair.ticket("trio") is not None)
    pair.prefill.inbox.put(commands.Prefill(1, "trio", start, pair.ticket("trio"), 60.0))
    pair.until(lambda: len(pair.tokens("trio")) >= 6)
    later = pair.begin(prompt_of(B, seed=1), max_tokens=B + 4)  # shares no block
    pair.until(lambda: sum(bool(token.finish_reason) for token in pair.tokens("trio")) == 3)
    assert pair.endings("trio") == []
    assert [ending.reason for ending in pair.endings(later)] == [Reason.PREEMPTED]
    pair.assert_drained()


def test_more_samples_than_ever_run_wait_for_ever(make_pair: MakePair) -> None:
    pair = make_pair(max_num_seqs=2)
    for count, reason in ((3, Reason.TOO_LARGE), (2, None)):
        start = messages.Start([5, 6], [messages.Sample(index, []) for index in range(count)], limits())
        pair.decode.inbox.put(commands.Reserve(1, f"{count}", start, 60.0))
        pair.until(lambda c=count: pair.ticket(f"{c}") is not None or bool(pair.decode.said(reports.Refused)))
        refused = {report.attempt: report.reason for report in pair.decode.said(reports.Refused)}
        assert refused.get(f"{count}") is reason
    # Both places are taken.
    pair.reserve([5], attempt="one more")
    pair.until(lambda: len(pair.decode.said(reports.Refused)) == 2)
    assert pair.decode.said(reports.Refused)[1].reason is Reason.NO_ROOM
    pair.decode.inbox.put(commands.Release("2", "test"))
    pair.assert_drained()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_prompt_near_the_pools_size_stops_the_next_one(side: str, make_pair: MakePair) -> None:
    """C44: 10 blocks of 16 on either side, the other side's pool larger: every length around the limit is served or
    refused at once with the numbers, and a small one is served after each."""
    sizes = {"prefill_blocks": 14, "decode_blocks": 14} | {f"{side}_blocks": 10}
    pair = make_pair(**sizes)
    rig = pair.prefill if side == "prefill" else pair.decode
    # Decode needs a slot for the first decoded token; prefill does not.
    limit = 10 * B if side == "prefill" else 10 * B - 1
    for length in range(143, 162):
        attempt = (
            pair.begin(prompt_of(length), max_tokens=1)
            if side == "prefill" or length <= limit
            else pair.reserve(prompt_of(length))
        )
        pair.until(lambda a=attempt: pair.is_finished(a) or any(r.attempt == a for r in rig.said(reports.Refused)))
        if length <= limit:
            assert len(pair.tokens(attempt)) == 1
        else:
            refused = rig.said(reports.Refused)[-1]
            assert (refused.attempt, refused.reason) == (attempt, Reason.TOO_LARGE)
            assert f"{length} tokens need 11 blocks: the pool has 10" in refused.message
            pair.decode.inbox.put(commands.Release(attempt, "refused"))
        # A prompt's blocks are in use on prefill until decode has acknowledged them; until then the next is refused.
        pair.until(lambda: pair.prefill.allocator.counts.in_use == 0)
        assert len(pair.generate([prompt_of(10)], max_tokens=2)[0]) == 2
        pair.until(lambda: pair.prefill.allocator.counts.in_use == 0)
    pair.assert_drained()


def test_growth_to_the_last_slot_of_the_pool_hangs(make_pair: MakePair) -> None:
    """C44: 100 tokens and 200 more do not fit 160: it ends by length with the last slot, whoever else is there."""
    pair = make_pair(decode_blocks=10, prefill_blocks=14)
    attempt = pair.begin(prompt_of(100), max_tokens=200)
    pair.until(lambda: len(pair.tokens(attempt)) >= 1)
    small = Request(prompt_of(10))
    play_router(pair, [small], max_tokens=2)
    pair.until(lambda: pair.is_finished(attempt))
    assert len(pair.tokens(attempt)) == 60
    assert pair.tokens(attempt)[-1].finish_reason == "length"
    pair.assert_drained()
