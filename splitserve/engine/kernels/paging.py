"""How kernels reach the pool: new tokens go in, tiles of float32 come out.

Called by the attention kernel and, for `store_tokens`, by `cpu_attention`. All arrays are flat. In a layer of a block
the K of a head are `[head_dim, token]`, so that neighbouring tokens load as one vector, and the V `[token, head_dim]`.
"""

from typing import Any, NamedTuple

from numba import njit
from numba.cpython.unsafe.tuple import tuple_setitem

from splitserve.engine.kernels.vector import LANES, array_at, load, load_one, prefetch, store

TILE = 64

_RUNS = (0,) * (TILE // LANES)
_LINE_NBYTES = 64  # of a cache

# For functions that only kernels call: no Python wrapper, no check for a divisor of zero.
inner = njit(error_model="numpy", no_cpython_wrapper=True)


class Geometry(NamedTuple):
    """Sizes of pool and model."""

    num_layers: int
    num_kv_heads: int
    heads_per_kv_head: int
    block_size: int
    head_dim: int
    padded_dim: int  # head_dim rounded up to whole vectors


class Paged(NamedTuple):
    """One layer of the pool, and the block tables of a batch laid end to end."""

    pool: Any
    tables: Any  # int32
    geometry: Geometry
    layer: int


class Rows(NamedTuple):
    """A `[tokens, heads, head_dim]` tensor of the pool's dtype: its memory, and the elements from one to the next."""

    elements: Any
    token_stride: int
    head_stride: int


class Tile(NamedTuple):
    """K and V of one head at `TILE` positions, by runs of LANES positions."""

    source: Any
    keys: tuple[int, ...]  # where each run's K start: [head_dim, LANES]
    key_stride: int  # from one dimension to the next
    values: tuple[int, ...]  # where each run's V start: [LANES, padded_dim]
    value_stride: int  # from one position to the next


def make_geometry(num_layers: int, num_kv_heads: int, num_heads: int, block_size: int, head_dim: int) -> Geometry:
    padded = -(-head_dim // LANES) * LANES
    return Geometry(num_layers, num_kv_heads, num_heads // num_kv_heads, block_size, head_dim, padded)


@inner
def as_geometry(sizes: Any) -> Geometry:
    """From an int64 array: a call from Python takes much longer with a tuple."""
    return Geometry(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5])


@inner
def _head_start(geometry: Geometry, block: Any, layer: int, head: int, is_value: int) -> Any:
    """Where in the pool a block's K or V of one head starts."""
    head_size = geometry.block_size * geometry.head_dim
    return (((block * geometry.num_layers + layer) * 2 + is_value) * geometry.num_kv_heads + head) * head_size


@inner
def _head_start_at(paged: Paged, table: int, position: int, head: int, is_value: int) -> Any:
    block = paged.tables[table + position // paged.geometry.block_size]
    return _head_start(paged.geometry, block, paged.layer, head, is_value)


@inner
def _key_start(paged: Paged, table: int, position: int, head: int) -> Any:
    return _head_start_at(paged, table, position, head, 0) + position % paged.geometry.block_size


@inner
def _value_start(paged: Paged, table: int, position: int, head: int) -> Any:
    geometry = paged.geometry
    return _head_start_at(paged, table, position, head, 1) + position % geometry.block_size * geometry.head_dim


@inner
def can_stay(geometry: Geometry) -> bool:
    """Whether kernels can compute with K and V where they lie: every run of LANES tokens or dimensions is whole."""
    return geometry.block_size % LANES == 0 and geometry.head_dim % LANES == 0


@inner
def tile_in_pool(paged: Paged, table: int, head: int, start: int, end: int) -> Tile:
    """The tile at position `start`, of a sequence of `end` tokens, where it lies; `can_stay` has to be true."""
    keys, values = _RUNS, _RUNS
    for run in range(len(_RUNS)):
        # After the sequence's end there is no block: any place will do for scores that nobody looks at.
        position = min(start + run * LANES, (end - 1) // LANES * LANES)
        keys = tuple_setitem(keys, run, _key_start(paged, table, position, head))
        values = tuple_setitem(values, run, _value_start(paged, table, position, head))
    return Tile(paged.pool, keys, paged.geometry.block_size, values, paged.geometry.head_dim)


@inner
def tile_in_scratch(paged: Paged, table: int, head: int, start: int, end: int, scratch: Any, at: int) -> Tile:
    """The tile at position `start`, of a sequence of `end` tokens, copied to `scratch[at:]` in float32."""
    last, geometry = min(start + TILE, end), paged.geometry
    values = at + geometry.head_dim * TILE
    _copy_keys(paged, table, head, start, last, scratch, at)
    _copy_values(paged, table, head, start, last, scratch, values)
    key_places, value_places = _RUNS, _RUNS
    for run in range(len(_RUNS)):
        key_places = tuple_setitem(key_places, run, at + run * LANES)
        value_places = tuple_setitem(value_places, run, values + run * LANES * geometry.padded_dim)
    return Tile(scratch, key_places, TILE, value_places, geometry.padded_dim)


@inner
def _copy_keys(paged: Paged, table: int, head: int, start: int, last: int, out: Any, at: int) -> None:
    """As `[head_dim, TILE]`; columns from `last` on become anything."""
    block_size = paged.geometry.block_size
    if block_size % LANES:
        for position in range(start, last):
            source = _key_start(paged, table, position, head)
            for d in range(paged.geometry.head_dim):
                out[at + d * TILE + position - start] = load_one(paged.pool, source + d * block_size)
        return
    for position in range(start, last, LANES):  # a vector may reach over `last`, but not out of its block
        source = _key_start(paged, table, position, head)
        for d in range(paged.geometry.head_dim):
            store(out, at + d * TILE + position - start, load(paged.pool, source + d * block_size))


@inner
def _copy_values(paged: Paged, table: int, head: int, start: int, last: int, out: Any, at: int) -> None:
    """As `[TILE, padded_dim]`; rows from `last` on stay as they are."""
    geometry = paged.geometry
    whole = geometry.head_dim // LANES * LANES
    for position in range(start, last):
        source = _value_start(paged, table, position, head)
        target = at + (position - start) * geometry.padded_dim
        for d in range(0, whole, LANES):
            store(out, target + d, load(paged.pool, source + d))
        for d in range(whole, geometry.head_dim):
            out[target + d] = load_one(paged.pool, source + d)
        for d in range(geometry.head_dim, geometry.padded_dim):
            out[target + d] = 0.0


@inner
def ask_for(paged: Paged, table: int, head: int, start: int, end: int, is_value: int) -> None:
    """Starts bringing K or V of the tile at position `start` nearer while something else is computed."""
    geometry = paged.geometry
    size = geometry.block_size * geometry.head_dim
    for position in range(start, min(start + TILE, end), geometry.block_size):
        source = _head_start_at(paged, table, position, head, is_value)
        for index in range(source, source + size, _LINE_NBYTES // paged.pool.itemsize):
            prefetch(paged.pool, index)


def store_tokens(
    pool: Any,
    sizes: Any,
    layer: int,
    blocks: Any,
    offsets: Any,
    keys: int,
    key_token_stride: int,
    key_head_stride: int,
    values: int,
    value_token_stride: int,
    value_head_stride: int,
) -> None:
    """Writes one layer's new K and V, given by address: those of token i go to slot `offsets[i]` of block `blocks[i]`.

    `sizes` are a `Geometry`'s; strides are in elements, as in `Rows`.
    """
    geometry = as_geometry(sizes)
    key = Rows(array_at(pool, keys), key_token_stride, key_head_stride)
    value = Rows(array_at(pool, values), value_token_stride, value_head_stride)
    head_dim, block_size = geometry.head_dim, geometry.block_size
    for token in range(blocks.size):
        for head in range(geometry.num_kv_heads):
            source = token * key.token_stride + head * key.head_stride
            target = _head_start(geometry, blocks[token], layer, head, 0) + offsets[token]
            for d in range(head_dim):
                pool[target + d * block_size] = key.elements[source + d]
            source = token * value.token_stride + head * value.head_stride
            target = _head_start(geometry, blocks[token], layer, head, 1) + offsets[token] * head_dim
            for d in range(head_dim):
                pool[target + d] = value.elements[source + d]
