"""Bytes of blocks: the layout every transport relies on, and who may write where."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from splitserve.engine.batch import Segment
from splitserve.engine.cpu_attention import CpuAttention
from splitserve.engine.layout import KVLayout
from splitserve.engine.packing import pack
from splitserve.engine.pool import KVPool
from tests.compiled import KERNEL_FOLDER

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


def _stored_by_pool(pool: KVPool, segment: Segment, key: torch.Tensor, value: torch.Tensor) -> None:
    batch = pack([segment], pool.layout.block_size, torch.device("cpu"))
    pool.store(1, batch.slot_blocks, batch.slot_offsets, key, value)


def _stored_by_kernel(pool: KVPool, segment: Segment, key: torch.Tensor, value: torch.Tensor) -> None:
    batch = pack([segment], pool.layout.block_size, torch.device("cpu"))
    CpuAttention(KERNEL_FOLDER).plan(batch, pool, num_heads=4).store(key, value, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("store", [_stored_by_pool, _stored_by_kernel])
def test_token_lands_in_another_slot(
    store: Callable[[KVPool, Segment, torch.Tensor, torch.Tensor], None], dtype: str
) -> None:
    """K of one head lie together by head_dim, V by token; other layers, blocks and slots stay as they are."""
    layout = dataclasses.replace(LAYOUT, dtype=dtype)
    pool = KVPool(layout, 3)
    # Two tokens on a border of blocks; heads first in memory, as models make them.
    key, value = torch.randn(2, layout.num_kv_heads, 2, layout.head_dim).to(pool.tensor.dtype).transpose(1, 2)
    store(pool, Segment([5, 6], 3, [2, 0], True), key, value)
    assert torch.equal(pool.keys[2, 1, :, :, 3], key[0])
    assert torch.equal(pool.keys[0, 1, :, :, 0], key[1])
    assert torch.equal(pool.values[2, 1, :, 3], value[0])
    assert torch.equal(pool.values[0, 1, :, 0], value[1])
    assert pool.tensor.count_nonzero() == key.numel() + value.numel()
    block = torch.frombuffer(pool.view(2), dtype=pool.tensor.dtype)
    head_size = layout.block_size * layout.head_dim
    of_head = ((1 * 2 + 0) * layout.num_kv_heads + 1) * head_size
    assert torch.equal(block[of_head : of_head + head_size][3 :: layout.block_size], key[0, 1])
    of_head = ((1 * 2 + 1) * layout.num_kv_heads + 1) * head_size
    assert torch.equal(block[of_head : of_head + head_size][3 * layout.head_dim :], value[0, 1])
