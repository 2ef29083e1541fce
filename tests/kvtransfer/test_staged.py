"""Blocks in device memory: what is sent is what the forward wrote, what arrives is there before anybody reads it.

The device of these tests does nothing until somebody waits for it, so whoever forgets to wait gets old bytes.
"""

import gc

import pytest
import torch

from kvtransfer.events import TransferAcked, TransferComplete
from splitserve.engine.layout import KVLayout
from splitserve.engine.pool import KVPool
from splitserve.engine.staging import StagedStore
from tests.kvtransfer.worlds import World, connect
from tests.lazy_device import LazyDevice

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="bfloat16")


class Side:
    """A pool, its device, and what the KV thread sees of both."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = KVPool(LAYOUT, num_blocks)
        self.device = LazyDevice()
        self.store = StagedStore(self.pool, self.device)

    def compute(self, block_id: int, seed: int) -> bytes:
        """Launches a forward that fills the block; returns the bytes that it will have."""
        values = torch.randn(LAYOUT.block_shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        self.device.launch(lambda: self.pool.tensor[block_id].copy_(values))
        return values.view(-1).view(torch.uint8).numpy().tobytes()


def test_block_is_sent_before_its_forward_has_run() -> None:
    side = Side(4)
    expected = side.compute(2, seed=1)
    side.store.lend([2])
    side.compute(3, seed=2)  # the next chunk, which nobody should wait for
    assert bytes(side.store.view(2)) == expected
    assert side.device.num_done == 1


def test_block_is_overwritten_while_its_last_owner_reads_it() -> None:
    side = Side(4)
    seen: list[torch.Tensor] = []
    side.pool.tensor[1].fill_(7.0)
    side.device.launch(lambda: seen.append(side.pool.tensor[1].clone()))
    side.store.lend([1])
    side.store.write(1, bytes(side.store.block_nbytes))
    assert seen[0].eq(7.0).all()
    assert not side.pool.tensor[1].any()


def test_block_that_is_lent_again_has_the_mark_of_the_first_time() -> None:
    """Sent once, computed anew for somebody else, sent again; then read by a forward and received into."""
    side = Side(4)
    first = side.compute(2, seed=1)
    side.store.lend([2])
    assert bytes(side.store.view(2)) == first
    second = side.compute(2, seed=2)
    side.store.lend([2])
    assert bytes(side.store.view(2)) == second
    seen: list[torch.Tensor] = []
    side.device.launch(lambda: seen.append(side.pool.tensor[2].clone()))
    side.store.lend([2])
    side.store.write(2, bytes(side.store.block_nbytes))
    assert seen[0].view(-1).view(torch.uint8).numpy().tobytes() == second


def test_view_changes_when_the_block_does() -> None:
    """The transport reads a view for as long as it likes, also when block and store are somebody else's by then."""
    side = Side(2)
    expected = side.compute(0, seed=1)
    side.store.lend([0])
    view = side.store.view(0)
    side.pool.tensor.fill_(1.0)
    side.store.lend([0])
    side.store.view(0)
    del side
    gc.collect()
    assert bytes(view) == expected


def test_foreign_block_or_size_is_touched() -> None:
    side = Side(2)
    data = bytes(side.store.block_nbytes)
    side.store.lend([1])
    for block_id, size, message in [
        (2, 0, "pool of 2 blocks"),
        (-1, 0, "pool of 2"),
        (0, 0, "never lent"),
        (1, 1, "bytes"),
    ]:
        with pytest.raises(ValueError, match=message):
            side.store.write(block_id, data + bytes(size))
    for block_id in (2, -1, 0):
        with pytest.raises(ValueError, match="block"):
            side.store.view(block_id)
    assert not side.pool.tensor.any()


def test_other_bytes_arrive_in_another_device(net: World) -> None:
    """A transfer from device to device in chunks, each sent while the next one is still to be computed."""
    source, sink = Side(40), Side(40)
    source_worker, sink_worker = net.worker("p0", store=source.store), net.worker("d0", store=sink.store)  # type: ignore[arg-type]
    connect(source_worker, sink_worker)
    targets, blocks = list(range(39, 9, -1)), list(range(30))
    ticket = sink_worker.ticket_for("t", targets)
    source_worker.agent.open(ticket)
    expected = []
    for chunk in range(0, 30, 10):
        expected += [source.compute(block, seed=block) for block in blocks[chunk : chunk + 10]]
        source_worker.agent.send("t", [(index, blocks[index]) for index in range(chunk, chunk + 10)])
    source_worker.agent.finish("t", [bytes(32)] * 30, b"")
    sink_worker.seen.wait(TransferComplete, "t")
    source_worker.seen.wait(TransferAcked, "t")
    for target, data in zip(targets, expected, strict=True):
        assert sink.pool.tensor[target].view(-1).view(torch.uint8).numpy().tobytes() == data
    assert not sink.pool.tensor[:10].any()
