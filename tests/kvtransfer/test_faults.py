"""Each kind of fault, on each carrier: a transfer succeeds or fails on both sides with the reason, never in silence.

C32: after every fault the next transfers work.
"""

import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from kvtransfer.carrier import Carrier
from kvtransfer.events import (
    FailureReason,
    LinkDown,
    LinkRefused,
    LinkUp,
    TransferAcked,
    TransferComplete,
    TransferFailed,
)
from kvtransfer.fault_plan import FaultPlan, FaultPlanFile, FaultRule, load_fault_plan
from kvtransfer.faults import FaultyCarrier
from kvtransfer.settings import KVSettings
from kvtransfer.zeromq import ZeroMQCarrier, ZeroMQSettings
from splitserve.service.errors import InvalidRequest
from tests.kvtransfer.worlds import Worker, World, connect

# Short, so that what is lost is noticed soon; the tests wait as long as it takes.
HASTY = KVSettings(
    window_bytes=16 * 1024,
    frame_bytes=2 * 1024,
    transfer_timeout_s=0.4,
    connect_timeout_s=1.0,
    ping_interval_s=0.1,
    ping_timeout_s=0.8,
    closing_timeout_s=0.8,
)
BLOCKS = list(range(8))
SINK_TIMEOUT_S = 0.8


@pytest.fixture(autouse=True)
def _testing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_TESTING", "1")


def pair(net: World, *rules: FaultRule) -> tuple[Worker, Worker]:
    """A source behind a faulty carrier, and a sink behind a sound one."""

    def wrap(carrier: Carrier) -> Carrier:
        return FaultyCarrier(carrier, FaultPlan(list(rules), seed=7))

    source = net.worker("p0", settings=HASTY, wrap=wrap)
    sink = net.worker("d0", settings=HASTY)
    connect(source, sink)
    return source, sink


def push(source: Worker, sink: Worker, name: str) -> list[bytes]:
    """Sends all blocks; returns what has to arrive."""
    patterns = [source.store.fill(block, f"{name} {block}") for block in BLOCKS]
    sink_ids = [block + 20 for block in BLOCKS]
    source.push(sink.ticket_for(name, sink_ids, timeout_s=SINK_TIMEOUT_S), BLOCKS)
    return patterns


def arrived(sink: Worker) -> list[bytes]:
    return [bytes(sink.store.view(block + 20)) for block in BLOCKS]


def check_next_transfer(source: Worker, sink: Worker) -> None:
    """Twenty in a row, over the old link or a new one."""
    for i in range(20):
        patterns = push(source, sink, f"next{i}")
        sink.seen.wait(TransferComplete, f"next{i}")
        source.seen.wait(TransferAcked, f"next{i}")
        assert arrived(sink) == patterns


@pytest.mark.parametrize("message", ["Open", "Blocks", "Finish"])
@pytest.mark.parametrize("kind", ["delay", "duplicate"])
def test_a_late_or_repeated_message_does_harm(net: World, kind: str, message: str) -> None:
    """C30: order and repetition change nothing; each side ends once, with the right bytes."""
    rule = FaultRule(kind=kind, message=message, transfer="t", nth=1, seconds=0.1)
    source, sink = pair(net, rule)
    patterns = push(source, sink, "t")
    sink.seen.wait(TransferComplete, "t")
    assert arrived(sink) == patterns
    source.seen.wait(TransferAcked, "t")
    check_next_transfer(source, sink)
    assert len(source.seen.terminal("t")) == len(sink.seen.terminal("t")) == 1
    if kind == "duplicate":
        assert sink.agent.stats().messages_dropped > 0


@pytest.mark.parametrize("message", ["Open", "Blocks", "Finish"])
def test_held_message_overtakes_the_replacement_of_its_plan(net: World, tmp_path: Path, message: str) -> None:
    path, patient = tmp_path / "plan.json", KVSettings()
    _write_plan(path, FaultRule(kind="hold", message=message, transfer="t"))
    source = net.worker("p0", settings=patient, wrap=lambda carrier: FaultyCarrier(carrier, FaultPlanFile(path)))
    sink = net.worker("d0", settings=patient)
    connect(source, sink)
    pattern = source.store.fill(0, "held")
    source.push(sink.ticket_for("t", [20], timeout_s=30), [0])
    time.sleep(0.1)
    assert not sink.seen.terminal("t"), "the message was not held"
    _write_plan(path, FaultRule(kind="duplicate", message="*", count=0))
    sink.seen.wait(TransferComplete, "t")
    source.seen.wait(TransferAcked, "t")
    assert bytes(sink.store.view(20)) == pattern


def _write_plan(path: Path, *rules: FaultRule) -> None:
    """In one step, as whoever replaces the plan of a running process has to."""
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(FaultPlan(list(rules), seed=7)))
    os.replace(new, path)


@pytest.mark.parametrize(("message", "nth"), [("Blocks", 1), ("Blocks", 4), ("Finish", 1)])
def test_a_lost_message_goes_unnoticed(net: World, message: str, nth: int) -> None:
    source, sink = pair(net, FaultRule(kind="drop", message=message, transfer="t", nth=nth))
    push(source, sink, "t")
    assert sink.seen.wait(TransferFailed, "t").reason is FailureReason.TIMEOUT
    assert source.seen.wait(TransferFailed, "t").reason is FailureReason.TIMEOUT
    check_next_transfer(source, sink)


def test_a_lost_acknowledgement_loses_credit(net: World) -> None:
    """More lost acknowledgements than the window has room for: the link goes on at full window."""
    source, sink = pair(net, FaultRule(kind="drop", message="BlocksAck", direction="in", count=30))
    for i in range(10):
        push(source, sink, f"t{i}")
        sink.seen.wait(TransferComplete, f"t{i}")
        source.seen.wait(TransferAcked, f"t{i}")
    check_next_transfer(source, sink)


def test_a_lost_final_acknowledgement_pins_blocks_for_ever(net: World) -> None:
    source, sink = pair(net, FaultRule(kind="drop", message="Acked", transfer="t", direction="in"))
    push(source, sink, "t")
    sink.seen.wait(TransferComplete, "t")
    assert source.seen.wait(TransferFailed, "t").reason is FailureReason.TIMEOUT
    check_next_transfer(source, sink)


def test_a_damaged_block_is_decoded(net: World) -> None:
    source, sink = pair(net, FaultRule(kind="corrupt", message="Blocks", transfer="t", nth=2))
    push(source, sink, "t")
    assert sink.seen.wait(TransferFailed, "t").reason is FailureReason.CORRUPT
    failed = source.seen.wait(TransferFailed, "t")
    assert failed.reason is FailureReason.CORRUPT
    assert "digest" in failed.detail
    check_next_transfer(source, sink)


def test_a_damaged_header_ends_more_than_its_transfer(net: World) -> None:
    """It may be undecodable (the link ends), name another transfer (that one is unknown), or differ in a count."""
    rules = [
        FaultRule(kind="corrupt", message="Blocks", part="header", transfer=f"t{i}", nth=1 + i % 4) for i in range(20)
    ]
    source, sink = pair(net, *rules)
    for i in range(20):
        patterns = push(source, sink, f"t{i}")
        end = sink.seen.wait_for_end(f"t{i}")
        source.seen.wait_for_end(f"t{i}")
        if isinstance(end, TransferComplete):
            assert arrived(sink) == patterns
    check_next_transfer(source, sink)


@pytest.mark.parametrize("message", ["Open", "Blocks", "Finish"])
def test_a_cut_link_hangs_its_transfers(net: World, message: str) -> None:
    source, sink = pair(net, FaultRule(kind="cut", message=message, transfer="t"))
    push(source, sink, "t")
    assert source.seen.wait(TransferFailed, "t").reason is FailureReason.LINK_LOST
    ended = sink.seen.wait(TransferFailed, "t")
    # What was queued goes with a cut link: a sink that has seen nothing of the transfer has only its deadline to go by.
    has_seen_nothing = "0 of" in ended.detail
    assert ended.reason is FailureReason.LINK_LOST or (ended.reason is FailureReason.TIMEOUT and has_seen_nothing)
    source.seen.wait(LinkDown)
    source.seen.wait(LinkUp, count=2)
    check_next_transfer(source, sink)


def test_a_frozen_link_hangs_its_transfers(net: World) -> None:
    """Longer than any patience: both sides give up by themselves and work again over a new link."""
    source, sink = pair(net, FaultRule(kind="freeze", message="Blocks", transfer="t", nth=3, seconds=600.0))
    push(source, sink, "t")
    assert source.seen.wait(TransferFailed, "t").reason in (FailureReason.TIMEOUT, FailureReason.LINK_LOST)
    assert sink.seen.wait(TransferFailed, "t").reason in (FailureReason.TIMEOUT, FailureReason.LINK_LOST)
    source.seen.wait(LinkUp, count=2)
    check_next_transfer(source, sink)


def test_a_short_freeze_fails_a_transfer(net: World) -> None:
    source, sink = pair(net, FaultRule(kind="freeze", message="Blocks", transfer="t", nth=3, seconds=0.1))
    patterns = push(source, sink, "t")
    sink.seen.wait(TransferComplete, "t")
    source.seen.wait(TransferAcked, "t")
    assert arrived(sink) == patterns


def test_a_slow_link_reorders_or_loses(net: World) -> None:
    """A limited bandwidth delays everything alike; 40 KiB at 200 KB/s."""
    source, sink = pair(net, FaultRule(kind="bandwidth", bytes_per_s=200_000.0))
    for i in range(5):
        patterns = push(source, sink, f"t{i}")
        sink.seen.wait(TransferComplete, f"t{i}")
        assert arrived(sink) == patterns


@pytest.mark.parametrize(("message", "direction"), [("Hello", "out"), ("Welcome", "in")])
@pytest.mark.parametrize("kind", ["drop", "corrupt", "duplicate", "cut"])
def test_a_disturbed_handshake_is_never_tried_again(net: World, kind: str, message: str, direction: str) -> None:
    """Whatever a damaged hello turns into, the link comes up, or the refusal says what was refused."""
    source, sink = (
        net.worker(
            "p0",
            settings=HASTY,
            wrap=lambda c: FaultyCarrier(
                c, FaultPlan([FaultRule(kind=kind, message=message, direction=direction)], seed=3)
            ),
        ),
        net.worker("d0", settings=HASTY),
    )
    source.agent.set_peers({"d0": sink.agent.endpoint})
    if isinstance(source.seen.wait_for_any(LinkUp, LinkRefused), LinkUp):
        check_next_transfer(source, sink)


# The plan itself.


def test_a_plan_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"seed": 5, "rules": [{"kind": "bandwidth", "bytes_per_s": 5e7}]}))
    plan = load_fault_plan(path)
    assert plan == FaultPlan([FaultRule(kind="bandwidth", bytes_per_s=5e7)], seed=5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"rules": [{"kind": "melt"}]}',
        '{"rules": [{"kind": "drop", "nth": 0}]}',
        '{"rules": [{"kind": "drop", "mesage": "Blocks"}]}',
        '{"rules": [{"kind": "bandwidth"}]}',
        '{"rules": [{"kind": "freeze"}]}',
    ],
)
def test_a_bad_plan_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"plan\.json"):
        load_fault_plan(path)


def test_a_plan_works_outside_of_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loopback: World) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"rules": []}')
    monkeypatch.delenv("SPLITSERVE_TESTING")
    with pytest.raises(InvalidRequest, match="SPLITSERVE_TESTING=1"):
        load_fault_plan(path)
    with pytest.raises(InvalidRequest, match="SPLITSERVE_TESTING=1"):
        FaultyCarrier(loopback.carrier(1024), FaultPlan([]))


def test_a_plan_works_on_a_real_network(loopback: World) -> None:
    """The endpoint that peers are told is what counts."""
    carrier = ZeroMQCarrier(ZeroMQSettings(advertise="192.0.2.1", use_ipc=False))
    with pytest.raises(InvalidRequest, match=r"only on loopback endpoints, not on tcp://192\.0\.2\.1"):
        loopback.worker("p0", wrap=lambda _: FaultyCarrier(carrier, FaultPlan([])))
