"""What a decoder layer computes between its matmuls: norms, rotary embeddings, and the gate of its MLP.

Called by `engine.fused_layer`. Memory comes as addresses, `elements` says of which dtype all of it is. Each kernel
computes the rows `first` to `last - 1`, one like the other, whatever rows there are beside them, and rounds to the
dtype wherever transformers' modules do.
"""

from typing import Any

import numpy as np

from splitserve.engine.kernels.paging import inner
from splitserve.engine.kernels.vector import (
    LANES,
    add,
    array_at,
    as_stored,
    broadcast,
    first_lane,
    load,
    load_one,
    multiply,
    sigmoid,
    store,
    store_one,
    subtract,
    sum_of_lanes,
)


@inner
def _normalize(source: Any, at: int, width: int, weight: Any, epsilon: float, target: Any, to: int) -> None:
    """`width` elements over the root of the mean of their squares, times `weight`."""
    whole = width // LANES * LANES
    squares = broadcast(np.float32(0.0))
    for column in range(0, whole, LANES):
        values = load(source, at + column)
        squares = add(squares, multiply(values, values))
    total = sum_of_lanes(squares)
    for column in range(whole, width):
        total += load_one(source, at + column) * load_one(source, at + column)
    factor = np.float32(1.0) / np.sqrt(total / np.float32(width) + np.float32(epsilon))
    for column in range(0, whole, LANES):
        values = as_stored(target, multiply(load(source, at + column), broadcast(factor)))
        store(target, to + column, multiply(values, load(weight, column)))
    for column in range(whole, width):
        value = first_lane(as_stored(target, broadcast(load_one(source, at + column) * factor)))
        store_one(target, to + column, value * load_one(weight, column))


def normalize_rows(
    elements: Any, first: int, last: int, rows: int, results: int, weight: int, width: int, epsilon: float
) -> None:
    """Root-mean-square norms of rows of `width` elements."""
    source, target, factors = array_at(elements, rows), array_at(elements, results), array_at(elements, weight)
    for row in range(first, last):
        _normalize(source, row * width, width, factors, epsilon, target, row * width)


def add_and_normalize_rows(
    elements: Any, first: int, last: int, rows: int, added: int, results: int, weight: int, width: int, epsilon: float
) -> None:
    """Adds `added` to `rows`, in place; `results` are the norms of the sums."""
    sums, others = array_at(elements, rows), array_at(elements, added)
    target, factors = array_at(elements, results), array_at(elements, weight)
    whole = width // LANES * LANES
    for row in range(first, last):
        start = row * width
        for at in range(start, start + whole, LANES):
            store(sums, at, add(load(sums, at), load(others, at)))
        for at in range(start + whole, start + width):
            store_one(sums, at, load_one(sums, at) + load_one(others, at))
        _normalize(sums, start, width, factors, epsilon, target, start)


def normalize_heads(
    elements: Any,
    first: int,
    last: int,
    heads: int,
    stride: int,
    weight: int,
    num_heads: int,
    head_dim: int,
    epsilon: float,
) -> None:
    """In place, each head by itself; `stride` elements from one row's first head to the next row's."""
    array, factors = array_at(elements, heads), array_at(elements, weight)
    for row in range(first, last):
        for head in range(num_heads):
            at = row * stride + head * head_dim
            _normalize(array, at, head_dim, factors, epsilon, array, at)


def rotate_heads(
    elements: Any,
    first: int,
    last: int,
    heads: int,
    stride: int,
    num_heads: int,
    head_dim: int,
    cosines: int,
    sines: int,
) -> None:
    """Rotary embeddings in place: dimension d turns with d + head_dim / 2, by `[rows, head_dim]` cosines and sines."""
    array, cos, sin = array_at(elements, heads), array_at(elements, cosines), array_at(elements, sines)
    half = head_dim // 2
    whole = half // LANES * LANES
    for row in range(first, last):
        angles = row * head_dim
        for head in range(num_heads):
            start = row * stride + head * head_dim
            for d in range(0, whole, LANES):
                low, high, angle = load(array, start + d), load(array, start + half + d), angles + d
                kept, turned = multiply(low, load(cos, angle)), multiply(high, load(sin, angle))
                store(array, start + d, subtract(as_stored(array, kept), as_stored(array, turned)))
                angle += half
                kept, turned = multiply(high, load(cos, angle)), multiply(low, load(sin, angle))
                store(array, start + half + d, add(as_stored(array, kept), as_stored(array, turned)))
            for d in range(whole, half):
                low_one, high_one = broadcast(load_one(array, start + d)), broadcast(load_one(array, start + half + d))
                angle = angles + d
                kept = multiply(low_one, broadcast(load_one(cos, angle)))
                turned = multiply(high_one, broadcast(load_one(sin, angle)))
                difference = subtract(as_stored(array, kept), as_stored(array, turned))
                store_one(array, start + d, first_lane(difference))
                angle += half
                kept = multiply(high_one, broadcast(load_one(cos, angle)))
                turned = multiply(low_one, broadcast(load_one(sin, angle)))
                store_one(array, start + half + d, first_lane(add(as_stored(array, kept), as_stored(array, turned))))


def gate_rows(elements: Any, first: int, last: int, rows: int, results: int, width: int) -> None:
    """A row is `width` gates and `width` values; the result is value times `gate * sigmoid(gate)`."""
    source, target = array_at(elements, rows), array_at(elements, results)
    whole = width // LANES * LANES
    for row in range(first, last):
        gates, values, to = 2 * row * width, (2 * row + 1) * width, row * width
        for column in range(0, whole, LANES):
            gate = load(source, gates + column)
            opened = as_stored(target, multiply(gate, sigmoid(gate)))
            store(target, to + column, multiply(opened, load(source, values + column)))
        for column in range(whole, width):
            gate = broadcast(load_one(source, gates + column))
            opened = as_stored(target, multiply(gate, sigmoid(gate)))
            store_one(target, to + column, first_lane(opened) * load_one(source, values + column))
