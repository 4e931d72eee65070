"""Functions of the caller that run inside kernels (epilogue, router weights, input scale), and their arguments."""

import inspect
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from epmoe import device
from epmoe.device.fingerprint import fingerprint
from epmoe.host.arrays import is_torch, view
from epmoe.kernels import ArrayArg, ScalarArg
from epmoe.kernels import user_functions as in_kernels
from epmoe_ref.errors import EPValueError

_ARRAY_DTYPES = ("float32", "int32")
_WIDENED = ("bfloat16", "float16")  # exact as float32, so an array in host memory is placed as that
NO_TYPES = (), ()
MOST = 128  # functions that are remembered
_chosen = OrderedDict()  # by fingerprint
_NUMBERS = {  # what functions are tried with in the simulator
    "router_weights": (np.int32(0), np.int32(0)),
    "epilogue": (np.int32(0), np.int32(0), np.float32(1)),
    "elementwise_lambda_fn": (np.int32(0), np.int32(0), np.float32(1)),
}


class Way(NamedTuple):
    """How all ranks reduce: compile-time options, which `key` stands for; the caller's functions are among them.

    takes_weights: router weights are arrays. stores: an elementwise_lambda_fn stores the result itself.
    """

    key: object
    options: dict
    takes_weights: bool
    stores: bool = False

    def check(self, engine, index, weights_args, epilogue_args, types):
        """Errors: as check_returned. index: of the rank whose arguments are tried; types: of both."""
        of_both = zip(self.options.items(), (weights_args, epilogue_args), types)
        for (what, function), args, kinds in of_both:
            if callable(function):
                args = of_rank(engine.world, index, args)
                check_returned(engine.machine, function, what, _NUMBERS[what], args, kinds)


SUMS = Way("sums", dict(router_weights="array", epilogue=None), True)  # without functions
NO_SUMS = Way("no sums", dict(router_weights=None, epilogue=None), False)


def way_of(cfg, router_weights, weights_args, epilogue, epilogue_args, elementwise_fn, out):
    """The Way of these arguments of combine, which must go together."""
    name, last = "epilogue", epilogue
    if elementwise_fn is not None:
        name, last = "elementwise_lambda_fn", elementwise_fn
        for other, given in (("epilogue", epilogue), ("out", out)):
            if given is not None:
                raise EPValueError(
                    f"elementwise_lambda_fn and {other} are both given: the function stores the result itself, and "
                    "nothing else is stored"
                )
    function, last = earlier(router_weights) if callable(router_weights) else None, earlier(last)
    for what, args in ("router_weights_args", weights_args), ("epilogue_args", epilogue_args):
        if not isinstance(args, (tuple, list)):
            raise EPValueError(
                f"{what} is a {type(args).__name__}; a tuple is needed, of one argument too: {what}=(a,)"
            )
    if router_weights is None and last is not None:
        raise EPValueError(
            f"{name} needs router weights: without them the rows are returned unreduced"
        )
    if router_weights is None and cfg.fused_shared_expert:
        raise EPValueError(
            "fused_shared_expert=True needs router weights: the shared expert is added to their sum"
        )
    if weights_args and function is None:
        raise EPValueError(
            "router_weights_args are given, and router_weights is no function that would take them"
        )
    if epilogue_args and last is None:
        raise EPValueError("epilogue_args are given, and there is no epilogue that would take them")
    if function is None and last is None:
        return NO_SUMS if router_weights is None else SUMS
    if last is not None:
        check_signature(last, name, ("token", "col", "value"), epilogue_args)
    if function is not None:
        check_signature(function, "router_weights", ("token", "k"), weights_args)
    options = {"router_weights": function or "array", name: last}
    return Way(tuple(options.items()), options, function is None, elementwise_fn is not None)


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


def argument(value, name, rank, place, writable):
    """ScalarArg or ArrayArg for a number or an array; place(name, array) gives the address of an array's elements.

    writable: whether the function may store into arrays that are writable and that it is given without a conversion.
    """
    what = f"{name} of rank {rank}"
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
    return ArrayArg(place(name, array), array.shape, array.dtype.name, bool(writable))


def earlier(function):
    """An earlier function that compiles to the same code, or this one; anything but a function as it is.

    In the simulator functions run as they are, with all that they do besides, so there each is its own.
    """
    if device.SIM or not hasattr(function, "__code__") or function in _chosen.values():
        return function
    mark = fingerprint(function)
    if mark is None:
        return function
    before = _chosen.get(mark)
    # what it refers to may have changed meanwhile
    if before is not None and fingerprint(before) == mark:
        return before
    _chosen[mark] = function
    if len(_chosen) > MOST:
        _chosen.popitem(last=False)
    return function


def _as_on_the_host(word):
    # inside simulated kernels nothing warns; a word of the GPU must stay what it is, and has its own way on the host
    return np.errstate(all="ignore")(word) if device.SIM else word


mul_rn, add_rn, fma_rn = map(_as_on_the_host, (device.mul_rn, device.add_rn, device.fma_rn))
