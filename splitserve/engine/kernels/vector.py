"""Vectors of sixteen float32 values as numba values, for kernels that say themselves which lanes do what.

Called by the other kernels; the `emit_*` functions, which write LLVM instructions, also by `blocks`. numba turns
loops over scalars into vector code as it sees fit; here every addition has its place, because a result must be the same
bits whichever loop computed it. So a multiply-add is always one fused operation, nothing is reassociated, and LLVM
splits the vectors where the processor has shorter ones.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_LONG = ir.IntType(64)
FLOATS = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_INT, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


VECTOR = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, FLOATS)


def emit_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(data, [index])


def emit_splat(builder: Any, value: Any, vector_type: Any = FLOATS) -> Any:
    first = builder.insert_element(ir.Constant(vector_type, ir.Undefined), value, ir.Constant(_INT, 0))
    mask = ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector_type, ir.Undefined), mask)


def _constant(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def emit_call(builder: Any, name: str, arguments: list[Any]) -> Any:
    kinds = [argument.type for argument in arguments]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kinds[0], kinds), f"llvm.{name}.v16f32")
    return builder.call(function, arguments)


def emit_load(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Sixteen elements as float32; bfloat16, held as uint16, is the upper half of a float32."""
    pointer = emit_pointer(context, builder, array_type, array, index)
    if array_type.dtype == types.float32:
        return builder.load(builder.bitcast(pointer, FLOATS.as_pointer()), align=4)
    return _emit_wide(builder, builder.load(builder.bitcast(pointer, _HALVES.as_pointer()), align=2))


def _emit_wide(builder: Any, halves: Any) -> Any:
    """The float32 values of sixteen bfloat16 ones, given as their bits."""
    return builder.bitcast(builder.shl(builder.zext(halves, _INTS), ir.Constant(_INTS, [16] * LANES)), FLOATS)


def _emit_bfloat16(builder: Any, value: Any, wide: Any, half: Any) -> Any:
    """The bits of float32 `value` as bfloat16, to nearest, ties to even; one value or many."""

    def number(bits: int) -> Any:
        return ir.Constant(wide, bits if wide is _INT else [bits] * LANES)

    bits = builder.bitcast(value, wide)
    is_odd = builder.and_(builder.lshr(bits, number(16)), number(1))
    rounded = builder.add(bits, builder.add(is_odd, number(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)  # whose bits a carry could turn into zero
    return builder.trunc(builder.lshr(builder.select(is_nan, number(0x7FC00000), rounded), number(16)), half)


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """`array[index : index + 16]` of a flat float32 or (uint16 as) bfloat16 array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_load(context, builder, signature.args[0], *arguments)

    return VECTOR(array, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, index: Any, vector: Any) -> Any:
    """`array[index : index + 16] = vector`; to nearest, ties to even, where the array is bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = emit_pointer(context, builder, signature.args[0], arguments[0], arguments[1])
        if signature.args[0].dtype == types.float32:
            builder.store(arguments[2], builder.bitcast(pointer, FLOATS.as_pointer()), align=4)
        else:
            rounded = _emit_bfloat16(builder, arguments[2], _INTS, _HALVES)
            builder.store(rounded, builder.bitcast(pointer, _HALVES.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR), generate


@intrinsic
def as_stored(typing: Any, array: Any, vector: Any) -> Any:
    """The vector that `load` would find after `store`: rounded where the array is bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if signature.args[0].dtype == types.float32:
            return arguments[1]
        return _emit_wide(builder, _emit_bfloat16(builder, arguments[1], _INTS, _HALVES))

    return VECTOR(array, VECTOR), generate


@intrinsic
def array_at(typing: Any, like: Any, address: Any) -> Any:
    """The memory at `address` as a flat array of the same type as `like`; its length is unknown and given as 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(like)(context, builder)
        item = ir.Constant(_LONG, like.dtype.bitwidth // 8)
        data = builder.inttoptr(arguments[1], context.get_data_type(like.dtype).as_pointer())
        zero = ir.Constant(_LONG, 0)
        context.populate_array(array, data=data, shape=[zero], strides=[item], itemsize=item, meminfo=None)
        return array._getvalue()

    return like(like, types.int64), generate


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Asks for `array[index]` to be brought into the second-level cache; any index is harmless."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = emit_pointer(context, builder, signature.args[0], *arguments)
        address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [address.type, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [address, ir.Constant(_INT, 0), ir.Constant(_INT, 2), ir.Constant(_INT, 1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def broadcast(typing: Any, value: Any) -> Any:
    """A vector of one float32 value."""
    return VECTOR(types.float32), lambda context, builder, signature, arguments: emit_splat(builder, arguments[0])


def _binary(name: str, emit: Callable[[Any, Any, Any], Any]) -> Any:
    def typed(typing: Any, left: Any, right: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(builder, *arguments)

        return VECTOR(VECTOR, VECTOR), generate

    typed.__name__ = typed.__qualname__ = name
    return intrinsic(typed)


add = _binary("add", lambda builder, left, right: builder.fadd(left, right))
subtract = _binary("subtract", lambda builder, left, right: builder.fsub(left, right))
multiply = _binary("multiply", lambda builder, left, right: builder.fmul(left, right))
divide = _binary("divide", lambda builder, left, right: builder.fdiv(left, right))
maximum = _binary(
    "maximum", lambda builder, left, right: builder.select(builder.fcmp_ordered(">", left, right), left, right)
)


@intrinsic
def load_one(typing: Any, array: Any, index: Any) -> Any:
    """`array[index]` as float32, of a flat float32 or (uint16 as) bfloat16 array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(emit_pointer(context, builder, signature.args[0], *arguments))
        if signature.args[0].dtype == types.float32:
            return value
        return builder.bitcast(builder.shl(builder.zext(value, _INT), ir.Constant(_INT, 16)), _FLOAT)

    return types.float32(array, types.intp), generate


@intrinsic
def store_one(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """`array[index] = value`, rounded as by `store`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = emit_pointer(context, builder, signature.args[0], arguments[0], arguments[1])
        result = arguments[2]
        if signature.args[0].dtype != types.float32:
            result = _emit_bfloat16(builder, result, _INT, ir.IntType(16))
        builder.store(result, pointer)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), generate


@intrinsic
def keep_lanes(typing: Any, vector: Any, first: Any, last: Any, otherwise: Any) -> Any:
    """Lanes `first <= lane < last` of `vector`, `otherwise` in the others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = ir.Constant(_INTS, list(range(LANES)))
        bounds = [emit_splat(builder, builder.trunc(bound, _INT), _INTS) for bound in arguments[1:3]]
        inside = builder.and_(builder.icmp_signed(">=", lanes, bounds[0]), builder.icmp_signed("<", lanes, bounds[1]))
        return builder.select(inside, arguments[0], emit_splat(builder, arguments[3]))

    return VECTOR(VECTOR, types.int64, types.int64, types.float32), generate


@intrinsic
def first_lane(typing: Any, vector: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.extract_element(arguments[0], ir.Constant(_INT, 0))

    return types.float32(VECTOR), generate


def _horizontal(name: str, emit: Callable[[Any, Any, Any], Any]) -> Any:
    """Combines lane i with i + 8, then i + 4, i + 2, i + 1: one order, always."""

    def typed(typing: Any, vector: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (value,) = arguments
            distance = LANES // 2
            while distance:
                mask = ir.Constant(ir.VectorType(_INT, LANES), [(lane + distance) % LANES for lane in range(LANES)])
                value = emit(builder, value, builder.shuffle_vector(value, value, mask))
                distance //= 2
            return builder.extract_element(value, ir.Constant(_INT, 0))

        return types.float32(VECTOR), generate

    typed.__name__ = typed.__qualname__ = name
    return intrinsic(typed)


sum_of_lanes = _horizontal("sum_of_lanes", lambda builder, left, right: builder.fadd(left, right))
largest_lane = _horizontal(
    "largest_lane", lambda builder, left, right: builder.select(builder.fcmp_ordered(">", left, right), left, right)
)

# 2**f for -0.5 <= f <= 0.5, highest power first: Taylor's coefficients ln(2)**k / k!, whose last is exactly 1.
_EXP2_TERMS = [float(np.log(2.0) ** k / np.prod(np.arange(1.0, k + 1))) for k in range(7, -1, -1)]
_ROUND = 1.5 * 2.0**23  # adding it leaves the nearest integer in a float32's lowest bits
_LOWEST_POWER = -126.0  # of two, among normal float32 values; below it a power counts as zero


def emit_power_of_two(builder: Any, exponent: Any) -> Any:
    shifted = builder.fadd(exponent, _constant(_ROUND))
    fraction = builder.fsub(exponent, builder.fsub(shifted, _constant(_ROUND)))
    value = _constant(_EXP2_TERMS[0])
    for term in _EXP2_TERMS[1:]:
        value = emit_call(builder, "fma", [value, fraction, _constant(term)])
    powers = builder.shl(builder.bitcast(shifted, _INTS), ir.Constant(_INTS, [23] * LANES))
    value = builder.bitcast(builder.add(builder.bitcast(value, _INTS), powers), FLOATS)
    is_far_below = builder.fcmp_ordered("<", exponent, _constant(_LOWEST_POWER))
    return builder.select(is_far_below, _constant(0.0), value)


@intrinsic
def power_of_two(typing: Any, vector: Any) -> Any:
    """`2 ** x` for x up to 0, to 1e-7 of its value; exactly 1 at 0 and exactly 0 below -126."""
    return VECTOR(VECTOR), lambda context, builder, signature, arguments: emit_power_of_two(builder, arguments[0])


@intrinsic
def sigmoid(typing: Any, vector: Any) -> Any:
    """`1 / (1 + exp(-x))`, to 1e-6 of its value where that is above 1e-37, below it 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        one = _constant(1.0)
        size = emit_call(builder, "fabs", [value])
        power = emit_power_of_two(builder, builder.fmul(size, _constant(float(np.float32(-1.0 / np.log(2.0))))))
        is_positive = builder.fcmp_ordered(">", value, _constant(0.0))
        return builder.fdiv(builder.select(is_positive, one, power), builder.fadd(one, power))

    return VECTOR(VECTOR), generate


@intrinsic
def tanh(typing: Any, vector: Any) -> Any:
    """To 1e-7, absolute."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        one = _constant(1.0)
        exponent = builder.fmul(emit_call(builder, "fabs", [value]), _constant(float(np.float32(-2.0 / np.log(2.0)))))
        power = emit_power_of_two(builder, exponent)
        size = builder.fdiv(builder.fsub(one, power), builder.fadd(one, power))
        return emit_call(builder, "copysign", [size, value])

    return VECTOR(VECTOR), generate
