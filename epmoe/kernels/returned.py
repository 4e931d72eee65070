"""Return values of the caller's functions: a value function returns one real number, an output lambda nothing."""

from functools import lru_cache
from numbers import Real

import numpy as np
from epmoe.device import SIM
from epmoe_ref.errors import EPValueError

CACHED = 128


class WrongReturn(EPValueError):
    """A function returned something else while a kernel ran in the simulator: that round has failed."""


def refusal(what, function, returned):
    """The error for a function, called `what` among the arguments, and a word for what it returned."""
    name = getattr(function, "__name__", repr(function))
    if what == "elementwise_lambda_fn":
        rule = "it stores its result itself and returns nothing; a function that returns the value is an epilogue"
    else:
        rule = "it must return one real number"
        if what == "epilogue":
            rule += "; a function that stores its result itself is given as elementwise_lambda_fn"
    return f"{what} {name} returns {returned}: {rule}"


def number(what, function, value):
    """The value that a value function returned, for the simulator."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, (Real, np.number, np.bool_)) and str(getattr(value, "dtype", "")) != "bfloat16" or (
            isinstance(value, np.complexfloating)):
        shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
        raise WrongReturn(refusal(what, function, "nothing" if value is None else f"a {type(value).__name__}{shape}"))
    return value


def nothing(what, function, value):
    """The value that an output lambda returned, for the simulator: None."""
    if value is not None:
        raise WrongReturn(refusal(what, function, f"a {type(value).__name__}"))


@lru_cache(CACHED)
def checked(what, function):
    """The function; in the simulator with a look at what each call returns."""
    if not SIM:
        return function
    look = nothing if what == "elementwise_lambda_fn" else number
    return lambda *arguments: look(what, function, function(*arguments))


@lru_cache(CACHED)
def check_compiled(what, function, kinds, cc):
    """EPValueError unless the function compiles for a GPU and returns what it must, told by the types alone.

    kinds: of its arguments, (dtype, number of axes, whether it may be written). cc: compute capability. Needs no GPU.
    """
    from epmoe.device.gpu_kernel import result_type
    from numba.core.errors import NumbaError
    from numba.cuda import types

    from .gpu_array import array_type

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
        raise EPValueError(refusal(what, function, "nothing" if returned == types.none else f"{returned}"))


def _reason(error):
    """The lines of Numba's error that say why, without the path it took through the compiler."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "Failed in" not in line]
    return next((line for line in lines if "Error: " in line), lines[0])
