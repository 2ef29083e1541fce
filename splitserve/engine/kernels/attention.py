"""The attention kernel: one arithmetic for prefill and decode.

Compiled by `compiled`, called by `cpu_attention`. The positions of a sequence are cut into tiles of `TILE` tokens at
fixed places. Every query row walks the tiles that it sees in order, with a running softmax in float32; within a tile a
score is one chain of fused multiply-adds over head_dim and a weighted value one chain over tokens. Nothing in a row's
chains depends on how many rows are computed beside it, so a token's result is the same bits alone, in any batch and in
any chunk. A position that a row must not see has the weight 0, and adding a tile of such weights changes no bit.

Work comes as items. Each thread has a scratch array of its own; `Places` says what lies where in it.
"""

from typing import Any, NamedTuple

import numpy as np

from splitserve.engine.kernels.blocks import STRIP, add_product, load_scaled_block, store_block, zero_block
from splitserve.engine.kernels.paging import (
    TILE,
    Geometry,
    GeometryArgument,
    Paged,
    Rows,
    RowsArgument,
    as_geometry,
    as_rows,
    ask_ahead,
    fill_keys,
    fill_values,
    inner,
)
from splitserve.engine.kernels.vector import (
    LANES,
    add,
    broadcast,
    divide,
    keep_lanes,
    largest_lane,
    load,
    load_one,
    maximum,
    multiply,
    power_of_two,
    store,
    store_one,
    subtract,
    sum_of_lanes,
    tanh,
)

NO_WINDOW = 1 << 30  # more than any position, and far from the limit of a 32-bit lane number

_LARGEST_GROUP = 6
_NEVER = np.float32(-1e30)  # running maximum of a row that has seen nothing: finite, so that no difference is NaN
_HIDDEN = np.float32(-np.inf)  # the score of what a row must not see: its weight is exactly 0
_ZERO = np.float32(0.0)
_STRIP_LANES = STRIP * LANES


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


class Softmax(NamedTuple):
    """What a layer wants of its scores, which are exponents of two."""

    factor: np.float32  # for queries
    softcap: np.float32  # 0 for none; else a score becomes softcap * tanh(score)
    window: int  # positions that a row sees, its own included


class Places(NamedTuple):
    keys: int  # of one tile: [head_dim, TILE]
    values: int  # of one tile: [TILE, padded_dim]
    weights: int  # of one group of rows: [group, TILE], scores at first
    factors: int  # of one group of rows: what a tile multiplies the sums before it with
    queries: int  # of an item: [rows, head_dim], scaled
    sums: int  # [rows, padded_dim]: weighted values so far
    totals: int  # [rows, LANES]: weights so far, by position modulo LANES
    maxima: int  # [rows]: largest score so far
    end: int


@inner
def _find_places(geometry: Geometry, num_rows: int) -> Places:
    values = geometry.head_dim * TILE
    weights = values + TILE * geometry.padded_dim
    factors = weights + _LARGEST_GROUP * TILE
    queries = factors + LANES
    sums = queries + num_rows * geometry.head_dim
    totals = sums + num_rows * geometry.padded_dim
    maxima = totals + num_rows * LANES
    return Places(0, values, weights, factors, queries, sums, totals, maxima, maxima + num_rows)


def scratch_size(geometry: Geometry, num_rows: int) -> int:
    """Elements of the scratch array for items of up to `num_rows` rows."""
    size: int = _find_places.py_func(geometry, num_rows).end
    return size


@inner
def _weigh(scratch: Any, places: Places, member: int, row: int, first: int, last: int, softcap: np.float32) -> None:
    """Makes weights of a row's scores. The row is the group's `member`; it sees the columns `first` to `last - 1`."""
    weights = places.weights + member * TILE
    sees_all = first <= 0 and last >= TILE
    largest = broadcast(_NEVER)
    for column in range(0, TILE, LANES):
        score = load(scratch, weights + column)
        if softcap != _ZERO:
            score = multiply(tanh(score), broadcast(softcap))
        if not sees_all:
            score = keep_lanes(score, first - column, last - column, _HIDDEN)
        store(scratch, weights + column, score)
        largest = maximum(score, largest)
    before = scratch[places.maxima + row]
    now = max(largest_lane(largest), before)
    factor = power_of_two(broadcast(before - now))
    total = multiply(load(scratch, places.totals + row * LANES), factor)
    for column in range(0, TILE, LANES):
        weight = power_of_two(subtract(load(scratch, weights + column), broadcast(now)))
        store(scratch, weights + column, weight)
        total = add(total, weight)
    store(scratch, places.totals + row * LANES, total)
    scratch[places.maxima + row] = now
    scratch[places.factors + member] = largest_lane(factor)


def _make_score(group: int) -> Any:
    @inner
    def score(scratch: Any, geometry: Geometry, places: Places, row: int) -> None:
        """Scores of `group` rows from `row` on and the tile's keys."""
        queries, stride = places.queries + row * geometry.head_dim, geometry.head_dim
        for column in range(0, TILE, _STRIP_LANES):
            block = zero_block(group, STRIP)
            for d in range(geometry.head_dim):
                block = add_product(block, scratch, queries + d, stride, places.keys + d * TILE + column)
            store_block(block, scratch, places.weights + column, TILE)

    return score


def _make_add_values(group: int, num_vectors: int) -> Any:
    @inner
    def add_values(
        scratch: Any, geometry: Geometry, places: Places, row: int, column: int, first: int, last: int
    ) -> None:
        """Adds the tile's values, weighted, to `num_vectors` vectors of the sums of `group` rows from `row` on."""
        padded = geometry.padded_dim
        sums, values = places.sums + row * padded + column, places.values + column
        block = load_scaled_block(group, num_vectors, scratch, sums, padded, places.factors)
        for token in range(first, last):
            block = add_product(block, scratch, places.weights + token, TILE, values + token * padded)
        store_block(block, scratch, sums, padded)

    return add_values


def _make_add_tile(group: int) -> Any:
    score, add_strip, add_vector = _make_score(group), _make_add_values(group, STRIP), _make_add_values(group, 1)

    @inner
    def add_tile(
        scratch: Any, geometry: Geometry, places: Places, row: int, index: int, offset: int, softmax: Softmax
    ) -> None:
        """`group` rows from `row` on, which is the `index`-th of its KV head, see the tile.

        `offset` is the position of the item's first token, counted from the tile's first.
        """
        per_kv_head = geometry.heads_per_kv_head
        newest = offset + (index + group - 1) // per_kv_head
        oldest = offset + index // per_kv_head - softmax.window + 1
        if newest < 0 or oldest >= TILE:
            return
        score(scratch, geometry, places, row)
        for member in range(group):
            own = offset + (index + member) // per_kv_head
            _weigh(scratch, places, member, row + member, own - softmax.window + 1, own + 1, softmax.softcap)
        first, last = max(oldest, 0), min(newest + 1, TILE)
        whole = geometry.padded_dim // _STRIP_LANES * _STRIP_LANES
        for column in range(0, whole, _STRIP_LANES):
            add_strip(scratch, geometry, places, row, column, first, last)
        for column in range(whole, geometry.padded_dim, LANES):
            add_vector(scratch, geometry, places, row, column, first, last)

    return add_tile


# A large group makes the most of each vector that it loads; the smaller ones take what is left.
_add_tile_6, _add_tile_3, _add_tile_1 = _make_add_tile(_LARGEST_GROUP), _make_add_tile(3), _make_add_tile(1)


@inner
def _add_tile(
    scratch: Any, geometry: Geometry, places: Places, first_row: int, num_rows: int, offset: int, softmax: Softmax
) -> None:
    """All rows of one KV head see the tile."""
    index = 0
    while index + _LARGEST_GROUP <= num_rows:
        _add_tile_6(scratch, geometry, places, first_row + index, index, offset, softmax)
        index += _LARGEST_GROUP
    while index + 3 <= num_rows:
        _add_tile_3(scratch, geometry, places, first_row + index, index, offset, softmax)
        index += 3
    while index < num_rows:
        _add_tile_1(scratch, geometry, places, first_row + index, index, offset, softmax)
        index += 1


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
        scratch[places.maxima + row] = _NEVER
    for at in range(places.sums, places.maxima):
        scratch[at] = _ZERO


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
            store(output.elements, target + d, add(mean, broadcast(_ZERO)))
        for d in range(whole, geometry.head_dim):
            store_one(output.elements, target + d, scratch[source + d] / total + _ZERO)


def attend(
    items: Any,
    first: int,
    last: int,
    tables: Any,
    pool: Any,
    geometry_argument: GeometryArgument,
    layer: int,
    factor: np.float32,
    softcap: np.float32,
    window: int,
    query_argument: RowsArgument,
    output_argument: RowsArgument,
    scratch: Any,
) -> None:
    """Computes the items `first` to `last - 1`, rows of an int64 array with the columns of `Item`."""
    geometry, softmax = as_geometry(geometry_argument), Softmax(factor, softcap, window)
    paged = Paged(pool, tables, geometry, layer)
    query, output = as_rows(query_argument, pool), as_rows(output_argument, pool)
    for number in range(first, last):
        item = Item(
            items[number, 0], items[number, 1], items[number, 2], items[number, 3], items[number, 4], items[number, 5]
        )
        rows_per_head = item.num_tokens * geometry.heads_per_kv_head
        num_rows = item.num_heads * rows_per_head
        places = _find_places(geometry, num_rows)
        _start(scratch, geometry, places, item, num_rows, query, softmax.factor)
        end = item.first_position + item.num_tokens
        first_seen = max(0, item.first_position - softmax.window + 1)
        for tile in range(first_seen // TILE * TILE, end, TILE):
            tile_end, offset = min(tile + TILE, end), item.first_position - tile
            for index in range(item.num_heads):
                head = item.first_head + index
                # What comes next is asked for in two parts: memory serves few lines at a time, and arithmetic has to
                # wait behind a long queue.
                is_last = index + 1 == item.num_heads
                next_head, next_tile = (item.first_head, tile + TILE) if is_last else (head + 1, tile)
                next_end = min(next_tile + TILE, end)
                fill_keys(paged, item.table, head, tile, tile_end, scratch, places.keys)
                ask_ahead(paged, item.table, next_head, next_tile, next_end, 0)
                fill_values(paged, item.table, head, tile, tile_end, scratch, places.values)
                ask_ahead(paged, item.table, next_head, next_tile, next_end, 1)
                _add_tile(scratch, geometry, places, index * rows_per_head, rows_per_head, offset, softmax)
        _finish(scratch, geometry, places, item, num_rows, output)
