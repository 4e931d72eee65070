"""Functions of the caller that run inside kernels (epilogue, router weights, input scale), and their arguments."""

import inspect
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from epmoe import device
from epmoe.device.fingerprint import fingerprint
from epmoe.host import inputs
from epmoe.host.arrays import view
from epmoe.host.out_arrays import expect_apart
from epmoe.kernels import ArrayArg, ScalarArg
from epmoe.kernels import user_functions as in_kernels
from epmoe_ref.errors import EPValueError

_ARRAY_DTYPES = ("float32", "int32")
_WIDENED = ("bfloat16", "float16")  # arrays of these in host memory become float32, which is exact
ALWAYS = NameError, AttributeError, TypeError, ImportError  # errors of a function whatever its arguments are
ARGUMENTS = "router_weights_args", "epilogue_args"
NO_ARGUMENTS = (), ()
MOST = 128  # functions that are remembered
_chosen = {}  # by fingerprint
_OF_VALUE = dict(token=np.int32(0), col=np.int32(0), value=np.float32(1))
PARAMETERS = {  # parameters before a function's own arguments: {name: value for trying it in the simulator}
    "input_scale": dict(i=np.int32(0)),
    "router_weights": dict(token=np.int32(0), k=np.int32(0)),
    "epilogue": _OF_VALUE,
    "elementwise_lambda_fn": _OF_VALUE,
}


class Way(NamedTuple):
    """How all ranks reduce. options: compile-time options, including the caller's functions; `key` identifies them.

    takes_weights: router weights are arrays. stores: an elementwise_lambda_fn stores the result itself.
    """

    key: object
    options: dict
    takes_weights: bool
    stores: bool = False

    def check(self, machine, arguments):
        """Check the functions with one rank's arguments, from arguments_of()."""
        for (what, function), args in zip(self.options.items(), arguments):
            if callable(function):
                check_function(machine, function, what, args)


SUMS = Way("sums", dict(router_weights="array", epilogue=None), True)  # no functions
NO_SUMS = Way("no sums", dict(router_weights=None, epilogue=None), False)


def way_of(cfg, router_weights, weights_args, epilogue, epilogue_args, elementwise_fn, out):
    """The Way for these arguments of combine. Errors: EPValueError if they contradict each other."""
    stores = elementwise_fn is not None
    last, name = (elementwise_fn, "elementwise_lambda_fn") if stores else (epilogue, "epilogue")
    for other, given in ("epilogue", epilogue), ("out", out):
        if stores and given is not None:
            raise EPValueError(
                f"elementwise_lambda_fn and {other} are both given: the function stores the result itself, and "
                "nothing else is stored"
            )
    if last is not None and not callable(last):
        raise EPValueError(f"{name} must be a function, not {type(last).__name__}")
    function, last = earlier(router_weights) if callable(router_weights) else None, earlier(last)
    for what, args in ("router_weights_args", weights_args), ("epilogue_args", epilogue_args):
        if not isinstance(args, (tuple, list)):
            raise EPValueError(
                f"{what} is a {type(args).__name__}; a tuple is needed, of one argument too: {what}=(a,)"
            )
    reduces = router_weights is not None
    if not reduces and last is not None:
        raise EPValueError(f"{name} needs router weights: without them the rows are returned unreduced")
    if not reduces and cfg.fused_shared_expert:
        raise EPValueError("fused_shared_expert=True needs router weights: the shared expert is added to their sum")
    if weights_args and function is None:
        raise EPValueError("router_weights_args are given, and router_weights is no function that would take them")
    if epilogue_args and last is None:
        raise EPValueError("epilogue_args are given, and there is no epilogue that would take them")
    if function is None and last is None:
        return SUMS if reduces else NO_SUMS
    options = {"router_weights": function or "array", name: last}
    return Way(tuple(options.items()), options, function is None, stores)


def check_function(machine, function, what, args=()):
    """Raise EPValueError unless a function takes PARAMETERS and args, and returns a number.

    An elementwise_lambda_fn must return nothing. args: from argument(). On a GPU Numba infers the return type. In the
    simulator the function is called once, with copies of its arrays.
    """
    names, numbers = PARAMETERS[what], PARAMETERS[what].values()
    try:
        inspect.signature(function).bind(*names, *args)
    except TypeError as e:
        given = f" and {len(args)} of {what}_args" if args else ""
        raise EPValueError(f"{what} cannot be called with ({', '.join(names)}){given}: {e}") from None
    except ValueError:
        pass  # built-in functions have no signature
    if not device.SIM:
        kinds = (*((n.dtype.name, 0, False) for n in numbers), *(a.type for a in args))
        return check_compiled(what, function, kinds, machine.compute_capability)
    name = getattr(function, "__name__", repr(function))
    try:
        value = function(*numbers, *map(_copy, args))
    except Exception as error:
        if "read-only" in str(error):
            raise EPValueError(
                f"{what} {name} stores into an array that it may only read: an elementwise_lambda_fn may store, into "
                "writable arrays of float32 or int32"
            ) from error
        # other errors may depend on the values: the first token or an array may be empty
        if what == "input_scale" or isinstance(error, ALWAYS):
            raise EPValueError(f"{what} {name} cannot be called: {type(error).__name__}: {error}") from error
        return
    value = in_kernels.returned(what, function, value)
    if what == "input_scale" and not inputs.is_scale(value):
        raise EPValueError(f"input_scale {name} returns {float(value)}; it must be positive and finite in float32")


def _copy(argument):
    """A copy of the host array of an ArrayArg, or the number of a ScalarArg."""
    if isinstance(argument, ScalarArg):
        return argument.value
    copy = np.array(argument.address.host)
    copy.flags.writeable = argument.writable
    return copy


@lru_cache(in_kernels.CACHED)
def check_compiled(what, function, kinds, cc):
    """Raise EPValueError unless the function compiles for a GPU and returns the right type. Needs no GPU.

    kinds: of its arguments, (dtype, number of axes, whether it may be written). cc: compute capability.
    """
    from numba.core.errors import NumbaError
    from numba.cuda import types

    from epmoe.device.gpu_kernel import result_type
    from epmoe.device.gpu_user_arrays import array_type

    try:
        returned = result_type(function, tuple(array_type(*kind) for kind in kinds), cc)
    except NumbaError as error:
        name = getattr(function, "__name__", repr(function))
        raise EPValueError(f"{what} {name} cannot be compiled for the GPU: {_reason(error)}") from error
    if what == "elementwise_lambda_fn":
        fits = returned == types.none
    else:
        fits = isinstance(returned, (types.Number, types.Boolean)) and not isinstance(returned, types.Complex)
    if not fits:
        raise EPValueError(in_kernels.refusal(what, function, "nothing" if returned == types.none else f"{returned}"))


def _reason(error):
    """The line of Numba's error that gives the reason, without the path through the compiler."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "Failed in" not in line]
    return next((line for line in lines if "Error: " in line), lines[0])


def arguments_of(engine, index, stores, *given):
    """Check the arguments of both functions (given) for the rank at this index of engine.ranks, by argument().

    Under a LocalWorld a list has one entry for each rank; other values are for all ranks. stores: see Way.
    """
    n_ranks, rank, checked = len(engine.ranks), engine.ranks[index].rank, []
    for what, args in zip(ARGUMENTS, given):
        writable, of_rank = stores and what == "epilogue_args", []
        for i, a in enumerate(args):
            if engine.lists and isinstance(a, list):
                if len(a) != n_ranks:
                    raise EPValueError(
                        f"{what}[{i}] is a list of {len(a)}; a list needs one entry for each of the {n_ranks} ranks: "
                        "make it an array if it is one argument for all ranks"
                    )
                a = a[index]
            of_rank.append(argument(engine.machine, a, f"{what}[{i}] of rank {rank}", writable))
        checked.append(of_rank)
    return checked


def argument(machine, value, what, writable):
    """Check an argument: a ScalarArg, or an ArrayArg whose address is still the Array, which must be placed.

    writable: whether the function may store into arrays, if they are writable and need no conversion.
    """
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        if not -(2**31) <= int(value) < 2**31:
            raise EPValueError(f"{what} is {value}, which does not fit in int32")
        return ScalarArg(int(value), "int32")
    if isinstance(value, (float, np.floating)):
        return ScalarArg(float(value), "float32")
    array = inputs.readable(machine, value, what, in_vectors=False)
    host, has_axes = array.host, len(array.shape) in (1, 2)
    if host is not None:
        writable = writable and host.flags.writeable
        if array.dtype.name in _WIDENED and has_axes:
            host, writable = host.astype(np.float32), False
        if not writable:  # the simulator then refuses a store
            host = host.view()
            host.flags.writeable = False
            array = view(host, what)
        else:
            expect_apart([(what, array)])
    if array.dtype.name not in _ARRAY_DTYPES or not has_axes:
        raise EPValueError(
            f"{what} is {array.dtype} {array.shape}; numbers, and arrays of one or two axes of "
            f"{', '.join(_ARRAY_DTYPES)} can be given to a function: convert it"
        )
    return ArrayArg(array, array.shape, array.dtype.name, bool(writable))


def earlier(function):
    """An earlier function that compiles to the same code, or this one. Anything but a function is returned unchanged.

    So a function that is made anew for each call is compiled once. In the simulator functions run as Python, with side
    effects, so each is returned unchanged.
    """
    if device.SIM or not hasattr(function, "__code__") or function in _chosen.values():
        return function
    mark = fingerprint(function)
    # values that the earlier function refers to may have changed meanwhile
    before = _chosen.get(mark)
    if before is not None and fingerprint(before) == mark:
        return before
    if mark is not None:
        _chosen[mark] = function
    if len(_chosen) > MOST:
        del _chosen[next(iter(_chosen))]
    return function


# Rounding functions for the caller, also for arrays. As in kernels, a result too large for float32 becomes infinity
# without a warning; on a GPU they have host versions that do so.
mul_rn, add_rn, fma_rn = device.mul_rn, device.add_rn, device.fma_rn
if device.SIM:
    mul_rn, add_rn, fma_rn = [np.errstate(all="ignore")(of_device) for of_device in (mul_rn, add_rn, fma_rn)]
