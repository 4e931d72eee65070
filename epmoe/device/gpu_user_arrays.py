"""An array in global memory, made inside a kernel from an address and lengths, for the caller's own functions.

Arrays as kernel arguments would cost host time at every launch. Made here, they are five registers, and the compiler
removes most of them.
"""

from .ptx_factory import typed_intrinsic, types

ITEMSIZE = 4  # of float32 and int32


def _codegen(context, builder, signature, args):
    """A C-contiguous Numba array of the signature's type. args: address, then the lengths of the axes."""
    address, *lengths = args
    array, itemsize = signature.return_type, context.get_constant(types.intp, ITEMSIZE)
    strides = [itemsize]
    for length in lengths[:0:-1]:
        strides.insert(0, builder.mul(strides[0], length))
    made = context.make_array(array)(context, builder)
    data = builder.inttoptr(address, context.get_data_type(array.dtype).as_pointer())
    where = dict(data=data, shape=lengths, strides=strides, itemsize=itemsize, meminfo=None)
    context.populate_array(made, **where)
    return made._getvalue()


def array_type(dtype: str, n_axes: int, writable: bool):
    """Numba's type for such an array; with no axes, for a number."""
    element = getattr(types, dtype)
    return types.Array(element, n_axes, "C", readonly=not writable) if n_axes else element


def array_at(dtype: str, n_axes: int, writable: bool):
    """Intrinsic (address, length of each axis) -> array; all arguments uint64."""
    array, words = array_type(dtype, n_axes, writable), [types.uint64] * (1 + n_axes)
    return typed_intrinsic("array_at", lambda *given: array(*words), _codegen, len(words))
