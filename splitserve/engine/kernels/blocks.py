"""Register blocks: a few rows of a few vectors each, held in the processor's registers through a whole matrix product.

Called by the attention kernels. A block is a numba tuple of rows, each a tuple of vectors. How many rows a block has
never changes the order of an element's sum.
"""

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from splitserve.engine.kernels.vector import (
    FLOATS,
    LANES,
    VECTOR,
    emit_call,
    emit_load,
    emit_pointer,
    emit_splat,
)

# Vectors side by side in a block of six rows: as many as fit into 32 registers of a vector each, or into 16 of half.
STRIP = 4 if binding.get_host_cpu_features().get("avx512f") else 1


def _block_type(num_rows: int, num_vectors: int) -> Any:
    return types.UniTuple(types.UniTuple(VECTOR, num_vectors), num_rows)


def _shape(block: Any) -> tuple[int, int]:
    return block.count, block.dtype.count


def _pack(context: Any, builder: Any, block_type: Any, rows: list[list[Any]]) -> Any:
    packed = [context.make_tuple(builder, block_type.dtype, row) for row in rows]
    return context.make_tuple(builder, block_type, packed)


def _unpack(builder: Any, block_type: Any, block: Any) -> list[list[Any]]:
    num_rows, num_vectors = _shape(block_type)
    return [[builder.extract_value(block, [row, column]) for column in range(num_vectors)] for row in range(num_rows)]


def _at(builder: Any, index: Any, row: int, stride: Any, column: int = 0) -> Any:
    kind = index.type
    offset = builder.add(builder.mul(ir.Constant(kind, row), stride), ir.Constant(kind, column * LANES))
    return builder.add(index, offset)


@intrinsic(prefer_literal=True)
def zero_block(typing: Any, num_rows: Any, num_vectors: Any) -> Any:
    block_type = _block_type(num_rows.literal_value, num_vectors.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(context.get_value_type(block_type), None)

    return block_type(num_rows, num_vectors), generate


@intrinsic(prefer_literal=True)
def load_scaled_block(
    typing: Any, num_rows: Any, num_vectors: Any, array: Any, index: Any, stride: Any, factors: Any
) -> Any:
    """Row r is the vectors at `array[index + r * stride :]` times `array[factors + r]`."""
    block_type = _block_type(num_rows.literal_value, num_vectors.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, array, index, stride, factors = arguments
        kind = signature.args[2]
        rows = []
        for row in range(num_rows.literal_value):
            at = _at(builder, factors, row, ir.Constant(factors.type, 1))
            factor = emit_splat(builder, builder.load(emit_pointer(context, builder, kind, array, at)))
            places = [_at(builder, index, row, stride, column) for column in range(num_vectors.literal_value)]
            rows.append([builder.fmul(emit_load(context, builder, kind, array, place), factor) for place in places])
        return _pack(context, builder, block_type, rows)

    return block_type(num_rows, num_vectors, array, types.intp, types.intp, types.intp), generate


@intrinsic
def store_block(typing: Any, block: Any, array: Any, index: Any, stride: Any) -> Any:
    """Row r goes to `array[index + r * stride :]`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, array, index, stride = arguments
        for row, vectors in enumerate(_unpack(builder, block, value)):
            for column, vector in enumerate(vectors):
                place = _at(builder, index, row, stride, column)
                pointer = emit_pointer(context, builder, signature.args[1], array, place)
                builder.store(vector, builder.bitcast(pointer, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(block, array, types.intp, types.intp), generate


@intrinsic
def add_product(
    typing: Any, block: Any, array: Any, factors: Any, stride: Any, source: Any, places: Any, offset: Any
) -> Any:
    """Adds the vectors at `source[place + offset :]` times `array[factors + r * stride]` to row r, fused."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, array, factors, stride, source, places, offset = arguments
        kind, source_kind = signature.args[1], signature.args[4]
        _, num_vectors = _shape(block)
        vectors = []
        for column in range(num_vectors):
            place = builder.add(builder.extract_value(places, column), offset)
            vectors.append(emit_load(context, builder, source_kind, source, place))
        rows = []
        for row, sums in enumerate(_unpack(builder, block, value)):
            pointer = emit_pointer(context, builder, kind, array, _at(builder, factors, row, stride))
            factor = emit_splat(builder, builder.load(pointer))
            rows.append([emit_call(builder, "fma", [factor, *pair]) for pair in zip(vectors, sums, strict=True)])
        return _pack(context, builder, block, rows)

    return block(block, array, types.intp, types.intp, source, places, types.intp), generate
