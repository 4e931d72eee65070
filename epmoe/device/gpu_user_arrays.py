"""An array in global memory, made inside a kernel from an address and lengths, for the caller's own functions.

Arrays as kernel arguments would cost host time at every launch; made here, they are five registers that the compiler
mostly removes.
"""

from llvmlite import ir
from numba.cuda.extending import intrinsic

from .ptx_factory import types

DTYPES = {"float32": types.float32, "int32": types.int32}
ITEMSIZE = 4


def _codegen(context, builder, signature, args):
    """A C-contiguous Numba array of the signature's type over args: address, then the lengths of the axes."""
    address, *lengths = args
    words = ir.IntType(64)
    made = context.make_array(signature.return_type)(context, builder)
    data = builder.inttoptr(
        address, context.get_data_type(signature.return_type.dtype).as_pointer()
    )
    strides, stride = [], ir.Constant(words, ITEMSIZE)
    for length in reversed(lengths):
        strides.insert(0, stride)
        stride = builder.mul(stride, length)
    n_elements = builder.udiv(stride, ir.Constant(words, ITEMSIZE))
    for name, value in (
        ("data", data),
        ("nitems", n_elements),
        ("itemsize", ir.Constant(words, ITEMSIZE)),
    ):
        setattr(made, name, value)
    made.shape = _pack(builder, lengths)
    made.strides = _pack(builder, strides)
    made.meminfo = ir.Constant(made.meminfo.type, None)
    made.parent = ir.Constant(made.parent.type, None)
    return made._getvalue()


def _pack(builder, values):
    packed = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        packed = builder.insert_value(packed, value, i)
    return packed


def array_type(dtype: str, n_axes: int, writable: bool):
    """Numba's type of such an array; of a number if it has no axes."""
    return (
        types.Array(DTYPES[dtype], n_axes, "C", readonly=not writable) if n_axes else DTYPES[dtype]
    )


def array_at(dtype: str, n_axes: int, writable: bool):
    """Intrinsic (address, length of each axis) -> array; all arguments uint64."""
    array = array_type(dtype, n_axes, writable)

    @intrinsic
    def vector(typing_context, address, n):
        return array(types.uint64, types.uint64), _codegen

    @intrinsic
    def matrix(typing_context, address, n, m):
        return array(types.uint64, types.uint64, types.uint64), _codegen

    return {1: vector, 2: matrix}[n_axes]
