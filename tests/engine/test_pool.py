"""Bytes of blocks: the layout every transport relies on, and who may write where."""

import dataclasses

import pytest
import torch

from splitserve.engine.layout import KVLayout
from splitserve.engine.pool import KVPool

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


def test_sizes_disagree_with_the_tensor() -> None:
    for dtype in ("float32", "bfloat16"):
        layout = dataclasses.replace(LAYOUT, dtype=dtype)
        pool = KVPool(layout, 5)
        assert pool.tensor[0].numel() * pool.tensor.element_size() == layout.block_nbytes == pool.block_nbytes
        assert pool.view(4).nbytes == layout.block_nbytes
        assert layout.token_nbytes * layout.block_size == layout.block_nbytes
    assert [LAYOUT.blocks_for(count) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_impossible_layout_is_made(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(LAYOUT, **{field: 0})
    with pytest.raises(ValueError, match="dtype"):
        dataclasses.replace(LAYOUT, dtype="float16")
    with pytest.raises(ValueError, match="at least 1 block"):
        KVPool(LAYOUT, 0)


def test_block_written_in_one_pool_reads_differently_in_another() -> None:
    source, sink = KVPool(LAYOUT, 3), KVPool(LAYOUT, 5)
    source.tensor.copy_(torch.randn(source.tensor.shape))
    sink.write(4, source.view(1))
    sink.write(0, bytes(source.view(2)))
    assert torch.equal(sink.tensor[4], source.tensor[1])
    assert torch.equal(sink.tensor[0], source.tensor[2])
    assert not sink.tensor[1:4].any()


def test_view_is_a_copy() -> None:
    pool = KVPool(LAYOUT, 2)
    view = pool.view(1)
    pool.tensor[1].fill_(1.0)
    assert view[:4] == torch.ones(1).numpy().tobytes()
    view[:4] = bytes(4)
    assert pool.tensor[1].flatten()[0] == 0
    assert not pool.tensor[0].any()


@pytest.mark.parametrize("block", [-1, 2])
def test_unknown_block_is_touched(block: int) -> None:
    pool = KVPool(LAYOUT, 2)
    for action in (
        pool.view,
        lambda block: pool.write(block, bytes(LAYOUT.block_nbytes)),
        lambda block: pool.clear([block]),
    ):
        with pytest.raises(ValueError, match="pool of 2 blocks"):
            action(block)


@pytest.mark.parametrize("excess", [-1, 1])
def test_block_of_wrong_size_is_written(excess: int) -> None:
    pool = KVPool(LAYOUT, 2)
    with pytest.raises(ValueError, match="bytes"):
        pool.write(0, b"\xff" * (LAYOUT.block_nbytes + excess))
    assert not pool.tensor.any()


def test_token_lands_in_another_slot() -> None:
    pool = KVPool(LAYOUT, 3)
    kv = torch.randn(2, 2, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    pool.store(1, torch.tensor([2, 0]), torch.tensor([3, 0]), kv)
    assert torch.equal(pool.tensor[2, 1, :, :, 3], kv[0])
    assert torch.equal(pool.tensor[0, 1, :, :, 0], kv[1])
    assert pool.tensor.count_nonzero() == kv.numel()
    # One token's keys of one head lie together: [layer, K/V, kv_head, token, head_dim].
    offset = (((1 * 2 + 0) * LAYOUT.num_kv_heads + 1) * LAYOUT.block_size + 3) * LAYOUT.head_dim * 4
    assert pool.view(2)[offset : offset + 4 * LAYOUT.head_dim] == kv[0, 0, 1].numpy().tobytes()
