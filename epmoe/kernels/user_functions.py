"""The caller's own functions inside a kernel: epilogue and router weights, with arguments from the parameter block.

A function is plain Python: scalars come as numbers, arrays as something to index with [i] or [i, j]. On the GPU it is
compiled; in the simulator it runs as it is. Its arguments travel as words (uint64) and become numbers and arrays where
the function is called, because device functions cannot return arrays.

A value function returns one real number. An output lambda (OutputLambda) stores into arrays among its arguments, and
returns nothing.
"""

from functools import lru_cache
from numbers import Real
from typing import NamedTuple

import numpy as np

from epmoe.device import SIM, array_at, device_fn, f32, i32, u32, u32_as_f32
from epmoe_ref.errors import EPValueError

from .params import CACHED


class ScalarArg(NamedTuple):
    """A number given to a user's function (epilogue, router weights): dtype "float32" or "int32"."""

    value: float
    dtype: str

    @property
    def type(self):
        """The key of a compiled kernel, as in ArrayArg."""
        return self.dtype, 0, False

    def words(self):
        """Its words in the parameter block."""
        raw = np.zeros(1, np.uint64)
        raw.view(self.dtype)[0] = self.value
        return [int(raw[0])]


class ArrayArg(NamedTuple):
    """A C-contiguous array given to a user's function: address, shape of one or two axes, dtype.

    dtype is "float32" or "int32". writable: whether the function may store into it, which an output lambda does.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    writable: bool = False

    @property
    def type(self):
        """The key of a compiled kernel: (dtype, number of axes, whether it may be written)."""
        return self.dtype, len(self.shape), self.writable

    def words(self):
        """Its words in the parameter block: address, then lengths of the axes."""
        return [self.address, *self.shape]


class OutputLambda(NamedTuple):
    """A function (token, col, value, *args) that replaces an epilogue and stores its result itself."""

    function: callable


def words_of(types) -> int:
    """Number of words for arguments of these types (dtype, number of axes, writable)."""
    return sum(1 + n_axes for _, n_axes, _ in types)


def bound(fn, types, what):
    """Device function (arguments, words) -> float32: calls fn(*arguments, *its own arguments, read from their words).

    what: the function's name among the caller's arguments. With an OutputLambda the result is 0.
    """
    stores = isinstance(fn, OutputLambda)
    of_device = device_fn(checked(what, fn.function if stores else fn))

    value = device_fn(lambda arguments, words: f32(of_device(*arguments)))

    @device_fn
    def store(arguments, words):
        of_device(*arguments)
        return f32(0)

    return _bind(store if stores else value, types, 0)


def _bind(call, types, first):
    if not types:
        return call
    (dtype, n_axes, writable), *others = types
    number = {"float32": device_fn(lambda word: u32_as_f32(u32(word))), "int32": device_fn(lambda word: i32(u32(word)))}
    made, end = number[dtype] if n_axes == 0 else array_at(dtype, n_axes, writable), first + 1 + n_axes
    call_rest = _bind(call, others, end)
    return device_fn(lambda arguments, words: call_rest(arguments + (made(*words[first:end]),), words))


class WrongReturn(EPValueError):
    """A function returned a wrong type while a kernel ran in the simulator. That round has failed."""


def refusal(what, function, returned):
    """The error message for a function, called `what` among the arguments. returned: words for its result."""
    name = getattr(function, "__name__", repr(function))
    if what == "elementwise_lambda_fn":
        rule = "it stores its result itself and returns nothing; a function that returns the value is an epilogue"
    else:
        rule = "it must return one real number"
        if what == "epilogue":
            rule += "; a function that stores its result itself is given as elementwise_lambda_fn"
    return f"{what} {name} returns {returned}: {rule}"


def returned(what, function, value):
    """Returns what a function returned in the simulator; raises if it is not a permitted value."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    is_number = isinstance(value, (Real, np.number, np.bool_)) or str(getattr(value, "dtype", "")) == "bfloat16"
    is_real = is_number and not isinstance(value, np.complexfloating)
    if (value is not None) if what == "elementwise_lambda_fn" else not is_real:
        shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
        raise WrongReturn(refusal(what, function, "nothing" if value is None else f"a {type(value).__name__}{shape}"))
    return value


@lru_cache(CACHED)
def checked(what, function):
    """The function; in the simulator each of its results is checked."""
    if not SIM:
        return function
    return lambda *arguments: returned(what, function, function(*arguments))
