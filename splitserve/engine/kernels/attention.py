"""The attention kernel: one arithmetic for prefill and decode.

Compiled by `compiled`, called by `cpu_attention`. The positions of a sequence are cut into tiles of `TILE` tokens at
fixed places. Every query row walks the tiles that it sees in order, with a running softmax in float32; within a tile a
score is one chain of fused multiply-adds over head_dim and a weighted value one chain over tokens. Nothing in a row's
chains depends on how many rows are computed beside it, so a token's result is the same bits alone, in any batch and in
any chunk. A position that a row must not see has the weight 0, and adding a tile of such weights changes no bit.

Work comes as items. Each thread has a scratch array of its own.
"""

from typing import Any, NamedTuple

import numpy as np

from splitserve.engine.kernels.paging import (
    TILE,
    Geometry,
    Paged,
    Rows,
    as_geometry,
    ask_for,
    can_stay,
    inner,
    tile_in_pool,
    tile_in_scratch,
)
from splitserve.engine.kernels.tiles import NEVER, ZERO, Places, Softmax, add_tile_to_rows, find_places
from splitserve.engine.kernels.vector import (
    LANES,
    add,
    array_at,
    broadcast,
    divide,
    load,
    load_one,
    multiply,
    store,
    store_one,
    sum_of_lanes,
)

NO_WINDOW = 1 << 30  # more than any position, and far from the limit of a 32-bit lane number

# Up to so many rows K and V are read where they lie: turning them into float32 first pays when more rows use them.
_ROWS_IN_PLACE = 8


class Item(NamedTuple):
    """Consecutive query tokens of one sequence and the KV heads for which to compute them.

    Its rows are one per KV head, token and query head of that KV head, in this order.
    """

    first_row: int  # of the packed batch
    num_tokens: int
    first_position: int
    table: int  # where the sequence's block table starts among those of the batch
    first_head: int
    num_heads: int


@inner
def _token_and_head(geometry: Geometry, item: Item, row: int) -> tuple[int, int]:
    """Row of the packed batch and query head of one of the item's rows."""
    per_kv_head = geometry.heads_per_kv_head
    kv_head, rest = divmod(row, item.num_tokens * per_kv_head)
    token, query_head = divmod(rest, per_kv_head)
    return item.first_row + token, (item.first_head + kv_head) * per_kv_head + query_head


@inner
def _start(
    scratch: Any, geometry: Geometry, places: Places, item: Item, num_rows: int, query: Rows, factor: np.float32
) -> None:
    """Takes in the queries of an item and empties its sums."""
    for row in range(num_rows):
        token, head = _token_and_head(geometry, item, row)
        source, target = token * query.token_stride + head * query.head_stride, places.queries + row * geometry.head_dim
        whole = geometry.head_dim // LANES * LANES
        for d in range(0, whole, LANES):
            store(scratch, target + d, multiply(load(query.elements, source + d), broadcast(factor)))
        for d in range(whole, geometry.head_dim):
            scratch[target + d] = load_one(query.elements, source + d) * factor
        scratch[places.maxima + row] = NEVER
    for at in range(places.sums, places.maxima):
        scratch[at] = ZERO


@inner
def _finish(scratch: Any, geometry: Geometry, places: Places, item: Item, num_rows: int, output: Rows) -> None:
    """Hands out the item's weighted means."""
    for row in range(num_rows):
        token, head = _token_and_head(geometry, item, row)
        source = places.sums + row * geometry.padded_dim
        target = token * output.token_stride + head * output.head_stride
        total = sum_of_lanes(load(scratch, places.totals + row * LANES))
        # A sum of zeros alone may be 0 or -0, by the tiles that rows beside it saw; plus 0 it is 0.
        whole = geometry.head_dim // LANES * LANES
        for d in range(0, whole, LANES):
            mean = divide(load(scratch, source + d), broadcast(total))
            store(output.elements, target + d, add(mean, broadcast(ZERO)))
        for d in range(whole, geometry.head_dim):
            store_one(output.elements, target + d, scratch[source + d] / total + ZERO)


def attend(
    items: Any,
    first: int,
    last: int,
    tables: Any,
    pool: Any,
    sizes: Any,
    layer: int,
    factor: np.float32,
    softcap: np.float32,
    window: int,
    queries: int,
    token_stride: int,
    head_stride: int,
    results: int,
    scratch: Any,
) -> None:
    """Computes the items `first` to `last - 1`, rows of an int64 array with the columns of `Item`.

    `queries` and `results` are addresses, the strides those of the queries, as in `Rows`; results lie side by side.
    """
    geometry, softmax = as_geometry(sizes), Softmax(factor, softcap, window)
    paged = Paged(pool, tables, geometry, layer)
    query = Rows(array_at(pool, queries), token_stride, head_stride)
    num_heads = geometry.num_kv_heads * geometry.heads_per_kv_head
    output = Rows(array_at(pool, results), num_heads * geometry.head_dim, geometry.head_dim)
    for number in range(first, last):
        item = Item(
            items[number, 0], items[number, 1], items[number, 2], items[number, 3], items[number, 4], items[number, 5]
        )
        rows_per_head = item.num_tokens * geometry.heads_per_kv_head
        num_rows = item.num_heads * rows_per_head
        places = find_places(geometry, num_rows)
        _start(scratch, geometry, places, item, num_rows, query, softmax.factor)
        end = item.first_position + item.num_tokens
        first_seen = max(0, item.first_position - softmax.window + 1)
        stays = can_stay(geometry) and rows_per_head <= _ROWS_IN_PLACE
        for start in range(first_seen // TILE * TILE, end, TILE):
            offset = item.first_position - start
            for index in range(item.num_heads):
                head, row = item.first_head + index, index * rows_per_head
                if stays:
                    ask_for(paged, item.table, head, start, end, 1)  # while the scores of the keys are computed
                    tile = tile_in_pool(paged, item.table, head, start, end)
                    add_tile_to_rows(scratch, geometry, places, row, rows_per_head, tile, offset, softmax)
                else:
                    copy = tile_in_scratch(paged, item.table, head, start, end, scratch, places.tile)
                    add_tile_to_rows(scratch, geometry, places, row, rows_per_head, copy, offset, softmax)
        _finish(scratch, geometry, places, item, num_rows, output)
