"""What happens to tokens and blocks when messages between two pools are lost, late, doubled or damaged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.carrier import Carrier
from kvtransfer.fault_plan import FaultPlan, FaultRule
from kvtransfer.faults import FaultyCarrier
from kvtransfer.settings import KVSettings
from splitserve.service.reasons import Reason
from splitserve.worker import commands, reports
from tests.reference import greedy
from tests.workers.pair import Pair
from tests.workers.test_hand_off import B, prompt_of

MakePair = Callable[..., Pair]
Tiny = Callable[[str], Path]

QUICK = KVSettings(transfer_timeout_s=1.0, ping_interval_s=0.2, ping_timeout_s=0.8, closing_timeout_s=0.8)


@pytest.fixture(autouse=True)
def _testing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_TESTING", "1")


def faults(*rules: dict[str, Any]) -> Callable[[Carrier], Carrier]:
    return lambda carrier: FaultyCarrier(carrier, FaultPlan([FaultRule(**rule) for rule in rules], seed=1))


def retry_until_exact(pair: Pair, prompt: list[int], whole: list[int]) -> int:
    """The router's way: attempts go on from the outputs so far. Returns how many it took."""
    outputs: list[int] = []
    for number in range(1, 6):
        attempt = pair.begin(prompt, outputs, max_tokens=len(whole))
        pair.until(lambda a=attempt: pair.is_finished(a) or bool(pair.endings(a)))
        outputs += [token.token_id for token in pair.tokens(attempt)]
        assert outputs == whole[: len(outputs)]
        if pair.is_finished(attempt):
            assert outputs == whole
            return number
        for rig in (pair.prefill, pair.decode):
            rig.inbox.put(commands.Release(attempt, "lost"))
    raise AssertionError(f"five attempts gave {outputs} of {whole}")


@pytest.mark.parametrize(
    ("rule", "attempts"),
    [
        ({"kind": "drop", "message": "Blocks", "nth": 1}, 2),
        ({"kind": "drop", "message": "Finish", "nth": 1}, 2),
        ({"kind": "corrupt", "message": "Blocks", "nth": 2}, 2),
        ({"kind": "corrupt", "message": "Finish", "nth": 1, "part": "header"}, 2),
        ({"kind": "duplicate", "message": "Blocks", "count": 0}, 1),
        ({"kind": "duplicate", "message": "Finish", "count": 0}, 1),
        ({"kind": "delay", "message": "Blocks", "count": 0, "seconds": 0.05}, 1),
        ({"kind": "cut", "message": "Blocks", "nth": 2}, 2),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_damaged_transfer_changes_a_token(rule: dict[str, Any], attempts: int, tiny: Tiny, make_pair: MakePair) -> None:
    """C32: each fault ends in the exact text, at most one attempt later, and with all blocks free."""
    pair = make_pair(settings=QUICK, wrap=faults(rule), max_num_batched_tokens=2 * B)
    prompt = prompt_of(5 * B + 3)
    assert retry_until_exact(pair, prompt, greedy(tiny("llama"), prompt, 8)) == attempts
    pair.assert_drained()


def test_late_bytes_land_in_the_next_request(tiny: Tiny, make_pair: MakePair) -> None:
    """C01: A is aborted while its blocks are under way; B gets the same blocks and its own text."""
    slow = {"kind": "delay", "message": "Blocks", "count": 4, "seconds": 1.0}
    pair = make_pair(wrap=faults(slow), decode_blocks=7, max_num_batched_tokens=B)
    first, second = prompt_of(6 * B, seed=1), prompt_of(6 * B - 1, seed=2)
    attempt = pair.begin(first, max_tokens=1)
    pair.until(lambda: pair.prefill.runner.num_forwards > 0 and pair.prefill.engine._attempts[attempt].num_sent > 2)
    for rig in (pair.prefill, pair.decode):
        rig.inbox.put(commands.Release(attempt, "the client left"))
    pair.until(lambda: not pair.decode.engine._reservations)
    (output,) = pair.generate([second], max_tokens=8)
    assert output == greedy(tiny("llama"), second, 8)
    pair.assert_drained()


def test_source_blocks_are_reused_before_they_have_left(tiny: Tiny, make_pair: MakePair) -> None:
    """C02: the second prompt needs the first one's blocks on prefill; it is refused until they are acknowledged."""
    slow = {"kind": "delay", "message": "Blocks", "count": 0, "seconds": 0.3}
    pair = make_pair(wrap=faults(slow), prefill_blocks=6)
    prompts = [prompt_of(5 * B, seed=1), prompt_of(5 * B, seed=2)]
    first = pair.begin(prompts[0], max_tokens=8)
    second = pair.reserve(prompts[1], max_tokens=8)
    refusals = 0
    while not pair.is_finished(second):
        pair.prefill_attempt(second, prompts[1], max_tokens=8)
        before = len(pair.prefill.said(reports.Refused))
        pair.until(
            lambda n=before: (
                len(pair.prefill.said(reports.Refused)) > n
                or any(a.attempt == second for a in pair.prefill.said(reports.Accepted))
            )
        )
        refusals = len(pair.prefill.said(reports.Refused))
        if any(a.attempt == second for a in pair.prefill.said(reports.Accepted)):
            pair.until(lambda: pair.is_finished(second))
    assert refusals > 0, "the second prompt never met the first one's pinned blocks"
    pair.until(lambda: pair.is_finished(first))
    for attempt, prompt in ((first, prompts[0]), (second, prompts[1])):
        assert [token.token_id for token in pair.tokens(attempt)] == greedy(tiny("llama"), prompt, 8)
    pair.assert_drained()


def test_decode_starts_from_partial_blocks(make_pair: MakePair) -> None:
    """C03: prefill gives up half-way; decode says nothing, frees its blocks and tells why."""
    pair = make_pair(max_num_batched_tokens=B, settings=QUICK)
    attempt = pair.begin(prompt_of(8 * B), max_tokens=8)
    pair.until(lambda: pair.decode.agent.stats().bytes_received >= 2 * pair.decode.runner.layout.block_nbytes)
    pair.prefill.inbox.put(commands.Release(attempt, "prefill failed"))
    pair.until(lambda: bool(pair.endings(attempt)))
    assert pair.tokens(attempt) == []
    assert [ending.reason for ending in pair.endings(attempt)] == [Reason.TRANSFER_FAILED]
    pair.assert_drained()


def test_blocks_wait_for_the_whole_prompt(make_pair: MakePair) -> None:
    """On a link of 50 MB/s the first block is on decode before the last chunk's forward starts."""
    pair = make_pair(wrap=faults({"kind": "bandwidth", "bytes_per_s": 50e6}), max_num_batched_tokens=2 * B)
    attempt = pair.begin(prompt_of(10 * B), max_tokens=2)
    pair.until(lambda: attempt in pair.prefill.engine._attempts)
    state = pair.prefill.engine._attempts[attempt]
    while state.num_computed < 8 * B:
        pair.prefill.loop.turn(wait_s=0.0)
    # Four of five chunks are computed and the fifth has not started: nothing turns the prefill engine here.
    pair.until_alone(pair.decode, lambda: pair.decode.agent.stats().bytes_received > 0)
    assert state.num_computed == 8 * B
    pair.until(lambda: pair.is_finished(attempt))
    pair.assert_drained()
