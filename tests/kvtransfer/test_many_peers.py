"""Several sources and sinks at once, and blocks that are reused the moment they come back."""

import multiprocessing
import os
import threading

import pytest

from kvtransfer.events import FailureReason, KVEvent, TransferAcked, TransferComplete, TransferFailed
from kvtransfer.settings import KVSettings
from splitserve.service.errors import Unavailable
from tests.kvtransfer.worlds import PATIENCE_S, Worker, World, connect, keys_for, world

KIB = 1024


def test_a_transfer_takes_another_pairs_link(net: World) -> None:
    """C80: nine pairs at once, each with patterns and amounts of its own, and byte counters that say so."""
    sources = [net.worker(f"p{i}") for i in range(3)]
    sinks = [net.worker(f"d{i}") for i in range(3)]
    for source in sources:
        connect(source, *sinks)
    wanted: dict[tuple[int, int, int], list[bytes]] = {}
    for p, source in enumerate(sources):
        for d, sink in enumerate(sinks):
            for turn in range(3):
                # Every transfer has blocks of its own on both sides; pair (p, d) moves p + d + 1 blocks per turn.
                count = p + d + 1
                source_ids = [(d * 3 + turn) * 7 + i for i in range(count)]
                sink_ids = [(p * 3 + turn) * 7 + i for i in range(count)]
                wanted[p, d, turn] = [source.store.fill(block, f"{p}>{d} {turn} {block}") for block in source_ids]
                source.push(sink.ticket_for(f"{p}>{d}.{turn}", sink_ids), source_ids)
    for (p, d, turn), patterns in wanted.items():
        complete = sinks[d].seen.wait(TransferComplete, f"{p}>{d}.{turn}")
        sources[p].seen.wait(TransferAcked, f"{p}>{d}.{turn}")
        assert complete.source_worker_id == f"p{p}"
        found = [bytes(sinks[d].store.view((p * 3 + turn) * 7 + i)) for i in range(len(patterns))]
        assert found == patterns
    for p, source in enumerate(sources):
        for d, sink in enumerate(sinks):
            num_bytes = 3 * (p + d + 1) * KIB
            assert source.agent.stats().peers[f"d{d}"].bytes_sent == num_bytes
            assert sink.agent.stats().peers[f"p{p}"].bytes_received == num_bytes


def test_one_restart_disturbs_other_pairs(net: World) -> None:
    """C80: a sink leaves and its successor joins while a transfer to another sink is half done."""
    source, stays, leaves = net.worker("p0"), net.worker("d0"), net.worker("d1")
    connect(source, stays, leaves)
    source.agent.open(stays.ticket_for("half", [0, 1]))
    source.agent.send("half", [(0, 0)])
    leaves.agent.close()
    successor = net.worker("d2")
    source.agent.set_peers({"d0": stays.agent.endpoint, "d2": successor.agent.endpoint})
    source.push(successor.ticket_for("new", [0]), [2])
    source.seen.wait(TransferAcked, "new")
    source.agent.send("half", [(1, 1)])
    source.agent.finish("half", keys_for(2), b"")
    source.seen.wait(TransferAcked, "half")


@pytest.mark.parametrize("frame_kib", [1, 63, 64, 65, 1024])
def test_a_block_is_reused_while_it_is_being_sent(real_net: World, frame_kib: int) -> None:
    """C76: frames around the size below which ZeroMQ copies; engines overwrite each block at its terminal event.

    Some transfers are cancelled half-way: an early overwrite would reach the sink as damage.
    """
    num_turns = 200 if frame_kib < 100 else 40
    settings = KVSettings(frame_bytes=130 * KIB, window_bytes=1024 * KIB)
    source = real_net.worker("p0", num_blocks=20, block_nbytes=frame_kib * KIB, settings=settings)
    sink = real_net.worker("d0", num_blocks=20, block_nbytes=frame_kib * KIB, settings=settings)
    connect(source, sink)
    slots = threading.Semaphore(4)
    free = [list(range(slot * 5, slot * 5 + 5)) for slot in range(4)]
    held: dict[str, tuple[list[int], list[bytes]]] = {}

    def reuse_source_blocks(event: KVEvent) -> None:
        if isinstance(event, TransferAcked | TransferFailed):
            ids, _ = held[event.transfer_id]
            for block in ids:
                source.store.fill(block, "already the next owner's")
            free.append(ids)
            slots.release()

    source.seen.react = reuse_source_blocks
    for turn in range(num_turns):
        assert slots.acquire(timeout=PATIENCE_S)
        ids = free.pop()
        name = f"t{turn}"
        # Both pools are used alike; a slot that is free at the source may still be open at the sink after a cancel.
        for earlier, (earlier_ids, _) in held.items():
            if earlier_ids == ids:
                sink.seen.wait_for_end(earlier)
        held[name] = (ids, [source.store.fill(block, f"{turn}/{block}") for block in ids])
        source.push(sink.ticket_for(name, ids), ids)
        if turn % 5 == 4:
            source.agent.cancel(name, "half-way")
        end = sink.seen.wait_for_end(name)
        if isinstance(end, TransferComplete):
            assert [bytes(sink.store.view(block)) for block in ids] == held[name][1]
        else:
            assert isinstance(end, TransferFailed)
            assert end.reason is FailureReason.CANCELLED


@pytest.mark.parametrize("order", ["receive first", "send first", "together"])
def test_an_abort_with_two_transfers_frees_twice(net: World, order: str) -> None:
    """C25: a worker that receives one transfer and sends another, both cancelled, one of them twice."""
    first, middle, last = net.worker("a"), net.worker("b"), net.worker("c")
    connect(first, middle)
    connect(middle, last)
    first.agent.open(middle.ticket_for("in", [0, 1]))
    first.agent.send("in", [(0, 0)])
    middle.agent.open(last.ticket_for("out", [0, 1]))
    middle.agent.send("out", [(0, 5)])
    for name in {"receive first": ["in", "out"], "send first": ["out", "in"], "together": ["in", "out", "in"]}[order]:
        middle.agent.cancel(name, "aborted")
        first.agent.cancel(name, "aborted")
    for worker, name in ((first, "in"), (middle, "in"), (middle, "out"), (last, "out")):
        failed = worker.seen.wait(TransferFailed, name)
        assert failed.reason is FailureReason.CANCELLED
    first.push(middle.ticket_for("next", [0, 1]), [0, 1])
    first.seen.wait(TransferAcked, "next")
    assert [len(middle.seen.terminal(name)) for name in ("in", "out")] == [1, 1]


# Forking.


def _transfer_in_child(transport: str, inherited: Worker) -> None:
    with pytest.raises(Unavailable, match="no KV thread runs in this process"):
        inherited.agent.expect("from the child", [0], 0, 30.0)
    inherited.agent.close()
    with world(transport) as made:
        source, sink = made.worker("p1"), made.worker("d1")
        connect(source, sink)
        pattern = source.store.fill(0, "in the child")
        source.push(sink.ticket_for("t", [0]), [0])
        sink.seen.wait(TransferComplete)
        assert bytes(sink.store.view(0)) == pattern
    os._exit(0)


def test_a_fork_inherits_a_context(zmq_net: World) -> None:
    """C80: the context is built by the thread that uses it, so a child builds its own, and harms its parent's not."""
    source, sink = zmq_net.worker("p0"), zmq_net.worker("d0")
    connect(source, sink)
    child = multiprocessing.get_context("fork").Process(target=_transfer_in_child, args=(zmq_net.transport, source))
    child.start()
    child.join(PATIENCE_S)
    assert child.exitcode == 0
    source.push(sink.ticket_for("after", [1]), [1])
    source.seen.wait(TransferAcked, "after")
