"""How kernels reach the pool: new tokens go in, tiles of float32 come out.

Called by the attention kernel and, for `store_tokens`, by `cpu_attention`. All arrays are flat. In a layer of a block
the K of a head are `[head_dim, token]`, so that neighbouring tokens load as one vector, and the V `[token, head_dim]`.
"""

from typing import Any, NamedTuple

from numba import njit

from splitserve.engine.kernels.vector import LANES, array_at, load, load_one, prefetch, store

TILE = 64

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


# How `Rows` and `Geometry` come from Python: plain tuples and addresses are the quickest to pass.
RowsArgument = tuple[int, int, int]  # address, token_stride, head_stride
GeometryArgument = tuple[int, int, int, int, int, int]


def make_geometry(num_layers: int, num_kv_heads: int, num_heads: int, block_size: int, head_dim: int) -> Geometry:
    padded = -(-head_dim // LANES) * LANES
    return Geometry(num_layers, num_kv_heads, num_heads // num_kv_heads, block_size, head_dim, padded)


@inner
def as_rows(argument: RowsArgument, pool: Any) -> Rows:
    return Rows(array_at(pool, argument[0]), argument[1], argument[2])


@inner
def as_geometry(argument: GeometryArgument) -> Geometry:
    return Geometry(argument[0], argument[1], argument[2], argument[3], argument[4], argument[5])


@inner
def _head_start(geometry: Geometry, block: Any, layer: int, head: int, is_value: int) -> Any:
    """Where in the pool a block's K or V of one head starts."""
    head_size = geometry.block_size * geometry.head_dim
    return (((block * geometry.num_layers + layer) * 2 + is_value) * geometry.num_kv_heads + head) * head_size


@inner
def _start_of(paged: Paged, table: int, position: int, head: int, is_value: int) -> Any:
    block = paged.tables[table + position // paged.geometry.block_size]
    return _head_start(paged.geometry, block, paged.layer, head, is_value)


@inner
def fill_keys(paged: Paged, table: int, head: int, start: int, end: int, out: Any, at: int) -> None:
    """K of positions `start` to `end - 1` to `out[at:]` as `[head_dim, TILE]`; other columns become anything."""
    block_size = paged.geometry.block_size
    if block_size % LANES:
        for position in range(start, end):
            source = _start_of(paged, table, position, head, 0) + position % block_size
            for d in range(paged.geometry.head_dim):
                out[at + d * TILE + position - start] = load_one(paged.pool, source + d * block_size)
        return
    for position in range(start, end, LANES):  # a vector may reach over `end`, but not out of its block
        source = _start_of(paged, table, position, head, 0) + position % block_size
        for d in range(paged.geometry.head_dim):
            store(out, at + d * TILE + position - start, load(paged.pool, source + d * block_size))


@inner
def fill_values(paged: Paged, table: int, head: int, start: int, end: int, out: Any, at: int) -> None:
    """V of positions `start` to `end - 1` to `out[at:]` as `[TILE, padded_dim]`; other rows stay as they are."""
    geometry = paged.geometry
    whole = geometry.head_dim // LANES * LANES
    for position in range(start, end):
        source = _start_of(paged, table, position, head, 1) + position % geometry.block_size * geometry.head_dim
        target = at + (position - start) * geometry.padded_dim
        for d in range(0, whole, LANES):
            store(out, target + d, load(paged.pool, source + d))
        for d in range(whole, geometry.head_dim):
            out[target + d] = load_one(paged.pool, source + d)
        for d in range(geometry.head_dim, geometry.padded_dim):
            out[target + d] = 0.0


@inner
def ask_ahead(paged: Paged, table: int, head: int, start: int, end: int, is_value: int) -> None:
    """Starts bringing K or V of positions `start` to `end - 1` nearer while something else is computed."""
    geometry = paged.geometry
    size = geometry.block_size * geometry.head_dim
    for position in range(start, end, geometry.block_size):
        source = _start_of(paged, table, position, head, is_value)
        for index in range(source, source + size, _LINE_NBYTES // paged.pool.itemsize):
            prefetch(paged.pool, index)


def store_tokens(
    pool: Any,
    geometry_argument: GeometryArgument,
    layer: int,
    blocks: Any,
    offsets: Any,
    key_argument: RowsArgument,
    value_argument: RowsArgument,
) -> None:
    """Writes one layer's new K and V: those of token i go to slot `offsets[i]` of block `blocks[i]`."""
    geometry, key, value = as_geometry(geometry_argument), as_rows(key_argument, pool), as_rows(value_argument, pool)
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
