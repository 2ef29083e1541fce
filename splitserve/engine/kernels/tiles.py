"""One tile against the rows that see it: scores, weights, weighted values.

Called by the attention kernel, item by item. Rows go in groups, held in registers side by side; a row's own arithmetic
is the same in each of them. What rows know between tiles is in their thread's scratch array, at `Places`.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.cpython.unsafe.tuple import tuple_setitem

from splitserve.engine.kernels.blocks import STRIP, add_product, load_scaled_block, store_block, zero_block
from splitserve.engine.kernels.paging import TILE, Geometry, Tile, inner
from splitserve.engine.kernels.vector import (
    LANES,
    add,
    broadcast,
    keep_lanes,
    largest_lane,
    load,
    maximum,
    multiply,
    power_of_two,
    store,
    subtract,
    tanh,
)

_LARGEST_GROUP = 6
NEVER = np.float32(-1e30)  # running maximum of a row that has seen nothing: finite, so that no difference is NaN
_HIDDEN = np.float32(-np.inf)  # the score of what a row must not see: its weight is exactly 0
ZERO = np.float32(0.0)
_STRIP_LANES = STRIP * LANES


def _neighbours(num_vectors: int) -> tuple[int, ...]:
    """Offsets of vectors side by side."""
    return tuple(range(0, num_vectors * LANES, LANES))


_STRIP_NEIGHBOURS = _neighbours(STRIP)


class Softmax(NamedTuple):
    """What a layer wants of its scores, which are exponents of two."""

    factor: np.float32  # for queries
    softcap: np.float32  # 0 for none; else a score becomes softcap * tanh(score)
    window: int  # positions that a row sees, its own included


class Places(NamedTuple):
    tile: int  # copies of K and V of one tile
    weights: int  # of one group of rows: [group, TILE], scores at first
    factors: int  # of one group of rows: what a tile multiplies the sums before it with
    queries: int  # of an item: [rows, head_dim], scaled
    sums: int  # [rows, padded_dim]: weighted values so far
    totals: int  # [rows, LANES]: weights so far, by position modulo LANES
    maxima: int  # [rows]: largest score so far
    end: int


@inner
def find_places(geometry: Geometry, num_rows: int) -> Places:
    weights = (geometry.head_dim + geometry.padded_dim) * TILE
    factors = weights + _LARGEST_GROUP * TILE
    queries = factors + LANES
    sums = queries + num_rows * geometry.head_dim
    totals = sums + num_rows * geometry.padded_dim
    maxima = totals + num_rows * LANES
    return Places(0, weights, factors, queries, sums, totals, maxima, maxima + num_rows)


def scratch_size(geometry: Geometry, num_rows: int) -> int:
    """Elements of the scratch array for items of up to `num_rows` rows."""
    size: int = find_places.py_func(geometry, num_rows).end
    return size


@inner
def _weigh(scratch: Any, places: Places, member: int, row: int, first: int, last: int, softcap: np.float32) -> None:
    """Makes weights of a row's scores. The row is the group's `member`; it sees the columns `first` to `last - 1`."""
    weights = places.weights + member * TILE
    sees_all = first <= 0 and last >= TILE
    largest = broadcast(NEVER)
    for column in range(0, TILE, LANES):
        score = load(scratch, weights + column)
        if softcap != ZERO:
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
    def score(scratch: Any, geometry: Geometry, places: Places, row: int, tile: Tile) -> None:
        """Scores of `group` rows from `row` on and the tile's keys."""
        queries, stride = places.queries + row * geometry.head_dim, geometry.head_dim
        for strip in range(TILE // _STRIP_LANES):
            keys = _STRIP_NEIGHBOURS
            for vector in range(STRIP):
                keys = tuple_setitem(keys, vector, tile.keys[strip * STRIP + vector])
            block = zero_block(group, STRIP)
            for d in range(geometry.head_dim):
                block = add_product(block, scratch, queries + d, stride, tile.source, keys, d * tile.key_stride)
            store_block(block, scratch, places.weights + strip * _STRIP_LANES, TILE)

    return score


def _make_add_values(group: int, num_vectors: int) -> Any:
    neighbours = _neighbours(num_vectors)

    @inner
    def add_values(
        scratch: Any, geometry: Geometry, places: Places, row: int, tile: Tile, column: int, first: int, last: int
    ) -> None:
        """Adds the tile's values, weighted, to `num_vectors` vectors of the sums of `group` rows from `row` on."""
        sums = places.sums + row * geometry.padded_dim + column
        block = load_scaled_block(group, num_vectors, scratch, sums, geometry.padded_dim, places.factors)
        for run in range(first // LANES, (last + LANES - 1) // LANES):
            values = tile.values[run] + column - run * LANES * tile.value_stride
            for token in range(max(first, run * LANES), min(last, (run + 1) * LANES)):
                at, weights = values + token * tile.value_stride, places.weights + token
                block = add_product(block, scratch, weights, TILE, tile.source, neighbours, at)
        store_block(block, scratch, sums, geometry.padded_dim)

    return add_values


def _make_add_tile(group: int) -> Any:
    score, add_strip, add_vector = _make_score(group), _make_add_values(group, STRIP), _make_add_values(group, 1)

    @inner
    def add_tile(
        scratch: Any,
        geometry: Geometry,
        places: Places,
        row: int,
        index: int,
        tile: Tile,
        offset: int,
        softmax: Softmax,
    ) -> None:
        """`group` rows from `row` on, which is the `index`-th of its KV head, see the tile.

        `offset` is the position of the item's first token, counted from the tile's first.
        """
        per_kv_head = geometry.heads_per_kv_head
        newest = offset + (index + group - 1) // per_kv_head
        oldest = offset + index // per_kv_head - softmax.window + 1
        if newest < 0 or oldest >= TILE:
            return
        score(scratch, geometry, places, row, tile)
        for member in range(group):
            own = offset + (index + member) // per_kv_head
            _weigh(scratch, places, member, row + member, own - softmax.window + 1, own + 1, softmax.softcap)
        first, last = max(oldest, 0), min(newest + 1, TILE)
        whole = geometry.padded_dim // _STRIP_LANES * _STRIP_LANES
        for column in range(0, whole, _STRIP_LANES):
            add_strip(scratch, geometry, places, row, tile, column, first, last)
        for column in range(whole, geometry.padded_dim, LANES):
            add_vector(scratch, geometry, places, row, tile, column, first, last)

    return add_tile


# A large group makes the most of each vector that it loads; the smaller ones take what is left.
_add_tile_6, _add_tile_3, _add_tile_1 = _make_add_tile(_LARGEST_GROUP), _make_add_tile(3), _make_add_tile(1)


@inner
def add_tile_to_rows(
    scratch: Any,
    geometry: Geometry,
    places: Places,
    first_row: int,
    num_rows: int,
    tile: Tile,
    offset: int,
    softmax: Softmax,
) -> None:
    """All rows of one KV head see the tile."""
    index = 0
    while index + _LARGEST_GROUP <= num_rows:
        _add_tile_6(scratch, geometry, places, first_row + index, index, tile, offset, softmax)
        index += _LARGEST_GROUP
    while index + 3 <= num_rows:
        _add_tile_3(scratch, geometry, places, first_row + index, index, tile, offset, softmax)
        index += 3
    while index < num_rows:
        _add_tile_1(scratch, geometry, places, first_row + index, index, tile, offset, softmax)
        index += 1
