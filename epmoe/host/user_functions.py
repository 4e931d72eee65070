"""Functions of the caller that run inside kernels (epilogue, router weights, input scale), and their arguments."""

import inspect

import numpy as np

from epmoe import device
from epmoe.host.arrays import is_torch, view
from epmoe.kernels import ArrayArg, ScalarArg
from epmoe.kernels import user_functions as in_kernels
from epmoe_ref.errors import EPValueError

_ARRAY_DTYPES = ("float32", "int32")
_WIDENED = ("bfloat16", "float16")  # exact as float32, so an array in host memory is placed as that


def expect_sequence(what, args):
    """Nothing, if what a function is given besides its numbers is a tuple or a list."""
    if not isinstance(args, (tuple, list)):
        raise EPValueError(
            f"{what} is a {type(args).__name__}; a tuple is needed, of one argument too: {what}=(a,)"
        )


def check_signature(function, what, parameters, args):
    """The function must take `parameters` and then one argument for each entry of args."""
    try:
        inspect.signature(function).bind(*parameters, *args)
    except TypeError as e:
        given = f" and {len(args)} of {what}_args" if args else ""
        raise EPValueError(
            f"{what} cannot be called with ({', '.join(parameters)}){given}: {e}"
        ) from None
    except ValueError:
        pass  # built-in functions have no signature


def check_returned(machine, function, what, numbers, args, kinds):
    """EPValueError unless a function returns what it must: a value function a number, elementwise_lambda_fn nothing.

    numbers: what it is tried with in the simulator, NumPy scalars; args: of the first rank; kinds: their types. On a GPU
    Numba's types tell. An elementwise_lambda_fn is not tried in the simulator, since it stores.
    """
    if not device.SIM:
        kinds = tuple((n.dtype.name, 0, False) for n in numbers) + tuple(kinds)
        in_kernels.check_compiled(what, function, kinds, machine.compute_capability)
    elif what != "elementwise_lambda_fn":
        try:
            value = function(*numbers, *args)
        except Exception:  # perhaps an array without an entry 0; else the kernel raises it, too
            return
        in_kernels.returned(what, function, value)


def of_rank(world, index, args):
    """This rank's arguments: under a LocalWorld a list has one entry for each rank; anything else is for all alike."""
    if not world.lists:
        return tuple(args)
    for a in args:
        if isinstance(a, list) and len(a) != len(world.ranks):
            raise EPValueError(
                f"an argument of a function is a list of {len(a)}; it needs one entry for each of the "
                f"{len(world.ranks)} ranks"
            )
    return tuple(a[index] if isinstance(a, list) else a for a in args)


def argument(value, what, place, writable=False):
    """ScalarArg or ArrayArg for a number or an array; place(array) gives the address of an array's elements.

    writable: whether the function may store into arrays that are writable and that it is given without a conversion.
    """
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        if not -(2**31) <= int(value) < 2**31:
            raise EPValueError(f"{what} is {value}, which does not fit in int32")
        return ScalarArg(int(value), "int32")
    if isinstance(value, (float, np.floating)):
        return ScalarArg(float(value), "float32")
    array = view(value, what)
    writable &= (
        array.host is None
        or array.host.flags.writeable
        and (not is_torch(value) or value.is_contiguous())
    )
    if array.dtype.name in _WIDENED and array.host is not None and len(array.shape) in (1, 2):
        array, writable = view(array.host.astype(np.float32), what), False
    if array.dtype.name not in _ARRAY_DTYPES or len(array.shape) not in (1, 2):
        raise EPValueError(
            f"{what} is {array.dtype} {array.shape}; numbers, and arrays of one or two axes of "
            f"{', '.join(_ARRAY_DTYPES)} can be given to a function: convert it"
        )
    return ArrayArg(place(array), array.shape, array.dtype.name, bool(writable))
